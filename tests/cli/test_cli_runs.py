import csv
import io
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from small_runs import json_of, write_model_folder, write_run

from hotpot.experience import RunReader
from hotpot.experience.run_folder.owner import OwnerLock
from hotpot.metrics import METRICS
from hotpot.models import train_tokenizer
from hotpot.observability.queries import cut


def test_runs_lists_finished_and_ended_ones(hotpot, runs: Path) -> None:
    rows = {row["run"]: row for row in json_of(hotpot("runs", "--runs", runs, "--json"))}
    assert rows["old"] == {
        "run": "old", "status": "finished", "updates": 1, "trajectories": 8, "before": 0.25, "after": 0.75, "seconds": 3.5,
    }  # fmt: skip
    assert rows["new"]["status"] == "ended"  # written by a program of its own, closed in order, no summary
    assert (rows["new"]["updates"], rows["new"]["trajectories"]) == (1, 8)
    assert (rows["new"]["before"], rows["new"]["after"]) == (0.25, 0.5)
    table = hotpot("runs", "--runs", runs).stdout
    assert "old" in table
    assert "0.75" in table


def test_runs_tells_running_stopped_ended_and_crashed_apart(hotpot, tmp_path: Path) -> None:
    run = write_run(tmp_path, "r")

    def status() -> str:
        (row,) = json_of(hotpot("runs", "--runs", tmp_path, "--json"))
        assert (row["updates"], row["trajectories"]) == (1, 8)
        return str(row["status"])

    assert status() == "ended"
    with closing(sqlite3.connect(run / "control.sqlite")) as ledger, ledger:
        ledger.execute("UPDATE owners SET closed_us = NULL")
    assert status() == "crashed"
    lock = OwnerLock(run)
    assert status() == "running"
    (run / "summary.json").write_text('{"status": "stopped", "updates": 1, "trajectories": 8}')
    assert status() == "running"
    lock.release()
    assert status() == "stopped"


def test_runs_over_nothing_and_over_damage(hotpot, tmp_path: Path) -> None:
    assert json_of(hotpot("runs", "--runs", tmp_path / "none", "--json")) == []
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "manifest.json").write_text("{}")
    (tmp_path / "bad" / "summary.json").write_text("{")
    (row,) = json_of(hotpot("runs", "--runs", tmp_path, "--json"))
    assert row["status"].startswith("unreadable")


def test_sql_as_json_csv_and_table(hotpot, runs: Path) -> None:
    query = "select purpose, count(*) as n, sum(num_steps) as steps from trajectories group by 1 order by 1"
    expected = [{"purpose": "evaluation", "n": 1, "steps": 2}, {"purpose": "training", "n": 8, "steps": 16}]
    assert json_of(hotpot("sql", "old", query, "--runs", runs, "--json")) == expected
    lines = list(csv.DictReader(io.StringIO(hotpot("sql", runs / "old", query, "--csv").stdout)))
    assert lines == [{key: str(value) for key, value in row.items()} for row in expected]
    assert "training" in hotpot("sql", "old", query, "--runs", runs).stdout


def test_sql_answers_the_lineage_question_without_nulls(hotpot, runs: Path) -> None:
    query = (
        "select env_version, reward_version, prompt_version, policy_version, schema_version, count(*) from steps "
        "group by 1,2,3,4,5"
    )
    rows = json_of(hotpot("sql", "old", query, "--runs", runs, "--json"))
    assert rows
    assert all(value is not None for row in rows for value in row.values())


def test_sql_metric_with_cuts_and_condition(hotpot, runs: Path) -> None:
    arguments = ("sql", "old", "--runs", runs, "--json", "--metric")
    assert json_of(hotpot(*arguments, "rollout/reward_mean")) == [{"value": 0.5}]
    found = json_of(
        hotpot(*arguments, "rollout/sampled_steps", "--by", "purpose, split", "--where", "policy_version = 1")
    )
    assert [(row["purpose"], row["split"], row["value"]) for row in found] == [
        ("evaluation", "holdout", 2.0), ("training", "train", 16.0),
    ]  # fmt: skip
    listed = json_of(hotpot("sql", "--metrics", "--json"))
    assert [row["name"] for row in listed] == list(METRICS)


def test_metrics_of_every_table_answer_over_a_real_run_in_the_required_cuts(runs: Path) -> None:
    reader = RunReader.open(runs / "old")
    for name in {found.source: name for name, found in METRICS.items()}.values():
        found = cut(reader, name, by=["policy_version", "env_version"])
        assert found.column_names == ["policy_version", "env_version", "value"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("old", "select nothing from steps"), "nothing"),
        (("old", "drop table steps"), "SELECT"),
        (("old",), "either a query or --metric"),
        (("old", "select 1", "--by", "split"), "--by and --where belong to --metric"),
        (("old", "select 1", "--csv", "--json"), "exclude each other"),
        (("old", "--metric", "learn/loss", "--by", "actor_id"), "cannot be cut"),
        (("odl", "select 1"), "nearest: old"),
    ],
)
def test_sql_used_wrongly(hotpot, runs: Path, arguments: tuple[str, ...], expected: str) -> None:
    result = hotpot("sql", *arguments, "--runs", runs)
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_folder_that_is_no_run_is_said_to_be_none(hotpot, runs: Path, tmp_path: Path) -> None:
    result = hotpot("lineage", tmp_path, "--runs", runs)
    assert result.exit_code == 2
    assert "is no run folder" in result.stderr


def test_show_without_and_with_a_tokenizer(hotpot, tmp_path: Path) -> None:
    run = write_run(tmp_path, "r")
    bare = hotpot("show", "r", "0.0.0", "--runs", tmp_path)
    assert bare.exit_code == 0
    assert "⟨" in bare.stdout
    for update, words in (("000000", "old"), ("000001", "find the customer")):
        checkpoint = run / "checkpoints" / f"update-{update}"
        checkpoint.mkdir(parents=True)
        for name, data in train_tokenizer([words] * 20).files().items():
            (checkpoint / name).write_bytes(data)
    text = hotpot("show", "r", "0.0.0", "--runs", tmp_path, "--low", "1.0").stdout
    assert "⟨" not in text
    assert "step 1" in text
    found = json_of(hotpot("show", "r", "0.0.0", "--runs", tmp_path, "--json"))
    assert found["trajectory_id"] == "0.0.0"
    assert next(span["stage"] for span in found["steps"][0]["spans"]) == "system"
    missing = hotpot("show", "r", "9.9.9", "--runs", tmp_path)
    assert missing.exit_code == 2
    assert "nearest: " in missing.stderr


def test_lineage_versions_changes_and_chain(hotpot, runs: Path) -> None:
    found = json_of(hotpot("lineage", "old", "--runs", runs, "--json"))
    assert (found["changes"], found["publishes"]) == ([], None)
    uses = found["versions"]
    assert {use["kind"] for use in uses} == {"env", "reward", "prompt", "policy", "schema"}
    assert all(use["first_update"] == 1 for use in uses)
    text = hotpot("lineage", "old", "--runs", runs).stdout
    assert "policy versions of old" in text
    assert "no version but the policy's changed in training" in text
    around = json_of(hotpot("lineage", "old", "--around-update", 1, "--runs", runs, "--json"))
    assert [point["update"] for point in around["curve"]] == [1]
    alone = hotpot("lineage", "old", "--window", 3, "--runs", runs)
    assert alone.exit_code == 2
    assert "--window 3 needs --around-update" in alone.stderr
    changed = json_of(hotpot("lineage", "new", "--against", "old", "--runs", runs, "--json"))
    assert changed == [
        {
            "part": "env",
            "where": "fake/tools.py line 41",
            "old": "line 41",
            "new": "line forty-one",
            "scope": "",
        },
        {"part": "recipe", "where": "learner.learning_rate", "old": "0.0001", "new": "0.0002", "scope": ""},
    ]
    text = hotpot("lineage", "new", "--against", "old", "--runs", runs).stdout
    assert "env: fake/tools.py line 41\n  - line 41\n  + line forty-one\n" in text
    assert "differ in nothing" in hotpot("lineage", "old", "--against", "old", "--runs", runs).stdout
    chain = hotpot("lineage", "old", "--trajectory", "1.2.0", "--runs", runs).stdout
    assert "the starting model published policy version 1" in chain
    assert "its checkpoint was not kept" in chain
    assert "update 1 consumed it (fresh, 1 epochs" in chain
    (runs / "old" / "checkpoints" / "update-000000").mkdir(parents=True)
    (policy,) = json_of(hotpot("lineage", "old", "--trajectory", "1.2.0", "--runs", runs, "--json"))[
        "policies"
    ]
    assert policy["checkpoint"] == str(runs / "old" / "checkpoints" / "update-000000")
    assert (
        "no update consumed it" in hotpot("lineage", "old", "--trajectory", "v0:0.0.0", "--runs", runs).stdout
    )
    assert (
        hotpot("lineage", "old", "--against", "new", "--trajectory", "1.2.0", "--runs", runs).exit_code == 2
    )


def test_model_info_reads_headers_only(hotpot, tmp_path: Path) -> None:
    found = json_of(hotpot("model", "info", write_model_folder(tmp_path / "m"), "--json"))
    assert (found["num_parameters"], found["precision"], found["chat_template"]) == (6, "F32", False)
    assert "num_parameters: 6" in hotpot("model", "info", tmp_path / "m").stdout


@pytest.mark.parametrize("missing_bytes", [1, 24, 60, 150])
def test_model_info_names_truncated_weights(hotpot, tmp_path: Path, missing_bytes: int) -> None:
    result = hotpot("model", "info", write_model_folder(tmp_path / "m", cut=missing_bytes))
    assert result.exit_code == 2
    assert "model.safetensors" in result.stderr


def test_env_list_and_check(hotpot) -> None:
    assert "order_desk" in {row["name"] for row in json_of(hotpot("env", "list", "--json"))}
    found = json_of(hotpot("env", "check", "order_desk", "--tasks", 4, "--episodes", 2, "--json"))
    assert found["good"] is True
    assert found["env_version"].startswith("order_desk@")
    assert "keeps its contract" in hotpot("env", "check", "order_desk", "--tasks", 4, "--episodes", 2).stdout


def test_env_check_says_no_with_code_1(hotpot, monkeypatch: pytest.MonkeyPatch) -> None:
    from hotpot.envs import check

    finding = check.Finding(rule="splits", level=check.Level.ERROR, detail="shared")
    monkeypatch.setattr(check, "check_environment", lambda env, **_: [finding])
    result = hotpot("env", "check", "order_desk")
    assert result.exit_code == 1
    assert "breaks its contract" in result.stdout
