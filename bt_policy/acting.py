"""Tasks in which the policy acts: an environment named by `data._target_` instead of a file of rows.

The class is called with the other keys of `data` and with `encoder`, `seed` and `world`; it is a `Task` of
`common/interfaces.py`. docs/your-environment.md walks through one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.errors import UserError
from common.interfaces import Policy, Task

OURS = ("app", "name", "code_levels", "sft_targets")  # keys of `data` that are not the environment's


def acts(cfg: DictConfig) -> bool:
    """Whether the data are an environment."""
    return "_target_" in cfg.data


def environment(cfg: DictConfig, policy: VLMPolicy, world: World) -> Task:
    """The environment that `data` describes. UserError where its class or a value does not fit."""
    plain: Any = OmegaConf.to_container(cfg.data, resolve=True)
    settings = {key: value for key, value in plain.items() if key not in OURS}
    try:
        return instantiate(settings, encoder=policy.encoder, seed=cfg.seed, world=world, _convert_="all")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, UserError):
                raise cause from None
            cause = cause.__cause__
        reason = error.__cause__ or error
        raise UserError(f"data._target_={settings['_target_']} could not be built: {reason}") from error


def sampler(cfg: DictConfig, policy: VLMPolicy, world: World, directory: Path) -> Policy:
    """The policy as the task sees it: itself, or with `rollout._target_` one whose codes are written elsewhere.

    `directory` is where adapters are laid for whoever writes them.
    """
    if "_target_" not in cfg.rollout:
        return policy
    plain: Any = OmegaConf.to_container(cfg.rollout, resolve=True)
    settings = {key: value for key, value in plain.items() if key not in OURS}
    return instantiate(settings, policy=policy, world=world, directory=directory, _convert_="all")
