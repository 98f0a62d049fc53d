"""transformers as the oracle of greedy generation: prompts of many lengths, and a comparison that shows its near ties."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotpot.config.sections import EngineSection
from hotpot.engine.embedded import EmbeddedEngine
from hotpot.models import Decoder, PolicyTokenizer
from hotpot.rollout import Dialect
from hotpot.types import Generation, GenerationRequest, Message, Purpose, Role, SampleKey, SamplingParams

GREEDY = SamplingParams(temperature=0.0)
NEAR_TIE = 1e-5
"""Two logits closer than this are the same but for rounding: either is the largest."""

ROOT = Path(__file__).parents[2]


def prompts(
    tokenizer: PolicyTokenizer, count: int, longest: int, openings: Sequence[Sequence[Message]] = ()
) -> list[NDArray[np.int32]]:
    """Return ``count`` prompts of 1 to ``longest`` tokens: real text cut at every length, and conversations in turn.

    Conversations begin with one of ``openings``, or a system prompt that all have in common.
    """
    text = tokenizer.encode_text((ROOT / "LICENSE").read_text() + (ROOT / "docs" / "glossary.md").read_text())
    dialect, found = Dialect(tokenizer), []
    for index in range(count):
        length = 1 + round((longest - 1) * (index / (count - 1)) ** 2)
        start = 97 * index % (len(text) - longest)
        piece = text[start : start + length]
        if index % 2:
            opening = (
                openings[index % len(openings)]
                if openings
                else _opening(tokenizer.decode(piece[: length // 2]))
            )
            chat = dialect.open(opening)[1].tokens
            piece = chat if len(chat) <= longest else chat[-longest:]
        found.append(piece)
    return found


def _opening(text: str) -> tuple[Message, ...]:
    return (
        Message(role=Role.SYSTEM, content="You answer questions about a text in one short sentence."),
        Message(role=Role.USER, content=f"{text}\n\nWhat is this about?"),
    )


def greedy(
    decoder: Decoder,
    given: Sequence[NDArray[np.int32]],
    new_tokens: int,
    stop: tuple[int, ...],
    **settings: Any,
) -> list[Generation]:
    """Return what the embedded engine answers to the prompts ``given``, all submitted at once."""
    engine = EmbeddedEngine(
        decoder.config,
        decoder.state_dict(),
        settings=EngineSection(**settings),
        max_context_tokens=max(len(prompt) for prompt in given) + new_tokens,
        sampling={Purpose.EVALUATION_GREEDY: GREEDY},
    )
    for index, prompt in enumerate(given):
        engine.submit(
            GenerationRequest(
                request_id=str(index),
                session_id=str(index),
                prompt=prompt,
                stop_tokens=stop,
                max_tokens=new_tokens,
                purpose=Purpose.EVALUATION_GREEDY,
                sampling=GREEDY,
                key=SampleKey(seed=1, issue=index, sample=0, step=0),
            )
        )
    answers: dict[str, Generation] = {}
    while len(answers) < len(given):
        answers |= {answer.request_id: answer for answer in engine.step()}
    engine.close()
    return [answers[str(index)] for index in range(len(given))]


@dataclass(frozen=True)
class Agreement:
    """How one answer compares with transformers': the largest difference of a log-probability, and where near ties went
    the other way (place, difference of the two logits)."""

    logprob_difference: float
    ties: tuple[tuple[int, float], ...]


def compare(
    module: Any, prompt: NDArray[np.int32], answer: Generation, new_tokens: int, stop: tuple[int, ...]
) -> Agreement:
    """Generate with transformers and compare token by token; raise AssertionError where they differ without a near tie.

    Where a token differs, the two logits must be closer than :data:`NEAR_TIE` in transformers' own computation; the rest is
    generated again behind the engine's token, and compared as strictly.
    """
    ours = answer.tokens.tolist()
    done, ties, worst = 0, [], 0.0
    while done < len(ours):
        theirs, logits = _generate(module, [*prompt.tolist(), *ours[:done]], new_tokens - done, stop)
        same = _agreeing(ours[done:], theirs)
        logprobs = torch.log_softmax(logits, -1)
        upto = min(same + 1, len(ours) - done, len(theirs))
        own = answer.model_logprobs[done : done + upto]
        expected = logprobs[torch.arange(upto), ours[done : done + upto]].numpy()
        worst = max(worst, float(np.abs(own - expected).max()))
        if same == len(ours) - done:
            assert same == len(theirs), f"the engine ended after {len(ours)} tokens, transformers went on"
            break
        assert same < len(theirs), f"transformers ended after {done + same} tokens, the engine went on"
        gap = float(logits[same, theirs[same]] - logits[same, ours[done + same]])
        assert 0 <= gap < NEAR_TIE, (
            f"token {done + same}: the engine chose {ours[done + same]}, transformers {theirs[same]}, whose logit is larger "
            f"by {gap:.2e}: no near tie"
        )
        ties.append((done + same, gap))
        done += same + 1
        if ours[done - 1] in stop:
            break
    return Agreement(logprob_difference=worst, ties=tuple(ties))


def _agreeing(ours: Sequence[int], theirs: Sequence[int]) -> int:
    return next(
        (place for place, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other),
        min(len(ours), len(theirs)),
    )


@torch.inference_mode()
def _generate(
    module: Any, context: list[int], new_tokens: int, stop: tuple[int, ...]
) -> tuple[list[int], torch.Tensor]:
    """Return transformers' greedy tokens behind ``context``, and the logits of each, float32 ``[m, vocab_size]``."""
    ids = torch.tensor([context])
    found = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return found.sequences[0, len(context) :].tolist(), torch.cat(found.logits)
