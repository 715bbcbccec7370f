"""The student before post-training: warm (taught until about 30% of its answers are right, then cached) or cold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from common.distributed import World
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import Recipe, end_id, new_net, pretrained
from rlsim.problems import OPERATIONS, Format

log = logging.getLogger(__name__)


def student(
    start: Mapping[str, Any],
    model: Mapping[str, Any],
    curriculum: Curriculum,
    form: Format,
    validation: tuple[int, int],
    cache: str | Path,
    seed: int,
    world: World,
) -> tuple[TinyGPTPolicy, dict[str, Any]]:
    """The student of a seed, and how it was made: {"steps": updates, accuracy on the validation problems by subject}.

    Weights begin from torch seed `seed`; a warm start then practises all of the curriculum's subjects together.
    """
    sizes = {name: model[name] for name in ("layers", "width", "heads")}
    if start["name"] == "cold":
        net = new_net(**sizes, form=form, seed=seed)
        return TinyGPTPolicy(net, end_id=end_id(form), world=world), {"steps": 0}
    recipe = Recipe(
        **sizes,
        operations=tuple(subject for subject in OPERATIONS if subject in curriculum.subjects),
        target=start["target"],
        check_every=start["check_every"],
        max_steps=start["max_steps"],
        init_seed=seed,
        problem_seed=1000 + seed,
        purpose="warm start",
        lr=start["lr"],
        batch=start["batch"],
        threads=start["threads"],
    )
    policy, report = pretrained(recipe, form, validation, cache, f"warm start of seed {seed}", world)
    log.info("warm start of seed %d: %s", seed, report)
    return policy, report
