"""Finding environments by name and binding them to parameters and versions.

Environments install as packages: a distribution names a spec under the entry point group ``hotpot.environments``.
Listing imports none of them. A spec that no distribution names is found by ``module:attribute``.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from pydantic import BaseModel, ValidationError

from hotpot.envs.base import BoundEnvironment, EnvironmentSpec
from hotpot.errors import EnvironmentSpecError
from hotpot.versions import NO_PERTURBATION, package_version

ENTRY_POINT_GROUP = "hotpot.environments"
"""Entry point group under which a distribution names its specs."""
FRAMEWORK = ("hotpot.envs.tools",)
"""Modules of Hotpot that shape what an environment answers, so they belong to every environment's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentEntry:
    """One installed environment: its name, where its spec is (``module:attribute``), and who brought it."""

    name: str
    target: str
    distribution: str


def list_environments() -> tuple[EnvironmentEntry, ...]:
    """Return the installed environments, sorted by name, without importing them."""
    return tuple(
        EnvironmentEntry(
            name=point.name, target=point.value, distribution=point.dist.name if point.dist else ""
        )
        for point in sorted(
            metadata.entry_points(group=ENTRY_POINT_GROUP), key=lambda point: (point.name, point.value)
        )
    )


def load_environment(
    kind: str,
    params: Mapping[str, Any] | None = None,
    *,
    perturbation: str = NO_PERTURBATION,
    allow_unverifiable: bool = False,
) -> BoundEnvironment:
    """Return the environment ``kind`` with ``params`` checked and both versions computed.

    ``kind`` is the name of an installed one, or ``module:attribute`` of a spec that can be imported. Raises
    EnvironmentSpecError for an unknown name or parameter (naming the nearest), a bad value, a spec that can't be
    imported, or a definition that no file pins down.
    """
    spec = _named(kind)
    return bind(spec, params, perturbation=perturbation, allow_unverifiable=allow_unverifiable)


def _named(kind: str) -> EnvironmentSpec[Any]:
    if ":" in kind:
        return _import(EnvironmentEntry(name=kind, target=kind, distribution="the recipe"))
    entries = {(entry.name, entry.target): entry for entry in list_environments()}
    matches = [entry for entry in entries.values() if entry.name == kind]
    if not matches:
        known = [entry.name for entry in entries.values()]
        raise EnvironmentSpecError(
            f"no environment is named {kind!r}{_nearest(kind, known)}; installed: {', '.join(known) or 'none'}"
        )
    if len(matches) > 1:
        raise EnvironmentSpecError(
            f"{kind!r} is brought by several distributions: {', '.join(f'{e.distribution} ({e.target})' for e in matches)}"
            "; uninstall all but one"
        )
    spec = _import(matches[0])
    if spec.name != kind:
        raise EnvironmentSpecError(
            f"entry point {kind!r} leads to a spec named {spec.name!r}; give both the same name"
        )
    return spec


def bind(
    spec: EnvironmentSpec[Any],
    params: Mapping[str, Any] | None = None,
    *,
    perturbation: str = NO_PERTURBATION,
    allow_unverifiable: bool = False,
) -> BoundEnvironment:
    """Return ``spec`` with ``params`` checked and both versions computed in this process.

    Raises EnvironmentSpecError as :func:`load_environment` does.
    """
    checked = _validate(spec, params or {})
    _refuse_sets(spec.name, checked.model_dump())
    values = checked.model_dump(mode="json")
    of_reward = values.keys() if spec.reward_params is None else set(spec.reward_params)
    of_env = values.keys() if spec.reward_params is None else values.keys() - of_reward
    exclude = [spec.reward_package] if _inside(spec.reward_package, spec.package) else []
    if spec.prompt_file is not None:
        exclude.append(f"{spec.package.replace('.', '/')}/{spec.prompt_file}")
    env_version = package_version(
        kind="env",
        name=spec.name,
        declared=spec.declared,
        packages=(spec.package, *spec.shares, *FRAMEWORK),
        exclude=exclude,
        params={key: values[key] for key in of_env},
        runs_on=spec.runs_on,
        definers=spec.definers(),
        perturbation=perturbation,
        allow_unverifiable=allow_unverifiable,
    )
    reward_version = package_version(
        kind="reward",
        name=f"{spec.name}.reward",
        declared=spec.reward_declared,
        packages=(spec.reward_package,),
        params={key: values[key] for key in of_reward},
        allow_unverifiable=allow_unverifiable,
    )
    return BoundEnvironment(spec=spec, params=checked, env_version=env_version, reward_version=reward_version)


def _import(entry: EnvironmentEntry) -> EnvironmentSpec[Any]:
    point = metadata.EntryPoint(name=entry.name, value=entry.target, group=ENTRY_POINT_GROUP)
    try:
        spec = point.load()
    except (ImportError, AttributeError) as error:
        raise EnvironmentSpecError(
            f"environment {entry.name!r} of {entry.distribution!r} can't be imported from {entry.target!r}: {error}; "
            "install what it needs, or repair what names it (module:attribute)"
        ) from error
    if not isinstance(spec, EnvironmentSpec):
        raise EnvironmentSpecError(
            f"{entry.target!r} is a {type(spec).__name__}, not an EnvironmentSpec; point the entry point at the spec"
        )
    return spec


def _validate(spec: EnvironmentSpec[Any], params: Mapping[str, Any]) -> BaseModel:
    fields = spec.params.model_fields
    for key in params:
        if key not in fields:
            raise EnvironmentSpecError(
                f"environment {spec.name!r} has no parameter {key!r}{_nearest(key, fields)}; "
                f"it has: {', '.join(fields) or 'none'}"
            )
    try:
        checked: BaseModel = spec.params.model_validate(dict(params))
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'params'} = {fault['input']!r}: {fault['msg']}"
            for fault in error.errors()
        )
        raise EnvironmentSpecError(f"parameters of environment {spec.name!r}: {faults}") from error
    return checked


def _refuse_sets(name: str, value: object) -> None:
    """Refuse sets: their order differs from process to process, and the version would with it."""
    if isinstance(value, set | frozenset):
        raise EnvironmentSpecError(f"a parameter of environment {name!r} is a set; declare it as a tuple")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for part in parts:
        _refuse_sets(name, part)


def _inside(inner: str, outer: str) -> bool:
    return inner.startswith(outer + ".")


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
