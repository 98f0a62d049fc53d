import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotpot.errors import RecipeError
from hotpot.experience import Redactor

SECRETS = {
    "sk-abcdefghij0123456789": "[redacted:api_key]",
    "AKIAIOSFODNN7EXAMPLE": "[redacted:aws_access_key]",
    "ghp_abcdefghijklmnopqrstuvwxyz0123456789": "[redacted:github_token]",
    "Authorization: Bearer abc.def-123456": "Authorization: Bearer [redacted:bearer_token]",
    "password=hunter2;": "password=[redacted:password];",
    'db_password: "two words"': "db_password: [redacted:password]",
    "postgres://ada:secret@host/db": "postgres://ada:[redacted:url_password]@host/db",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----": "[redacted:private_key]",
    "-----BEGIN PRIVATE KEY-----\nMIIE cut off": "[redacted:private_key]",
    "xoxb-1234567890-abc": "[redacted:slack_token]",
    "hf_abcdefghijklmnopqrstuv": "[redacted:hugging_face_token]",
    "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSM": "[redacted:json_web_token]",
}


@pytest.mark.parametrize("text", SECRETS)
def test_secrets_are_replaced_once_and_for_all(text):
    redactor = Redactor()
    assert redactor.redact(f"before {text} after") == (f"before {SECRETS[text]} after", 1) or text.startswith(
        "-----BEGIN PRIVATE"
    )
    cleaned, count = redactor.redact(text)
    assert (cleaned, count) == (SECRETS[text], 1)
    assert redactor.redact(cleaned) == (cleaned, 0)


@pytest.mark.parametrize(
    "text",
    ["", "total=12", "price of item 7 for Ada: 3.50", "the secret of success", "find_customer(name=Ada)", "sk-8"],
)  # fmt: skip
def test_ordinary_tool_text_stays(text):
    assert Redactor().redact(text) == (text, 0)


def test_several_are_counted():
    text, count = Redactor().redact("password=a sk-abcdefghij0123456789 AKIAIOSFODNN7EXAMPLE")
    assert count == 3
    assert "sk-" not in text


def test_the_recipes_patterns_are_added():
    redactor = Redactor([r"customer-\d+"])
    assert redactor.redact("customer-12 pays") == ("[redacted:custom] pays", 1)


@pytest.mark.parametrize("pattern", ["(", "x*", ""])
def test_a_pattern_that_cannot_work_is_refused(pattern):
    with pytest.raises(RecipeError, match="redact_patterns"):
        Redactor([pattern])


def test_json_stays_json():
    redactor = Redactor(["hunter2"])
    text = '{"a":{"api_key":"abc","url":"https://ada:pw@host/"},"list":["hunter2",1,null],"redact_patterns":["hunter2"]}'
    cleaned, count = redactor.redact_json(text, leave=["redact_patterns"])
    assert count == 3
    assert json.loads(cleaned) == {
        "a": {"api_key": "[redacted:password]", "url": "https://ada:[redacted:url_password]@host/"},
        "list": ["[redacted:custom]", 1, None],
        "redact_patterns": ["hunter2"],
    }
    assert redactor.redact_json(cleaned, leave=["redact_patterns"]) == (cleaned, 0)
    assert redactor.redact_json('{ "a": 1}') == ('{ "a": 1}', 0)
    assert redactor.redact_json("no json, hunter2") == ("no json, [redacted:custom]", 1)


def test_command_lines():
    words = ["hotpot", "--set", "a.password=x1", "--api-key", "abc", "--name", "run", "--password"]
    assert Redactor().redact_arguments(words) == (
        "hotpot", "--set", "a.password=[redacted:password]", "--api-key", "[redacted:password]",
        "--name", "run", "--password",
    )  # fmt: skip


@given(st.text())
def test_redacting_twice_changes_nothing_more(text):
    redactor = Redactor()
    once, _ = redactor.redact(text)
    assert redactor.redact(once) == (once, 0)


def test_keys_numbers_and_what_utf8_cannot_carry():
    text = '{"pin":{"db_password":1234,"n":1},"sk-abcdefghij0123456789":1,"sk-abcdefghij0123456780":2,"x":"\\ud800"}'
    cleaned, count = Redactor().redact_json(text)
    assert count == 3
    assert json.loads(cleaned) == {
        "pin": {"db_password": "[redacted:password]", "n": 1},
        "[redacted:api_key]": 1,
        "[redacted:api_key]'": 2,
        "x": "\ud800",
    }
    assert cleaned.isascii()
    assert Redactor().redact_json(cleaned) == (cleaned, 0)
