"""`resume=DIR`: continue a stopped run in place, with the configuration that it wrote itself.

What decides the numbers stays as it was; how long, how often and where to report may change. A sweep's directory
resumes every job of it that has no result yet (`common/plugins/hydra_plugins/arms_sweeper.py` skips the others).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, open_dict

from common.command_line import split
from common.config import validate
from common.errors import UserError
from common.files import write_text
from common.job import train

CHANGEABLE = ("steps", "eval_every", "log_every", "cache_dir", "wandb.mode", "wandb.project", "wandb.entity")


def resume_run(app: str, directory: Path, overrides: Sequence[str]) -> None:
    """Continue one run; one that is complete is left alone."""
    from hydra.core.utils import configure_log, setup_globals

    cfg = load(app, directory, overrides)
    validate(cfg, app)
    if finished(directory, cfg.steps):
        print(f"{directory} is complete; steps=N with a larger N would go on.")
        return
    main_rank = int(os.environ.get("RANK", 0)) == 0
    if main_rank:
        write_text(directory / ".hydra" / "config.yaml", OmegaConf.to_yaml(cfg))
    setup_globals()
    settings = OmegaConf.load(directory / ".hydra" / "hydra.yaml")
    assert isinstance(settings, DictConfig)
    with open_dict(settings):
        settings.hydra.runtime.output_dir = str(directory.resolve())  # it may have been moved
        settings.hydra.job_logging.root.handlers = list(
            settings.hydra.job_logging.handlers
        )  # a sweep's jobs were quiet
    if main_rank:
        configure_log(settings.hydra.job_logging, settings.hydra.verbose)
    with open_dict(cfg):
        cfg.resume = str(directory)
    train(app, cfg, directory)


def load(app: str, directory: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration a run wrote, with the changes that resuming allows."""
    file = directory / ".hydra" / "config.yaml"
    if not file.is_file():
        raise UserError(f"resume={directory}: there is no run (no {file}).")
    cfg = OmegaConf.load(file)
    assert isinstance(cfg, DictConfig)
    if cfg.get("app") != app:
        raise UserError(
            f"resume={directory}: that run is of {cfg.get('app')}; continue it with `python -m {cfg.get('app')}`."
        )
    began = OmegaConf.load(directory / ".hydra" / "overrides.yaml")
    for override in overrides:
        key, value = split(override)
        if key in CHANGEABLE:
            OmegaConf.update(cfg, key, OmegaConf.from_dotlist([f"v={value}"]).v)
        elif override not in began:
            raise UserError(
                f"resume={directory} goes on as it began, without {override}; only {', '.join(CHANGEABLE)} may change."
            )
    return cfg


def finished(directory: Path, steps: int | None) -> bool:
    """True where a run has its result and no further steps are asked for."""
    file = directory / "result.json"
    if not file.is_file():
        return False
    done = json.loads(file.read_text(encoding="utf-8")).get("steps")
    return steps is None or done is None or done >= steps


def sweep_arguments(directory: Path, overrides: Sequence[str]) -> list[str]:
    """The command line that a sweep was started with, to run it again in its own directory."""
    if overrides:
        raise UserError(f"resume={directory} is a sweep, which goes on as it began; leave out {' '.join(overrides)}.")
    began = OmegaConf.load(directory / "multirun.yaml").hydra.overrides
    hydra = [text for text in began.hydra if split(text)[0] not in ("hydra.sweep.dir", "hydra.mode")]
    return [*began.task, *hydra, f"hydra.sweep.dir='{directory.as_posix()}'"]
