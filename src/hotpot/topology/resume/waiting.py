"""What waits for a learner, read from the record: what a resume takes into the queue again, and which groups to go on with.

Owns the definition: a finished training trajectory of the run's own is *collected* where a recorded update names it,
*discarded* where table ``discards`` does, and *waiting* otherwise. Knows no queue. Reads; never writes.
"""

from hotpot.experience import RunReader, read_trajectories
from hotpot.topology.resume.position import INTERRUPTIONS
from hotpot.types import Purpose, Split, Trajectory

_OWN = "regexp_full_match(attempt_id, '[0-9]+[.][0-9]+[.][0-9]+')"
"""Attempts of the run's own sampler. What was imported, or brought back from quarantine, belongs to no group under way."""

_TRAINING = f"purpose = '{Purpose.TRAINING.value}' AND {_OWN}"

COLLECTED = """
SELECT unnest(collected_trajectories) AS trajectory_id FROM updates
UNION ALL SELECT trajectory_id FROM consumptions
UNION ALL SELECT t.trajectory_id FROM trajectories t JOIN groups g USING (group_id)
  JOIN updates u ON u."update" = g."update" WHERE u.learner_settings = ''"""
"""Trajectories that an update has had. Updates of releases that did not name what they collected are known by their groups."""

_USED = f"{COLLECTED} UNION ALL SELECT trajectory_id FROM discards"
"""Trajectories that are spoken for."""


def waiting_trajectories(reader: RunReader) -> list[Trajectory]:
    """Return the finished training trajectories that no recorded update collected and nobody discarded, with their steps,
    in order of finishing (as the store took them)."""
    ids = reader.sql(
        f"SELECT trajectory_id FROM trajectories WHERE {_TRAINING} AND split = '{Split.TRAIN.value}' "
        f"AND trajectory_id NOT IN ({_USED})"
    )["trajectory_id"].to_pylist()
    return read_trajectories(reader, "trajectory_id IN (SELECT unnest(?))", [ids]) if ids else []


def open_issues(reader: RunReader, *, wanted: int, issued: int) -> list[int]:
    """Return the task issues whose groups were under way when the process ended, ascending, as far as an attempt was made
    at them.

    Of each task ``issued`` episodes were issued, ``wanted`` of which count. An issue is open where fewer than wanted have
    finished, an episode was interrupted or not begun, and nothing of its group was learned from or discarded.
    """
    interruptions = ", ".join(f"'{reason}'" for reason in INTERRUPTIONS)
    found = reader.sql(
        f"""
        WITH ended AS (
          SELECT CAST(substr(group_id, 2) AS BIGINT) AS issue, group_id, episode_id,
            bool_or(state = 'finished') AS finished,
            bool_or(state = 'dropped' AND reason NOT IN ({interruptions})) AS given_up
          FROM attempts WHERE {_TRAINING} GROUP BY ALL)
        SELECT issue FROM ended GROUP BY issue, group_id
        HAVING count(*) FILTER (WHERE finished) < ? AND count(*) FILTER (WHERE finished OR given_up) < ?
          AND group_id NOT IN (SELECT group_id FROM trajectories WHERE trajectory_id IN ({_USED}))
        ORDER BY issue""",
        [wanted, issued],
    )
    return [row["issue"] for row in found.to_pylist()]
