"""Secrets, hidden in what runs keep of a user's code: reports, comparisons and checkpoints are passed on.

A text is hidden if its name contains "token", "password", "secret" or "key", or if it looks like a service's token.
Numbers stay: ``max_tokens=512`` is a setting. Sources may be long, so no pattern tries a part of them twice.
"""

from __future__ import annotations

import re

HIDDEN = "***"
"""Text in place of a secret."""

_SECRET_WORDS = frozenset({
    "token", "password", "passwd", "pwd", "passphrase", "secret", "credential", "key", "apikey", "auth",
    "authorization",
})  # fmt: skip
_ASSIGNMENT = re.compile(
    r"""\b(?P<name>\w++)(?P<sign>['"]?\]?\s*+(?::\s*+[\w.|\[\] ]++)?\s*+[=:]\s*+[rbfu]{0,2})"""
    r"""(?P<quote>'{3}|"{3}|'|")(?P<value>(?:\\.|(?!(?P=quote))[^\\…])*)(?P<end>(?P=quote)|…|$)""",
    re.IGNORECASE | re.DOTALL,
)  # a text that was cut ends without its quote
_SERVICE_TOKEN = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abpr]-|AKIA|AIza)[\w-]{10,}")
_URL_PASSWORD = re.compile(r"(://[^\s/:@'\"]*:)[^\s/@'\"]+@")


def is_secret_name(name: str) -> bool:
    """Return whether a name says that its value is secret, such as ``api_key`` or ``hfToken``."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(word.lower().removesuffix("s") in _SECRET_WORDS for word in words)


def hide_secrets(text: str) -> str:
    """Return a text of code or values without the secrets in it."""
    text = _ASSIGNMENT.sub(_hide_value, text)
    return _URL_PASSWORD.sub(rf"\g<1>{HIDDEN}@", _SERVICE_TOKEN.sub(HIDDEN, text))


def _hide_value(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]) or not match["value"]:
        return match[0]
    return f"{match['name']}{match['sign']}{match['quote']}{HIDDEN}{match['quote']}"
