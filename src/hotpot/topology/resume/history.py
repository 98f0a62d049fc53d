"""What a run did before this process took it up, read from its records: for resuming and for its one summary.

Owns the position: which update a checkpoint stands for, and the chain of updates that leads to it. Updates that were
recorded after the checkpoint are history too, but not on the chain: the run goes on without what they learned. A new
run has an empty history. Reads; never writes.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.errors import RecipeError, RunFolderError
from hotpot.experience import Redactor, RunReader, from_table, read_manifest
from hotpot.observability.files import replace_text
from hotpot.topology.collecting.intake import IntakeCounts
from hotpot.topology.resume.checkpoints import find_checkpoint, list_checkpoints
from hotpot.topology.resume.rebuild import policy_checksums
from hotpot.types import EvaluationRow, UpdateRow

RECIPE_NAME = "recipe.json"
"""File in the run folder with the settings as they were told last; the manifest keeps those it began with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class History:
    """Where a run stands and what lies behind it.

    ``update`` made the weights to go on with (0: the starting model); ``source`` is their checkpoint, None where the
    run begins with the recipe's model. ``updates`` is the chain to them, in order. ``seconds`` is the wall time of the
    main loop by span, as far as it was recorded with updates and evaluations. ``versions`` are the (kind, version) that
    the run has explained, ``checksums`` those of the weights of policy versions.
    """

    update: int = 0
    source: Path | None = None
    updates: Sequence[UpdateRow] = ()
    evaluations: Sequence[EvaluationRow] = ()
    counts: IntakeCounts = field(default_factory=IntakeCounts)
    seconds: Mapping[str, float] = field(default_factory=dict)
    versions: Set[tuple[str, str]] = frozenset()
    checksums: Mapping[int, str] = field(default_factory=dict)


def read_history(folder: Path, checkpoint: str | None = None) -> History:
    """Return the history of the run in ``folder`` up to ``checkpoint`` ("first", "last" or a number; default last).

    A run that ended before its first checkpoint has learned nothing yet and begins with the recipe's model. Raises
    :class:`RunFolderError` where the updates a checkpoint descends from are not in the lake, and as
    :func:`hotpot.topology.resume.checkpoints.find_checkpoint` does.
    """
    reader = RunReader.open(folder)
    recorded: list[UpdateRow] = from_table("updates", reader.table("updates"))
    evaluations: list[EvaluationRow] = from_table("evaluations", reader.table("evaluations"))
    begun = bool(recorded) or checkpoint is not None or bool(list_checkpoints(folder))
    update, source = find_checkpoint(folder, checkpoint) if begun else (0, None)
    return History(
        update=update,
        source=source,
        updates=_chain(recorded, update, folder),
        evaluations=sorted(evaluations, key=lambda row: row.evaluation),
        counts=_counts(reader),
        seconds=_seconds(recorded, evaluations),
        versions=known_versions(reader),
        checksums=policy_checksums(reader),
    )


def known_versions(reader: RunReader) -> Set[tuple[str, str]]:
    """Return (kind, version) of every version the run's table ``versions`` explains."""
    found = reader.table("versions", ["kind", "version"]).to_pylist()
    return frozenset((row["kind"], row["version"]) for row in found)


def last_recipe(folder: Path) -> dict[str, Any]:
    """Return the recipe that the run in ``folder`` was told last: by its start, or by its last resume."""
    path = folder / RECIPE_NAME
    text = path.read_text(encoding="utf-8") if path.is_file() else read_manifest(folder).recipe
    found: dict[str, Any] = json.loads(text)
    return found


def write_recipe(folder: Path, recipe: Recipe, redactor: Redactor) -> None:
    """Keep ``recipe`` as what the run was told last, whole or not at all, its secrets replaced."""
    text, _ = redactor.redact_json(recipe.model_dump_json(), leave=("redact_patterns",))
    replace_text(folder / RECIPE_NAME, [text, "\n"])


def check_complete(recipe: Recipe, folder: Path) -> None:
    """Raise :class:`RecipeError` where a setting to resume with is a secret that was replaced when it was kept."""
    for name, value in _settings(recipe.model_dump(mode="json")):
        if isinstance(value, str) and value.startswith("[redacted:"):
            raise RecipeError(
                f"{name} of {folder} is a secret that was not kept ({value}); give it again as {name}=VALUE"
            )


def changed_settings(folder: Path, recipe: Recipe) -> dict[str, list[Any]]:
    """Return {setting: [as it was told last, now]} for what the run in ``folder`` is to do differently from here on."""
    old = dict(_settings(last_recipe(folder)))
    new = dict(_settings(recipe.model_dump(mode="json")))
    return {
        name: [old.get(name), new.get(name)]
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _chain(recorded: Sequence[UpdateRow], update: int, folder: Path) -> list[UpdateRow]:
    by_number = {row.update: row for row in recorded}
    chain: list[UpdateRow] = []
    at = update
    while at:
        if at not in by_number:
            raise RunFolderError(
                f"{folder}: checkpoint of update {update} descends from update {at}, which is not in the lake; the run "
                "folder is not whole: restore it from a copy"
            )
        chain.append(by_number[at])
        at = by_number[at].parent_update
    return chain[::-1]


def _counts(reader: RunReader) -> IntakeCounts:
    (row,) = reader.sql(
        """
        SELECT count(*) FILTER (WHERE purpose = 'training') AS training,
          count(*) FILTER (WHERE purpose <> 'training') AS evaluation,
          coalesce(sum(num_prompt_tokens + num_sampled_tokens) FILTER (WHERE purpose = 'training'), 0)::BIGINT AS tokens,
          coalesce(sum(num_sampled_tokens) FILTER (WHERE purpose = 'training'), 0)::BIGINT AS sampled_tokens
        FROM trajectories"""
    ).to_pylist()
    return IntakeCounts(**row)


def _seconds(recorded: Sequence[UpdateRow], evaluations: Sequence[EvaluationRow]) -> dict[str, float]:
    """Return the recorded wall time by span; what an update's spans leave of its time is ``other``."""
    named = {
        name: math.fsum(getattr(row, f"{name}_s") for row in recorded)
        for name in ("generate", "environment", "store", "learn", "publish")
    }
    whole = math.fsum((row.finished_us - row.started_us) / 1e6 for row in recorded)
    measured = math.fsum(row.seconds for row in evaluations if row.label != "manual")
    return {**named, "evaluate": measured, "other": max(0.0, whole - math.fsum(named.values()))}


def _settings(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
