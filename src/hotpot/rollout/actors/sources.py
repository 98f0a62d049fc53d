"""Where an actor's process gets the run's environments from: by name and parameters, never as objects."""

import json
import sys
from typing import Any

from hotpot.envs import BoundEnvironment, EnvironmentSpec, list_environments
from hotpot.errors import EnvironmentSpecError
from hotpot.ids import canonical_json
from hotpot.rollout.actors.codec import Source


def source_of(name: str, environment: BoundEnvironment) -> Source:
    """Return how ``environment``, named ``name`` in the mix, is made in another process.

    Raises EnvironmentSpecError where it can't be: it is neither installed nor an attribute of the module that defines it.
    """
    manifest = json.loads(environment.env_version.manifest)
    return Source(
        name=name,
        kind=_kind(environment.spec),
        params=canonical_json(environment.params.model_dump(mode="json")),
        perturbation=manifest["perturbation"],
        unverifiable=bool(manifest["unverifiable"]),
        env_version=environment.env_version.version,
        reward_version=environment.reward_version.version,
    )


def _kind(spec: EnvironmentSpec[Any]) -> str:
    """Return what the registry finds ``spec`` by: the name it is installed under, or ``module:attribute``."""
    for entry in list_environments():
        if entry.name == spec.name and _found(*entry.target.split(":")) is spec:
            return spec.name
    for definer in dict.fromkeys((spec.make.__module__, spec.task.__module__, spec.package)):
        for attribute, value in vars(sys.modules[definer]).items() if definer in sys.modules else ():
            if value is spec:
                return f"{definer}:{attribute}"
    raise EnvironmentSpecError(
        f"environment {spec.name!r} can't be made in another process: it is not installed, and {spec.package} has no "
        "attribute that is its spec; install it, or take actors.kind = 'threads'"
    )


def _found(module: str, attribute: str) -> object:
    """Return what an entry point leads to, where that has been imported; what has not been is not in use."""
    return getattr(sys.modules.get(module), attribute, None)
