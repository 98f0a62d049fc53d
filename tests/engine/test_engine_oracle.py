"""Greedy generation of the embedded engine is transformers' own, token by token, on a pretrained and on a tiny model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle_cases import NEAR_TIE, Agreement, compare, greedy, prompts
from transformers import AutoModelForCausalLM

from hotpot.config.load import load_recipe
from hotpot.envs import load_environment
from hotpot.models import Decoder, PolicyTokenizer, load_policy
from hotpot.rollout import Dialect
from hotpot.topology import warmstart
from hotpot.types import Message, Role, Split

PROMPTS, TOLERANCE = 64, 1e-4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


def load(folder: Path) -> tuple[Decoder, Any, PolicyTokenizer]:
    decoder = load_policy(folder)
    assert isinstance(decoder, Decoder)
    module = AutoModelForCausalLM.from_pretrained(folder).eval()
    module.generation_config.do_sample = False
    return decoder, module, PolicyTokenizer.load(folder)


def check(
    folder: Path, longest: int, new_tokens: int, openings: Any = (), **settings: Any
) -> list[Agreement]:
    """Compare 64 prompts of 1 to ``longest`` tokens; return how they agree."""
    decoder, module, tokenizer = load(folder)
    stop = Dialect(tokenizer).stop_tokens
    given = prompts(tokenizer, PROMPTS, longest, openings)
    lengths = sorted({len(prompt) for prompt in given})
    assert len(given) == PROMPTS
    assert lengths[0] == 1
    assert lengths[-1] >= 0.9 * longest
    assert len(lengths) > PROMPTS / 3
    answers = greedy(decoder, given, new_tokens, stop, **settings)
    found = [
        compare(module, prompt, answer, new_tokens, stop)
        for prompt, answer in zip(given, answers, strict=True)
    ]
    assert max(one.logprob_difference for one in found) < TOLERANCE
    assert sum(len(one.ties) for one in found) <= 2, "near ties are rare; this many are another computation"
    assert sum(len(answer.tokens) for answer in answers) > PROMPTS * new_tokens / 3
    return found


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The decoder of the order desk's recipe, imitated for some steps."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    warmstart(load_recipe(Path("recipes/order_desk.toml"), ["run.threads=1", "warmstart.steps=40"]), folder)
    return folder


def order_desk_openings(count: int) -> list[tuple[Message, ...]]:
    environment, found = load_environment("order_desk", {}), []
    system = Message(role=Role.SYSTEM, content=environment.system_prompt())
    for index in range(count):
        world = environment.make()
        found.append((system, *world.reset(environment.task(Split.TRAIN, 7, index), index).messages))
        world.close()
    return found


def test_tiny_is_token_identical(tiny: Path) -> None:
    check(tiny, 460, 48, order_desk_openings(32), max_concurrency=16, prefill_tokens=256)


def test_smollm2_is_token_identical(smollm2: Path) -> None:
    check(smollm2, 420, 16, max_concurrency=24, prefill_tokens=512)


def test_a_wrong_token_is_no_near_tie(tiny: Path) -> None:
    """The comparison itself can fail, in tokens, in length and in log-probabilities."""
    decoder, module, tokenizer = load(tiny)
    prompt = prompts(tokenizer, 8, 60)[6]
    (answer,) = greedy(decoder, [prompt], 8, ())
    assert compare(module, prompt, answer, 8, ()).ties == ()
    wrong = answer.tokens.copy()
    wrong[3] = (wrong[3] + 1) % decoder.config.vocab_size
    with pytest.raises(AssertionError, match=r"token 3: .* no near tie"):
        compare(module, prompt, replace(answer, tokens=wrong), 8, ())
    with pytest.raises(AssertionError, match="transformers went on"):
        compare(module, prompt, replace(answer, tokens=answer.tokens[:5]), 8, ())
    shifted = replace(answer, model_logprobs=answer.model_logprobs + np.float32(0.01))
    assert compare(module, prompt, shifted, 8, ()).logprob_difference > 100 * NEAR_TIE
