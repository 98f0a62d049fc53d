"""What an operator can give that cannot work: one message with value, rule and remedy, exit code 2, nothing left behind."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from hotpot.config.load import load_recipe
from hotpot.experience import open_run
from hotpot.topology import train, warmstart

Hotpot = Callable[..., Result]

RECIPE = Path(__file__).parents[2] / "recipes" / "order_desk.toml"
SMALL = (
    "run.deterministic=true", "run.trace=false", "warmstart.steps=2", "warmstart.batch_size=4", "warmstart.hidden_size=16",
    "warmstart.intermediate_size=16", "warmstart.num_heads=2", "warmstart.num_kv_heads=2", "warmstart.num_layers=1",
    "rollout.tasks_per_batch=2", "rollout.samples_per_task=2", "rollout.max_steps=2", "rollout.max_step_tokens=4",
    "learner.minibatches=2", "topology.updates=1", "evaluation.num_tasks_final=2", "evaluation.greedy=false",
)  # fmt: skip


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model that knows nothing, ``model``, and a finished run of it, ``runs/done``."""
    folder = tmp_path_factory.mktemp("made")
    warmstart(load_recipe(RECIPE, SMALL), folder / "model")
    own = (f"model.path={folder / 'model'}", f"run.folder={folder / 'runs'}", "run.id=done")
    train(load_recipe(RECIPE, [*SMALL, *own]))
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder of the test's own with copies of both, and of the recipe."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    shutil.copy(RECIPE, tmp_path / "recipe.toml")
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(hotpot: Hotpot, place: Path, *arguments: str) -> str:
    """Run the command, assert that it refuses as it should and leaves everything as it was, and return the message."""
    before = contents(place)
    result = hotpot(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    message = result.stderr
    assert message.startswith("error: ")
    assert "Traceback" not in message
    assert contents(place) == before
    return message


def contents(folder: Path) -> dict[str, bytes | None]:
    # Readers of a SQLite file in WAL mode may leave its index beside it.
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
        if path.suffix not in {".sqlite-shm", ".sqlite-wal"}
    }


def overridden(*overrides: str) -> list[str]:
    return ["train", "recipe.toml", *SMALL, "model.path=model", *overrides]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["learner.learnin_rate=1"], ["learner.learnin_rate", "nearest: learner.learning_rate"]),
        (["frobnicate=1"], ["unknown section or setting frobnicate", "known here: name, run"]),
        (["rollout.max_steps"], ["'rollout.max_steps'", "section.key=value"]),
        (["learner.clip_low=[1"], ["learner.clip_low=[1", "not valid TOML", "mind the shell's quotes"]),
        (["rollout.max_steps=0"], ["command line", "rollout.max_steps = 0", "must be > 0", "leave it out for 8"]),
        (["learner.minibatches=5"], ["command line", "learner.minibatches = 5", "4 episodes of an update", "lower it"]),
        (["rollout.samples_per_task=1"], ["rollout.samples_per_task = 1", "nothing to compare with", "at least 2"]),
        (["rollout.max_step_tokens=512"], ["rollout.max_step_tokens = 512", "no room for a prompt", "raise the latter"]),
        (["rollout.max_context_tokens=4096"], ["rollout.max_context_tokens = 4096", "512 tokens the model at model", "lower it"]),
        (["env.kind=order_dsk"], ["'order_dsk'", "did you mean 'order_desk'?", "installed: order_desk"]),
        (["env.params.num_item=3"], ["no parameter 'num_item'", "did you mean 'num_items'?"]),
        (["env.params.num_items=99"], ["num_items = 99", "less than or equal to 24"]),
        (["env.params={min_quantity = 9, max_quantity = 3}"], ["min_quantity = 9 is above max_quantity = 3"]),
        (["store.redact_patterns=['(']"], ["store.redact_patterns: '('", "no regular expression", "correct or remove it"]),
        (["sampling.training.top_k=5"], ["sampling.training", "learner.old_logprobs = 'recomputed'"]),
        (["model.path=nowhere"], ["no model folder at nowhere", "hotpot model warmstart"]),
        (["model.path=file"], ["no model folder at file", "hotpot model warmstart"]),
        (["learner.kl_coefficient=0.1", "learner.reference_path=nowhere"], ["at nowhere", "hotpot model warmstart"]),
        (["debug.mode=learn_from_record"], ["debug.source_run is set exactly when"]),
        (["debug.mode=learn_from_record", "debug.source_run=nowhere"], ["nowhere does not exist", "hotpot runs"]),
        (["run.id=done"], ["runs/done exists", "choose another run id, or resume"]),
        (["run.id=a/b"], ['run.id = "a/b"', "must match"]),
        (["run.folder=file/runs"], ["can't create run folder file/runs", "Not a directory", "check the path and rights"]),
        (["run.folder=/proc/runs"], ["can't create run folder /proc/runs", "check the path and rights"]),
    ],
)  # fmt: skip
def test_train_refuses(hotpot: Hotpot, place: Path, overrides: list[str], expected: list[str]) -> None:
    message = refusal(hotpot, place, *overridden(*overrides))
    assert all(part in message for part in expected), message


def test_train_without_a_model_says_how_to_make_one(hotpot: Hotpot, place: Path) -> None:
    message = refusal(hotpot, place, "train", "recipe.toml", *SMALL)
    assert "model.path is not set" in message
    assert "hotpot model warmstart RECIPE --out FOLDER" in message


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train", "recpe.toml"], ["recpe.toml does not exist", "nearest: recipe.toml"]),
        (["train", "model"], ["model is a folder", "a TOML file"]),
        (["train", "--resume", "dne"], ["no run 'dne'", "nearest: done"]),
        (["train", "--resume", "model"], ["model is no run folder", "no manifest.json"]),
        (["train", "recipe.toml", "--checkpoint", "last"], ["--checkpoint belongs to --resume"]),
        (["train", "--resume", "done", "--checkpoint", "7"], ["no checkpoint '7'", "first, last, 0, 1"]),
        (["train", "--resume", "done", "learner.minibatches=9"], ["learner.minibatches = 9", "lower it"]),
        (["eval", "done", "--checkpoint", "frist"], ["no checkpoint 'frist'", "first, last, 0, 1"]),
        (["eval", "nowhere"], ["no run 'nowhere'", "hotpot runs"]),
        (["sql", "nowhere", "select 1"], ["no run 'nowhere'"]),
        (["sql", "done", "selec 1"], ["syntax error", "tables: steps, trajectories"]),
        (["sql", "done", "select nocolumn from events"], ['"nocolumn" not found', "columns of events: run_id"]),
        (["sql", "done", "delete from steps"], ["only a single SELECT", "delete from steps"]),
        (["sql", "done", "copy (select 1) to 'out.csv'"], ["only a single SELECT"]),
        (["sql", "done", "select 1; drop table steps"], ["only a single SELECT"]),
        (["sql", "done", "select * from read_csv('recipe.toml')"], ["Permission Error"]),
        (["show", "done", "0.0.7"], ["no trajectory '0.0.7'", "nearest: 0.0.0"]),
        (["lineage", "done", "--trajectory", "x"], ["no trajectory 'x'", "nearest: "]),
        (["lineage", "done", "--against", "dome"], ["no run 'dome'", "nearest: done"]),
        (["model", "info", "runs"], ["runs has no config.json", "as transformers saves it"]),
    ],
)  # fmt: skip
def test_other_commands_refuse(
    hotpot: Hotpot, place: Path, arguments: list[str], expected: list[str]
) -> None:
    message = refusal(hotpot, place, *arguments)
    assert all(part in message for part in expected), message


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["warmstart.hidden_size=17"], ["warmstart.hidden_size = 17", "not a multiple of", "change either"]),
        (["warmstart.num_heads=4", "warmstart.num_kv_heads=3"], ["warmstart.num_kv_heads = 3 does not divide", "change either"]),
        (["warmstart.max_context_tokens=50"], ["more than warmstart.max_context_tokens = 50", "raise it"]),
        (["--out", "model"], ["model exists", "--overwrite"]),
        (["--out", "file"], ["file exists and is no model folder", "choose another"]),
        (["--out", "runs", "--overwrite"], ["runs exists and is no model folder", "choose another"]),
        (["--out", "file/model"], ["file/model can't be made", "choose another folder"]),
    ],
)  # fmt: skip
def test_warmstart_refuses(hotpot: Hotpot, place: Path, overrides: list[str], expected: list[str]) -> None:
    out = [] if "--out" in overrides else ["--out", "new"]
    message = refusal(hotpot, place, "model", "warmstart", "recipe.toml", *SMALL, *out, *overrides)
    assert all(part in message for part in expected), message


def test_warmstart_into_a_folder_that_only_turns_out_to_be_unwritable(hotpot: Hotpot, place: Path) -> None:
    result = hotpot("model", "warmstart", "recipe.toml", *SMALL, "--out", "/proc/models/m")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: /proc/models/m can't be written: ")
    assert "choose another folder" in result.stderr


# ---- files that are not whole ----


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda model: (model / "chat_template.jinja").unlink(), ["model: the tokenizer has no chat template", "add chat_template.jinja"]),
        (lambda model: (model / "tokenizer.json").unlink(), ["model: the tokenizer has no tokenizer.json", "as transformers saves it"]),
        (lambda model: (model / "config.json").unlink(), ["no model at model (no config.json)", "hotpot model warmstart"]),
        (lambda model: (model / "config.json").write_text("{"), ["model/config.json is not JSON", "make it again"]),
        (lambda model: (model / "model.safetensors").unlink(), ["no .safetensors file"]),
        (lambda model: cut(model / "model.safetensors"), ["model/model.safetensors is truncated or damaged"]),
        (lambda model: cut(model / "tokenizer.json"), ["model: ", "damaged", "make the model folder again"]),
    ],
)  # fmt: skip
def test_a_model_folder_that_is_not_whole(
    hotpot: Hotpot, place: Path, spoil: Callable[[Path], None], expected: list[str]
) -> None:
    spoil(place / "model")
    message = refusal(hotpot, place, *overridden())
    assert all(part in message for part in expected), message


@pytest.mark.parametrize("command", [["train", "--resume", "done", "topology.updates=2"], ["eval", "done"]])
@pytest.mark.parametrize("name", ["model.safetensors", "learner/optimizer.safetensors", "learner.json"])
def test_a_truncated_checkpoint_is_refused_and_an_earlier_one_works(
    hotpot: Hotpot, place: Path, command: list[str], name: str
) -> None:
    checkpoint = place / "runs" / "done" / "checkpoints" / "update-000001"
    cut(checkpoint / name)
    message = refusal(hotpot, place, *command)
    assert f"runs/done/checkpoints/update-000001/{name}" in message
    assert "truncated or damaged" in message
    assert "use another checkpoint" in message
    result = hotpot(*command, "--checkpoint", "first")
    assert result.exit_code == 0, result.output
    if command[0] == "train":
        updates = open_run(place / "runs" / "done").sql(
            'select "update", parent_update from updates order by 1'
        )
        assert updates.to_pylist() == [
            {"update": 1, "parent_update": 0}, {"update": 2, "parent_update": 0}, {"update": 3, "parent_update": 2},
        ]  # fmt: skip
        summary = json.loads((place / "runs" / "done" / "summary.json").read_text())
        assert (summary["status"], summary["updates"]) == ("finished", 2)


def test_a_checkpoint_with_other_weights_is_refused(hotpot: Hotpot, place: Path) -> None:
    path = place / "runs" / "done" / "checkpoints" / "update-000001" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    message = refusal(hotpot, place, "eval", "done")
    assert "are not those learner.json was written with; use another checkpoint" in message


def test_a_run_without_its_checkpoints_or_manifest(hotpot: Hotpot, place: Path) -> None:
    run = place / "runs" / "done"
    shutil.rmtree(run / "checkpoints")
    assert "restore runs/done/checkpoints" in refusal(hotpot, place, "train", "--resume", "done")
    assert "has no checkpoint" in refusal(hotpot, place, "eval", "done")
    (run / "manifest.json").write_text("{")
    message = refusal(hotpot, place, "train", "--resume", "done")
    assert "can't read runs/done/manifest.json" in message
    assert "restore it from a copy" in message
    (run / "manifest.json").unlink()
    assert "no manifest.json" in refusal(hotpot, place, "eval", "runs/done")


def test_a_run_that_learns_from_a_record_is_not_resumed(hotpot: Hotpot, place: Path) -> None:
    options = ("debug.mode=learn_from_record", "debug.source_run=runs/done", "run.id=learned")
    assert hotpot(*overridden(*options)).exit_code == 0
    message = refusal(hotpot, place, "train", "--resume", "learned")
    assert "debug.source_run = runs/done" in message
    assert "another run.id" in message
