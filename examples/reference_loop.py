"""The whole algorithm in one file: warm start, rollout, group advantages, clipped policy gradient, hold-out evaluation.

To be read in one sitting. Shares no code with engine, rollout or learner: it imports records, environment and decoder.

    python examples/reference_loop.py [--seed 0] [--updates 40]

The algorithm: imitate a careless demonstrator, then repeat { sample 16 tasks x 8 episodes; advantage = reward minus the
mean of the task's own episodes (arXiv:2503.20783); one pass of 4 clipped policy-gradient steps (arXiv:1707.06347) on the
tokens the model sampled, and on nothing else }.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotpot.envs import BoundEnvironment, Demonstration, Environment, demonstrate, load_environment
from hotpot.ids import canonical_json
from hotpot.models import Decoder, DecoderConfig, KeyValueCache, PolicyTokenizer, train_tokenizer
from hotpot.types import Action, Message, Observation, Role, Split, Task, ToolCall

MAX_STEPS, MAX_STEP_TOKENS, MAX_CONTEXT, LEARNING_RATE = 8, 48, 512, 3e-4
SHAPE = {
    "hidden_size": 128, "intermediate_size": 384, "num_layers": 2, "num_heads": 4, "num_kv_heads": 1,
    "rope_theta": 1000.0, "max_context_tokens": MAX_CONTEXT, "initializer_range": 0.06,
}  # fmt: skip
ROLE_TOKEN = {Role.USER: "<|user|>", Role.TOOL: "<|tool|>"}


# ---- text and tokens: the model's own tokens are kept as sampled; only what is given to it is rendered ----


def render(tokenizer: PolicyTokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of new messages and the opening of the model's reply."""
    tokens: list[int] = []
    for message in messages:
        tokens += [tokenizer.special_ids[ROLE_TOKEN[message.role]], *tokenizer.encode_text(message.content)]
        tokens.append(tokenizer.end_id)
    return [*tokens, tokenizer.special_ids["<|assistant|>"]]


def render_opening(tokenizer: PolicyTokenizer, system: str, observation: Observation) -> list[int]:
    """Return the tokens of the system prompt with its tools, then of the opening messages."""
    tokens = [tokenizer.special_ids["<|system|>"], *tokenizer.encode_text(system)]
    for tool in observation.tools:
        arguments = ", ".join(re.findall(r'"(\w+)":\{', tool.parameters.split('"properties":{', 1)[1]))
        tokens += tokenizer.encode_text(f"\n{tool.name}({arguments})").tolist()
    return [*tokens, tokenizer.end_id, *render(tokenizer, observation.messages)]


def write(tokenizer: PolicyTokenizer, action: Action) -> list[int]:
    """Return the tokens with which a demonstrator says ``action``."""
    if action.tool_call is None:
        return [*tokenizer.encode_text(action.answer or ""), tokenizer.end_id]
    arguments = ", ".join(f"{key}={value}" for key, value in json.loads(action.tool_call.arguments).items())
    call = tokenizer.encode_text(f"{action.tool_call.name}({arguments})")
    return [tokenizer.special_ids["<|call|>"], *call, tokenizer.end_id]


def read(tokenizer: PolicyTokenizer, sampled: Sequence[int]) -> Action:
    """Return what the model did, from the tokens it sampled."""
    call, body = tokenizer.special_ids["<|call|>"], list(sampled[:-1])
    if call not in body:
        return Action(answer=tokenizer.decode(body).strip())
    text = tokenizer.decode(body[body.index(call) + 1 :])
    match = re.fullmatch(r"(\w+)\((.*)\)", text, flags=re.DOTALL)
    if match is None:
        return Action(malformed="not a call")
    arguments = dict(re.findall(r"(\w+)=(.*?)(?:, (?=\w+=)|$)", match[2], flags=re.DOTALL))
    return Action(tool_call=ToolCall(name=match[1], arguments=canonical_json(arguments)))


@dataclass
class Episode:
    """One agent in one environment: every token so far, and which of them the model sampled."""

    env: Environment
    group: int
    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    reward: float = 0.0
    success: bool = False
    done: bool = False
    steps: int = 0
    reply: list[int] = field(default_factory=list)


@torch.inference_mode()
def sample_replies(model: Decoder, episodes: list[Episode], end: int, generator: torch.Generator) -> None:
    """Let the model continue every episode until its end token: one padded prefill, then one token a pass."""
    lengths = torch.tensor([len(episode.tokens) for episode in episodes])
    width = int(lengths.max())
    prompts = torch.zeros(len(episodes), width, dtype=torch.long)
    for row, episode in enumerate(episodes):
        prompts[row, : len(episode.tokens)] = torch.tensor(episode.tokens)
    cache = KeyValueCache(model.config, len(episodes), width + MAX_STEP_TOKENS)
    rows, keys = slice(0, len(episodes)), torch.arange(width + MAX_STEP_TOKENS)
    positions = torch.arange(width).expand(len(episodes), -1)
    causal = (keys[None, :width] <= keys[:width, None]).expand(len(episodes), 1, -1, -1)
    hidden = model(prompts, positions, cache=cache, rows=rows, attend=causal)
    last = hidden[torch.arange(len(episodes)), lengths - 1]
    running = torch.ones(len(episodes), dtype=torch.bool)
    for offset in range(MAX_STEP_TOKENS):
        logprobs = torch.log_softmax(model.logits(last), dim=-1)
        drawn = torch.multinomial(logprobs.exp(), 1, generator=generator)[:, 0]
        chosen = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
        for row in running.nonzero()[:, 0].tolist():
            episodes[row].reply.append(int(drawn[row]))
            episodes[row].logprobs.append(chosen[row])
        running &= drawn != end
        if not running.any() or offset == MAX_STEP_TOKENS - 1:
            return
        at = (lengths + offset)[:, None]
        attend = (keys[None, : width + offset + 1] <= at)[:, None, None]
        last = model(drawn[:, None], at, cache=cache, rows=rows, attend=attend)[:, 0]


def play(
    model: Decoder, tokenizer: PolicyTokenizer, environment: BoundEnvironment, tasks: Sequence[Task],
    generator: torch.Generator, samples: int = 1,
) -> list[Episode]:  # fmt: skip
    """Run ``samples`` episodes of every task to their ends, all at once."""
    episodes: list[Episode] = []
    for group, task in enumerate(tasks):
        for _ in range(samples):
            env = environment.make()
            opening = render_opening(tokenizer, environment.system_prompt(), env.reset(task, 0))
            episodes.append(Episode(env, group, opening, [False] * len(opening), [0.0] * len(opening)))
    while running := [episode for episode in episodes if not episode.done]:
        sample_replies(model, running, tokenizer.end_id, generator)
        for episode in running:
            reply, episode.reply = episode.reply, []
            episode.tokens += reply
            episode.sampled += [True] * len(reply)
            episode.steps += 1
            if reply[-1] != tokenizer.end_id:
                episode.done = True
                continue
            result = episode.env.step(read(tokenizer, reply))
            episode.reward += sum(reward.value for reward in result.rewards)
            episode.success = bool(result.success)
            observed = [] if result.done else render(tokenizer, result.messages)
            too_long = len(episode.tokens) + len(observed) + MAX_STEP_TOKENS > MAX_CONTEXT
            episode.done = result.done or episode.steps == MAX_STEPS or too_long
            if not episode.done:
                episode.tokens += observed
                episode.sampled += [False] * len(observed)
                episode.logprobs += [0.0] * len(observed)
    for episode in episodes:
        episode.env.close()
    return episodes


@dataclass(frozen=True)
class Sample:
    """One trajectory to learn from: tokens, which of them were sampled, their old log-probabilities, the advantage."""

    tokens: Sequence[int]
    sampled: Sequence[bool]
    logprobs: Sequence[float]
    advantage: float


def advantages(rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Return reward minus the mean reward of the same group."""
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).append(reward)
    return [r - sum(members[g]) / len(members[g]) for r, g in zip(rewards, groups, strict=True)]


def collect(model, tokenizer, environment, tasks, generator) -> tuple[list[Episode], list[Sample]]:
    """Play 8 episodes of every task; return them, and what there is to learn from them."""
    episodes = play(model, tokenizer, environment, tasks, generator, samples=8)
    gains = advantages([e.reward for e in episodes], [e.group for e in episodes])
    signal = {e.group for e, gain in zip(episodes, gains, strict=True) if gain != 0}
    pairs = [
        (e, gain) for e, gain in zip(episodes, gains, strict=True) if e.group in signal
    ]  # others say nothing
    return episodes, [Sample(e.tokens, e.sampled, e.logprobs, gain) for e, gain in pairs]


def token_logprobs(model: Decoder, samples: Sequence[Sample]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return new and old log-probabilities, advantages and the mask, each ``[B, T - 1]``, of predicting token t + 1."""
    width = max(len(sample.tokens) for sample in samples)

    def padded(values: Iterable[Sequence[float]], dtype: torch.dtype) -> Tensor:
        return torch.stack([F.pad(torch.tensor(list(v), dtype=dtype), (0, width - len(v))) for v in values])

    tokens = padded((sample.tokens for sample in samples), torch.long)
    mask = padded((sample.sampled for sample in samples), torch.bool)[:, 1:]
    old = padded((sample.logprobs for sample in samples), torch.float32)[:, 1:]
    hidden = model(tokens, torch.arange(width).expand_as(tokens))
    logprobs = torch.log_softmax(model.logits(hidden[:, :-1]), dim=-1)
    new = logprobs.gather(2, tokens[:, 1:, None])[..., 0]
    return new, old, torch.tensor([[sample.advantage] for sample in samples]).expand_as(new), mask


def policy_loss(model: Decoder, samples: Sequence[Sample], *, clip: float = 0.2) -> Tensor:
    """Return the clipped policy-gradient loss, a mean over the sampled tokens of ``samples``."""
    new, old, advantage, mask = token_logprobs(model, samples)
    ratio = torch.exp(new - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return -gain[mask].mean()


def learn(
    model: Decoder, optimizer: torch.optim.Optimizer, minibatches: Sequence[Sequence[Sample]]
) -> list[float]:
    """Take one optimiser step a minibatch; return the losses."""
    return [descend(model, optimizer, policy_loss(model, samples)) for samples in minibatches]


def descend(model: Decoder, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    """Take one optimiser step down ``loss``, its gradient clipped to norm 1; return its value."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def warm_start(environment: BoundEnvironment, *, seed: int, steps: int) -> tuple[Decoder, PolicyTokenizer]:
    """Make a tokenizer and a small model that imitates the careless demonstrator."""
    batch, peak, warmup = 8, 1.5e-3, max(1, steps // 10)
    tasks = [environment.task(Split.TRAIN, seed + 1_000_003, index) for index in range(steps * batch)]
    shown = [demonstrate(environment, task, index) for index, task in enumerate(tasks)]
    corpus = [environment.system_prompt()]
    for one in shown[:1000]:
        replies = [exchange.result.messages for exchange in one.exchanges]
        corpus += [
            message.content for messages in (one.observation.messages, *replies) for message in messages
        ]
        calls = [exchange.action.tool_call for exchange in one.exchanges]
        corpus += [text for call in calls if call for text in (call.name, call.arguments)]
    tokenizer = train_tokenizer(corpus)
    model = Decoder(DecoderConfig(vocab_size=tokenizer.vocab_size, **SHAPE))
    model.initialize(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        chosen = shown[step * batch : (step + 1) * batch]
        new, _, _, mask = token_logprobs(model, [transcript(tokenizer, environment, one) for one in chosen])
        fall = 0.1 + 0.9 * 4 * (steps - step) / steps
        optimizer.param_groups[0]["lr"] = peak * min(1.0, (step + 1) / warmup, fall)
        descend(model, optimizer, -new[mask].mean())
    return model, tokenizer


def transcript(tokenizer: PolicyTokenizer, environment: BoundEnvironment, shown: Demonstration) -> Sample:
    """Return a demonstration as tokens; what the demonstrator said counts as sampled."""
    tokens = render_opening(tokenizer, environment.system_prompt(), shown.observation)
    sampled = [False] * len(tokens)
    for exchange in shown.exchanges:
        said = write(tokenizer, exchange.action)
        given = [] if exchange.result.done else render(tokenizer, exchange.result.messages)
        tokens, sampled = [*tokens, *said, *given], [*sampled, *[True] * len(said), *[False] * len(given)]
    return Sample(tokens, sampled, [0.0] * len(tokens), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--updates", type=int, default=40)
    arguments = parser.parse_args()
    started, shuffle = time.perf_counter(), random.Random(arguments.seed)
    generator = torch.Generator().manual_seed(arguments.seed)
    environment = load_environment("order_desk", {})
    model, tokenizer = warm_start(environment, seed=arguments.seed, steps=900)
    holdout = [environment.task(Split.HOLDOUT, arguments.seed, i) for i in range(512)]

    def success() -> float:
        episodes = play(model, tokenizer, environment, holdout, generator)
        return sum(episode.success for episode in episodes) / len(episodes)

    print(f"warm start: hold-out success {success():.3f} after {time.perf_counter() - started:.0f} s")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for update in range(1, arguments.updates + 1):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (
            1 - 0.9 * (update - 1) / max(1, arguments.updates - 1)
        )
        tasks = [environment.task(Split.TRAIN, arguments.seed, update * 16 + i) for i in range(16)]
        episodes, batch = collect(model, tokenizer, environment, tasks, generator)
        shuffle.shuffle(batch)
        losses = learn(model, optimizer, [batch[i::4] for i in range(4)]) if len(batch) >= 4 else []
        mean = sum(e.reward for e in episodes) / len(episodes)
        print(f"update {update:3d}  reward {mean:.3f}  first loss {(losses or [0])[0]:+.4f}", flush=True)
    print(f"after: hold-out success {success():.3f} in {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
