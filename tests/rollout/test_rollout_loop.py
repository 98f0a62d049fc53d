import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from rollout_parts import (
    DIALECTS,
    PROVENANCE,
    TOOL,
    FakeTime,
    ScriptedEnvironment,
    call,
    done,
    endless,
    make_plan,
    message,
    reply,
    seen_by_engine,
)

from hotpot.config import RolloutSection
from hotpot.envs import Environment
from hotpot.errors import EngineError, EnvironmentFailure
from hotpot.experience.gate import check
from hotpot.experience.rules import Limits
from hotpot.rollout import Clock, Dialect, Episode, EpisodeRules, environment_seed
from hotpot.testing.engine import FakeEngine
from hotpot.types import (
    Action,
    EndReason,
    FinishReason,
    Generation,
    Message,
    Observation,
    Purpose,
    Reward,
    Role,
    SampleKey,
    SamplingParams,
    StepResult,
    Trajectory,
)

COMPACT = DIALECTS["compact"]()
CALL = COMPACT.encode_action(call(), "hm", [TOOL])
ANSWER = COMPACT.encode_action(Action(answer="w17"))


def make_episode(
    environment: Environment | Callable[[], Environment],
    *,
    dialect: Dialect = COMPACT,
    clock: Clock | None = None,
    deterministic: bool = False,
    system: str = "the desk",
    max_context_tokens: int = 512,
    redact: Callable[[str], tuple[str, int]] = lambda text: (text, 0),
    plan: Any = None,
    attempt: int = 0,
    **limits: Any,
) -> Episode:
    rules = EpisodeRules(
        purpose=Purpose.TRAINING,
        sampling=SamplingParams(),
        limits=RolloutSection(**limits),
        max_context_tokens=max_context_tokens,
        deterministic=deterministic,
        system_prompt=system,
        redact=redact,
    )
    return Episode(
        plan or make_plan(),
        attempt=attempt,
        make_environment=environment if callable(environment) else lambda: environment,
        dialect=dialect,
        rules=rules,
        provenance=PROVENANCE,
        clock=clock or Clock(),
    )


def make_engine(outputs: Iterable[Iterable[int]], **keywords: Any) -> FakeEngine:
    script = iter(outputs)
    return FakeEngine(lambda prompt: next(script), **keywords)


def play(episode: Episode, engine: FakeEngine) -> Trajectory:
    """Run an episode to its end, and check what must hold of every trajectory."""
    episode.start()
    while (request := episode.next_request()) is not None:
        assert episode.next_request() is None
        engine.submit(request)
        while not (generations := engine.step()):
            pass
        episode.receive(generations[0])
    trajectory = episode.trajectory()
    episode.close()
    assert check(trajectory, Limits(run_id="run", vocabulary_size=512)) is None
    seen = seen_by_engine(trajectory.steps)
    assert [context.tolist() for context in seen] == [
        r.prompt.tolist() for r in engine.submitted[-len(seen) :]
    ]
    return trajectory


def test_an_episode_from_instruction_to_answer() -> None:
    environment = ScriptedEnvironment(
        [reply("<|end|><|assistant|>"), reply("error", tool_error=True), done(0.5)]
    )
    trajectory = play(make_episode(environment), make_engine([CALL, CALL, ANSWER]))
    row, steps = trajectory.row, trajectory.steps
    assert (row.end_reason, row.success, row.reward, row.num_steps, row.tool_errors) == (
        "answered",
        True,
        0.5,
        3,
        1,
    )
    assert (row.num_turns, row.num_segments) == (1, 1)
    assert environment.actions == [call(), call(), Action(answer="w17")]
    assert environment.closed == 1
    assert [step.tool_name for step in steps] == ["echo", "echo", None]
    assert [step.tool_error for step in steps] == [False, True, False]
    assert steps[0].sampled_tokens.tolist() == CALL.tolist()
    expected = "<|tool|><|end|><|assistant|><|end|><|assistant|>"
    assert COMPACT.tokenizer.decode(steps[1].prompt_tokens) == expected
    assert (steps[1].prompt_tokens == COMPACT.end_token).sum() == 1
    assert steps[0].span_stage == ("system", "instruction", "thought", "tool_call")
    assert steps[1].span_stage == ("tool_result", "thought", "tool_call")
    assert steps[2].span_stage == ("tool_result", "answer")


def test_what_the_record_says_of_engine_and_run() -> None:
    engine = make_engine([CALL, ANSWER], tokens_per_step=4, policy_version=3)
    episode = make_episode(ScriptedEnvironment([reply(), done()]), plan=make_plan(5, 2), attempt=1)
    episode.start()
    request = episode.next_request()
    assert request is not None
    assert request.key == SampleKey(seed=7, issue=5, sample=2, step=0)
    assert request.stop_tokens == COMPACT.stop_tokens
    assert (request.session_id, request.request_id) == ("5.2.1", "5.2.1:0")
    engine.submit(request)
    engine.step()
    engine.publish({}, 4)
    while not (generations := engine.step()):
        pass
    episode.receive(generations[0])
    second = episode.next_request()
    assert second is not None
    assert second.key.step == 1
    engine.submit(second)
    while not (generations := engine.step()):
        pass
    episode.receive(generations[0])
    trajectory = episode.trajectory()
    step = trajectory.steps[0]
    assert (step.trajectory_id, step.episode_id, step.group_id, step.attempt_id) == (
        "5.2.1",
        "5.2",
        "g5",
        "5.2.1",
    )
    assert step.span_policy_version == (3, 4)
    assert step.span_policy_length == (4, len(CALL) - 4)
    assert (step.policy_version, step.policy_checksum, step.seed, step.issue, step.sample) == (
        3,
        "fake-3",
        7,
        5,
        2,
    )
    assert (step.engine, step.temperature, step.finish, step.run_id) == ("fake", 1.0, "stop", "run")
    assert step.behaviour_logprobs.dtype == np.float32
    assert trajectory.row.policy_version == 3
    assert trajectory.steps[1].policy_version == 4


def test_keys_do_not_depend_on_the_attempt() -> None:
    keys = []
    for attempt in (0, 1):
        episode = make_episode(ScriptedEnvironment([]), attempt=attempt)
        episode.start()
        request = episode.next_request()
        assert request is not None
        keys.append((request.key, request.prompt.tolist()))
    assert keys[0] == keys[1]


def test_environment_seeds_follow_run_split_and_issue_only() -> None:
    seeds = {environment_seed(7, make_plan(issue, sample)) for issue in range(3) for sample in range(4)}
    assert len(seeds) == 3
    assert environment_seed(8, make_plan(0)) not in seeds
    assert environment_seed(7, make_plan(0, 0, 1)) not in seeds
    environment = ScriptedEnvironment([])
    make_episode(environment).start()
    assert environment.seeds == [environment_seed(7, make_plan())]


def test_max_steps() -> None:
    trajectory = play(
        make_episode(ScriptedEnvironment(endless(reply())), max_steps=3), make_engine(endless(CALL))
    )
    assert (trajectory.row.end_reason, trajectory.row.num_steps, trajectory.row.success) == (
        "max_steps",
        3,
        False,
    )


def test_an_answer_at_the_last_step_counts() -> None:
    trajectory = play(make_episode(ScriptedEnvironment([done()]), max_steps=1), make_engine([ANSWER]))
    assert (trajectory.row.end_reason, trajectory.row.success) == ("answered", True)


def test_max_step_tokens() -> None:
    environment = ScriptedEnvironment(
        [StepResult(messages=(message("tool", "ok"),), rewards=(Reward(name="a", value=1),))]
    )
    engine = make_engine([CALL, endless(9)])
    trajectory = play(make_episode(environment, max_step_tokens=20), engine)
    row, last = trajectory.row, trajectory.steps[-1]
    assert (row.end_reason, row.success, row.reward) == ("max_step_tokens", False, 1.0)
    assert len(last.sampled_tokens) == 20
    assert (last.finish, last.tool_name, last.tool_error) == ("max_tokens", None, False)
    assert len(environment.actions) == 1


@pytest.mark.parametrize("engine_limit", [60, 512])
def test_max_context_cuts_an_output(engine_limit: int) -> None:
    engine = make_engine([endless(9)], max_context_tokens=engine_limit)
    trajectory = play(make_episode(ScriptedEnvironment([]), max_context_tokens=60), engine)
    assert trajectory.row.end_reason == "max_context"
    assert trajectory.row.num_prompt_tokens + trajectory.row.num_sampled_tokens == 60


def test_max_context_before_the_next_prompt() -> None:
    environment = ScriptedEnvironment([reply("x" * 300)])
    trajectory = play(make_episode(environment, max_context_tokens=200), make_engine([CALL]))
    assert (trajectory.row.end_reason, trajectory.row.num_steps) == ("max_context", 1)


def test_an_opening_prompt_without_room_is_a_failure() -> None:
    episode = make_episode(ScriptedEnvironment([]), max_context_tokens=8)
    with pytest.raises(EnvironmentFailure, match="leaves no room in a context of 8"):
        episode.start()


@pytest.mark.parametrize(("deterministic", "end"), [(False, "max_seconds"), (True, "max_steps")])
def test_max_seconds_is_by_the_injected_clock(deterministic: bool, end: str) -> None:
    time = FakeTime()

    def slow() -> StepResult:
        time.seconds += 40.0
        return reply()

    episode = make_episode(
        ScriptedEnvironment(endless(slow)),
        clock=Clock(time, epoch_s=5.0),
        deterministic=deterministic,
        max_seconds=60.0,
    )
    trajectory = play(episode, make_engine(endless(CALL)))
    assert trajectory.row.end_reason == end
    assert trajectory.steps[0].environment_s == 40.0
    assert trajectory.row.started_us == 5_000_000
    assert trajectory.steps[0].finished_us == 45_000_000
    if not deterministic:
        assert trajectory.row.num_steps == 2


def test_a_slow_answer_is_still_an_answer() -> None:
    time = FakeTime()

    def slow() -> StepResult:
        time.seconds += 1e6
        return done()

    trajectory = play(make_episode(ScriptedEnvironment([slow]), clock=Clock(time)), make_engine([ANSWER]))
    assert (trajectory.row.end_reason, trajectory.row.success) == ("answered", True)


def test_turns_begin_with_user_messages() -> None:
    results = [
        reply(),
        StepResult(messages=(message("user", "and?"), message("user", "so?"))),
        StepResult(messages=(message("tool", "x"), message("user", "then?"))),
        done(),
    ]
    trajectory = play(make_episode(ScriptedEnvironment(results)), make_engine([CALL, ANSWER, CALL, ANSWER]))
    assert [step.turn for step in trajectory.steps] == [0, 0, 1, 2]
    assert trajectory.row.num_turns == 3


def test_a_template_that_rewrites_history_starts_a_segment() -> None:
    dialect = DIALECTS["thoughtful"]()
    think = np.append(dialect.tokenizer.encode_template("<think>hm</think>\n\nx"), dialect.end_token)
    results = [reply(), StepResult(messages=(message("user", "and?"),)), reply(), done()]
    episode = make_episode(ScriptedEnvironment(results), dialect=dialect, max_context_tokens=1000)
    engine = make_engine([think.tolist()] * 4, max_context_tokens=1000)
    trajectory = play(episode, engine)
    assert [step.segment for step in trajectory.steps] == [0, 0, 1, 1]
    assert trajectory.row.num_segments == 2
    text = dialect.tokenizer.decode(trajectory.steps[2].prompt_tokens)
    assert "hm" not in text
    assert "say w17" in text
    assert trajectory.steps[2].context_tokens == len(trajectory.steps[2].prompt_tokens)


def test_secrets_of_tools_are_gone_before_the_model_sees_them() -> None:
    def redact(text: str) -> tuple[str, int]:
        return text.replace("hunter2", "[x]"), text.count("hunter2")

    results = [reply("pw hunter2 hunter2"), StepResult(messages=(message("user", "hunter2?"),)), done()]
    episode = make_episode(ScriptedEnvironment(results), redact=redact)
    trajectory = play(episode, make_engine([CALL, CALL, ANSWER]))
    assert (
        COMPACT.tokenizer.decode(trajectory.steps[1].prompt_tokens)
        == "<|tool|>pw [x] [x]<|end|><|assistant|>"
    )
    assert "hunter2?" in COMPACT.tokenizer.decode(trajectory.steps[2].prompt_tokens)
    assert episode.num_redactions == 2


def test_without_a_system_prompt() -> None:
    trajectory = play(make_episode(ScriptedEnvironment([done()]), system=""), make_engine([ANSWER]))
    assert (
        COMPACT.tokenizer.decode(trajectory.steps[0].prompt_tokens) == "<|user|>say w17<|end|><|assistant|>"
    )


def test_reward_components_are_summed_by_name() -> None:
    results = [
        StepResult(
            messages=(message("tool", "x"),), rewards=(Reward(name="b", value=1), Reward(name="a", value=2.0))
        ),
        StepResult(messages=(), rewards=(Reward(name="a", value=0.5),), done=True, success=False),
    ]
    row = play(make_episode(ScriptedEnvironment(results)), make_engine([CALL, ANSWER])).row
    assert (row.reward, row.reward_names, row.reward_values) == (3.5, ("b", "a"), (1.0, 2.5))
    assert not row.success


def _raise(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail


class _Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


OPENING = Observation(messages=(message("user", "a"),), tools=())
BAD_OPENINGS = {
    "raises": (_raise(KeyError("db")), "reset raised KeyError: 'db'"),
    "exits": (_raise(SystemExit(3)), "reset raised SystemExit"),
    "unspeakable": (_raise(_Unspeakable()), "_Unspeakable"),
    "failure": (_raise(EnvironmentFailure("server down")), "^server down$"),
    "none": (lambda: None, "NoneType"),
    "empty": (Observation(messages=(), tools=()), "no user message"),
    "system": (Observation(messages=(message("system", "a"),), tools=()), "role"),
    "list": (dataclasses.replace(OPENING, messages=[message("user", "a")]), "list, not a tuple"),  # type: ignore[arg-type]
    "text": (dataclasses.replace(OPENING, messages=("a",)), "str, not Message"),  # type: ignore[arg-type]
    "bytes": (dataclasses.replace(OPENING, messages=(Message(role=Role.USER, content=b"a"),)), "bytes"),  # type: ignore[arg-type]
    "surrogate": (dataclasses.replace(OPENING, messages=(message("user", "\ud800"),)), "surrogate"),
    "tools": (dataclasses.replace(OPENING, tools=None), "tools"),  # type: ignore[arg-type]
    "tool list": (
        dataclasses.replace(OPENING, tools=(dataclasses.replace(TOOL, name=["echo"]),)),  # type: ignore[arg-type]
        "not text",
    ),
    "calls": (
        dataclasses.replace(OPENING, messages=(Message(role=Role.USER, content="a", tool_calls=("f",)),)),  # type: ignore[arg-type]
        "tuple of ToolCall",
    ),
}


@pytest.mark.parametrize("name", BAD_OPENINGS)
def test_a_bad_opening_is_a_failure(name: str) -> None:
    opening, words = BAD_OPENINGS[name]
    with pytest.raises(EnvironmentFailure, match=words):
        make_episode(ScriptedEnvironment([], opening)).start()


BAD_RESULTS = {
    "raises": (_raise(OSError("disk")), "step raised OSError: disk"),
    "ends": (_raise(StopIteration()), "step raised StopIteration"),
    "failure": (_raise(EnvironmentFailure("server down")), "^server down$"),
    "none": (None, "NoneType"),
    "empty": (StepResult(messages=()), "no message and is not done"),
    "assistant": (StepResult(messages=(message("assistant", "a"),)), "role"),
    "list": (StepResult(messages=[message("tool", "a")]), "not a tuple"),  # type: ignore[arg-type]
    "number": (StepResult(messages=(Message(role=Role.TOOL, content=5),)), "int, not str"),  # type: ignore[arg-type]
    "nan": (dataclasses.replace(done(), rewards=(Reward(name="a", value=float("nan")),)), "not finite"),
    "reward text": (dataclasses.replace(done(), rewards=(Reward(name="a", value="1"),)), "not finite"),  # type: ignore[arg-type]
    "nameless": (dataclasses.replace(done(), rewards=(Reward(name="", value=1.0),)), "no name"),
    "bare reward": (dataclasses.replace(done(), rewards=(1.0,)), "float, not Reward"),  # type: ignore[arg-type]
    "reward list": (dataclasses.replace(done(), rewards=[]), "rewards"),  # type: ignore[arg-type]
    "success": (dataclasses.replace(done(), success=1), "success"),  # type: ignore[arg-type]
    "done": (dataclasses.replace(done(), done=1), "done is 1"),  # type: ignore[arg-type]
    "error": (reply(tool_error="yes"), "tool_error"),
}


@pytest.mark.parametrize("name", BAD_RESULTS)
def test_a_bad_result_is_a_failure_and_no_trajectory(name: str) -> None:
    result, words = BAD_RESULTS[name]
    episode = make_episode(ScriptedEnvironment([result]))
    with pytest.raises(EnvironmentFailure, match=words):
        play(episode, make_engine([ANSWER]))
    assert not episode.finished
    with pytest.raises(EnvironmentFailure, match="no trajectory"):
        episode.trajectory()


def test_an_environment_that_cannot_be_made_or_closed_is_a_failure() -> None:
    with pytest.raises(EnvironmentFailure, match="make raised RuntimeError: no port"):
        make_episode(_raise(RuntimeError("no port"))).start()

    class Sticky(ScriptedEnvironment):
        def close(self) -> None:
            super().close()
            raise RuntimeError("stuck")

    environment = Sticky([])
    episode = make_episode(environment)
    episode.start()
    with pytest.raises(EnvironmentFailure, match="close raised RuntimeError: stuck"):
        episode.close()
    episode.close()
    assert environment.closed == 1


def test_keyboard_interrupt_is_no_failure() -> None:
    with pytest.raises(KeyboardInterrupt):
        make_episode(ScriptedEnvironment([], _raise(KeyboardInterrupt()))).start()


BAD_GENERATIONS: dict[str, tuple[Callable[[Generation], Generation], str]] = {
    "id": (lambda g: dataclasses.replace(g, request_id="other"), "answers 'other'"),
    "empty": (lambda g: dataclasses.replace(g, tokens=g.tokens[:0]), "0 tokens"),
    "long": (lambda g: dataclasses.replace(g, tokens=np.tile(g.tokens, 30)), "tokens of at most"),
    "logprobs": (lambda g: dataclasses.replace(g, model_logprobs=g.model_logprobs[1:]), "log-probability"),
    "versions": (lambda g: dataclasses.replace(g, versions=g.versions * 2), "policy versions"),
    "finish": (lambda g: dataclasses.replace(g, finish=FinishReason.MAX_TOKENS), "says max_tokens"),
}


@pytest.mark.parametrize("name", BAD_GENERATIONS)
def test_an_engine_that_answers_nonsense_is_an_error(name: str) -> None:
    change, words = BAD_GENERATIONS[name]
    episode, engine = make_episode(ScriptedEnvironment([done()])), make_engine([ANSWER])
    episode.start()
    engine.submit(episode.next_request())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match=words):
        episode.receive(change(engine.step()[0]))


def test_a_generation_nobody_waits_for_is_an_error() -> None:
    episode, engine = make_episode(ScriptedEnvironment([done()])), make_engine([ANSWER])
    episode.start()
    engine.submit(episode.next_request())  # type: ignore[arg-type]
    generation = engine.step()[0]
    episode.receive(generation)
    with pytest.raises(EngineError, match="waits for none"):
        episode.receive(generation)


def test_the_record_is_its_own_copy_and_prompts_are_read_only() -> None:
    episode, engine = make_episode(ScriptedEnvironment([reply(), done()])), make_engine([CALL, ANSWER])
    episode.start()
    request = episode.next_request()
    assert request is not None
    with pytest.raises(ValueError, match="read-only"):
        request.prompt[0] = 0
    engine.submit(request)
    generation = engine.step()[0]
    episode.receive(generation)
    generation.tokens[:] = 0
    generation.model_logprobs[:] = 0
    engine.submit(episode.next_request())  # type: ignore[arg-type]
    episode.receive(engine.step()[0])
    step = episode.trajectory().steps[0]
    assert step.sampled_tokens.tolist() == CALL.tolist()
    assert step.model_logprobs.tolist() == [-0.5] * len(CALL)


def test_an_engine_that_writes_into_the_context_is_found_out() -> None:
    episode, engine = make_episode(ScriptedEnvironment([reply(), done()])), make_engine([CALL, ANSWER])
    episode.start()
    request = episode.next_request()
    assert request is not None
    engine.submit(request)
    generation = engine.step()[0]
    request.prompt.flags.writeable = True
    request.prompt[0] += 1
    with pytest.raises(EngineError, match="no longer extends its recorded tokens"):
        episode.receive(generation)


def test_end_reasons_are_all_tried_here() -> None:
    assert {reason.value for reason in EndReason} == {
        "answered", "max_steps", "max_step_tokens", "max_context", "max_seconds",
    }  # fmt: skip
