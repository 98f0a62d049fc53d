"""Tokenizers, chat templates and small stand-ins that the tests of rollout share."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, repeat

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from hotpot.envs import Environment
from hotpot.models.tokenizer import PolicyTokenizer, train_tokenizer
from hotpot.rollout import Dialect, EpisodePlan, Provenance
from hotpot.types import (
    Action,
    Message,
    Observation,
    Reward,
    Role,
    Split,
    StepResult,
    Task,
    ToolCall,
    ToolSpec,
)

CORPUS = [
    "the desk is open\nanswer 42",
    "find_customer(name=Ada)",
    "calculate(expression=3*4)",
    "say w17",
    "error",
] * 5

TOOL = ToolSpec(
    name="echo",
    description="say a text back",
    parameters='{"properties":{"count":{"type":"integer"},"text":{"type":"string"}},"type":"object"}',
)

SMOL_TEMPLATE = (
    "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML without tools, with a default system message."""

THOUGHTFUL_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools' }}
    {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content and loop.index0 < ns.last_user %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML with tools in JSON and tool results inside user messages, which drops the thoughts of earlier turns."""


def compact_tokenizer(template: str | None = None) -> PolicyTokenizer:
    tokenizer = train_tokenizer(CORPUS, vocab_size=320)
    if template is None:
        return tokenizer
    return PolicyTokenizer(tokenizer.files() | {"chat_template.jinja": template.encode()})


def chatml_tokenizer(template: str, *, eos: str = "<|im_end|>") -> PolicyTokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        AddedToken(t, special=True, normalized=False) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    ]
    trainer = BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        show_progress=False,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(
        [*CORPUS, "<think>\nhm\n</think>\n\n", '{"name": "echo", "arguments": {}}'], trainer
    )
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in ("<tool_call>", "</tool_call>")]
    )
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos, "pad_token": "<|endoftext|>"}
    return PolicyTokenizer(
        {
            "tokenizer.json": tokenizer.to_str().encode(),
            "tokenizer_config.json": json.dumps(config).encode(),
            "chat_template.jinja": template.encode(),
        }
    )


DIALECTS: dict[str, Callable[[], Dialect]] = {
    "compact": lambda: Dialect(compact_tokenizer()),
    "smol": lambda: Dialect(chatml_tokenizer(SMOL_TEMPLATE)),
    "thoughtful": lambda: Dialect(chatml_tokenizer(THOUGHTFUL_TEMPLATE)),
}

PROVENANCE = Provenance(
    run_id="run",
    seed=7,
    actor_id="actor-0",
    actor_group="group-0",
    env_version="stub@1+00",
    reward_version="stub@1+01",
    prompt_version="stub@1+02",
)


def message(role: str, content: str, name: str = "") -> Message:
    return Message(role=Role(role), content=content, name=name)


def call(text: str = "hi") -> Action:
    return Action(
        tool_call=ToolCall(name="echo", arguments=json.dumps({"text": text}, separators=(",", ":")))
    )


def make_plan(issue: int = 0, sample: int = 0, evaluation: int | None = None) -> EpisodePlan:
    split = Split.TRAIN if evaluation is None else Split.HOLDOUT
    return EpisodePlan(
        task=Task(env="stub", split=split, content=f'{{"n":{issue},"split":"{split}"}}'),
        issue=issue,
        sample=sample,
        evaluation=evaluation,
    )


class ScriptedEnvironment(Environment):
    """Plays back results; anything callable among them is called instead (to raise, or to return rubbish)."""

    def __init__(self, results: Iterable[object], opening: object = None) -> None:
        self._results: Iterator[object] = iter(results)
        self._opening = opening
        self.actions: list[Action] = []
        self.seeds: list[int] = []
        self.closed = 0

    def reset(self, task: Task, seed: int) -> Observation:
        self.seeds.append(seed)
        if self._opening is not None:
            return self._opening() if callable(self._opening) else self._opening  # type: ignore[return-value]
        return Observation(messages=(message("user", "say w17"),), tools=(TOOL,))

    def step(self, action: Action) -> StepResult:
        self.actions.append(action)
        result = next(self._results)
        return result() if callable(result) else result  # type: ignore[return-value]

    def close(self) -> None:
        self.closed += 1


def reply(text: str = "ok", **fields: object) -> StepResult:
    return StepResult(messages=(message("tool", text, "echo"),), **fields)  # type: ignore[arg-type]


def done(value: float = 1.0, *, success: bool = True) -> StepResult:
    return StepResult(messages=(), rewards=(Reward(name="right", value=value),), done=True, success=success)


def endless(result: object) -> Iterator[object]:
    return chain(repeat(result))


class FakeTime:
    """Seconds that stand still until told otherwise."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def seen_by_engine(steps: Iterable[object]) -> list[np.ndarray]:
    """Return the context before each step, put together from the record alone, by brute force."""
    contexts: list[np.ndarray] = []
    context: list[int] = []
    segment = 0
    for step in steps:
        if step.segment != segment:  # type: ignore[attr-defined]
            context, segment = [], step.segment  # type: ignore[attr-defined]
        context = context + step.prompt_tokens.tolist()  # type: ignore[attr-defined]
        contexts.append(np.array(context, dtype=np.int32))
        context = context + step.sampled_tokens.tolist()  # type: ignore[attr-defined]
    return contexts
