"""One-digit arithmetic and a model that learns it in a second: the simulator's configuration, made small."""

from __future__ import annotations

from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, open_dict

from common.config import conf_directory

SMALL = [
    "data.digits=1",
    "data.validation.size=50",
    "data.test.size=50",
    "model.layers=1",
    "model.width=16",
    "model.heads=2",
    "steps=4",
    "eval_every=2",
    "wandb=disabled",
]
START = ["start.target=0.1", "start.max_steps=200", "start.batch=64", "start.lr=0.01"]


def small_teacher(name: str) -> list[str]:
    """Overrides of a teacher's specification."""
    spec = f"teachers.specs.{name}"
    sizes = [f"{spec}.model.layers=1", f"{spec}.model.width=16", f"{spec}.model.heads=2"]
    return [
        *sizes,
        f"{spec}.target=0.2",
        f"{spec}.max_steps=200",
        f"{spec}.check_every=10",
        f"{spec}.batch=64",
        f"{spec}.lr=0.01",
    ]


def composed(*overrides: str) -> DictConfig:
    """The configuration of a command line's overrides."""
    with initialize_config_dir(str(conf_directory()), version_base="1.3"):
        return compose("rlsim", list(overrides))


def small(cache: Path, *overrides: str) -> DictConfig:
    """The same, small, with its own cache."""
    start = [] if "start=cold" in overrides else START
    cfg = composed(*overrides, *SMALL, *start, f"cache_dir={cache}")
    with open_dict(cfg):
        cfg.arms = {}
    return cfg
