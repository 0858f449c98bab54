"""Secrets are hidden in texts of code and values."""

import functools

import pytest

from dtkit._util.redaction import hide_secrets, is_secret_name
from dtkit.training.settings import describe_value


@pytest.mark.parametrize(
    "name", ["token", "HF_TOKEN", "hfToken", "api_key", "APIKey", "passwords", "clientSecret", "pwd"]
)
def test_names_of_secrets_are_known(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["tokenizer", "monkey", "keyword", "author", "lr", "keypoints", "x"])
def test_other_names_are_none_of_secrets(name: str):
    assert not is_secret_name(name)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("f(token='abc', lr=0.1)", "f(token='***', lr=0.1)"),
        ('api_key: str = "a\\"b"', 'api_key: str = "***"'),
        ("{'password': 'abc', 'user': 'me'}", "{'password': '***', 'user': 'me'}"),
        ('os.environ["WANDB_API_KEY"] = "abc"', 'os.environ["WANDB_API_KEY"] = "***"'),
        ("secret='cut in the mid…", "secret='***'"),
        ("max_tokens=512, token=''", "max_tokens=512, token=''"),
        ("login('hf_abcdefghijklmnop')", "login('***')"),
        ("get('https://me:word@host/x')", "get('https://me:***@host/x')"),
        ("tokenizer='gpt2'", "tokenizer='gpt2'"),
        ("get(url, headers={'Authorization': 'Bearer abc'})", "get(url, headers={'Authorization': '***'})"),
    ],
)
def test_secrets_in_texts_are_hidden(text: str, shown: str):
    assert hide_secrets(text) == shown


@pytest.mark.timeout(10)  # with a pattern that tries each part of a word, this takes hours
@pytest.mark.parametrize("piece", ["a", " ", "a: ", "key", "key: a ", "://"])
def test_long_texts_are_read_once(piece: str):
    text = f"x = {piece * 50_000}, token='abc'"
    assert hide_secrets(text) == text.replace("abc", "***")


API_KEY = "sesame-" * 20


def call(*_args: object, **_options: object) -> None: ...


def test_settings_of_a_run_have_no_secret():
    token, rate = "sesame", 0.1
    assert describe_value(lambda p: (p, token, rate)) == "lambda p: (p, token, rate), where rate=0.1, token='***'"
    functions = [
        lambda p: (p, API_KEY),
        lambda p, secret="sesame": (p, secret),
        lambda p: call(p, password="sesame"),
        functools.partial(call, token=API_KEY),
        {"api_key": API_KEY},
    ]
    for function in functions:
        text = describe_value(function)
        assert "***" in text
        assert "sesame" not in text
