"""Hydra sweeper: every arm of an experiment times every swept value, on whichever launcher is configured.

All jobs are composed and checked before the first one starts. One that fails does not stop the others; the summary is
written in any case and names it. `common/arms.py` says how arms and command line become jobs.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from common.arms import Settings, expand
from common.command_line import opened
from common.config import all_groups
from common.errors import UserError
from common.files import write_text
from common.sweep import Placed, Progress, check, report, waves

log = logging.getLogger(__name__)


class ArmsSweeper(Sweeper):
    """Selected by conf/hydra/sweeper/arms.yaml; `params` are sweeps that the command line may replace."""

    def __init__(self, params: dict[str, Any] | None = None) -> None:
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Called by Hydra: keep what composing needs, make the launcher."""
        self.context, self.config = hydra_context, config
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Called by Hydra with the command line's overrides."""
        app, directory = self.config.app, Path(self.config.hydra.sweep.dir)
        arms = {name: [opened(str(text), app) for text in own] for name, own in (self.config.arms or {}).items()}
        jobs = expand(arms, self.settings(arguments), all_groups())
        placed = check(app, jobs, self.compose, directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "multirun.yaml", OmegaConf.to_yaml(self.config))
        launcher = str(self.config.hydra.runtime.choices.get("hydra/launcher"))
        with Progress(placed, directory) as progress:
            broken = None
            for wave in waves(placed):
                broken = self._run([job for job in wave if not job.finished], quiet=launcher != "basic") or broken
        report(directory, self.config.experiment or "sweep", progress.failures(broken), placed)

    def settings(self, arguments: Sequence[str]) -> Settings:
        """Key -> values, the experiment's sweeps first and replaced by what the command line says."""
        parser = OverridesParser.create(config_loader=self.context.config_loader)
        given = parser.parse_overrides([*(f"{key}={value}" for key, value in self.params.items()), *arguments])
        settings: Settings = {}
        for override in given:
            settings[override.get_key_element()] = _values(override)
        return settings

    def compose(self, overrides: Sequence[str]) -> DictConfig:
        """The configuration of one job."""
        return self.context.config_loader.load_sweep_config(self.config, list(overrides))

    def _run(self, jobs: Sequence[Placed], *, quiet: bool) -> str | None:
        """Run the jobs. Why the launcher itself broke, if it did: a worker that is killed (memory) takes those beside
        it along, and what had not begun is launched again.
        """
        broken = None
        while jobs:
            try:
                self.launcher.launch([job.overrides(quiet=quiet) for job in jobs], initial_job_idx=0)
                return broken
            except Exception as error:
                log.debug("launcher", exc_info=True)
                broken = f"{type(error).__name__}: {' '.join(str(error).split()).partition('. ')[0]}"
            still = [job for job in jobs if not job.begun]
            if len(still) == len(jobs):
                return broken
            jobs = still
        return broken


def _values(override: Override) -> list[str]:
    """The values of one override as text for another command line; one unless it sweeps."""
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: only lists of values can be swept here, as in a,b or range(0,5).")
    return [str(value) for value in override.sweep_string_iterator()]
