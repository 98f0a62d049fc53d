"""The benchmark against TRL: whose turn it is, that both sides do the same work, and what it says of them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hotpot.models import Decoder, DecoderConfig, PolicyTokenizer, save_model, train_tokenizer


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "learner_parts"]:
        del sys.modules[name]


@pytest.fixture
def turns(parts: None) -> ModuleType:
    from learner_parts import turns

    return turns


def take(turns: Any, wall_s: float, cpu_s: float = 1.0) -> None:
    """What the next iteration took."""
    spent = sys.modules["learner_parts.turns"].Spent
    turns.take(spent(wall_s, cpu_s))


def play(turns: Any, seconds_of: dict[int, float]) -> list[int]:
    used = []
    while len(used) < turns.total:
        used.append(turns.threads)
        take(turns, seconds_of[used[-1]])
    return used


def test_each_count_is_tried_and_the_rounds_have_the_best(turns: ModuleType) -> None:
    side = turns.Turns(counts=(1, 2), rounds=3)
    assert play(side, {1: 1.0, 2: 0.75}) == [1, 1, 2, 1, 2, 2, 2, 2]
    assert (side.best, side.tried) == (2, {1: 1.0, 2: 0.75})
    assert [spent.wall_s for spent in side.counted] == [0.75] * 3


def test_a_hopeless_count_is_tried_once(turns: ModuleType) -> None:
    side = turns.Turns(counts=(1, 2), rounds=2)
    assert play(side, {1: 1.0, 2: 9.0}) == [1, 1, 2, 1, 1, 1, 1]
    assert side.best == 1


def test_one_core_leaves_nothing_to_try(turns: ModuleType) -> None:
    side = turns.Turns(counts=(1,), rounds=2)
    assert play(side, {1: 1.0}) == [1, 1, 1]
    assert len(side.counted) == 2


def test_speeds_are_compared_turn_by_turn(turns: ModuleType) -> None:
    ours, theirs = (turns.Turns(counts=(1,), rounds=3) for _ in range(2))
    for mine, other in ((9.0, 9.0), (1.0, 3.0), (2.0, 8.0), (1.0, 5.0)):
        take(ours, mine, cpu_s=0.5)
        take(theirs, other)
    assert turns.times_as_fast(ours, theirs) == (4.0, 2.0)


def write_model(folder: Path, texts: list[str]) -> PolicyTokenizer:
    tokenizer = train_tokenizer(texts)
    decoder = Decoder(
        DecoderConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=16,
            intermediate_size=24,
            num_layers=1,
            num_heads=2,
            num_kv_heads=1,
            max_context_tokens=256,
        )
    )
    decoder.initialize(0)
    save_model(folder, decoder, tokenizer.files())
    return tokenizer


def test_a_padded_vocabulary_reads_as_before_and_writes_every_token(parts: None, tmp_path: Path) -> None:
    from learner_parts.work import padded_tokenizer

    texts = ["price each order w300", "7 valves"]
    tokenizer = write_model(tmp_path, texts)
    padded = padded_tokenizer(tokenizer, tokenizer.vocab_size + 40)
    assert padded.vocab_size == tokenizer.vocab_size + 40
    for text in texts:
        assert padded.encode_text(text).tolist() == tokenizer.encode_text(text).tolist()
    assert padded.decode([tokenizer.vocab_size + 3]) == f"w{tokenizer.vocab_size + 3}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")
def test_both_sides_do_the_same_work(parts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(
        "trl",
        reason="trl is not installed; `make test-slow` installs the extra 'parity'",
        exc_type=ImportError,
    )
    from learner_parts import against, trl_side, work

    monkeypatch.setattr(against, "thread_counts", lambda: (1,))
    openings = work.make_openings(4)
    write_model(tmp_path / "model", [message.content for opening in openings for message in opening.messages])
    tiny = work.Work(
        folder=tmp_path / "model", openings=openings, tasks=2, samples=2, length=5, minibatches=2
    )
    seen: list[list[list[int]]] = []
    calls: list[int] = []

    class Watched(trl_side.ClockedTrainer):  # type: ignore[misc, name-defined]
        def _generate_single_turn(self, prompt_ids: Any, *rest: Any) -> Any:
            found = super()._generate_single_turn(prompt_ids, *rest)
            seen.append([list(ids) for ids in prompt_ids])
            assert [len(ids) for ids in found[0]] == [tiny.length] * tiny.completions
            return found

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            calls.append(1)
            return super().training_step(*arguments, **named)

    monkeypatch.setattr(trl_side, "ClockedTrainer", Watched)
    line = against.whole(tiny, tmp_path, 2)
    # One iteration to warm up and two rounds; the prompts are ours, token by token, in the same order.
    side = against.HotpotSide(tiny)
    expected = [[side.prompt(i).tolist() for i in (a, a, b, b)] for a, b in ((0, 1), (2, 3), (0, 1))]
    assert seen == expected
    assert len(calls) == 3 * tiny.minibatches
    assert line["over_trl"] > 0
    assert line["cpu_over_trl"] > 0
    assert line["threads"] == {"hotpot": 1, "trl": 1}
    assert 0 <= line["padding_share"] < 0.5
    learned = against.learning(tiny, tmp_path, 1)
    assert learned["learner_over_trl"] > 0
    assert len(seen) == 3, "learning alone generates nothing"
