"""The one exception a user is meant to read: what is wrong, where, and what to do, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(Exception):
    """Wrong input or configuration. Printed as one sentence without a traceback; the exit code is 1."""


def one_of(field: str, value: object, choices: Iterable[object]) -> None:
    """Refuse `value` unless it is one of `choices`; the message names the field, the choices and the nearest one."""
    choices = list(choices)
    if value in choices:
        return
    near = get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    raise UserError(f"{field}={value} is not known; choose one of {', '.join(map(str, choices))}.{hint}")


def is_number(value: object) -> bool:
    """True for an int or a float; a bool, a word and NaN are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


def at_least(field: str, value: object, least: float, *, optional: bool = False, whole: bool = False) -> None:
    """Refuse `value` unless it is a (whole) number >= `least` (or null where `optional`)."""
    if value is None and optional:
        return
    if not is_number(value) or not value >= least or (whole and not isinstance(value, int)):
        kind = "a whole number" if whole else "a number"
        raise UserError(f"{field}={value} must be {kind} of at least {least}{' or null' if optional else ''}.")
