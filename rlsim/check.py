"""What only the simulator can judge about a configuration: a sentence each, before training, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig

from common.config import resolved, whole
from common.errors import UserError
from rlsim.curriculum import Curriculum
from rlsim.problems import MOST_DIGITS, OPERATIONS


def validate(cfg: DictConfig) -> None:
    """Refuse what cannot run."""
    plain = resolved(cfg)
    _data(plain["data"])
    _sizes("model", plain["model"])
    curriculum = Curriculum.from_config(plain["curriculum"]["stages"], plain["steps"])
    unknown = [subject for subject in curriculum.subjects if subject not in plain["data"]["operations"]]
    if unknown:
        raise UserError(
            f"curriculum={plain['curriculum']['name']} practises {', '.join(map(str, unknown))}, "
            f"but data.operations has {' '.join(plain['data']['operations'])}; add it or choose another curriculum."
        )
    _start(plain["start"])
    if needs_teachers(plain["method"]):
        _teachers(plain["teachers"], curriculum, plain["data"]["operations"], plain["method"]["name"])


def needs_teachers(method: Mapping[str, Any]) -> bool:
    """True for a method that asks a teacher: distillation, or imitation of a teacher's answers."""
    return "teacher" in method or method.get("targets") == "teacher"


def _data(data: Mapping[str, Any]) -> None:
    whole("data.digits", data["digits"], 1)
    if data["digits"] > MOST_DIGITS:
        raise UserError(f"data.digits={data['digits']} is more than the {MOST_DIGITS} that a 64-bit number holds.")
    _operations("data.operations", data["operations"], list(OPERATIONS))
    for name in ("pad_answers", "stop_at_end"):
        if not isinstance(data[name], bool):
            raise UserError(f"data.{name}={data[name]} must be true or false.")
    for name in ("validation", "test"):
        whole(f"data.{name}.seed", data[name]["seed"], 0)
        whole(f"data.{name}.size", data[name]["size"], 1)


def _operations(field: str, operations: Any, known: list[str]) -> None:
    if not isinstance(operations, list) or not operations:
        raise UserError(f"{field}={operations} must be a list of operations out of {' '.join(known)}.")
    unknown = [operation for operation in operations if operation not in known]
    if unknown:
        named = ", ".join(map(str, unknown))
        raise UserError(f"{field} has {named}, which is not known here; choose from {' '.join(known)}.")
    if len(set(operations)) < len(operations):
        raise UserError(f"{field}={operations} names an operation twice; once is enough.")


def _sizes(field: str, model: Mapping[str, Any]) -> None:
    for name in ("layers", "width", "heads"):
        whole(f"{field}.{name}", model[name], 1)
    if model["width"] % model["heads"]:
        raise UserError(f"{field}.width={model['width']} must be a multiple of {field}.heads={model['heads']}.")


def _start(start: Mapping[str, Any]) -> None:
    if start["name"] != "cold":
        _training("start", start)


def _training(field: str, recipe: Mapping[str, Any]) -> None:
    """The numbers that teachers and warm starts have in common."""
    _between(f"{field}.target", recipe["target"], 0, 1)
    for name in ("check_every", "max_steps", "batch", "threads"):
        whole(f"{field}.{name}", recipe[name], 1)
    if isinstance(recipe["lr"], bool) or not isinstance(recipe["lr"], (int, float)) or not recipe["lr"] > 0:
        raise UserError(f"{field}.lr={recipe['lr']} must be a positive number.")


def _between(field: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low < value <= high:
        raise UserError(f"{field}={value} must be a number above {low} and at most {high}.")


def _teachers(teachers: Mapping[str, Any], curriculum: Curriculum, operations: list[str], method: str) -> None:
    name, by_subject, specs = teachers["name"], teachers["by_subject"], teachers["specs"]
    uncovered = [subject for subject in curriculum.subjects if subject not in by_subject]
    if uncovered:
        raise UserError(
            f"teachers={name} has no teacher for {', '.join(uncovered)}, which method={method} asks for; "
            "choose other teachers (specialists and add_only cover both subjects) or another curriculum."
        )
    for subject in curriculum.subjects:
        spec = by_subject[subject]
        if spec not in specs:
            known = ", ".join(specs) or "nothing"
            raise UserError(f"teachers.by_subject names {spec} for {subject}, but teachers.specs has {known}; add it.")
        field = f"teachers.specs.{spec}"
        _operations(f"{field}.operations", specs[spec]["operations"], operations)
        _sizes(f"{field}.model", specs[spec]["model"])
        whole(f"{field}.seed", specs[spec]["seed"], 0)
        _training(field, specs[spec])
