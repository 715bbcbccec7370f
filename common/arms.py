"""From an experiment's arms and a command line to the list of jobs.

An experiment names its arms, `arms: {opd-weak: [method=opd, teachers=weak]}`: they are not a Cartesian product. What
the command line adds is: every swept value multiplies every arm, `arm=` and `method=` pick arms, a method that no arm
has becomes an arm of its own, and any other setting replaces that of the arms.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from common.command_line import split
from common.errors import UserError, one_of

Settings = dict[str, list[str]]  # key, with its prefix -> the values to run


@dataclass(frozen=True)
class Job:
    """One run: the arm it belongs to and the overrides that make it."""

    arm: str
    overrides: tuple[str, ...]


def expand(arms: Mapping[str, Sequence[str]], settings: Settings, groups: Sequence[str] = ()) -> list[Job]:
    """Every job of a sweep, arm by arm.

    `settings` are those of the command line (a key with several values is swept); `groups` are the keys whose value
    names itself in an arm's name (teachers=weak -> "weak", steps=100 -> "steps=100").
    """
    settings = dict(settings)
    chosen = _narrow({name: _as_settings(overrides, name, groups) for name, overrides in arms.items()}, settings)
    jobs = [job for name, own in chosen.items() for job in _multiply(name, own | settings, groups)]
    twice = [job for job, times in Counter(jobs).items() if times > 1]
    if twice:
        raise UserError(f"Two jobs of the sweep are the same: {' '.join(twice[0].overrides)}.")
    return jobs


def _as_settings(overrides: Sequence[str], arm: str, groups: Sequence[str]) -> Settings:
    """An arm's own overrides by key, with its prefix unless it names a group: `+method=x` is `method=x`."""
    own = {}
    for override in overrides:
        key, value = split(str(override))
        if not key or not value:
            raise UserError(f"arms.{arm}: {override} is not key=value.")
        own[key if key in groups else str(override).partition("=")[0]] = [value]
    return own


def _narrow(arms: dict[str, Settings], settings: Settings) -> dict[str, Settings]:
    """The arms that `arm=` and `method=` leave, taking both out of `settings` where arms answer for them."""
    names = settings.pop("arm", None)
    if not arms:
        if names is not None:
            raise UserError("arm= picks among the arms of an experiment, and this sweep has none.")
        return {"": {}}
    methods = settings.pop("method", None)
    for name in names or []:
        one_of("arm", name, arms)
    picked = {name: own for name, own in arms.items() if names is None or name in names}
    if methods is None:
        return picked
    kept = {name: own for name, own in picked.items() if own.get("method", methods)[0] in methods}
    everywhere = {own["method"][0] for own in arms.values() if "method" in own}
    kept |= {method: {"method": [method]} for method in methods if method not in everywhere}
    if not kept:
        raise UserError(f"method={','.join(methods)} and arm={','.join(names or arms)} leave no arm to run.")
    return kept


def _multiply(arm: str, settings: Settings, groups: Sequence[str]) -> list[Job]:
    """The jobs of one arm: the product of its values, named by those that vary other than the seed."""
    varied = [key for key, values in settings.items() if len(values) > 1 and key != "seed"]
    if not arm and "method" in settings:
        varied = ["method", *(key for key in varied if key != "method")]
    jobs = []
    for values in itertools.product(*settings.values()):
        pairs = dict(zip(settings, values, strict=True))
        parts = [arm] if arm else []
        parts += [_label(key, pairs[key], key in groups) for key in varied]
        jobs.append(Job("-".join(parts) or "run", tuple(f"{key}={value}" for key, value in pairs.items())))
    return jobs


def _label(key: str, value: str, named: bool) -> str:
    """A value as part of an arm's name, which is also a directory's."""
    text = value if named else f"{key.lstrip('+').rpartition('.')[2]}={value}"
    return re.sub(r"[^\w.=+-]+", "_", text).strip("_.")
