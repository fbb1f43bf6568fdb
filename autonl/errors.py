"""The one error that bad input ends in."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import NoReturn


class AutoNLError(ValueError):
    """Bad input: one line that says what was wrong, where, and what is allowed."""


def shown(value: object) -> str:
    """A value as an error quotes it: on one line, not longer than 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse(field: str, value: object, allowed: str) -> NoReturn:
    """Raise the error for a field whose value is not allowed."""
    raise AutoNLError(f"{field}: {shown(value)} is not allowed; allowed: {allowed}")


def refuse_name(what: str, name: object, known: Iterable[str]) -> NoReturn:
    """Raise the error for a name that is not among the known ones, nearest first."""
    names = sorted(known)
    near = get_close_matches(str(name), names, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    listed = ", ".join(names) if len(names) <= 40 else f"{len(names)} names, such as {', '.join(near or names[:3])}"
    raise AutoNLError(f"unknown {what} {shown(name)}{hint}; allowed: {listed}")
