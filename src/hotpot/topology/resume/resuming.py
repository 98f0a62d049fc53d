"""Taking a run up again: what is refused, what is learned again, where it goes on, and whether that is exact.

::

    checks (nothing written) ──► store opened and recovered ──► roll forward ──► checkpoint of the last update
                                                                             ──► position, past of the pending update

Owns the decision what a resume is: *exact* where, in deterministic mode, everything from the next update on is what an
uninterrupted run would have computed, bit for bit. What makes it inexact is collected in words and ends on the record.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotpot.config import Recipe
from hotpot.errors import RecipeError, RunFolderError
from hotpot.experience import Ledger, RunReader, from_table
from hotpot.experience.crashpoints import reach
from hotpot.learner import Learner
from hotpot.learner.checkpoint import read_manifest
from hotpot.models import checksum, load_policy
from hotpot.observability.changes import known_versions
from hotpot.rollout import NOTHING, Past
from hotpot.topology.parts.ingredients import Ingredients
from hotpot.topology.resume.checkpoints import (
    LAST,
    checkpoint_folder,
    left_behind,
    list_checkpoints,
    write_checkpoint,
)
from hotpot.topology.resume.history import History
from hotpot.topology.resume.left import NOTHING_LEFT, Left, read_left
from hotpot.topology.resume.position import Position, behind_the_marks, is_barren, read_past, read_position
from hotpot.topology.resume.roll_forward import Rolled, on_the_way, roll_forward
from hotpot.topology.resume.run_state import ARITHMETIC, RunState, differences, read_run_state, versions_of
from hotpot.types import UpdateRow
from hotpot.versions import Version, diff

COLLECTING = ("env.", "prompt.", "model.", "rollout.", "sampling.", "engine.", "gate.", "run.seed", "run.deterministic", "debug.")  # fmt: skip
"""Settings that decide what is collected: changed ones end a pending update."""

HARMLESS = (
    "store.",
    "checkpoint.",
    "evaluation.",
    "run.trace",
    "run.self_test",
    "run.folder",
    "topology.max_seconds",
)
"""Settings that change nothing of what is learned."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resumption:
    """How a run is taken up. ``why`` are the reasons for which it is not exact; ``events`` go on the record."""

    history: History
    position: Position
    past: Past = NOTHING
    left: Left = NOTHING_LEFT
    rolled: tuple[int, ...] = ()
    why: tuple[str, ...] = ()
    events: tuple[tuple[str, dict[str, Any]], ...] = ()

    def detail(self) -> dict[str, Any]:
        """Return what the event ``resumed`` says of it."""
        return {
            "exact": not self.why,
            "inexact_because": list(self.why),
            "rolled_forward": list(self.rolled),
            "kept_episodes": len(self.past.finished) + len(self.left.past.finished),
            "next_update": self.position.next_update,
            "next_issue": self.position.next_issue,
            **({"left_groups": len(self.left.issues)} if self.left.issues else {}),
            **({"left_until": self.left.until} if self.left.until else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Taking:
    """What a resume is told: ``told`` are the settings the run was told last, ``changed`` how the recipe differs from
    them, ``checkpoint`` the one to go back to (None: the last), ``here`` what this process computes on and with.
    """

    folder: Path
    recipe: Recipe
    told: Recipe
    changed: Mapping[str, Sequence[Any]]
    checkpoint: str | None
    here: Mapping[str, Any] = field(default_factory=dict)

    @property
    def goes_back(self) -> bool:
        """Whether an earlier checkpoint was asked for by name."""
        return self.checkpoint not in (None, LAST)


def check_same_experiment(taking: Taking, made: Ingredients, source: Path | None) -> list[str]:
    """Refuse to go on with another environment, reward, prompt or model; return the changes that were accepted, in words.

    Nothing is written. Raises :class:`RunFolderError` or :class:`RecipeError` with what differs.
    """
    _check_model(taking)
    state = read_run_state(source) if source is not None else None
    if state is None:
        return []
    accepted = []
    for kind, versions in versions_of(made.environments).items():
        old, new = getattr(state, f"{kind}_version"), "|".join(one.version for one in versions)
        if old == new:
            continue
        asked_for = any(name.startswith(_EXPLAINS[kind]) for name in taking.changed)
        if not asked_for and kind not in taking.recipe.checkpoint.accept_changed:
            raise RunFolderError(
                f"{taking.folder} was trained with {kind} version {old}, now it is {new}:\n"
                f"{_shown(taking.folder, kind, old, versions)}\n"
                f'restore what it was, start a new run, or say checkpoint.accept_changed=["{kind}"] to go on with both '
                "on one record"
            )
        accepted.append(f"{kind} version was {old}, is {new}")
    return accepted


def take_up(
    taking: Taking,
    history: History,
    ledger: Ledger,
    make_learner: Callable[[], Learner],
    keep: Callable[[Learner, Path, History], None],
) -> Resumption:
    """Come to the last recorded update's weights and say where the run goes on.

    ``make_learner`` returns a learner with the settings told last in the state of ``history``; ``keep(learner, folder,
    history)`` saves one as a checkpoint into ``folder``. The store must be open: this process owns the run.
    """
    folder = taking.folder
    if taking.goes_back:
        back = f"went back to checkpoint {history.update}"
        return Resumption(
            history=history,
            position=behind_the_marks(ledger),
            why=(back, *_reasons(taking, history.source)),
        )
    reader = RunReader.open(folder)
    rows = _missing(reader, folder, history)
    why = _reasons(taking, history.source)
    rolled = Rolled(updates=())
    if rows:
        learner, rolled = roll_forward(make_learner, reader, rows, before=len(history.updates))
        history = _advanced(history, rolled)
        after = ledger.mark("update") if rolled.failed is not None else history.update
        if rolled.updates or rolled.failed is not None:
            write_checkpoint(
                folder,
                history.update,
                lambda into: keep(learner, into, history),
                keep=taking.told.checkpoint.keep,
                after=after,
            )
        history = replace(history, source=checkpoint_folder(folder, history.update))
    reach("resume_learned")
    left = NOTHING_LEFT
    if taking.recipe.topology.kind == "sync":
        position, past = _where(taking, reader, ledger, history, failed=rolled.failed is not None)
    else:
        position, past = behind_the_marks(ledger), NOTHING
        left = read_left(reader, ledger, leave=any(name.startswith(COLLECTING) for name in taking.changed))
        why = [*why, f"topology.kind is {taking.recipe.topology.kind}"]
    problem = [position.problem] if position.problem else []
    return Resumption(
        history=history,
        position=position,
        past=past,
        left=left,
        rolled=tuple(row.update for row in rolled.updates),
        why=(*why, *_told(rolled), *problem),
        events=tuple(_events(rolled)),
    )


def _where(
    taking: Taking, reader: RunReader, ledger: Ledger, history: History, *, failed: bool
) -> tuple[Position, Past]:
    if failed or taking.recipe.debug.mode != "train":
        return behind_the_marks(ledger), NOTHING
    if "topology.kind" in taking.changed:  # what an asynchronous run left is no pending update
        return behind_the_marks(ledger, "topology.kind changed"), NOTHING
    position = read_position(reader, ledger, history.update)
    if position.problem:
        return position, NOTHING
    past = read_past(reader, position.next_issue, company=taking.recipe.run.deterministic)
    begun = bool(past.next_attempts)
    other = [name for name in taking.changed if name.startswith(COLLECTING)]
    if begun and other:
        return behind_the_marks(
            ledger, f"update {position.next_update} was left, since {', '.join(other)} changed"
        ), NOTHING
    rollout = taking.recipe.rollout
    if is_barren(past, rollout.tasks_per_batch * rollout.samples_per_task):
        return behind_the_marks(
            ledger, f"update {position.next_update} was left, since nothing came of it to learn from"
        ), NOTHING
    return position, past


def _missing(reader: RunReader, folder: Path, history: History) -> list[UpdateRow]:
    recorded: list[UpdateRow] = from_table("updates", reader.table("updates"))
    return on_the_way(recorded, history.update, after=left_behind(folder, history.update))


def _advanced(history: History, rolled: Rolled) -> History:
    if not rolled.updates:
        return history
    return replace(
        history, update=rolled.updates[-1].update, updates=[*history.updates, *rolled.updates], source=None
    )


def _reasons(taking: Taking, source: Path | None) -> list[str]:
    """Return why going on can't be exact, whatever the record holds."""
    found = [] if taking.recipe.run.deterministic else ["run.deterministic is false"]
    found += [
        f"{name} was {old}, is {new}" for name, (old, new) in taking.changed.items() if _matters(name, taking)
    ]
    state: RunState | None = read_run_state(source) if source is not None else None
    if state is not None:
        found += differences(state, dict(taking.here), ARITHMETIC)
    return found


def _matters(name: str, taking: Taking) -> bool:
    if name == "topology.updates" and taking.recipe.learner.final_learning_rate_share == 1:
        return False
    return not name.startswith(HARMLESS)


def _told(rolled: Rolled) -> list[str]:
    if rolled.failed is not None:
        return [f"update {rolled.failed} could not be learned again as recorded"]
    return list(rolled.differences)


def _events(rolled: Rolled) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    if rolled.updates:
        numbers = [row.update for row in rolled.updates]
        differing = list(rolled.differences) if rolled.failed is None else []
        found.append(("rolled_forward", {"updates": numbers, "differences": differing}))
    if rolled.failed is not None:
        found.append(
            ("roll_forward_failed", {"update": rolled.failed, "differences": list(rolled.differences)})
        )
    return found


_EXPLAINS = {"env": ("env.",), "reward": ("env.",), "prompt": ("prompt.", "env.", "store.redact_patterns")}
"""By kind of version, the settings whose change asks for another one."""


def _check_model(taking: Taking) -> None:
    kept = list_checkpoints(taking.folder)
    if "model.path" not in taking.changed or not kept or taking.recipe.model.path is None:
        return
    old = read_manifest(checkpoint_folder(taking.folder, kept[0]))["weights_checksum"]
    implementation = taking.recipe.model.implementation
    decoder = load_policy(taking.recipe.model.path, implementation)
    new = checksum(decoder.state_dict())
    if new == old:
        return
    was = load_policy(checkpoint_folder(taking.folder, kept[0]), implementation).config
    shape = "of the same shape" if was == decoder.config else f"of shape {decoder.config}, not {was}"
    raise RecipeError(
        f"model.path = {taking.recipe.model.path} has weights {new}, {shape}; {taking.folder} began with {old}, and a "
        "resume goes on from its checkpoints: leave model.path as it was, or start a new run"
    )


def _shown(folder: Path, kind: str, old: str, new: Sequence[Version]) -> str:
    """Return how the versions that are ``new`` differ from those in the place of which they stand."""
    before = set(old.split("|"))
    known = [one for one in known_versions(RunReader.open(folder)).get(kind, ()) if one.version in before]
    now = {one.version for one in new}
    gone = sorted((one for one in known if one.version not in now), key=lambda one: one.version)
    come = [one for one in new if one.version not in before]
    changes = [str(change) for was, made in zip(gone, come, strict=False) for change in diff(was, made)]
    return "\n".join(f"  {line}" for text in changes[:20] for line in text.splitlines()[:20])
