"""Keeps docs/objectives.md true to an audit: a table row whose last cell names an entry gets its figures.

    python -m rlsim.audit --updates 24 --claim-rows 8192 --prompts 16 --out docs/audit    # makes the numbers
    python -m rlsim.audit.document              # puts them into docs/objectives.md

A row ends in `| exact cosine | exact scale | one update | answers | `family: name` |`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import write_text
from rlsim.audit.report import figures_of

FIGURES = 4
HERE = Path(__file__).resolve().parents[2] / "docs"
DOCUMENT, AUDIT = HERE / "objectives.md", HERE / "audit" / "audit.json"


def refreshed(text: str, objectives: Sequence[Mapping[str, Any]]) -> str:
    """The document with every named entry's figures; UserError where it names one that was not audited."""
    known = {f"{row['family']}: {row['name']}": row for row in objectives}
    return "\n".join(_line(line, known) for line in text.split("\n"))


def _line(line: str, known: Mapping[str, Mapping[str, Any]]) -> str:
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    if not line.startswith("|") or len(cells) <= FIGURES + 1 or not re.fullmatch(r"`[^`]+: [^`]+`", cells[-1]):
        return line
    name = cells[-1].strip("`")
    if name not in known:
        raise UserError(f"{DOCUMENT} names the entry {name}, which {AUDIT} does not have; run the audit again.")
    return f"| {' | '.join([*cells[: -FIGURES - 1], *figures_of(known[name]), cells[-1]])} |"


def read(path: Path) -> list[dict[str, Any]]:
    """The objectives of an audit.json; what noise made undefined is NaN again."""
    rows = json.loads(path.read_text(encoding="utf-8"))["objectives"]
    for row in rows:
        for part in ("sampled", "reward"):
            row[part] = {name: math.nan if value is None else value for name, value in row[part].items()}
    return rows


def main() -> None:
    """Refresh the document in place."""
    write_text(DOCUMENT, refreshed(DOCUMENT.read_text(encoding="utf-8"), read(AUDIT)))


if __name__ == "__main__":
    main()
