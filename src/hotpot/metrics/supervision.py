"""Metrics of what the supervisor, the circuit breakers and the watchdog found: counted over the events, all processes of a
run together."""

from hotpot.metrics.definition import Metric, define

_FOUND = """(
  SELECT e.kind, e."update", e.policy_version,
    coalesce(
      CASE WHEN e.kind = 'environment_breaker_opened' THEN json_extract_string(e.detail, '$.env_version')
           ELSE u.env_version END, 'unknown') AS env_version,
    CASE WHEN e.kind = 'beats'
         THEN list_max(json_extract(e.detail, '$.parts[*].silent_s')::DOUBLE[]) END AS silent_s
  FROM events e LEFT JOIN updates u ON u."update" = e."update"
  WHERE e.kind IN ('beats', 'actor_replaced', 'part_dead', 'environment_breaker_opened', 'watchdog_ended'))"""
"""One row per finding and per beat, with the environment versions in the update's batch (unknown before it is recorded); a
breaker has its own."""


def _found(
    name: str, unit: str, kind: str, meaning: str, remedy: str, *, healthy: str = "0", value: str = "count(*)"
) -> Metric:
    return define(
        f"system/{name}", "events", unit, meaning, value, "1", mask=f"kind = '{kind}'",
        source=_FOUND, cuts=("update", "policy_version", "env_version"),
        healthy=healthy, remedy=remedy,
    )  # fmt: skip


METRICS = (
    _found(
        "actor_replacements", "actors", "actor_replaced", "Actors that were replaced because they made no progress.",
        "Read the events actor_replaced: they name the actor and its silence. An environment hangs: mend it, or lower "
        "actors.call_timeout_s so that its calls fail alone.",
    ),
    _found(
        "dead_parts", "parts", "part_dead", "Actors, engines and learners that were taken for dead.",
        "Read the events part_dead. If the part was only slow, raise supervision.dead_after_s.",
    ),
    _found(
        "environment_breaker_openings", "openings", "environment_breaker_opened",
        "How often the circuit breaker of an environment version opened.",
        "Read the events environment_breaker_opened: they have the commonest reasons of failure.",
    ),
    _found(
        "watchdog_endings", "processes", "watchdog_ended",
        "Processes of the run that its watchdog ended, told by the ones that took it up.",
        "Read the events watchdog_ended: culprit and where; every stack is in the run's logs folder.",
    ),
    _found(
        "longest_silence_s", "seconds", "beats",
        "Longest time that a part with work made no progress, as the beats tell it.",
        "Find the part: see docs/supervision.md for the query. It will be taken for dead where this grows further.",
        healthy="well below supervision.dead_after_s", value="max(silent_s)",
    ),
)  # fmt: skip
"""The metrics of supervision."""
