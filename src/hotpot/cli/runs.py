"""``hotpot runs``: which runs there are, how far they came, what they reached."""

from pathlib import Path
from typing import Any

from hotpot.cli.output import print_json, print_rows
from hotpot.cli.runs_folder import DEFAULT_RUNS, JsonOption, RunsOption, list_runs, open_reader, read_summary
from hotpot.errors import HotpotError


def runs(folder: RunsOption = DEFAULT_RUNS, json_output: JsonOption = False) -> None:
    """List the runs with their status, updates and hold-out success."""
    rows = [describe(run) for run in list_runs(folder)]
    if json_output:
        print_json(rows)
    else:
        print_rows(rows, columns=COLUMNS, title=f"runs under {folder}")


COLUMNS = ("run", "status", "updates", "trajectories", "before", "after", "seconds")


def describe(run: Path) -> dict[str, Any]:
    """Return one run's line. A run without a summary is read from its records; ``after`` is then its last evaluation.

    ``status`` is running where a living process writes the run; else what its summary says (finished, stopped, failed);
    without one either a program of yours wrote it and closed it in order (ended), or the process died (crashed).
    """
    from hotpot.experience.log.ledger_file import ended_in_order
    from hotpot.experience.run_folder.owner import is_owned

    try:
        # Before the summary is looked for: a run that ends in between is then called running, never crashed.
        running = is_owned(run)
        summary = read_summary(run)
        if running or summary is None:
            ended = "ended" if not running and ended_in_order(run / "control.sqlite") else "crashed"
            return _unfinished(run, "running" if running else ended)
        return _finished(run, summary)
    except HotpotError as error:
        return {**dict.fromkeys(COLUMNS), "run": run.name, "status": f"unreadable: {error}"}


def _finished(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    holdout = summary.get("holdout") or {}
    return {
        "run": run.name,
        "status": summary.get("status", "finished"),
        "updates": summary.get("updates"),
        "trajectories": summary.get("trajectories"),
        "before": (holdout.get("before") or {}).get("mean"),
        "after": (holdout.get("after") or {}).get("mean"),
        "seconds": summary.get("seconds_total"),
    }


def _unfinished(run: Path, status: str) -> dict[str, Any]:
    reader = open_reader(run)
    (row,) = reader.sql(
        """
        WITH measured AS (  -- each environment of a mix by itself, the last time of each label and update
          SELECT label, "update", max(evaluation) AS evaluation, max_by(success_rate, evaluation) AS success,
            max_by(num_tasks, evaluation) AS tasks
          FROM evaluations WHERE purpose = 'evaluation'
          GROUP BY label, "update", env_version, reward_version)
        SELECT (SELECT count(*) FROM updates) AS updates,
          (SELECT count(*) FROM trajectories WHERE purpose = 'training') AS trajectories,
          (SELECT sum(success * tasks) / sum(tasks) FROM measured WHERE label = 'before') AS before,
          (SELECT sum(success * tasks) / sum(tasks) FROM measured
            WHERE (label, "update") = (SELECT (label, "update") FROM measured WHERE label <> 'before'
              ORDER BY evaluation DESC LIMIT 1)) AS after,
          (SELECT (max(time_us) - min(time_us)) / 1e6 FROM events) AS seconds"""
    ).to_pylist()
    return {"run": run.name, "status": status, **row}
