"""What the prompt remembers: two strings of 0 and 1, one character for each of the last decisions, the newest last.

The first says which of them moved the agent to another cell, the second which of them had the target in view. An
episode begins with two empty strings. This is where frames without the target get the missing information from.
"""

from __future__ import annotations

from collections import deque


class Memory:
    """The last `length` decisions of one episode."""

    def __init__(self, length: int) -> None:
        self._moved: deque[bool] = deque(maxlen=length)
        self._in_view: deque[bool] = deque(maxlen=length)

    def add(self, *, moved: bool, in_view: bool) -> None:
        """A decision was carried out; `in_view` is about the frame that it was made from."""
        self._moved.append(moved)
        self._in_view.append(in_view)

    @property
    def strings(self) -> tuple[str, str]:
        """As a row and the prompt have them."""
        return "".join("01"[flag] for flag in self._moved), "".join("01"[flag] for flag in self._in_view)
