"""What the tests of the mathematics share: the published numbers and the enumerated policies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import settings

from tests.common.enumerated import Enumerated

settings.register_profile(
    "suite", max_examples=40, deadline=None, derandomize=True
)  # the same examples on every machine
settings.load_profile("suite")


@pytest.fixture(scope="session")
def oracle() -> dict:
    """tests/oracles/published.json."""
    return json.loads((Path(__file__).parents[1] / "oracles" / "published.json").read_text())


@pytest.fixture(scope="session")
def fixed() -> Enumerated:
    """64 answers of three tokens."""
    return Enumerated(vocab=4, length=3)


@pytest.fixture(scope="session")
def stopping() -> Enumerated:
    """40 answers of one, two or three tokens: token 3 ends an answer."""
    return Enumerated(vocab=4, length=3, end=3)


@pytest.fixture(scope="session")
def short() -> Enumerated:
    """Nine answers of two tokens, for groups of three and more."""
    return Enumerated(vocab=3, length=2)
