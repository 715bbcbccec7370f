"""The text beside the frame: a template from the configuration, or a function of the user's own.

`bt_prompt(name, memory)` renders `prompt.template` with the target's name and, where a row carries memory (two
strings of 0 and 1), appends `prompt.memory`. A user's function of the same signature replaces it:
`prompt.function=package.module.name`. It is resolved when a run starts, so that a wrong name fails at once, and
called only when a row is read.
"""

from __future__ import annotations

import importlib
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from common.errors import UserError

Memory = Sequence[str] | None
PromptFunction = Callable[[str, Memory], str]

TEMPLATE = "Go to the {name}. Code:"
MEMORY = " Memory: {0} {1}."


def bt_prompt(name: str, memory: Memory = None, *, template: str = TEMPLATE, memory_template: str = MEMORY) -> str:
    """The prompt of one decision: `template` with {name}, and `memory_template` with {0}, {1} where there is memory."""
    text = template.format(name=name)
    return text if memory is None else text + memory_template.format(*memory)


def from_config(template: str = TEMPLATE, memory: str = MEMORY, function: str | None = None) -> PromptFunction:
    """The prompt function that the `prompt` group of the configuration describes."""
    if function is not None:
        return resolve(function)
    _check_fields("prompt.template", template, {"name"})
    _check_fields("prompt.memory", memory, {"0", "1"})

    def render(name: str, row_memory: Memory = None) -> str:
        return bt_prompt(name, row_memory, template=template, memory_template=memory)

    return render


def resolve(path: str) -> PromptFunction:
    """The function at a dotted path. It is imported, not called."""
    module_name, _, attribute = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"prompt.function={path} cannot be imported ({error}); "
            f"give module.function and put the module's folder on PYTHONPATH."
        ) from error
    if not callable(found):
        raise UserError(
            f"prompt.function={path} is not a function; it must take (name, memory) and return the prompt's text."
        )
    return found


def user_turn(text: str) -> list[Mapping[str, Any]]:
    """The chat messages of one decision: a frame, then the text."""
    return [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]


def _check_fields(where: str, template: str, allowed: set[str]) -> None:
    try:
        fields = {field for _, field, _, _ in string.Formatter().parse(template) if field is not None}
    except ValueError as error:
        raise UserError(f"{where}={template!r} is not a valid template: {error}.") from error
    if not fields <= allowed:
        wanted = ", ".join(f"{{{field}}}" for field in sorted(allowed))
        raise UserError(
            f"{where}={template!r} uses fields other than {wanted}; double a brace that is meant literally."
        )
