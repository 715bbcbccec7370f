"""One run of a method in a world, from configuration to result.json: what both applications share.

world = open_world(...)                      # ranks
parts = build(world)                         # the application's policy, task and teachers
trainer.train(context)                       # common/trainers/
result.json, curves.png, checkpoints/        # in the run's directory
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from common.checkpoint import Checkpoints
from common.distributed import World, open_world
from common.errors import UserError
from common.files import write_json
from common.interfaces import Policy, Task
from common.tracking import Tracker
from common.trainers.context import Context

log = logging.getLogger(__name__)


@dataclass
class Parts:
    """What an application builds from its configuration."""

    policy: Policy
    task: Task
    teachers: Mapping[str, Policy] = field(default_factory=dict)
    reference: Callable[[], Policy] | None = None  # the KL's reference; None = the policy as it starts
    optimizer_state: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)  # go into result.json: how the start was made, an example, ...
    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)  # name -> (columns, rows)
    finish: Callable[[dict[str, Any], Context], None] | None = None  # what the application leaves besides


def build_trainer(method: DictConfig) -> Any:
    """The trainer a method's configuration describes. UserError where its values do not fit."""
    try:
        return instantiate(method, _convert_="all")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise cause from None
        raise


def execute(cfg: DictConfig, directory: Path, build: Callable[[World], Parts]) -> dict[str, Any]:
    """Build, train, and write what a run leaves. Returns the content of result.json. Every rank calls."""
    trainer = build_trainer(cfg.method)  # before anything is built: a wrong value costs nothing
    world = open_world(cfg.distributed.name, cfg.distributed.backend)
    began = time.monotonic()
    parts = build(world)
    with _tracker(cfg, directory, world) as tracker:
        context = Context(
            parts.policy, parts.task, world,
            seed=cfg.seed, steps=cfg.steps, rounds=cfg.get("rounds"),
            eval_every=cfg.eval_every, log_every=cfg.log_every,
            teachers=parts.teachers, reference=parts.reference, recorder=tracker,
            checkpoints=Checkpoints(directory, world), resume=cfg.resume is not None,
            optimizer_state=parts.optimizer_state,
        )  # fmt: skip
        trained = time.monotonic()
        trainer.train(context)
        seconds = time.monotonic() - trained
        result = _result(cfg, trainer, context, parts, directory)
        result |= {"seconds": round(seconds, 1), "build_seconds": round(trained - began, 1)}
        if parts.finish is not None:
            parts.finish(result, context)
        for name, (columns, rows) in parts.tables.items():
            tracker.table(name, columns, rows)
        tracker.summary(
            {f"final/{name}": value for name, value in result["final"].items()} | {"updates": result["updates"]}
        )
        tracker.weights(context.checkpoints.last_directory)
    if world.main:
        write_json(directory / "result.json", result)
        if cfg.arm is None:  # a sweep draws one picture for all; `python -m common.report DIR` draws a run's later
            _picture(directory)
    world.barrier()
    return result


def _tracker(cfg: DictConfig, directory: Path, world: World) -> Tracker:
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    arm = cfg.arm or cfg.method.name
    return Tracker(
        directory,
        world,
        name=f"{arm} seed {cfg.seed}",
        group=f"{cfg.app}/{cfg.experiment or 'adhoc'}/{arm}",
        job_type=cfg.method.name,
        tags=[tag for tag in (cfg.app, cfg.experiment, arm) if tag],
        config=plain,  # type: ignore[arg-type]
        wandb=plain["wandb"],
        total=cfg.steps,
    )


def _result(cfg: DictConfig, trainer: Any, context: Context, parts: Parts, directory: Path) -> dict[str, Any]:
    report = dict(context.report)
    start, final = report.pop("start", {}), report.pop("final", {})
    sampling = getattr(trainer, "sampling", None)
    return {
        "app": cfg.app,
        "method": cfg.method.name,
        "arm": cfg.arm,
        "experiment": cfg.experiment,
        "seed": cfg.seed,
        "steps": cfg.steps if cfg.steps is not None else report.get("updates"),
        "start": _short(start),
        "final": _short(final),
        "batch": trainer.optim.rows_per_update,
        "group": None if sampling is None else sampling.group,
        "lr": trainer.optim.lr,
        "directory": str(directory),
        **report,
        **parts.facts,
    }


def _short(metrics: Mapping[str, float]) -> dict[str, float]:
    """Accuracies under their subject's own name, as the reference's files have them; other metrics as they are."""
    return {name.removeprefix("acc/"): value for name, value in metrics.items()}


def _picture(directory: Path) -> None:
    from common.report import write_run

    write_run(directory)
