"""The benchmark of engines: its arithmetic, its turns, and that its sides do the work they say."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from hotpot.models import Decoder, DecoderConfig, PolicyTokenizer, save_model, train_tokenizer

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

SERVER = '''#!{python}
"""Stands in for `vllm serve`: answers with as many tokens as are asked for, and writes down what it was asked."""
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def log_message(self, *_): pass
    def do_GET(self): self.reply(b"")
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open({log!r}, "a") as log: log.write(json.dumps(asked) + "\\n")
        ids = list(range(asked["max_tokens"]))
        choice = {{"token_ids": ids, "logprobs": {{"token_logprobs": [0.0] * len(ids)}}}}
        self.reply(json.dumps({{"choices": [choice]}}).encode())
    def reply(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)

assert sys.argv[1] == "serve"
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
'''


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("benchmark_engine", BENCHMARKS / "engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in [name for name in sys.modules if name.split(".")[0] == "engine_parts"]:
        del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(["price each order w300", "7 valves"])
    decoder = Decoder(
        DecoderConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=16,
            intermediate_size=24,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            max_context_tokens=256,
        )
    )
    decoder.initialize(0)
    save_model(tmp_path / "model", decoder, tokenizer.files())
    return tmp_path / "model"


class FakeSide:
    """Takes the seconds it is told to."""

    def __init__(self, log: list[str], name: str, seconds: list[float]) -> None:
        self.log, self.name, self.seconds = log, name, seconds

    def warm(self) -> None:
        self.log.append(f"{self.name} warm")

    def round(self, number: int) -> float:
        self.log.append(f"{self.name} {number}")
        return self.seconds[number]

    def close(self) -> None:
        self.log.append(f"{self.name} closed")


def test_sides_take_turns_and_each_counts_with_its_best_setting(benchmark: ModuleType) -> None:
    from engine_parts.turns import in_turns

    log: list[str] = []
    ours = {
        "a": lambda: FakeSide(log, "a", [3.0, 5.0, 4.0]),
        "b": lambda: FakeSide(log, "b", [9.0, 2.0, 2.0]),
    }
    theirs = {"x": lambda: FakeSide(log, "x", [8.0, 8.0, 7.0])}
    own, other = in_turns(ours, theirs, 3)
    pair = ["a warm", "x warm", "a 0", "x 0", "a 1", "x 1", "a 2", "x 2", "a closed", "x closed"]
    assert log == [*pair, "b warm", "b 0", "b 1", "b 2", "b closed"]
    assert (own.best, own.median("a"), own.median("b")) == ("b", 4.0, 2.0)
    assert own.rate(100) == 50.0
    assert other.best == "x"


def test_a_side_that_fails_closes_both(benchmark: ModuleType) -> None:
    from engine_parts.turns import in_turns

    log: list[str] = []
    with pytest.raises(IndexError):
        in_turns({"a": lambda: FakeSide(log, "a", [1.0])}, {"x": lambda: FakeSide(log, "x", [])}, 1)
    assert log[-2:] == ["a closed", "x closed"]


def test_bounds_hold_only_where_something_was_measured(benchmark: ModuleType) -> None:
    line = benchmark.assemble(
        {"over_vllm": 1.5, "over_transformers.tiny": 2.99, "overhead.episodes": 0.1, "floor_ratio": 2.51,
         "overhead.tiny": None, "tokens_per_s.tiny": 7.0}
    )  # fmt: skip
    held = {name for name in benchmark.BOUNDS if benchmark.holds(name, line)}
    assert held == {"embedded_over_vllm", "overhead_share"}
    assert line["overhead_shares"] == {"episodes": 0.1}
    assert line["tokens_per_s"] == {"tiny": 7.0}
    assert json.loads(json.dumps(line)) == line


def test_operations_are_those_of_the_weights(benchmark: ModuleType, model: Path) -> None:
    from engine_parts.floor import head_operations, layer_operations, operations

    from hotpot.models import load_decoder

    decoder = load_decoder(model)
    weights = {name: tensor for name, tensor in decoder.state_dict().items() if tensor.ndim == 2}
    layers = sum(tensor.numel() for name, tensor in weights.items() if name.startswith("layers."))
    config = decoder.config
    assert layer_operations(config) == 2 * layers
    assert head_operations(config) == 2 * weights["embed_tokens.weight"].numel()
    # Scores and values: 2 products of num_heads * head_dim by one, for each token seen, in each layer.
    assert operations(config, computed=0, sampled=0, seen=1) == 2 * 2 * 16 * 2


def test_a_tally_counts_each_computed_token_and_what_it_sees(benchmark: ModuleType) -> None:
    from engine_parts.hotpot_side import Tally

    tally = Tally()
    tally.add(10, SimpleNamespace(tokens=[1, 2, 3], report=SimpleNamespace(reused_tokens=4)))  # type: ignore[arg-type]
    # Places 4 to 11: the rest of the prompt, and the first two of three sampled tokens.
    assert asdict(tally) == {
        "prompt": 10,
        "reused": 4,
        "computed": 8,
        "sampled": 3,
        "seen": sum(range(5, 13)),
    }


def test_overhead_is_what_is_neither_forward_nor_sample(benchmark: ModuleType) -> None:
    from engine_parts.spans import overhead

    before, after = {"forward": 1.0, "other": 5.0}, {"forward": 4.0, "sample": 0.5, "other": 6.0}
    assert overhead(before, after, 4.0) == 0.125


def sizes_of_episodes() -> dict[str, int]:
    return {"episodes": 3, "steps": 3, "system": 40, "task": 7, "observation": 5, "sampled": 4}


def test_prompts_have_the_sizes_and_no_round_repeats_another(benchmark: ModuleType, model: Path) -> None:
    from engine_parts.work import BatchSizes, EpisodeSizes, Text, batch, episodes

    text, sizes = Text(PolicyTokenizer.load(model)), EpisodeSizes(**sizes_of_episodes())
    first, second = episodes(text, sizes, 0), episodes(text, sizes, 1)
    assert len({tuple(one.context[:40]) for one in first}) == 1
    assert len({tuple(one.context) for one in [*first, *second]}) == 6
    assert first[0].context[:40] != second[0].context[:40]
    asked = 0
    for episode in first:
        while True:
            asked += len(episode.context)
            if not episode.take([1] * sizes.sampled):
                break
        assert len(episode.context) == sizes.longest
    assert asked == sizes.num_prompt
    with pytest.raises(AssertionError, match="3 tokens where 4 were asked for"):
        second[0].take([1, 2, 3])
    some = BatchSizes(prompts=5, shortest=2, longest=10, sampled=1)
    assert [len(prompt) for prompt in batch(text, some, 0)] == [2, 6, 10, 8, 4]


@pytest.mark.parametrize("nonces", [False, True])
def test_our_side_plays_the_episodes_and_says_what_it_reused(
    benchmark: ModuleType, model: Path, nonces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine_parts import hotpot_side

    monkeypatch.setattr(hotpot_side, "product_speed", lambda: 1e9)
    sizes = hotpot_side.EpisodeSizes(**sizes_of_episodes())
    side = hotpot_side.HotpotSide(
        {"folder": model, "threads": 1, "engine": {"max_concurrency": 3}, "kind": "episodes",
         "sizes": asdict(sizes), "nonces": nonces}
    )  # fmt: skip
    assert side({"do": "warm"})["sampled"] == 3 * 4
    found = side({"do": "round", "number": 0})
    assert (found["sampled"], found["prompt"]) == (sizes.num_sampled, sizes.num_prompt)
    assert found["seconds"] > 0
    assert found["floor_s"] > 0
    assert (found["reused"] == 0) == nonces
    assert found["overhead"] is None or 0 <= found["overhead"] <= 1


def test_vllm_is_asked_what_ours_is_asked(benchmark: ModuleType, model: Path, tmp_path: Path) -> None:
    from engine_parts.vllm_side import VllmSide
    from engine_parts.work import EpisodeSizes, Text, episodes

    program, log = tmp_path / "vllm", tmp_path / "asked.jsonl"
    program.write_text(SERVER.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    sizes = EpisodeSizes(**sizes_of_episodes())
    side = VllmSide(program, model, sizes, tmp_path / "log", options=[], environment={})
    try:
        assert side.round(0) > 0
    finally:
        side.close()
    asked = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(asked) == sizes.episodes * sizes.steps
    assert sum(len(one["prompt"]) for one in asked) == sizes.num_prompt
    assert {one["max_tokens"] for one in asked} == {sizes.sampled}
    assert all(one["ignore_eos"] and one["return_token_ids"] and one["logprobs"] == 0 for one in asked)
    expected = {tuple(one.context) for one in episodes(Text(PolicyTokenizer.load(model)), sizes, 0)}
    assert {tuple(one["prompt"]) for one in asked if len(one["prompt"]) == 47} == expected


def test_a_server_that_ends_is_an_error_that_names_its_log(
    benchmark: ModuleType, model: Path, tmp_path: Path
) -> None:
    from engine_parts.vllm_side import VllmSide
    from engine_parts.work import EpisodeSizes

    program = tmp_path / "vllm"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match=r"vLLM ended with 3, see .*log"):
        VllmSide(
            program,
            model,
            EpisodeSizes(**sizes_of_episodes()),
            tmp_path / "log",
            options=[],
            environment={},
        )


def test_an_unknown_part_is_named(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARTS", "vllm,nope")
    with pytest.raises(SystemExit, match="no part 'nope'"):
        benchmark.main()
