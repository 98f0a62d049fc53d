"""Versions nobody can forget to bump: fingerprints of packages, parameters and what they run on.

A version string is ``name@declared+fingerprint``, and ``name@declared+fingerprint~perturbation`` where a perturbation
wraps the thing. The fingerprint is a hash over the *manifest*: every file of the package folders that define the
thing (data files too, ``__pycache__`` not), its resolved parameters, and the exact versions of the distributions and
runtimes it runs on.

``fingerprint`` computes versions · ``files`` finds and hashes what they cover · ``compare`` says what changed

It does not know what an environment is. Invariants: equal files, parameters and packages give equal strings on every
machine; a perturbation is a suffix and never part of the fingerprint. Files are read when the version is computed:
compute it in the process that runs the thing, right after importing it.
"""

from hotpot.versions.compare import Change, diff
from hotpot.versions.files import package_files
from hotpot.versions.fingerprint import (
    NO_PERTURBATION,
    PROMPT_RUNS_ON,
    Version,
    package_version,
    prompt_version,
)

__all__ = [
    "NO_PERTURBATION",
    "PROMPT_RUNS_ON",
    "Change",
    "Version",
    "diff",
    "package_files",
    "package_version",
    "prompt_version",
]
