"""Adapters, bfloat16 and checkpointed layers in whole runs: resumed, rolled forward and done over to the bit."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from redo_cases import prove

from hotpot.errors import ModelFilesError, RecipeError
from hotpot.experience import RunReader
from hotpot.experience.crashpoints import arm
from hotpot.learner import precision
from hotpot.learner.checkpoint import read_manifest
from hotpot.models import checksum, load_decoder
from hotpot.topology import train
from hotpot.topology.redo import Changes, redo
from hotpot.topology.resume.checkpoints import checkpoint_folder

SHORT = (
    "topology.updates=2",
    "checkpoint.every_updates=0",
    "evaluation.every_updates=0",
    "evaluation.num_tasks_final=2",
)
LORA = (
    *SHORT, "learner.lora_rank=4", "learner.kl_coefficient=0.05", "learner.learning_rate=1e-2", "learner.schedule=cosine",
    "learner.warmup_updates=1", "learner.final_learning_rate_share=0.5",
)  # fmt: skip
ROUGH = (
    *SHORT, "learner.lora_rank=4", "learner.precision=bfloat16", "learner.old_logprobs=recomputed",
    "learner.gradient_checkpointing=true",
)  # fmt: skip


class Broke(BaseException):
    """The process broke off."""


def broken(run, monkeypatch, place: str, count: int, *overrides: str) -> None:
    def kill(_pid: int, _signal: int) -> None:
        raise Broke

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill)
        arm(place, count)
        try:
            with pytest.raises(Broke):
                run(*overrides)
        finally:
            arm("")


def learned(folder: Path) -> list[Any]:
    columns = ["update", "batch_hash", "losses", "grad_norms", "learning_rate", "weights_checksum"]
    rows = RunReader.open(folder).table("updates", columns).to_pylist()
    return sorted(rows, key=lambda row: row["update"])


def told(folder: Path, kind: str) -> list[dict[str, Any]]:
    rows = RunReader.open(folder).table("events", ["detail"], where=f"kind = '{kind}'").to_pylist()
    return [json.loads(row["detail"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [LORA, ROUGH], ids=["lora", "rough"])
def test_it_goes_on_to_the_bit_and_is_proved_from_the_first_checkpoint(
    run, recipe, monkeypatch, tmp_path, settings
) -> None:
    broken(run, monkeypatch, "learned", 2, *settings)
    folder = run(*settings, resume=tmp_path / "run")
    (resumed,) = told(folder, "resumed")
    assert (resumed["exact"], resumed["inexact_because"], resumed["rolled_forward"]) == (True, [], [1])
    whole = train(recipe(*settings, "run.id=whole"))
    assert learned(folder) == learned(whole)
    base = read_manifest(checkpoint_folder(folder, 0))["weights_checksum"]
    last = checkpoint_folder(folder, 2)
    manifest = read_manifest(last)
    assert manifest["adapter"]["base_checksum"] == base != manifest["weights_checksum"]
    assert manifest["weights_checksum"] == learned(folder)[-1]["weights_checksum"]
    assert checksum(load_decoder(last).state_dict()) == manifest["weights_checksum"]
    prove(folder)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [SHORT, LORA], ids=["all", "lora"])
def test_transformers_loads_what_a_run_wrote(run, settings) -> None:
    """The last checkpoint, adapters merged, is what the run recorded that it learned, and transformers computes the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = run(*settings)
    checkpoint = checkpoint_folder(folder, 2)
    module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    named = {name.removeprefix("model."): value for name, value in module.state_dict().items()}
    tied = {name: value for name, value in named.items() if name != "lm_head.weight"}
    assert checksum(tied) == learned(folder)[-1]["weights_checksum"]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    (row,) = (
        RunReader.open(folder).sql("select sampled_tokens from steps order by issue desc limit 1").to_pylist()
    )
    tokens = torch.tensor([row["sampled_tokens"]])
    assert tokenizer.decode(tokens[0])
    ours, start = load_decoder(checkpoint), load_decoder(checkpoint_folder(folder, 0))
    with torch.no_grad():
        theirs = module(input_ids=tokens, use_cache=False).logits
        found, before = (
            one.logits(one(tokens, torch.arange(tokens.shape[1])[None])) for one in (ours, start)
        )
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    assert float((before - theirs).abs().max()) > 1e-3


def test_what_does_not_carry_over_is_refused_before_anything_is_written(run, recipe, tmp_path) -> None:
    folder = run(*LORA, "topology.updates=1", "learner.warmup_updates=0")
    more = ("topology.updates=2", "learner.warmup_updates=0")
    for changed, words in (
        (("learner.lora_rank=0",), "set learner.lora_rank as it was"),
        (("learner.lora_alpha=3",), "lora_rank, lora_alpha and lora_targets as they were"),
    ):
        with pytest.raises(ModelFilesError, match=words):
            train(recipe(*LORA, *more, *changed), resume=folder)
        with pytest.raises(ModelFilesError, match=words):
            list(redo(folder, "1", Changes(settings=changed)))
    # Another model in the place of the first checkpoint's.
    first = checkpoint_folder(folder, 0)
    shutil.copy(checkpoint_folder(folder, 1) / "model.safetensors", first / "model.safetensors")
    sums = [read_manifest(checkpoint_folder(folder, update))["weights_checksum"] for update in (0, 1)]
    with pytest.raises(ModelFilesError) as caught:
        train(recipe(*LORA, *more), resume=folder)
    assert all(one in str(caught.value) for one in sums)
    assert len(learned(folder)) == 1


def test_auto_is_settled_once_and_what_is_emulated_is_said(run, recipe, monkeypatch, capsys) -> None:
    monkeypatch.setattr(precision, "native_bfloat16", lambda device="cpu": True)
    settings = (*SHORT, "learner.precision=auto", "learner.decoupled=all")
    folder = run(*settings, "topology.updates=1")
    monkeypatch.undo()
    from coin_recipe import use_coin

    use_coin(monkeypatch)
    monkeypatch.setattr(precision, "native_bfloat16", lambda device="cpu": False)
    train(recipe(*settings), resume=folder)
    rows = RunReader.open(folder).table("updates", ["learner_settings", "cpu_capability"]).to_pylist()
    assert [json.loads(row["learner_settings"])["precision"] for row in rows] == ["bfloat16"] * 2
    assert [row["cpu_capability"].endswith("emulated") for row in rows] == [False, True]
    assert "cpu_capability was " in " ".join(told(folder, "resumed")[0]["inexact_because"])
    (started,), (resumed,) = told(folder, "run_started"), told(folder, "resumed")
    assert (started["precision_learner"], resumed["precision_learner"]) == ("bfloat16", "bfloat16, emulated")
    for test in told(folder, "self_test"):
        assert test["problem"] == ""
        assert 1e-4 < test["logprob_difference_max"] < test["tolerance"] == 0.5
    first, second = redo(folder, "all")
    assert (first.findings.verdict, second.findings.verdict) == ("identical", "identical")
    assert [figure.name for figure in first.findings.other_kernels] == ["cpu_capability"]
    assert second.findings.other_kernels == ()


def test_adapters_need_a_package_before_a_run_folder_is_made(recipe, tmp_path, monkeypatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(RecipeError, match="extra"):
        train(recipe(*LORA))
    assert not (tmp_path / "run").exists()
