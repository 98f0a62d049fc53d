"""Metrics of the gate: what share of each producer's records it refused, and for which reasons."""

from hotpot.metrics.definition import define

_REFUSED = """
  SELECT producer, reason, coalesce(json_extract_string(payload, '$.row.env_version'), 'unknown') AS env_version,
    coalesce(try_cast(json_extract_string(payload, '$.row.policy_version') AS BIGINT), -1) AS policy_version
  FROM quarantine"""
"""One row per refused record; its versions as far as they can be read."""

_JUDGED = f"""({_REFUSED}
  UNION ALL SELECT actor_id, '', env_version, policy_version FROM trajectories)"""
"""One row per record brought to the gate; ``reason`` is empty where it was accepted."""

_CUTS = ("policy_version", "env_version", "producer")

METRICS = (
    define(
        "gate/refused_share", "quarantine", "share",
        "Share of the records brought to the gate that went to quarantine. An accepted record's producer is its actor. A "
        "record refused and accepted later counts in both.",
        "count(*) FILTER (WHERE reason <> '')", "count(*)", source=_JUDGED, cuts=_CUTS,
        healthy="0",
        remedy="Cut by producer to see whose, then `hotpot lake quarantine list RUN` for the reasons and an example of each.",
    ),
    define(
        "gate/refused_records", "quarantine", "records",
        "Records that went to quarantine. Cut by reason and producer it says what is wrong with whom.",
        "count(*)", "1", source=f"({_REFUSED})", cuts=(*_CUTS, "reason"),
        healthy="0",
        remedy="Mend the producer, or explain the version; then `hotpot lake quarantine requeue RUN --reason R`.",
    ),
    define(
        "gate/held_share", "quarantine", "share",
        "Share of the refused records that were not judged because their producer's breaker was open.",
        "count(*) FILTER (WHERE reason = 'breaker_open')", "count(*)", source=f"({_REFUSED})", cuts=_CUTS,
        healthy="0",
        remedy="Look at the events breaker_opened: they name the producer and an example; see `[gate]` in the recipe.",
    ),
)  # fmt: skip
"""The metrics of the gate."""
