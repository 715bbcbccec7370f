"""Tasks in which the policy acts (`data.environment` names the class), and who writes its codes (`rollout.sampler`).

An environment's class is called with the other keys of `data` and with `encoder`, `seed` and `world`; it is a `Task` of
`common/interfaces.py` (docs/your-environment.md). A sampler's is called with the other keys of `rollout` and with
`policy`, `world` and `directory`; it is a `Policy` that answers like the one it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.errors import UserError
from common.interfaces import Policy, Task

OURS = ("app", "name", "environment", "sampler", "code_levels", "sft_targets")  # keys that are not the class's own


def acts(cfg: DictConfig) -> bool:
    """Whether the data are an environment."""
    return "environment" in cfg.data


def environment(cfg: DictConfig, policy: VLMPolicy, world: World) -> Task:
    """The environment that `data` describes. UserError where its class or a value does not fit."""
    given = {"encoder": policy.encoder, "seed": cfg.seed, "world": world}
    return _made("data.environment", cfg.data.environment, settings(cfg.data), given)


def sampler(cfg: DictConfig, policy: VLMPolicy, world: World, directory: Path) -> Policy:
    """The policy as the task sees it: itself, or one whose codes are written elsewhere.

    `directory` is where adapters are laid for whoever writes them.
    """
    if "sampler" not in cfg.rollout:
        return policy
    given = {"policy": policy, "world": world, "directory": directory}
    return _made("rollout.sampler", cfg.rollout.sampler, settings(cfg.rollout), given)


def settings(group: DictConfig) -> dict[str, Any]:
    """The keys of a group that its class is called with."""
    plain: Any = OmegaConf.to_container(group, resolve=True)
    return {key: value for key, value in plain.items() if key not in OURS}


def _made(key: str, name: str, arguments: Mapping[str, Any], given: Mapping[str, Any]) -> Any:
    try:
        found = get_class(name)
    except Exception as error:
        raise UserError(
            f"{key}={name} cannot be imported ({error}); give package.module.Class and put its folder on PYTHONPATH."
        ) from error
    try:
        return found(**arguments, **given)
    except TypeError as error:
        raise UserError(f"{key}={name} does not take these settings: {error}.") from error
