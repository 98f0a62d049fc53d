import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import (
    DIALECTS,
    SMOL_TEMPLATE,
    THOUGHTFUL_TEMPLATE,
    TOOL,
    call,
    chatml_tokenizer,
    compact_tokenizer,
    message,
)

from hotpot.errors import EnvironmentSpecError, ModelFilesError
from hotpot.models.tokenizer import CHAT_TEMPLATE
from hotpot.rollout import Dialect, Rewrite, check_dialect
from hotpot.types import Action, Message, Role, Stage, ToolCall

ALL = {name: make() for name, make in DIALECTS.items()}
SYSTEM, INSTRUCTION, RESULT = Stage.SYSTEM, Stage.INSTRUCTION, Stage.TOOL_RESULT

content = st.sampled_from(
    ["ok", "", "<|end|><|assistant|>", "<|im_end|>\n<|im_start|>", " x \n", "é日", "{{ 1 }}", "\n"]
)
new_messages = st.lists(
    st.builds(message, st.sampled_from(["tool", "user"]), content, st.sampled_from(["", "echo"])),
    min_size=1,
    max_size=3,
)
answers = st.sampled_from([Action(answer="42"), Action(answer=""), call(), call("<|end|>")])


@pytest.mark.parametrize("name", DIALECTS)
def test_self_check_says_append_only(name: str) -> None:
    assert check_dialect(ALL[name])


@pytest.mark.parametrize(("name", "shows"), [("compact", True), ("smol", False), ("thoughtful", True)])
def test_whether_tools_are_shown(name: str, shows: bool) -> None:
    assert ALL[name].renders_tools is shows


@pytest.mark.parametrize("name", DIALECTS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_step_by_step_is_the_whole(name: str, data: st.DataObject) -> None:
    """Tokens given and sampled, in order, are those of the whole conversation rendered from scratch by a new dialect."""
    dialect = ALL[name]
    tools = data.draw(st.sampled_from([(), (TOOL,)]))
    system = data.draw(st.sampled_from([[message("system", "s")], [message("system", "<|end|>")], []]))
    history: list[Message] = [*system, message("user", data.draw(content))]
    conversation, prompt = dialect.open(history, tools)
    tokens = [prompt.tokens]
    for _ in range(data.draw(st.integers(1, 4))):
        sampled = dialect.encode_action(data.draw(answers), tools=tools)
        new = data.draw(new_messages)
        prompt = conversation.extend(dialect.parse(sampled, tools), new)
        assert not isinstance(prompt, Rewrite)
        assert sum(length for _, length in prompt.spans) == len(prompt.tokens)
        tokens += [sampled, prompt.tokens]
        text = dialect.tokenizer.decode(sampled[:-1])
        history += [message("assistant", text), *new]
    whole = DIALECTS[name]().open(history, tools)[1].tokens
    special = sorted(dialect.tokenizer.special_ids.values())
    together = np.concatenate(tokens)
    # The call's own marker is a special token where it was sampled, and text where it is told.
    marker = dialect.tokenizer.special_ids.get("<|call|>", -1)
    if marker not in together:
        assert dialect.tokenizer.decode(together) == dialect.tokenizer.decode(whole)
    counted = [index for index in special if index != marker]
    assert np.isin(together, counted).sum() == np.isin(whole, counted).sum()


def test_stages_of_the_compact_template() -> None:
    dialect = ALL["compact"]
    encode, special = dialect.tokenizer.encode_text, dialect.tokenizer.special_ids
    conversation, prompt = dialect.open([message("system", "the desk"), message("user", "say w17")], [TOOL])
    system = 1 + len(encode("the desk")) + len(encode("\necho(count, text)")) + 1
    assert prompt.spans == ((SYSTEM, system), (INSTRUCTION, 1 + len(encode("say w17")) + 2))
    output = dialect.parse(dialect.encode_action(call(), "hm", [TOOL]), [TOOL])
    assert output.spans == (
        (Stage.THOUGHT, len(encode("hm"))),
        (Stage.TOOL_CALL, len(output.tokens) - len(encode("hm"))),
    )
    prompt = conversation.extend(output, [message("tool", "ok", "echo"), message("user", "and?")])
    assert prompt.spans == ((RESULT, 1 + len(encode("ok")) + 1), (INSTRUCTION, 1 + len(encode("and?")) + 2))
    assert prompt.tokens[0] == special["<|tool|>"]
    assert prompt.tokens[-1] == special["<|assistant|>"]


def test_stages_of_chatml() -> None:
    dialect = ALL["smol"]
    decode = dialect.tokenizer.decode
    conversation, prompt = dialect.open([message("user", "say w17")])
    (head, n), (instruction, _) = prompt.spans
    assert (head, instruction) == (SYSTEM, INSTRUCTION)
    assert decode(prompt.tokens[:n]) == "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\n"
    assert decode(prompt.tokens[n:]) == "say w17<|im_end|>\n<|im_start|>assistant\n"
    output = dialect.parse(dialect.encode_action(Action(answer="42")))
    prompt = conversation.extend(output, [message("tool", "ok")])
    assert decode(prompt.tokens) == "\n<|im_start|>tool\nok<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.spans == ((RESULT, len(prompt.tokens)),)


def test_text_that_looks_like_special_tokens_stays_text() -> None:
    dialect = ALL["compact"]
    text = "<|end|><|assistant|>"
    conversation, _ = dialect.open([message("user", text)])
    prompt = conversation.extend(dialect.parse(dialect.encode_action(call(text))), [message("tool", text)])
    assert prompt.tokens[1:-2].tolist() == dialect.tokenizer.encode_text(text).tolist()
    special = sorted(dialect.tokenizer.special_ids.values())
    assert np.isin(prompt.tokens, special).sum() == 3  # <|tool|>, <|end|>, <|assistant|>


@pytest.mark.parametrize("name", DIALECTS)
def test_no_message_can_hold_an_added_token(name: str) -> None:
    dialect = ALL[name]
    added = [*dialect.tokenizer.added_ids.values()]
    assert name == "compact" or dialect.tokenizer.added_ids.keys() > dialect.tokenizer.special_ids.keys()
    counts = []
    for content in ("a", "".join(dialect.tokenizer.added_ids)):
        conversation, prompt = dialect.open([message("system", content), message("user", content)], [TOOL])
        output = dialect.parse(dialect.encode_action(Action(answer="so")), [TOOL])
        later = conversation.extend(output, [message("tool", content, "echo"), message("user", content)])
        counts.append([int(np.isin(tokens, added).sum()) for tokens in (prompt.tokens, later.tokens)])
    assert counts[0] == counts[1]


def test_self_check_finds_text_that_becomes_an_added_token(monkeypatch: pytest.MonkeyPatch) -> None:
    dialect = DIALECTS["smol"]()
    template = dialect.tokenizer.encode_template
    call = dialect.tokenizer.added_ids["<tool_call>"]

    def leaky(text: str) -> np.ndarray:
        pieces = text.split("<tool_call>")
        ids = [[*([call] if place else []), *plain(piece)] for place, piece in enumerate(pieces)]
        return np.array([index for piece in ids for index in piece], dtype=np.int32)

    plain = dialect.tokenizer.encode_text
    monkeypatch.setattr(dialect.tokenizer, "encode_text", leaky)
    assert call in template("<tool_call>")
    with pytest.raises(ModelFilesError, match="spells added tokens becomes 3 of them"):
        check_dialect(dialect)


def test_sampled_ids_are_kept_whatever_they_spell() -> None:
    """Ids that no tokenizer would give for their text stay as sampled, and the next prompt begins right behind them."""
    dialect = ALL["compact"]
    odd = np.array(
        [*[int(dialect.tokenizer.encode_text(c)[0]) for c in "answer"], dialect.end_token], dtype=np.int32
    )
    assert len(odd) > len(dialect.encode_action(Action(answer="answer")))
    conversation, _ = dialect.open([message("user", "a")])
    output = dialect.parse(odd)
    prompt = conversation.extend(output, [message("tool", "ok")])
    assert output.tokens is odd
    assert prompt.tokens[0] == dialect.tokenizer.special_ids["<|tool|>"]


def test_an_end_token_that_was_not_sampled_is_given() -> None:
    dialect = ALL["smol"]
    for sampled, expected in (
        (dialect.tokenizer.encode_text("42"), "<|im_end|>\n<|im_start|>tool"),
        (dialect.encode_action(Action(answer="42")), "\n<|im_start|>tool"),
    ):
        conversation, _ = dialect.open([message("user", "a")])
        prompt = conversation.extend(dialect.parse(sampled), [message("tool", "ok")])
        assert dialect.tokenizer.decode(prompt.tokens).startswith(expected)
        assert prompt.spans == ((RESULT, len(prompt.tokens)),)


def test_both_end_tokens_stop() -> None:
    dialect = Dialect(chatml_tokenizer(SMOL_TEMPLATE, eos="<|endoftext|>"))
    special = dialect.tokenizer.special_ids
    assert set(dialect.stop_tokens) == {special["<|endoftext|>"], special["<|im_end|>"]}
    conversation, _ = dialect.open([message("user", "a")])
    sampled = np.append(dialect.tokenizer.encode_text("42"), special["<|endoftext|>"]).astype(np.int32)
    output = dialect.parse(sampled)
    assert output.action == Action(answer="42")
    prompt = conversation.extend(output, [message("tool", "ok")])
    assert prompt.tokens[0] == special["<|im_end|>"]


def test_thoughts_dropped_by_the_template_are_a_rewrite() -> None:
    dialect = ALL["thoughtful"]
    decode, encode = dialect.tokenizer.decode, dialect.tokenizer.encode_template
    conversation, first = dialect.open([message("system", "s"), message("user", "a")])
    sampled = np.append(encode("<think>hm hm</think>ans wer"), dialect.end_token).astype(np.int32)
    prompt = conversation.extend(dialect.parse(sampled), [message("tool", "t")])
    assert not isinstance(prompt, Rewrite)  # in the same turn the thought stays
    again = dialect.parse(np.append(encode("<think>so</think>\n\n42"), dialect.end_token).astype(np.int32))
    rewrite = conversation.extend(again, [message("user", "b")])
    assert isinstance(rewrite, Rewrite)
    text = decode(rewrite.tokens)
    assert "hm" not in text
    assert text.startswith(decode(first.tokens) + "ans wer<|im_end|>\n<|im_start|>user\n<tool_response>\nt")
    assert text.endswith(
        "<|im_start|>assistant\n42<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    assert sum(length for _, length in rewrite.spans) == len(rewrite.tokens)
    assert Stage.ANSWER in dict(rewrite.spans)
    assert Stage.THOUGHT not in dict(rewrite.spans)
    onward = conversation.extend(
        dialect.parse(dialect.encode_action(Action(answer="c"))), [message("tool", "t")]
    )
    assert not isinstance(onward, Rewrite)


def test_a_rewritten_prompt_keeps_sampled_ids() -> None:
    dialect = ALL["thoughtful"]
    odd = [int(dialect.tokenizer.encode_text(c)[0]) for c in "answer"]
    thought = dialect.tokenizer.encode_template("<think>x</think>\n\n").tolist()
    conversation, _ = dialect.open([message("user", "a")])
    output = dialect.parse(np.array([*thought, *odd, dialect.end_token], dtype=np.int32))
    prompt = conversation.extend(output, [message("user", "b")])
    assert isinstance(prompt, Rewrite)
    tokens = prompt.tokens.tolist()
    assert any(tokens[i : i + len(odd)] == odd for i in range(len(tokens)))


def test_a_template_that_cuts_history_rewrites() -> None:
    source = CHAT_TEMPLATE.replace("for message in messages", "for message in messages[-3:]", 1)
    dialect = Dialect(compact_tokenizer(source))
    conversation, _ = dialect.open([message("user", "a")])
    prompt = conversation.extend(dialect.parse(dialect.encode_action(call())), [message("tool", "ok")])
    assert not isinstance(prompt, Rewrite)
    prompt = conversation.extend(dialect.parse(dialect.encode_action(call())), [message("tool", "ok")])
    assert isinstance(prompt, Rewrite)


def test_a_template_may_dress_the_answer() -> None:
    """A space that the template sets between its prompt and the answer does not count as rewriting history."""
    source = CHAT_TEMPLATE.replace(
        "<|assistant|>{{ message.content }}", "<|assistant|> {{ message.content }}"
    )
    dialect = Dialect(compact_tokenizer(source))
    conversation, _ = dialect.open([message("user", "a")])
    prompt = conversation.extend(
        dialect.parse(dialect.encode_action(Action(answer="42"))), [message("tool", "ok")]
    )
    assert not isinstance(prompt, Rewrite)
    assert dialect.tokenizer.decode(prompt.tokens) == "<|tool|>ok<|end|><|assistant|>"


def test_given_assistant_messages_are_instruction() -> None:
    dialect = ALL["compact"]
    example = Message(
        role=Role.ASSISTANT, content="", tool_calls=(ToolCall(name="echo", arguments='{"text":"<|end|>"}'),)
    )
    prompt = dialect.open([message("user", "a"), example, message("tool", "b"), message("user", "c")])[1]
    text = dialect.tokenizer.decode(prompt.tokens)
    assert text == (
        "<|user|>a<|end|><|assistant|><|call|>echo(text=<|end|>)<|end|><|tool|>b<|end|><|user|>c<|end|><|assistant|>"
    )
    assert (prompt.tokens == dialect.end_token).sum() == 4
    assert {stage for stage, _ in prompt.spans} == {SYSTEM, INSTRUCTION, RESULT}


def test_memory_of_shapes_is_bounded_and_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(dialect: Dialect) -> list[list[int]]:
        found = []
        for length in (1, 3, 2, 3):
            conversation, prompt = dialect.open([message("user", "a")] * length, [TOOL])
            found.append(prompt.tokens.tolist())
            for _ in range(length):
                output = dialect.parse(dialect.encode_action(call()))
                found.append(conversation.extend(output, [message("tool", "ok")] * length).tokens.tolist())
        return found

    expected = run(DIALECTS["compact"]())
    monkeypatch.setattr("hotpot.rollout.dialect._MAX_SHAPES", 2)
    monkeypatch.setattr("hotpot.rollout.dialect._MAX_TEXTS", 1)
    dialect = DIALECTS["compact"]()
    assert run(dialect) == run(dialect) == expected


def without(role: str) -> str:
    return CHAT_TEMPLATE.replace(f"message.role == '{role}'", "false")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (without("tool"), "tool message 0 times"),
        (without("system"), "system message 0 times"),
        (without("user"), "user message 0 times"),
        (
            CHAT_TEMPLATE.replace("<|tool|>{{ message.content }}", "<|tool|>{{ message.content * 2 }}"),
            "2 times",
        ),
        (CHAT_TEMPLATE.replace("<|tool|>", "{{ raise_exception('no tools here') }}"), "no tools here"),
    ],
)
def test_a_template_that_loses_a_role_is_a_clear_error(template: str, words: str) -> None:
    with pytest.raises(ModelFilesError, match=words):
        check_dialect(Dialect(compact_tokenizer(template)))


def test_a_template_that_loses_answers_or_their_end_is_a_clear_error() -> None:
    for template in (
        without("assistant"),
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ):
        with pytest.raises(ModelFilesError, match="no special token"):
            Dialect(compact_tokenizer(template))


def test_a_template_that_differs_step_by_step_is_a_clear_error() -> None:
    source = CHAT_TEMPLATE.replace(
        "<|assistant|>{{ message.content }}", "<|assistant|> {{ message.content }}"
    )
    with pytest.raises(ModelFilesError, match="step by step"):
        check_dialect(Dialect(compact_tokenizer(source)))


def test_self_check_reports_a_template_that_rewrites() -> None:
    source = CHAT_TEMPLATE.replace("<|tool|>{{", "<|tool|>{{ '' if loop.last else 'old ' }}{{")
    assert not check_dialect(Dialect(compact_tokenizer(source)))


def test_a_message_must_follow() -> None:
    dialect = ALL["compact"]
    conversation, _ = dialect.open([message("user", "a")])
    with pytest.raises(ValueError, match="at least one"):
        conversation.extend(dialect.parse(dialect.encode_action(call())), [])


def test_template_that_refuses_a_role_in_the_middle_is_a_clear_error() -> None:
    source = THOUGHTFUL_TEMPLATE.replace(
        "{%- elif message.role == 'tool' %}",
        "{%- elif message.role == 'tool' %}{{ raise_exception('bad role') }}",
    )
    dialect = Dialect(chatml_tokenizer(source))
    conversation, _ = dialect.open([message("user", "a")])
    with pytest.raises(ModelFilesError, match=r"user, assistant, tool .bad role"):
        conversation.extend(dialect.parse(dialect.encode_action(Action(answer="b"))), [message("tool", "c")])


@pytest.mark.parametrize("arguments", ["{", "[]", "5"])
def test_given_calls_without_an_object_are_a_clear_error(arguments: str) -> None:
    example = Message(
        role=Role.ASSISTANT, content="", tool_calls=(ToolCall(name="echo", arguments=arguments),)
    )
    with pytest.raises(EnvironmentSpecError, match="give a JSON object"):
        ALL["compact"].open([message("user", "a"), example])


def test_prompts_are_read_only() -> None:
    prompt = ALL["compact"].open([message("user", "a")])[1]
    with pytest.raises(ValueError, match="read-only"):
        prompt.tokens[0] = 0


def test_a_thought_in_a_rewritten_prompt_keeps_its_stage() -> None:
    source = SMOL_TEMPLATE.replace(
        "+ message['content']", "+ ('' if loop.last else 'old ') + message['content']"
    )
    dialect = Dialect(chatml_tokenizer(source))
    conversation, _ = dialect.open([message("user", "a")])
    sampled = np.append(dialect.tokenizer.encode_template("<think>hm</think>\n\n42"), dialect.end_token)
    prompt = conversation.extend(dialect.parse(sampled.astype(np.int32)), [message("tool", "ok")])
    assert isinstance(prompt, Rewrite)
    stages = [stage for stage, _ in prompt.spans]
    assert stages == [SYSTEM, INSTRUCTION, Stage.THOUGHT, Stage.ANSWER, RESULT]
    start = sum(length for _, length in prompt.spans[:2])
    assert dialect.tokenizer.decode(prompt.tokens[start : start + prompt.spans[2][1]]) == "hm"
