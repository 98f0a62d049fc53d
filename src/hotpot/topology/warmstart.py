"""The warm start: a small policy made from nothing but an environment's demonstrator.

::

    demonstrations ──► tokenizer (trained on their texts) ──► sequences ──► imitation ──► model folder

Consumes the train split only, from a stream of tasks apart from the run's own (another seed), so the tasks of the run
are new to the policy. Produces an ordinary model folder.
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from hotpot.config import Recipe
from hotpot.envs.demonstrate import Demonstration, demonstrate
from hotpot.errors import RecipeError
from hotpot.experience.sequences.segments import TrainingSequence
from hotpot.ids import sha256_hex
from hotpot.learner.imitation import imitate
from hotpot.models import (
    Decoder,
    DecoderConfig,
    checksum,
    measure_threads,
    save_model,
    train_tokenizer,
    use_threads,
)
from hotpot.models.disk import check_new_folder, replace_folder
from hotpot.rollout import Dialect, Mix
from hotpot.topology.parts.ingredients import model_files, read_mix, system_prompt
from hotpot.types import Message, Role, Split, ToolSpec

TOKENIZER_EPISODES = 1000
"""Demonstrations whose texts the tokenizer is trained on."""


def warmstart(
    recipe: Recipe, out: Path, *, console: Console | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Make a model folder at ``out`` by imitation of the environment's demonstrator; return what was done.

    The folder appears whole or not at all. Raises :class:`hotpot.errors.ModelFilesError` where ``out`` exists (without
    ``overwrite``), :class:`hotpot.errors.EnvironmentSpecError` where the environment has no demonstrator,
    :class:`RecipeError` where a demonstration does not fit the model's context.
    """
    check_new_folder(out, overwrite=overwrite)
    console = console or Console(quiet=True)
    started, settings = time.perf_counter(), recipe.warmstart
    mix = read_mix(recipe)
    demonstrations = list(_demonstrations(recipe, mix, settings.steps * settings.batch_size))
    tokenizer = train_tokenizer(_corpus(demonstrations[:TOKENIZER_EPISODES], recipe.prompt.system))
    dialect = Dialect(tokenizer)
    sequences = [
        _sequence(dialect, demonstration, settings.max_context_tokens) for demonstration in demonstrations
    ]
    decoder = Decoder(_shape(recipe, tokenizer.vocab_size))
    decoder.initialize(recipe.run.seed)
    batches = [
        sequences[start : start + settings.batch_size]
        for start in range(0, len(sequences), settings.batch_size)
    ]
    threads = _choose_threads(recipe, decoder, batches[0])
    console.print(
        f"warm start: {len(demonstrations)} demonstrations, {np.mean([d.success for d in demonstrations]):.0%} right; "
        f"{sum(p.numel() for p in decoder.parameters()):,} parameters, {tokenizer.vocab_size} tokens, {threads} thread(s)"
    )
    losses = imitate(decoder, _announced(batches, console), settings)
    replace_folder(out, lambda folder: save_model(folder, decoder, model_files(tokenizer, dialect)))
    report = {
        "folder": str(out),
        "seconds": round(time.perf_counter() - started, 2),
        "demonstrations": len(demonstrations),
        "demonstrations_right": float(np.mean([d.success for d in demonstrations])),
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "vocab_size": tokenizer.vocab_size,
        "loss_first": losses[0],
        "loss_last": float(np.mean(losses[-20:])),
        "checksum": checksum(decoder.state_dict()),
        "env_version": "|".join(sorted({member.versions[0] for member in mix})),
    }
    console.print(
        f"warm start: loss {losses[0]:.2f} -> {report['loss_last']:.3f} in {report['seconds']:.0f} s: {out}"
    )
    return report


def _demonstrations(recipe: Recipe, mix: Mix, count: int) -> Iterator[Demonstration]:
    stream = int(sha256_hex(f"warmstart {recipe.run.seed}")[:12], 16)
    prompts = {member.name: system_prompt(recipe, member) for member in mix}
    for index in range(count):
        member, _ = mix.draw(stream, index)
        task = member.environment.task(Split.TRAIN, stream, index)
        yield demonstrate(member.environment, task, index, system_prompt=prompts[member.name])


def _corpus(demonstrations: Sequence[Demonstration], system: str | None) -> Iterator[str]:
    for demonstration in demonstrations:
        yield demonstration.system_prompt if system is None else system
        for tool in demonstration.observation.tools:
            yield f"{tool.name} {' '.join(json.loads(tool.parameters)['properties'])}"
        for message in demonstration.observation.messages:
            yield message.content
        for exchange in demonstration.exchanges:
            yield exchange.action.answer or ""
            if exchange.action.tool_call is not None:
                yield f"{exchange.action.tool_call.name} {exchange.action.tool_call.arguments}"
            for message in exchange.result.messages:
                yield message.content


def _sequence(dialect: Dialect, demonstration: Demonstration, max_context: int) -> TrainingSequence:
    opening = (
        Message(role=Role.SYSTEM, content=demonstration.system_prompt),
        *demonstration.observation.messages,
    )
    tools: tuple[ToolSpec, ...] = demonstration.observation.tools
    conversation, prompt = dialect.open(opening, tools)
    parts, sampled = [prompt.tokens], [False]
    for exchange in demonstration.exchanges:
        said = dialect.encode_action(exchange.action, tools=tools)
        parts.append(said)
        sampled.append(True)
        if not exchange.result.done:
            parts.append(conversation.extend(dialect.parse(said, tools), exchange.result.messages).tokens)
            sampled.append(False)
    tokens = np.concatenate(parts)
    if len(tokens) > max_context:
        raise RecipeError(
            f"a demonstration has {len(tokens)} tokens, more than warmstart.max_context_tokens = {max_context}; raise it"
        )
    mask = np.repeat(sampled, [len(part) for part in parts])
    return TrainingSequence(
        trajectory_id=demonstration.task.task_id,
        group_id=demonstration.task.task_id,
        segment=0,
        tokens=tokens,
        loss_mask=mask,
        behaviour_logprobs=np.zeros(len(tokens), dtype=np.float32),
        model_logprobs=np.zeros(len(tokens), dtype=np.float32),
        token_policy_version=np.where(mask, 0, -1).astype(np.int32),
        reward=float(demonstration.success),
    )


def _shape(recipe: Recipe, vocab_size: int) -> DecoderConfig:
    settings = recipe.warmstart
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        rope_theta=settings.rope_theta,
        max_context_tokens=settings.max_context_tokens,
        initializer_range=settings.initializer_range,
    )


def _choose_threads(recipe: Recipe, decoder: Decoder, batch: Sequence[TrainingSequence]) -> int:
    threads = 1 if recipe.run.deterministic else recipe.run.threads
    if not threads:
        probe = Decoder(decoder.config)
        threads, _ = measure_threads(lambda: imitate(probe, [batch], recipe.warmstart))
    use_threads(threads)
    return threads


def _announced(
    batches: Sequence[Sequence[TrainingSequence]], console: Console
) -> Iterator[Sequence[TrainingSequence]]:
    for step, batch in enumerate(batches):
        if step and step % 100 == 0:
            console.print(f"warm start: step {step} of {len(batches)}")
        yield batch
