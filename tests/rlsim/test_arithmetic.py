"""The arithmetic task: pure batches, an even split, the verifier, and an evaluation that equals greedy writing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.distributed import World
from common.interfaces import Task
from common.seeding import uniforms
from rlsim.arithmetic import ArithmeticTask, right_answers
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import end_id, new_net
from rlsim.problems import TOKEN, Format, text

HALVES = [{"subjects": ["+"], "share": 0.5}, {"subjects": ["-"], "share": 0.5}]


def task(form: Format | None = None, subjects: str = "+-", seed: int = 0, **options: object) -> ArithmeticTask:
    form = form or Format()
    return ArithmeticTask(form, Curriculum.always(subjects), form.fixed(5, 50), seed=seed, **options)  # type: ignore[arg-type]


def ids(*answers: str) -> Tensor:
    return torch.tensor([[TOKEN[c] for c in answer] for answer in answers])


def test_it_is_a_task_without_end() -> None:
    assert isinstance(task().subjects, tuple)
    assert (task().size, task().offline) == (None, False)
    wanted: Task = task()
    assert wanted is not None


def test_a_batch_depends_on_seed_step_and_draw_alone() -> None:
    first = task(seed=3)
    forwards = [first.batch(step, 20).prompts for step in range(4)]
    backwards = [task(seed=3).batch(step, 20).prompts for step in reversed(range(4))]
    assert all(torch.equal(a, b) for a, b in zip(forwards, reversed(backwards), strict=True))
    others = [task(seed=4).batch(0, 20), first.batch(0, 20, 1), first.batch(0, 20, 2), first.batch(1, 20)]
    others.append(task(seed=3, purpose="teacher").batch(0, 20))
    distinct = {tuple(batch.prompts.flatten().tolist()) for batch in [first.batch(0, 20), *others]}
    assert len(distinct) == 6


def test_a_batch_is_independent_of_the_global_generators() -> None:
    torch.manual_seed(1)
    before = task().batch(2, 8).prompts
    torch.manual_seed(2)
    assert torch.equal(task().batch(2, 8).prompts, before)


@pytest.mark.parametrize("n", [1, 2, 7, 256])
def test_subjects_share_a_batch_evenly(n: int) -> None:
    batch = task().batch(0, n)
    assert len(batch) == n == len(batch.prompts) == len(batch.answers_BA)
    assert abs(batch.subjects.count("+") - batch.subjects.count("-")) <= 1
    assert [text(prompt)[3] for prompt in batch.prompts] == batch.subjects
    assert len(set(batch.row_ids)) == n


def test_a_batch_follows_the_curriculum() -> None:
    form = Format()
    made = ArithmeticTask(form, Curriculum.from_config(HALVES, 10), form.fixed(1, 10), seed=0)
    assert [set(made.batch(step, 6).subjects) for step in range(10)] == [{"+"}] * 5 + [{"-"}] * 5
    assert made.subjects == ("+", "-")


@pytest.mark.parametrize(
    ("form", "true", "written", "right"),
    [
        (Format(), "8610$", "8610$", True),
        (Format(), "8610$", "8611$", False),
        (Format(), "8610$", "86100", False),  # no end
        (Format(), "8610$", "861$$", False),  # ended one digit early
        (Format(), "0000$", "0$$$$", False),
        (Format(pad_answers=False), "861$$", "861$$", True),
        (Format(pad_answers=False), "861$$", "861$7", True),  # what follows the end does not count
        (Format(pad_answers=False), "861$$", "8610$", False),
        (Format(pad_answers=False, stop_at_end=False), "861$$", "861$7", False),  # here it does
    ],
)
def test_an_answer_is_right_when_all_that_counts_is(form: Format, true: str, written: str, right: bool) -> None:
    mask = ids(true) == ids(true)
    if form.stop_at_end:
        mask = torch.tensor([[i <= true.index("$") for i in range(len(true))]])
    assert right_answers(ids(written), ids(true), mask).tolist() == [right]


def student(form: Format, seed: int = 0) -> TinyGPTPolicy:
    return TinyGPTPolicy(new_net(1, 16, 2, form, seed), end_id=end_id(form))


@pytest.mark.parametrize("form", [Format(1), Format(1, False), Format(1, False, False), Format(2, True, False)])
def test_evaluation_counts_what_greedy_writing_gets_right(form: Format) -> None:
    made, policy = task(form), student(form)
    optimizer = torch.optim.Adam([p for _, p in policy.trainable()], lr=0.01)
    for step in range(60):  # enough to be right sometimes
        batch = made.batch(step, 64)
        logits = policy.answer_logits(batch.prompts, batch.answers_BA)
        (torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.answers_BA.flatten())).backward()
        optimizer.step()
        optimizer.zero_grad()
    for subject, (prompts, answers, mask) in made.asked.items():
        expected = right_answers(policy.sample(prompts).answers_NA, answers, mask).sum().item()
        assert made.evaluate(policy)[f"acc/{subject}"] == (expected, 50)
        assert form.digits > 1 or 0 < expected < 50


def test_evaluation_asks_only_about_the_curriculum() -> None:
    assert set(task(subjects="-").evaluate(student(Format()))) == {"acc/-"}


def test_the_score_is_the_mean_over_subjects() -> None:
    assert task().score({"acc/+": 0.5, "acc/-": 1.0}) == 0.75


def test_experience_verifies_what_was_written() -> None:
    form = Format(1, False)
    made, policy = task(form), student(form)
    batch = made.batch(0, 10)
    rows = made.experience(policy, batch, 4, temperature=2.0, uniforms_NA=uniforms(0, "test", 0, 40, form.answer_len))
    assert (rows.units, len(rows), rows.group, rows.temperature) == (10, 40, 4, 2.0)
    for i, written in enumerate(rows.answers_NA):
        true = text(batch.answers_BA[i // 4]).partition("$")[0]
        found, end, _ = text(written).partition("$")
        assert rows.rewards_N[i].item() == float(found == true and end == "$")
        assert rows.mask_NA[i].sum().item() == min(len(found) + 1, form.answer_len)


def test_ranks_evaluate_disjoint_shares() -> None:
    form = Format()
    policy = student(form)
    whole = ArithmeticTask(form, Curriculum.always("+"), form.fixed(5, 51), seed=0).evaluate(policy)
    parts = [
        ArithmeticTask(form, Curriculum.always("+"), form.fixed(5, 51), seed=0, world=World(rank, 4)).evaluate(policy)
        for rank in range(4)
    ]
    assert whole["acc/+"] == (sum(p["acc/+"][0] for p in parts), sum(p["acc/+"][1] for p in parts))
    assert whole["acc/+"][1] == 51
