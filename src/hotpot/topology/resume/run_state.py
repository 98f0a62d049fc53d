"""What a run says of itself in each checkpoint's manifest, and what of it a resume must find again.

Owns the record :class:`RunState` (under ``run`` in ``learner.json``) and the comparison of two of them. Knows no weights.

Two kinds of differences: versions (environment, reward, prompt) make it another experiment, so a resume refuses them;
arithmetic (torch, instructions, threads) and code may round or decide otherwise, so it goes on and says so.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hotpot import __version__
from hotpot.config import Recipe
from hotpot.errors import ModelFilesError
from hotpot.ids import sha256_hex
from hotpot.learner.checkpoint import read_manifest
from hotpot.learner.precision import spelled
from hotpot.models import arithmetic
from hotpot.topology.parts.ingredients import RunEnvironment
from hotpot.types import SCHEMA_VERSION
from hotpot.versions import Version, package_files

ARITHMETIC = ("torch", "cpu_capability", "threads_engine", "threads_learner", "code")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stood and on what.

    ``update`` made the weights, served as ``policy_version``; ``done`` updates lie on the way to them, which is where
    the schedules stand. ``marks`` are the ledger's high-water marks, ``replay_update`` the last update that replay heard
    of (-1 without replay). The versions are those on the steps: ``env_version`` holds the fingerprint of the data.
    ``recipe`` is the hash of all settings, ``code`` release and hash of Hotpot's own files.
    """

    run_id: str
    update: int
    done: int
    policy_version: int
    marks: dict[str, int]
    replay_update: int
    env_version: str
    reward_version: str
    prompt_version: str
    schema_version: int
    recipe: str
    code: str
    deterministic: bool
    seed: int
    threads_engine: int
    threads_learner: int
    torch: str
    cpu_capability: str

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return dataclasses.asdict(self)


def surroundings(recipe: Recipe, *, threads_engine: int, threads_learner: int) -> dict[str, Any]:
    """Return the fields of :class:`RunState` that say what the run is computed on and with."""
    found = arithmetic()
    if recipe.learner.precision != "float32":  # its products have kernels of their own
        found["cpu_capability"] += f", {spelled('bfloat16')}"
    return {
        "schema_version": SCHEMA_VERSION,
        "recipe": sha256_hex(recipe.model_dump_json()),
        "code": code_version(),
        "deterministic": recipe.run.deterministic,
        "seed": recipe.run.seed,
        "threads_engine": threads_engine,
        "threads_learner": threads_learner,
        **found,
    }


def versions_of(environments: Sequence[RunEnvironment]) -> dict[str, tuple[Version, ...]]:
    """Return the versions of each kind that a run over ``environments`` is made of, each once, ascending."""
    found = {
        "env": [one.environment.env_version for one in environments],
        "reward": [one.environment.reward_version for one in environments],
        "prompt": [one.prompt for one in environments],
    }
    by_name = {kind: {one.version: one for one in versions} for kind, versions in found.items()}
    return {kind: tuple(named[name] for name in sorted(named)) for kind, named in by_name.items()}


def made_of(environments: Sequence[RunEnvironment]) -> dict[str, Any]:
    """Return the fields of :class:`RunState` that say what the run is made of; those of a mix joined by ``|``."""
    return {
        f"{kind}_version": "|".join(one.version for one in versions)
        for kind, versions in versions_of(environments).items()
    }


def read_run_state(checkpoint: Path) -> RunState | None:
    """Return what the run said of itself in ``checkpoint``; None where an older release wrote it.

    Raises :class:`ModelFilesError` where the manifest is damaged, or of a later release.
    """
    found = read_manifest(checkpoint)["run"]
    if not found:
        return None
    if found.get("schema_version", 0) > SCHEMA_VERSION:
        raise ModelFilesError(
            f"{checkpoint} is of schema version {found['schema_version']}, this release knows {SCHEMA_VERSION}; use the "
            "release that wrote it, or a newer one"
        )
    try:
        return RunState(**{field.name: found[field.name] for field in dataclasses.fields(RunState)})
    except KeyError as error:
        raise ModelFilesError(
            f"{checkpoint} does not say {error} of its run; restore it from a copy, or use another checkpoint"
        ) from None


def differences(old: RunState, new: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return, in words, which of the fields ``names`` differ."""
    return [
        f"{name} was {getattr(old, name)}, is {new[name]}"
        for name in names
        if getattr(old, name) != new[name]
    ]


@cache
def code_version() -> str:
    """Return the release and a hash over all of Hotpot's own files, as they are now."""
    files = package_files("hotpot")
    text = "\n".join(f"{name} {sha256_hex(path.read_bytes())}" for name, path in files.items())
    return f"{__version__}+{sha256_hex(text)[:16]}"
