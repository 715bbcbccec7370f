"""The simulator: from a configuration to a student, its problems and its teachers; `common/run.py` does the rest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from common.config import resolved
from common.distributed import World
from common.run import Parts, execute
from common.trainers.context import Context
from rlsim.arithmetic import ArithmeticTask
from rlsim.check import needs_teachers
from rlsim.curriculum import Curriculum
from rlsim.example_card import card_table, example_card
from rlsim.problems import Format
from rlsim.start import student
from rlsim.teachers import Teachers


def run(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """Run a checked configuration in its directory; the content of result.json."""
    return execute(cfg, directory, partial(build, resolved(cfg)))


def build(cfg: Mapping[str, Any], world: World) -> Parts:
    """What a trainer needs, from plain configuration. Teachers are trained only once they are asked for."""
    data = cfg["data"]
    form = Format(data["digits"], data["pad_answers"], data["stop_at_end"])
    validation = (data["validation"]["seed"], data["validation"]["size"])
    test = form.fixed(data["test"]["seed"], data["test"]["size"])
    curriculum = Curriculum.from_config(cfg["curriculum"]["stages"], cfg["steps"])
    by_subject, specs = cfg["teachers"]["by_subject"], cfg["teachers"]["specs"]
    teachers = Teachers(by_subject, specs, form, validation, cfg["cache_dir"], world)
    policy, warm = student(
        cfg["start"], cfg["model"], curriculum, form, validation, cfg["cache_dir"], cfg["seed"], world
    )
    facts: dict[str, Any] = {"teachers": cfg["teachers"]["name"], "curriculum": cfg["curriculum"]["name"], "warm": warm}
    tables = {}
    if needs_teachers(cfg["method"]) and "+" in teachers and "+" in curriculum.subjects:
        card = example_card(policy, teachers["+"], test["+"], form)
        if card is not None:
            facts["example"], tables["example"] = card, card_table(card)
    return Parts(
        policy,
        ArithmeticTask(form, curriculum, test, seed=cfg["seed"], world=world),
        teachers,
        facts=facts,
        tables=tables,
        finish=partial(_finish, teachers),
    )


def _finish(teachers: Teachers, result: dict[str, Any], context: Context) -> None:
    """What is known only at the end: a cold start's accuracy, and how the teachers that were asked for were made."""
    if result["warm"]["steps"] == 0:
        result["warm"] = {"steps": 0, **result["start"]}
    if teachers.reports:
        result["teacher_reports"] = teachers.reports
