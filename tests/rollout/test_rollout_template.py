import json
from pathlib import Path

import pytest
from rollout_parts import (
    SMOL_TEMPLATE,
    THOUGHTFUL_TEMPLATE,
    TOOL,
    chatml_tokenizer,
    compact_tokenizer,
    message,
)
from transformers import AutoTokenizer

from hotpot.errors import EnvironmentSpecError, ModelFilesError
from hotpot.models.tokenizer import PolicyTokenizer
from hotpot.rollout import Dialect
from hotpot.rollout.template import ChatTemplate, Shape, escape
from hotpot.types import Role, ToolSpec

USER = Shape(role=Role.USER, body=(None,))
ANSWER = Shape(role=Role.ASSISTANT, body=(None,))

MESSAGES = [
    message("system", "the desk is open"),
    message("user", "say w17"),
    message("assistant", "42"),
    message("tool", "error", "echo"),
    message("tool", "ok 3", "echo"),
    message("assistant", "so"),
    message("user", "and 5?"),
]


@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no_tools", "tools"])
@pytest.mark.parametrize("number", [2, 5, 7])
@pytest.mark.parametrize(
    "tokenizer",
    [compact_tokenizer(), chatml_tokenizer(SMOL_TEMPLATE), chatml_tokenizer(THOUGHTFUL_TEMPLATE)],
    ids=["compact", "smol", "thoughtful"],
)
def test_tokens_are_those_of_transformers(tokenizer: PolicyTokenizer, number: int, tools, tmp_path) -> None:
    for name, data in tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    schemas = [
        {
            "type": "function",
            "function": {
                "name": t.name,
                "description": t.description,
                "parameters": json.loads(t.parameters),
            },
        }
        for t in tools
    ]
    expected = oracle.apply_chat_template(
        [
            {"role": str(m.role), "content": m.content} | ({"name": m.name} if m.name else {})
            for m in MESSAGES[:number]
        ],
        tools=schemas or None,
        add_generation_prompt=True,
        return_dict=False,
    )
    prompt = Dialect(tokenizer).open(MESSAGES[:number], tools)[1]
    assert prompt.tokens.tolist() == list(expected)


def test_content_inside_json_is_escaped_as_json() -> None:
    tokenizer = chatml_tokenizer(SMOL_TEMPLATE.replace("message['content']", "(message['content'] | tojson)"))
    prompt = Dialect(tokenizer).open([message("user", 'a "b"\n\\c é')])[1]
    assert '<|im_start|>user\n"a \\"b\\"\\n\\\\c é"<|im_end|>' in tokenizer.decode(prompt.tokens)


def test_content_can_be_json_inside_json() -> None:
    template = ChatTemplate("{{ messages[0].content | tojson | tojson }}", special_texts=())
    rendered = template.render([USER], (), generation_prompt=False)
    slot, level = rendered.slot(next(c for c in rendered.text if c >= "\U000f0000"))
    assert (slot.message, slot.part, level) == (0, 0, 2)
    assert rendered.text.replace(rendered.text[3], escape('"\n', level)) == json.dumps(json.dumps('"\n'))


def test_tojson_follows_the_conventions_of_transformers() -> None:
    source = "{{ tools[0].function.parameters | tojson(ensure_ascii=True, indent=2, sort_keys=True) }}"
    tool = ToolSpec(name="f", description="d", parameters='{"z":"é<>&","a":[1]}')
    rendered = ChatTemplate(source, special_texts=()).render([USER], [tool], generation_prompt=False)
    assert rendered.text == json.dumps({"z": "é<>&", "a": [1]}, indent=2, sort_keys=True)


def test_description_with_a_special_token_stays_text() -> None:
    tokenizer = chatml_tokenizer(THOUGHTFUL_TEMPLATE)
    tool = ToolSpec(name="f", description="x <|im_end|> <tool_call> y", parameters='{"type":"object"}')
    plain = ToolSpec(name="f", description="x", parameters='{"type":"object"}')
    prompts = [Dialect(tokenizer).open([message("user", "a")], [t])[1].tokens.tolist() for t in (tool, plain)]
    for index in tokenizer.added_ids.values():
        assert prompts[0].count(index) == prompts[1].count(index)
    assert "x <|im_end|> <tool_call> y" in tokenizer.decode(prompts[0])


@pytest.mark.parametrize("bos", ["<|endoftext|>", {"content": "<|endoftext|>", "__type": "AddedToken"}, None])
def test_the_first_token_of_a_conversation_is_that_of_transformers(bos: object, tmp_path: Path) -> None:
    files = chatml_tokenizer("{{ bos_token }}" + SMOL_TEMPLATE).files()
    config = json.loads(files["tokenizer_config.json"]) | ({"bos_token": bos} if bos else {})
    tokenizer = PolicyTokenizer(files | {"tokenizer_config.json": json.dumps(config).encode()})
    for name, data in tokenizer.files().items():
        (tmp_path / name).write_bytes(data)
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(
        [{"role": str(m.role), "content": m.content} for m in MESSAGES[:2]],
        add_generation_prompt=True,
        return_dict=False,
    )
    prompt = Dialect(tokenizer).open(MESSAGES[:2])[1].tokens.tolist()
    assert prompt == list(expected)
    assert (prompt[0] == tokenizer.special_ids["<|endoftext|>"]) is (bos is not None)


@pytest.mark.parametrize(
    "tool",
    [
        ToolSpec(name="f<|im_end|>", description="", parameters="{}"),
        ToolSpec(name="f", description="", parameters='{"properties":{"<|im_start|>":{}}}'),
        ToolSpec(name="f", description="", parameters='{"enum":["<|im_end|>"]}'),
        ToolSpec(name="f<tool_call>", description="", parameters="{}"),
    ],
)
def test_names_with_control_tokens_are_refused(tool: ToolSpec) -> None:
    with pytest.raises(EnvironmentSpecError, match="control token"):
        Dialect(chatml_tokenizer(THOUGHTFUL_TEMPLATE)).open([message("user", "a")], [tool])


def test_generation_blocks_and_loop_controls_render() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}"
        "{% generation %}<{{ m.content }}>{% endgeneration %}{% endfor %}"
    )
    rendered = ChatTemplate(source, special_texts=()).render([USER, ANSWER], (), generation_prompt=False)
    assert rendered.text == f"<{rendered.contents[0]}>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y') }}",
        "{{ raise_exception('no') }}",
        "{{ messages[5].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ [1, 2] | random }}",
        "{{ lipsum() }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_a_clear_error(source: str) -> None:
    with pytest.raises(ModelFilesError, match="chat template"):
        ChatTemplate(source, special_texts=()).render([USER], (), generation_prompt=True)


def test_a_template_may_ask_whether_there_is_a_date() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert ChatTemplate(source, special_texts=()).render([USER], (), generation_prompt=True).text == "2024"


@pytest.mark.parametrize("source", ["{% for %}", "a\U000f0001b"])
def test_a_template_that_is_none_is_a_clear_error(source: str) -> None:
    with pytest.raises(ModelFilesError):
        ChatTemplate(source, special_texts=())


def test_no_tools_and_an_empty_list_of_tools_are_the_same() -> None:
    template = ChatTemplate("{% if tools is not none %}tools{% endif %}", special_texts=())
    assert template.render([USER], [], generation_prompt=True).text == ""
