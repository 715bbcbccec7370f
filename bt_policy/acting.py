"""Tasks in which the policy acts (`data.environment` names the class), and who writes its codes (`rollout.sampler`).

An environment's class is called with the other keys of `data` and with `encoder`, `seed` and `world`; it is a `Task` of
`common/interfaces.py` (docs/your-environment.md). A sampler's is called with the other keys of `rollout` and with
`policy`, `world` and `directory`; it is a `Policy` that answers like the one it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.errors import UserError
from common.interfaces import Policy, Task

OURS = (
    "app",
    "name",
    "environment",
    "sampler",
    "code_levels",
    "sft_targets",
    "rows_per_round",
)  # keys that are not the class's own


def acts(cfg: DictConfig) -> bool:
    """Whether the data are an environment."""
    return "environment" in cfg.data


def check(cfg: DictConfig) -> None:
    """UserError where the environment knows from `data` alone that it will not work (its static `check`, if any)."""
    _found("data.environment", cfg.data.environment, "check")(**settings(cfg.data))


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
    return _found(key, name)(**arguments, **given)


def _found(key: str, name: str, method: str | None = None) -> Callable[..., Any]:
    """The class called `name`, or its method; called with what it does not take, it says so in a sentence."""
    try:
        found: Any = get_class(name)
    except Exception as error:
        raise UserError(
            f"{key}={name} cannot be imported ({error}); give package.module.Class and put its folder on PYTHONPATH."
        ) from error
    if method is not None:
        found = getattr(found, method, lambda **_: None)

    def call(**arguments: Any) -> Any:
        try:
            return found(**arguments)
        except TypeError as error:
            raise UserError(f"{key}={name} does not take these settings: {error}.") from error

    return call
