"""Where an actor's process gets the run's environments from: by name and parameters, never as objects."""

import json
import sys

from hotpot.envs import BoundEnvironment, list_environments
from hotpot.errors import EnvironmentSpecError
from hotpot.ids import canonical_json
from hotpot.rollout.actors.codec import Source


def source_of(name: str, environment: BoundEnvironment) -> Source:
    """Return how ``environment``, named ``name`` in the mix, is made in another process.

    Raises EnvironmentSpecError where it can't be: it is neither installed nor an attribute of the module that defines it.
    """
    manifest = json.loads(environment.env_version.manifest)
    installed = any(entry.name == environment.name for entry in list_environments())
    return Source(
        name=name,
        kind=environment.name,
        target="" if installed else _target(environment),
        params=canonical_json(environment.params.model_dump(mode="json")),
        perturbation=manifest["perturbation"],
        unverifiable=bool(manifest["unverifiable"]),
        env_version=environment.env_version.version,
        reward_version=environment.reward_version.version,
    )


def _target(environment: BoundEnvironment) -> str:
    package = environment.spec.package
    for attribute, value in vars(sys.modules[package]).items() if package in sys.modules else ():
        if value is environment.spec:
            return f"{package}:{attribute}"
    raise EnvironmentSpecError(
        f"environment {environment.name!r} can't be made in another process: it is not installed, and {package} has no "
        "attribute that is its spec; install it, or take actors.kind = 'threads'"
    )
