"""Rows of a jsonl file: read, checked and turned into what a task hands out. docs/rows.md describes the fields.

    {"image": "frames/3f.png", "name": "purple box", "code": "210", "adv": 0.5, "vllm_logp": -1.2}

Every row and every picture is looked at before a model is loaded. A bad row is named with file, line, field and reason.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bt_policy import pictures
from bt_policy.frames import Frame
from common.errors import UserError

log = logging.getLogger(__name__)

SHOWN = 10  # bad rows that are named one by one
MAX_PIXELS = 32_000_000


@dataclass(frozen=True)
class Row:
    """One decision: a frame and a target's name, and the code that was (or should be) written."""

    line: int
    frame: Frame
    name: str
    code: str
    memory: tuple[str, str] | None = None
    adv: float | None = None
    logps: tuple[float, ...] | float | None = None  # the sampler's: one a digit, or their sum
    temperature: float | None = None  # recorded with the row; None = it is not
    mask: tuple[int, ...] | None = None  # legal digits at each position when the code was sampled; None = any token
    subject: str = "rows"
    adapter: str | None = None
    template: str | None = None


@dataclass(frozen=True)
class Problem:
    """Why a line is not a row."""

    file: Path
    line: int
    field: str
    reason: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.field}: {self.reason}"


class _Bad(Exception):
    """A field and what is wrong with it."""


def read(
    path: Path,
    *,
    levels: Sequence[int] | None = None,
    image_root: Path | None = None,
    max_pixels: int = MAX_PIXELS,
    cache: Path | None = None,
) -> tuple[list[Row], list[Problem], dict[int, str]]:
    """Good rows, problems, and the text of the bad lines. With `levels` null the first code's length is everyone's."""
    rows, problems, bad = [], [], {}
    places = [place for place in (image_root, path.parent, Path.cwd()) if place is not None]
    for number, text in _lines(path):
        try:
            row = _parse(number, text, levels, places)
        except _Bad as error:
            field, reason = error.args
            problems.append(Problem(path, number, field, reason))
            bad[number] = text
            continue
        levels = levels or [10] * len(row.code)
        rows.append(row)
    refused, keys = pictures.check((row.frame.source for row in rows), max_pixels, cache)
    good = []
    for row in rows:
        if row.frame.source in refused:
            problems.append(Problem(path, row.line, "image", f"{row.frame.source} {refused[row.frame.source]}"))
            bad[row.line] = ""
        else:
            good.append(replace(row, frame=Frame(keys[row.frame.source], row.frame.source)))
    if "" in bad.values():
        bad |= {number: text for number, text in _lines(path) if bad.get(number) == ""}
    return good, sorted(problems, key=lambda problem: problem.line), bad


def accept(
    path: Path, found: tuple[list[Row], list[Problem], dict[int, str]], on_bad_row: str, rejected: Path | None
) -> list[Row]:
    """The good rows; UserError names the bad ones, unless `on_bad_row` is "skip": then `rejected` receives them."""
    rows, problems, bad = found
    if problems and on_bad_row == "error":
        raise UserError(_summary(problems) + "\nMend them, or leave them out with data.on_bad_row=skip.")
    if problems:
        log.warning("%s", _summary(problems))
        if rejected is not None:
            reasons = {problem.line: f"{problem.field}: {problem.reason}" for problem in problems}
            lines = [json.dumps({"line": n, "reason": reasons[n], "row": bad[n]}) for n in sorted(bad)]
            rejected.write_text("\n".join(lines) + "\n")
            log.warning("%d rows left out; they are in %s", len(problems), rejected)
    if not rows:
        raise UserError(f"{path} has no usable row.")
    return rows


def _summary(problems: Sequence[Problem]) -> str:
    shown = "\n".join(f"  {problem}" for problem in problems[:SHOWN])
    more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
    return f"{len(problems)} bad row{'s' if len(problems) > 1 else ''}:\n{shown}{more}"


def _lines(path: Path) -> list[tuple[int, str]]:
    """Numbered lines that are not blank, without BOM and CRLF; bytes that are not UTF-8 are kept as marks."""
    if not path.is_file():
        raise UserError(f"data file {path} does not exist.")
    text = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
    return [(n, line.strip()) for n, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _parse(number: int, text: str, levels: Sequence[int] | None, places: Sequence[Path]) -> Row:
    try:
        text.encode("utf-8")
        record = json.loads(text)
    except UnicodeEncodeError:
        raise _Bad("line", "is not UTF-8") from None
    except ValueError as error:
        raise _Bad("line", f"is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise _Bad("line", "is not a JSON object")
    code = _code(record.get("code"), levels)
    return Row(
        line=number,
        frame=Frame("", _picture(_text(record, "image"), places)),
        name=_text(record, "name"),
        code=code,
        memory=_optional(record, "memory", _memory),
        adv=_optional(record, "adv", _number),
        logps=_optional(record, "vllm_logp", lambda value: _logps(value, len(code))),
        temperature=_optional(record, "temperature", _positive),
        mask=_optional(record, "mask", lambda value: _mask(value, code, levels)),
        subject=_optional(record, "subject", str) or "rows",
        adapter=_optional(record, "adapter", str),
        template=_optional(record, "template", str),
    )


def _optional(record: dict[str, Any], field: str, read_value: Callable[[Any], Any]) -> Any:
    if record.get(field) is None:
        return None
    try:
        return read_value(record[field])
    except ValueError as error:
        raise _Bad(field, str(error)) from None


def _text(record: dict[str, Any], field: str) -> str:
    value = record.get(field)
    if value is None:
        raise _Bad(field, "is missing")
    if not isinstance(value, str) or not value.strip():
        raise _Bad(field, f"must be a text, not {value!r}")
    return value


def _code(value: Any, levels: Sequence[int] | None) -> str:
    if value is None:
        raise _Bad("code", "is missing")
    if not isinstance(value, str) or not value or not all(digit in "0123456789" for digit in value):
        raise _Bad("code", f"must be a string of the digits 0-9, not {value!r}")
    if levels is None:
        return value
    if len(value) != len(levels):
        raise _Bad("code", f"{value!r} has {len(value)} digits where {len(levels)} are expected")
    for position, (digit, level) in enumerate(zip(value, levels, strict=True)):
        if int(digit) >= level:
            raise _Bad("code", f"{value!r}: digit {position + 1} must be below its {level} levels")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"must be a number, not {value!r}")
    if not math.isfinite(value):
        raise ValueError(f"must be finite, not {value}")
    return float(value)


def _positive(value: Any) -> float:
    if _number(value) <= 0:
        raise ValueError(f"must be above 0, not {value}")
    return float(value)


def _logps(value: Any, digits: int) -> tuple[float, ...] | float:
    numbers = value if isinstance(value, list) else [value]
    if isinstance(value, list) and len(value) != digits:
        raise ValueError(f"has {len(value)} log-probs for {digits} digits")
    if any(_number(one) > 1e-3 for one in numbers):
        raise ValueError(f"a log-prob cannot be above 0: {value}")
    return tuple(map(float, value)) if isinstance(value, list) else float(value)


def _memory(value: Any) -> tuple[str, str]:
    fits = (
        isinstance(value, list) and len(value) == 2 and all(isinstance(s, str) and set(s) <= {"0", "1"} for s in value)
    )
    if not fits:
        raise ValueError(f"must be two strings of 0 and 1, not {value!r}")
    return value[0], value[1]


def _mask(value: Any, code: str, levels: Sequence[int] | None) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(one, bool) or not isinstance(one, int) for one in value):
        raise ValueError(f"must list how many digits are legal at each position, not {value!r}")
    if list(value) != list(levels or [10] * len(code)):
        raise ValueError(f"{value} is not the configured codes.levels {list(levels or [10] * len(code))}")
    return tuple(value)


def _picture(name: str, places: Sequence[Path]) -> Path:
    """An absolute path as it is; a relative one in data.image_root, beside the jsonl, then in the working directory."""
    if os.path.isabs(name):
        return Path(name)
    for place in places:
        if (place / name).exists():
            return place / name
    raise _Bad("image", f"{name} is not in {', '.join(dict.fromkeys(map(str, places)))}")
