"""Arms that learn from what other arms of the sweep leave run behind them."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.arms import Job
from common.errors import UserError
from common.sweep import Placed, waves

ARMS = {
    "sft": "method=sft",
    "rlvr": "method=rlvr",
    "opd": "model.teacher=arm://sft",
    "mopd": "++model.teachers={ball: arm://sft, key: 'arm://rlvr'}",
    "last": "model.adapter=arm://mopd",
}


def placed(directory: Path, *names: str, seeds: tuple[int, ...] = (0,), arms: dict[str, str] = ARMS) -> list[Placed]:
    return [
        Placed(Job(name, (arms[name], f"seed={seed}")), seed, directory / name / f"seed={seed}")
        for name in names
        for seed in seeds
    ]


def order(jobs: list[Placed]) -> list[list[str]]:
    return [[job.name for job in wave] for wave in waves(jobs)]


def test_an_arm_runs_behind_those_that_its_settings_name(tmp_path: Path) -> None:
    jobs = placed(tmp_path, "last", "opd", "sft", "rlvr", "mopd")
    assert order(jobs) == [
        ["sft seed=0", "rlvr seed=0"], ["opd seed=0", "mopd seed=0"], ["last seed=0"],
    ]  # fmt: skip


def test_arms_that_name_none_run_at_once(tmp_path: Path) -> None:
    assert order(placed(tmp_path, "sft", "rlvr", seeds=(0, 1))) == [
        ["sft seed=0", "sft seed=1", "rlvr seed=0", "rlvr seed=1"]
    ]


def test_what_is_done_need_not_be_in_the_sweep(tmp_path: Path) -> None:
    jobs = placed(tmp_path, "opd", seeds=(0, 1))
    for seed in (0, 1):
        with pytest.raises(UserError, match=rf"opd seed={seed} learns from what the arm sft leaves.*arm=sft,opd"):
            waves(jobs)
        folder = tmp_path / "sft" / f"seed={seed}"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text("{}")
    assert order(jobs) == [["opd seed=0", "opd seed=1"]]


def test_arms_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    arms = {"a": "model.adapter=arm://b", "b": "model.adapter=arm://a"}
    with pytest.raises(UserError, match="The arms a, b wait for each other"):
        waves(placed(tmp_path, "a", "b", arms=arms))


def test_an_arm_that_names_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wait for each other"):
        waves(placed(tmp_path, "a", arms={"a": "model.adapter=arm://a"}))
