"""What a process says on the record before it does anything: what the run is made of, what it was told, where it stands.

Owns the event ``run_started``, ``resumed`` or ``opened_for_evaluation`` and the rows of the versions not explained yet.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hotpot.learner.precision import spelled
from hotpot.models import checksum
from hotpot.topology.parts.ingredients import Ingredients
from hotpot.topology.session import Session
from hotpot.topology.updates import rows


def introduce(
    session: Session,
    made: Ingredients,
    kind: str,
    more: Mapping[str, Any],
    events: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> None:
    """Put on the record what the run is made of and what this process was told; ``more`` goes into the
    event, ``events`` before it."""
    progress = session.progress
    served = rows.policy_version(
        progress.policy_version,
        checksum=checksum(session.learner.weights()),
        update=progress.update,
        origin=made.origin,
    )
    own = [
        version
        for one in made.environments
        for version in (one.environment.env_version, one.environment.reward_version, one.prompt)
    ]
    # Environments of a mix may share one.
    by_name = {(known.kind, known.version): known for known in [*own, served, rows.schema_version()]}
    unknown = [known for name, known in by_name.items() if name not in session.history.versions]
    detail: dict[str, Any] = {
        "origin": made.origin,
        "threads_engine": session.threads.engine,
        "threads_learner": session.threads.learner,
        "precision_learner": spelled(session.learner.precision),
        **({"mix": [rows.mix_detail(member) for member in made.mix]} if len(made.mix) > 1 else {}),
        **more,
    }
    described = [rows.version_row(session.run_id, known) for known in unknown]
    told = [session.event(name, dict(found)) for name, found in events]
    session.store.record([*described, *told, session.event(kind, detail)])
    if spelled(session.learner.precision) == "bfloat16, emulated":
        session.view.message(
            "learner.precision is bfloat16, for which this processor has no instructions: its products are emulated, as exact "
            "and slower; learner.precision = float32 is faster here"
        )
    if not made.dialect.renders_tools:
        session.view.message(
            "the chat template shows the model no tools; name them in prompt.system, or use another template"
        )
