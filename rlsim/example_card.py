"""One problem that the student gets wrong, digit by digit: the verifier says so, the teacher says what to write."""

from __future__ import annotations

from typing import Any

import torch

from common.interfaces import Policy
from rlsim.arithmetic import right_answers, tensors
from rlsim.problems import VOCAB, Format, Problems, text

LOOKED_AT = 400  # test problems among which a wrong answer is looked for
PLACES = ("ones", "tens", "hundreds", "thousands")


@torch.no_grad()
def example_card(student: Policy, teacher: Policy, additions: Problems, form: Format) -> dict[str, Any] | None:
    """The first of the additions that the student, writing greedily, gets wrong; None where it gets all right."""
    prompts_BP, answers_BA, mask_BA = (x[:LOOKED_AT] for x in tensors([additions], student.device))
    written_BA = student.sample(prompts_BP).answers_NA
    wrong = (~right_answers(written_BA, answers_BA, mask_BA)).nonzero()
    if len(wrong) == 0:
        return None
    row = slice(int(wrong[0]), int(wrong[0]) + 1)
    prompt, written, answer = prompts_BP[row], written_BA[row], answers_BA[row]
    student_AV = student.answer_logits(prompt, written)[0].softmax(-1)
    teacher_AV = teacher.answer_logits(prompt, written)[0].softmax(-1)
    places = []
    for i in range(form.digits + 1):
        token = int(written[0, i])
        places.append(
            {
                "place": PLACES[i] if i < len(PLACES) else f"10^{i}",
                "student_wrote": VOCAB[token],
                "true": VOCAB[int(answer[0, i])],
                "student_prob": round(float(student_AV[i, token]), 3),
                "teacher_prob_of_that": round(float(teacher_AV[i, token]), 3),
                "teacher_would_write": VOCAB[int(teacher_AV[i].argmax())],
            }
        )
    return {
        "problem": text(prompt[0]),
        "true_answer": _number(answer[0], form),
        "student_answer": _number(written[0], form),
        "verifier": 0,
        "places": places,
    }


def card_table(card: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
    """The card as columns and rows, for a table."""
    columns = ["problem", *card["places"][0]]
    return columns, [[card["problem"], *place.values()] for place in card["places"]]


def _number(answer_A: torch.Tensor, form: Format) -> str:
    """An answer's digits in reading order, without zeros in front or anything behind its end."""
    digits = text(answer_A[: form.digits + 1])
    if form.stop_at_end:
        digits = digits.partition("$")[0]
    return digits[::-1].lstrip("0") or "0"
