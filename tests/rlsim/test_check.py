"""What the simulator refuses, in one sentence, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from common.errors import UserError
from rlsim.check import needs_teachers, validate
from tests.rlsim.small import composed


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=sft"],
        ["method=rlvr", "teachers=none", "curriculum=cascade"],
        ["method=mopd", "teachers=specialists", "curriculum=mix"],
        ["method=opd", "teachers=add_only", "curriculum=cascade"],
        ["method=sft", "method.targets=reference", "teachers=none", "curriculum=mix"],
        ["method=ppo", "data.digits=1", 'data.operations=["-"]', 'curriculum.stages=[{subjects: ["-"], steps: 500}]'],
    ],
)
def test_what_can_run_passes(overrides: list[str]) -> None:
    validate(composed(*overrides))


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["method=opd", "curriculum=mix"],
            r"teachers=add has no teacher for -, which method=opd asks for; choose other",
        ),
        (["method=sft", "teachers=none"], r"teachers=none has no teacher for \+"),
        (["method=mopd", "teachers=weak", "curriculum=cascade"], r"teachers=weak has no teacher for -"),
        (
            ["method=rlvr", 'curriculum.stages=[{subjects: ["*"], share: 1}]'],
            r"practises \*, but data.operations has \+ -",
        ),
        (["method=rlvr", "curriculum=mix", 'data.operations=["+"]'], r"curriculum=mix practises -, but"),
        (["method=rlvr", "curriculum.stages=[]"], "curriculum.stages is empty"),
        (["method=rlvr", "data.digits=0"], "data.digits=0 must be a whole number of at least 1"),
        (["method=rlvr", "data.digits=19"], "data.digits=19 is more than the 18"),
        (["method=rlvr", 'data.operations=["/"]'], r"data.operations has /, which is not known here; choose from \+ -"),
        (["method=rlvr", 'data.operations=["+", "+"]'], "names an operation twice"),
        (["method=rlvr", "data.operations=[]"], "must be a list of operations"),
        (["method=rlvr", "data.pad_answers=maybe"], "data.pad_answers=maybe must be true or false"),
        (["method=rlvr", "data.test.size=0"], "data.test.size=0 must be a whole number"),
        (["method=rlvr", "model.heads=3"], "model.width=64 must be a multiple of model.heads=3"),
        (["method=rlvr", "model.layers=0"], "model.layers=0 must be"),
        (["method=rlvr", "start.target=1.5"], "start.target=1.5 must be a number above 0 and at most 1"),
        (["method=rlvr", "start.lr=0"], "start.lr=0 must be a positive number"),
        (["method=opd", "teachers.specs.add.target=0"], "teachers.specs.add.target=0 must be"),
        (["method=opd", "teachers.specs.add.model.heads=5"], "teachers.specs.add.model.width=128 must be a multiple"),
        (["method=opd", 'data.operations=["-"]'], r"practises \+, but data.operations has -"),
    ],
)
def test_what_cannot_run_is_one_sentence(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as error:
        validate(composed(*overrides))
    assert str(error.value).count("\n") == 0


def test_a_teacher_without_a_specification_is_named() -> None:
    cfg = composed("method=opd")
    cfg.teachers.by_subject["+"] = "ad"
    with pytest.raises(UserError, match=r"names ad for \+, but teachers.specs has add"):
        validate(cfg)


def test_teachers_are_judged_only_where_a_method_asks_for_them() -> None:
    validate(composed("method=rlvr", "curriculum=mix", "teachers.specs.add.target=0"))


@pytest.mark.parametrize(
    ("method", "asks"), [("sft", True), ("opd", True), ("mopd", True), ("gkd", True), ("rlvr", False), ("ppo", False)]
)
def test_methods_that_ask_a_teacher_are_known(method: str, asks: bool) -> None:
    assert needs_teachers(composed(f"method={method}").method) is asks


def test_checking_does_not_import_torch() -> None:
    code = "import sys, rlsim.check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
