"""The one error that bad input ends in."""

from collections.abc import Iterable
from difflib import get_close_matches
from reprlib import Repr
from typing import NoReturn


class AutoNLError(ValueError):
    """Bad input: one line that says what was wrong, where, and what is allowed."""


_quote = Repr()
_quote.maxlevel, _quote.maxstring, _quote.maxother = 2, 80, 80


def shown(value: object) -> str:
    """A value as an error quotes it: short and on one line, however large the value is."""
    try:
        text = _quote.repr(value)
    except ValueError:  # Python does not print a number of thousands of digits
        text = f"a huge {type(value).__name__}"
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
