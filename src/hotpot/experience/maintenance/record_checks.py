"""Checks of the records: that they are whole, single, and refer to each other as they must.

Owns the rules as SQL, one each; a rule's query returns a line of text for each breach. Knows the columns of
:data:`hotpot.types.TABLES` and which trajectories were deleted. ``deep`` rules read the token columns.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hotpot.errors import StoreError, UsageError
from hotpot.experience.maintenance.findings import Finding, capped
from hotpot.experience.maintenance.ranges import pieces
from hotpot.experience.reading.reader import RunReader
from hotpot.ids import prefix_hash


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One rule: its name, the table it is told of, the tables it needs, and the query that finds breaches."""

    name: str
    table: str
    needs: tuple[str, ...]
    query: str
    deep: bool = False


RULES = (
    Rule(
        name="attempt_ends",
        table="attempts",
        needs=("attempts",),
        query="SELECT attempt_id || ' ended ' || count(*) || ' times: ' || string_agg(state, ', ') FROM attempts "
        "WHERE state != 'leased' GROUP BY attempt_id HAVING count(*) > 1",
    ),
    Rule(
        name="attempt_state",
        table="attempts",
        needs=("attempts",),
        query="SELECT attempt_id || ' is ' || state || ', which is no state' FROM attempts "
        "WHERE state NOT IN ('leased', 'finished', 'failed', 'dropped')",
    ),
    Rule(
        name="finished_attempt",
        table="attempts",
        needs=("attempts", "trajectories"),
        query="SELECT attempt_id || ' is finished but has no trajectory' FROM attempts WHERE state = 'finished' "
        "AND attempt_id NOT IN (SELECT attempt_id FROM trajectories) "
        "AND attempt_id NOT IN (SELECT split_part(id, '/', 1) FROM (SELECT unnest($deleted) AS id))",
    ),
    Rule(
        name="trajectory_attempt",
        table="trajectories",
        needs=("attempts", "trajectories"),
        query="SELECT trajectory_id || ' is of attempt ' || attempt_id || ', which is not finished' FROM trajectories "
        "WHERE attempt_id NOT IN (SELECT attempt_id FROM attempts WHERE state = 'finished')",
    ),
    Rule(
        name="trajectory_twice",
        table="trajectories",
        needs=("trajectories",),
        query="SELECT trajectory_id || ' is there ' || count(*) || ' times' FROM trajectories "
        "GROUP BY trajectory_id HAVING count(*) > 1",
    ),
    Rule(
        name="incomplete_trajectory",
        table="steps",
        needs=("trajectories", "steps"),
        query="WITH there AS (SELECT trajectory_id, count(*) AS n, count(DISTINCT step) AS d, min(step) AS low, "
        "max(step) AS high FROM steps GROUP BY trajectory_id) "
        "SELECT trajectory_id || ' has ' || num_steps || ' steps, but ' || coalesce(n, 0) || ' are there' "
        "FROM trajectories LEFT JOIN there USING (trajectory_id) "
        "WHERE coalesce(n, 0) != num_steps OR d != n OR low != 0 OR high != n - 1",
    ),
    Rule(
        name="stray_steps",
        table="steps",
        needs=("trajectories", "steps"),
        query="SELECT DISTINCT trajectory_id || ' has steps but no row in trajectories' FROM steps "
        "WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories)",
    ),
    Rule(
        name="update_twice",
        table="updates",
        needs=("updates",),
        query="SELECT 'update ' || update || ' is there ' || count(*) || ' times' FROM updates "
        "GROUP BY update HAVING count(*) > 1",
    ),
    Rule(
        name="consumption_trajectory",
        table="consumptions",
        needs=("trajectories", "consumptions"),
        query="SELECT 'update ' || update || ' consumed ' || trajectory_id || ', which is neither there nor deleted' "
        "FROM consumptions WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories) "
        "AND trajectory_id NOT IN (SELECT unnest($deleted))",
    ),
    Rule(
        name="consumption_update",
        table="consumptions",
        needs=("updates", "consumptions"),
        query="SELECT trajectory_id || ' was consumed by update ' || update || ', which is not there' "
        "FROM consumptions WHERE update NOT IN (SELECT update FROM updates)",
    ),
    Rule(
        name="consumption_twice",
        table="consumptions",
        needs=("consumptions",),
        query="SELECT 'update ' || update || ' consumed ' || trajectory_id || ' ' || count(*) || ' times' "
        "FROM consumptions GROUP BY update, trajectory_id HAVING count(*) > 1",
    ),
    Rule(
        name="discard_trajectory",
        table="discards",
        needs=("trajectories", "discards"),
        query="SELECT trajectory_id || ' was discarded (' || reason || '), and is neither there nor deleted' FROM discards "
        "WHERE trajectory_id NOT IN (SELECT trajectory_id FROM trajectories WHERE purpose = 'training') "
        "AND trajectory_id NOT IN (SELECT unnest($deleted))",
    ),
    Rule(
        name="discard_twice",
        table="discards",
        needs=("discards",),
        query="SELECT trajectory_id || ' was discarded ' || count(*) || ' times' FROM discards "
        "GROUP BY trajectory_id HAVING count(*) > 1",
    ),
    Rule(
        name="discard_collected",
        table="discards",
        needs=("updates", "discards"),
        query="SELECT d.trajectory_id || ' was discarded (' || d.reason || ') and collected for update ' || u.update "
        "FROM discards d JOIN (SELECT update, unnest(collected_trajectories) AS trajectory_id FROM updates) u "
        "USING (trajectory_id)",
    ),
    Rule(
        name="collected_twice",
        table="updates",
        needs=("updates",),
        query="SELECT trajectory_id || ' was collected for ' || count(*) || ' updates: ' || string_agg(update, ', ' "
        "ORDER BY update) FROM (SELECT update, unnest(collected_trajectories) AS trajectory_id FROM updates) "
        "GROUP BY trajectory_id HAVING count(*) > 1",
    ),
    Rule(
        name="update_consumptions",
        table="consumptions",
        needs=("updates", "consumptions"),
        query="SELECT 'update ' || u.update || ' learned from ' || any_value(u.num_trajectories) || ' trajectories, but ' "
        "|| count(c.trajectory_id) || ' consumptions are there' FROM updates u LEFT JOIN consumptions c "
        "ON c.update = u.update GROUP BY u.update HAVING count(c.trajectory_id) != any_value(u.num_trajectories)",
    ),
    Rule(
        name="learned_update",
        table="learned_tokens",
        needs=("updates", "learned_tokens"),
        query="SELECT DISTINCT 'update ' || update || ' has learned tokens but no row in updates' FROM learned_tokens "
        "WHERE update NOT IN (SELECT update FROM updates)",
    ),
    Rule(
        name="learned_consumption",
        table="learned_tokens",
        needs=("consumptions", "learned_tokens"),
        query="SELECT DISTINCT 'update ' || l.update || ' learned tokens of ' || l.trajectory_id || ' without consuming it' "
        "FROM learned_tokens l ANTI JOIN consumptions c "
        "ON c.update = l.update AND c.trajectory_id = l.trajectory_id",
    ),
    Rule(
        name="learned_missing",
        table="learned_tokens",
        needs=("consumptions", "learned_tokens"),
        query="SELECT 'update ' || c.update || ' consumed ' || c.trajectory_id || ', but its learned tokens are not there' "
        "FROM consumptions c ANTI JOIN learned_tokens l ON c.update = l.update AND c.trajectory_id = l.trajectory_id "
        "WHERE c.update IN (SELECT update FROM learned_tokens) AND c.trajectory_id NOT IN (SELECT unnest($deleted))",
    ),
    Rule(
        name="deleted_present",
        table="trajectories",
        needs=("trajectories", "steps", "learned_tokens", "quarantine"),
        query="SELECT id || ' was deleted, but ' || place || ' still has it: repeat the deletion' FROM ("
        "SELECT DISTINCT trajectory_id AS id, 'trajectories' AS place FROM trajectories "
        "UNION ALL SELECT DISTINCT trajectory_id, 'steps' FROM steps "
        "UNION ALL SELECT DISTINCT trajectory_id, 'learned_tokens' FROM learned_tokens "
        "UNION ALL SELECT DISTINCT record_id, 'quarantine' FROM quarantine) "
        "WHERE id IN (SELECT unnest($deleted))",
    ),
    Rule(
        name="step_lengths",
        table="steps",
        needs=("steps",),
        deep=True,
        query="SELECT trajectory_id || ' step ' || step || ': lengths of tokens, log-probabilities and spans disagree' "
        "FROM steps WHERE len(behaviour_logprobs) != len(sampled_tokens) OR len(model_logprobs) != len(sampled_tokens) "
        "OR coalesce(list_sum(span_length), 0) != len(prompt_tokens) + len(sampled_tokens) "
        "OR coalesce(list_sum(span_policy_length), 0) != len(sampled_tokens)",
    ),
    Rule(
        name="trajectory_tokens",
        table="steps",
        needs=("trajectories", "steps"),
        deep=True,
        query="SELECT t.trajectory_id || ' has other numbers of tokens than its steps' FROM trajectories t JOIN ("
        "SELECT trajectory_id, sum(len(prompt_tokens)) AS given, sum(len(sampled_tokens)) AS sampled FROM steps "
        "GROUP BY trajectory_id) s USING (trajectory_id) "
        "WHERE given != num_prompt_tokens OR sampled != num_sampled_tokens",
    ),
    Rule(
        name="learned_lengths",
        table="learned_tokens",
        needs=("learned_tokens",),
        deep=True,
        query="SELECT 'update ' || update || ' position ' || position || ': lengths disagree' FROM learned_tokens "
        "WHERE len(loss_mask) != len(tokens) OR len(advantages) != len(tokens) OR len(returns) != len(tokens) "
        "OR len(old_logprobs) != len(tokens) OR len(new_logprobs) != len(tokens)",
    ),
)
"""Every rule a record is held against."""


def check_records(
    reader: RunReader, deleted: Sequence[str], damaged: Collection[str], *, deep: bool
) -> Iterator[Finding | tuple[str, str]]:
    """Yield a finding for each breach, or (rule, reason) for each rule that needs a damaged table."""
    for rule in RULES:
        if rule.deep and not deep:
            continue
        broken = [name for name in rule.needs if name in damaged]
        if broken:
            yield rule.name, f"it needs {', '.join(broken)}"
            continue
        try:
            yield from capped(rule.name, rule.table, _breaches(reader, rule, deleted))
        except StoreError as error:
            yield rule.name, str(error)
        except UsageError as error:
            detail = f"rule {rule.name} can't be asked, so rows it needs can't be read: {error}"
            yield Finding(check="unreadable_rows", table=rule.table, detail=detail)
    if deep and "steps" not in damaged:
        yield from capped("prefix_hash", "steps", _broken_chains(reader))


def _breaches(reader: RunReader, rule: Rule, deleted: Sequence[str]) -> list[str]:
    params = {"deleted": list(deleted)} if "$deleted" in rule.query else None
    table = reader.sql(rule.query.replace("$deleted", "$deleted::VARCHAR[]"), params)
    details: list[Any] = table.column(0).to_pylist()
    return sorted(details)


def _broken_chains(reader: RunReader) -> Iterator[str]:
    """Yield the steps whose tokens are not those their hash was made of; a trajectory's steps lie in a row."""
    columns = ["trajectory_id", "step", "segment", "prompt_tokens", "sampled_tokens", "prefix_hash"]
    chain, of = "", ("", -1)
    for piece in pieces(reader, "steps", columns):
        for batch in piece.to_batches(max_chunksize=4096):
            for row in batch.to_pylist():
                if of != (row["trajectory_id"], row["segment"]):
                    chain, of = "", (row["trajectory_id"], row["segment"])
                if prefix_hash(np.array(row["prompt_tokens"], np.int32), extends=chain) != row["prefix_hash"]:
                    yield f"{row['trajectory_id']} step {row['step']}: its tokens are not those of its prefix_hash"
                chain = prefix_hash(np.array(row["sampled_tokens"], np.int32), extends=row["prefix_hash"])
