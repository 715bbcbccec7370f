"""What a configuration must satisfy before anything is loaded. Imports neither torch nor transformers."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from bt_policy import prompt
from bt_policy.places import located
from common.errors import UserError, at_least, one_of


def validate(cfg: DictConfig) -> None:
    """UserError names the first value that cannot work."""
    prompt.from_config(**OmegaConf.to_container(cfg.prompt, resolve=True))
    _check_levels(cfg.model.levels)
    _check_lora(cfg.model.lora)
    at_least("rounds", cfg.rounds, 1, optional=True, whole=True)
    if "environment" not in cfg.data:  # an environment judges its own values (acting.check)
        _check_rows(cfg)


def _check_rows(cfg: DictConfig) -> None:
    one_of("data.on_bad_row", cfg.data.on_bad_row, ("error", "skip"))
    one_of("data.reward", cfg.data.reward, ("exact", "digits"))
    at_least("data.max_pixels", cfg.data.max_pixels, 1)
    for key in ("train", "valid"):
        path = cfg.data[key]
        if path is not None and not Path(located(path)).is_file():
            raise UserError(f"data.{key}={path} does not exist.")
    if cfg.data.train is None and cfg.data.get("level") is None:
        raise UserError("There are no rows to learn from: give data.train=ROWS.jsonl (docs/rows.md describes them).")


def _check_levels(levels: object) -> None:
    if levels is None:
        return
    fine = len(levels) > 0 and all(isinstance(level, int) and 2 <= level <= 10 for level in levels)  # type: ignore[arg-type, call-overload]
    if not fine:
        raise UserError(f"model.levels={levels} must list between 2 and 10 levels for each digit of a code.")


def _check_lora(lora: DictConfig) -> None:
    at_least("model.lora.r", lora.r, 1)
    at_least("model.lora.alpha", lora.alpha, 1)
    if not 0 <= lora.dropout < 1:
        raise UserError(f"model.lora.dropout={lora.dropout} must be at least 0 and below 1.")
