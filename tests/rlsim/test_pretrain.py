"""Teachers and warm starts: trained once, the same bits whichever run needed them first."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from common.distributed import World
from rlsim import pretrain
from rlsim.curriculum import Curriculum
from rlsim.pretrain import Recipe, pretrained, threads, train
from rlsim.problems import Format
from rlsim.start import student
from rlsim.teachers import Teachers
from rlsim.tiny_gpt import TinyGPT

FORM = Format(1)
RECIPE = Recipe(
    layers=1, width=16, heads=2, operations=("+",), target=0.15, check_every=5, max_steps=300,
    init_seed=3, problem_seed=3, purpose="teacher", lr=0.01, batch=64,
)  # fmt: skip
SPEC = {
    "operations": ["+"], "target": 0.15, "check_every": 5, "seed": 3, "max_steps": 300, "lr": 0.01, "batch": 64,
    "threads": 1, "model": {"layers": 1, "width": 16, "heads": 2},
}  # fmt: skip
VALIDATION = (999, 60)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that were really trained."""
    made: list[Recipe] = []

    def counting(recipe: Recipe, form: Format, validation: tuple[int, int]):  # type: ignore[no-untyped-def]
        made.append(recipe)
        return train(recipe, form, validation)

    monkeypatch.setattr(pretrain, "train", counting)
    return made


def test_training_ends_at_the_first_look_that_reaches_the_target() -> None:
    policy, report = train(RECIPE, FORM, VALIDATION)
    assert 0 < report["steps"] < 300
    assert report["steps"] % 5 == 0
    assert report["+"] >= 0.15
    _, before = train(replace(RECIPE, max_steps=report["steps"] - 5), FORM, VALIDATION)
    assert before["steps"] == report["steps"] - 5  # one look earlier it was not there yet
    assert before["+"] < 0.15
    assert policy.answer_len == FORM.answer_len


def test_a_target_reached_by_the_first_weights_trains_nothing() -> None:
    _, report = train(replace(RECIPE, target=-1.0), FORM, VALIDATION)
    assert report["steps"] == 0


def test_the_cache_gives_the_bits_that_training_gives(tmp_path: Path, counted: list[Recipe]) -> None:
    torch.manual_seed(0)
    fresh, told = pretrained(RECIPE, FORM, VALIDATION, tmp_path, "a teacher", World())
    torch.manual_seed(1)
    torch.rand(5)
    stored, again = pretrained(RECIPE, FORM, VALIDATION, tmp_path, "a teacher", World())
    with threads(RECIPE.threads):
        direct, _ = train(RECIPE, FORM, VALIDATION)
    assert told == again
    assert len(counted) == 1
    for name, tensor in direct.state().items():
        assert torch.equal(tensor, fresh.state()[name])
        assert torch.equal(tensor, stored.state()[name])


def test_building_changes_neither_threads_nor_the_global_generator(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        pretrained(replace(RECIPE, max_steps=5), FORM, VALIDATION, tmp_path, "a teacher", World())
        assert torch.get_num_threads() == 2
        assert torch.equal(torch.rand(3), expected)
    finally:
        torch.set_num_threads(before)


def test_the_thread_count_is_restored_after_an_error() -> None:
    def fail() -> None:
        with threads(3):
            assert torch.get_num_threads() == 3
            raise ValueError("inside")

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="inside"):
        fail()
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    "change", [{"target": 0.16}, {"init_seed": 4}, {"problem_seed": 4}, {"lr": 0.02}, {"width": 8}, {"purpose": "warm"}]
)
def test_another_recipe_is_another_entry(tmp_path: Path, counted: list[Recipe], change: dict) -> None:
    short = replace(RECIPE, max_steps=1)
    pretrained(short, FORM, VALIDATION, tmp_path, "a", World())
    pretrained(replace(short, **change), FORM, VALIDATION, tmp_path, "b", World())
    assert len(counted) == 2


def test_padded_answers_share_an_entry_whatever_follows_the_end(tmp_path: Path, counted: list[Recipe]) -> None:
    short = replace(RECIPE, max_steps=1)
    stopping, _ = pretrained(short, Format(1, True, True), VALIDATION, tmp_path, "a", World())
    going_on, _ = pretrained(short, Format(1, True, False), VALIDATION, tmp_path, "a", World())
    assert len(counted) == 1
    assert (stopping.end_id, going_on.end_id) == (13, None)
    pretrained(short, Format(1, False, True), VALIDATION, tmp_path, "a", World())
    pretrained(short, Format(1, False, False), VALIDATION, tmp_path, "a", World())
    assert len(counted) == 3


def test_a_teacher_is_built_when_it_is_first_asked(tmp_path: Path, counted: list[Recipe]) -> None:
    teachers = Teachers({"+": "add", "-": "add"}, {"add": SPEC}, FORM, VALIDATION, tmp_path, World())
    assert list(teachers) == ["+", "-"]
    assert "+" in teachers
    assert len(teachers) == 2
    assert counted == []
    with torch.no_grad():  # as in the middle of a trainer's scoring
        assert teachers["+"] is teachers["-"]
    assert counted == [RECIPE]
    assert teachers["+"].trainable() == []
    assert teachers.reports["add"]["+"] >= 0.15


def test_a_teacher_computes_how_the_problems_it_grades_begin_once(
    tmp_path: Path, counted: list[Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered: list[torch.Tensor] = []
    monkeypatch.setattr(TinyGPT, "remember", lambda self, beginnings_RK: remembered.append(beginnings_RK))
    by_subject = {"+": "add", "-": "add"}
    assert Teachers(by_subject, {"add": SPEC}, FORM, VALIDATION, tmp_path, World())["+"].trainable() == []
    problems = FORM.draw(50, "-", np.random.default_rng(0)).prompts_BP[:, :2]
    known = {tuple(row) for row in remembered[0].tolist()}
    assert len(known) == 20
    assert {tuple(row) for row in problems.tolist()} <= known
    monkeypatch.setattr("rlsim.teachers.MOST_BEGINNINGS", 19)  # as with many digits
    Teachers(by_subject, {"add": SPEC}, FORM, VALIDATION, tmp_path, World())["+"]
    assert len(remembered) == 1


def test_a_start_is_of_its_seed_and_its_curriculums_subjects(tmp_path: Path, counted: list[Recipe]) -> None:
    start = {"name": "warm", "target": 0.1, "check_every": 5, "max_steps": 5, "lr": 0.01, "batch": 64, "threads": 1}
    model = {"layers": 1, "width": 16, "heads": 2}
    late = Curriculum((("-",), ("+",)), (0, 10))
    student(start, model, late, FORM, VALIDATION, tmp_path, 7, World())
    assert (counted[0].init_seed, counted[0].problem_seed, counted[0].operations) == (7, 1007, ("+", "-"))
    student(start, model, Curriculum.always(("+", "-")), FORM, VALIDATION, tmp_path, 7, World())
    assert len(counted) == 1  # the order of the stages does not matter


def test_a_cold_start_is_the_seeds_first_weights(tmp_path: Path, counted: list[Recipe]) -> None:
    model = {"layers": 1, "width": 16, "heads": 2}
    policy, report = student({"name": "cold"}, model, Curriculum.always("+"), FORM, VALIDATION, tmp_path, 7, World())
    assert report == {"steps": 0}
    assert counted == []
    expected = pretrain.new_net(**model, form=FORM, seed=7).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.state().items())
