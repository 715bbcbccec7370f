"""Problems and answers, against Python's own arithmetic and string formatting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsim.problems import END, MOST_DIGITS, OPERATIONS, VOCAB, Format, Problems, text

formats = st.builds(Format, st.integers(1, MOST_DIGITS), st.booleans(), st.booleans())


def result(a: int, b: int, operation: str) -> tuple[int, int, int]:
    if operation == "+":
        return a, b, a + b
    return max(a, b), min(a, b), abs(a - b)


@given(formats, st.sampled_from("+-"), st.data())
def test_every_problem_reads_back_as_its_sum_or_difference(form: Format, operation: str, data: st.DataObject) -> None:
    numbers = st.integers(0, 10**form.digits - 1)
    a, b = data.draw(numbers), data.draw(numbers)
    problems = form.write(np.array([a]), np.array([b]), operation)
    left, right, answer = result(a, b, operation)
    digits = form.digits
    assert text(problems.prompts_BP[0]) == f"{left:0{digits}d}{operation}{right:0{digits}d}="
    expected = f"{answer:0{digits + 1}d}"[::-1] if form.pad_answers else str(answer)[::-1]
    assert text(problems.answers_BA[0]) == (expected + "$").ljust(form.answer_len, "$")
    scored = len(expected) + 1 if form.stop_at_end else form.answer_len
    assert problems.mask_BA[0].tolist() == [True] * scored + [False] * (form.answer_len - scored)


@given(formats, st.sampled_from("+-"), st.integers(0, 5), st.integers(0, 2**32))
def test_shapes_and_types_hold_for_any_number_of_problems(form: Format, operation: str, n: int, seed: int) -> None:
    problems = form.draw(n, operation, np.random.default_rng(seed))
    assert problems.prompts_BP.shape == (n, form.prompt_len)
    assert problems.answers_BA.shape == problems.mask_BA.shape == (n, form.answer_len)
    assert problems.prompts_BP.dtype == problems.answers_BA.dtype == np.int64
    assert problems.mask_BA.dtype == bool


@pytest.mark.parametrize(("seed", "size"), [(999, 1000), (12345, 2000)])
def test_the_fixed_sets_are_drawn_from_one_generator_addition_first(seed: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    fixed = Format().fixed(seed, size)
    assert list(fixed) == ["+", "-"]
    for operation in "+-":
        a, b = rng.integers(0, 1000, size), rng.integers(0, 1000, size)
        written = [result(int(x), int(y), operation) for x, y in zip(a, b, strict=True)]
        prompts = [[VOCAB.index(c) for c in f"{x:03d}{operation}{y:03d}="] for x, y, _ in written]
        answers = [[VOCAB.index(c) for c in f"{z:04d}"[::-1] + "$"] for _, _, z in written]
        assert fixed[operation].prompts_BP.tolist() == prompts
        assert fixed[operation].answers_BA.tolist() == answers
        assert fixed[operation].mask_BA.all()


def test_the_first_fixed_problems_are_these() -> None:
    def shown(problems: Problems) -> list[str]:
        pairs = zip(problems.prompts_BP[:2], problems.answers_BA[:2], strict=True)
        return [text(prompt) + text(answer) for prompt, answer in pairs]

    assert shown(Format().fixed(12345, 2000)["+"]) == ["699+684=3831$", "227+189=6140$"]
    assert shown(Format().fixed(999, 1000)["-"]) == ["697-309=8830$", "962-315=7460$"]


def test_digits_are_their_own_token_ids() -> None:
    assert VOCAB[:10] == "0123456789"
    assert VOCAB[END] == "$"
    assert set(OPERATIONS) <= set(VOCAB)
