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
from common.errors import UserError
from common.files import write_text
from common.sweep import Progress, check, report

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
        jobs = expand(self.config.arms or {}, self.settings(arguments), list(self.config.hydra.runtime.choices))
        placed = check(app, jobs, self.compose, directory)
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "multirun.yaml", OmegaConf.to_yaml(self.config))
        launcher = str(self.config.hydra.runtime.choices.get("hydra/launcher"))
        waiting = [job for job in placed if not job.finished]
        with Progress(placed, directory) as progress:
            returned, broken = self._launch([job.overrides(quiet=launcher != "basic") for job in waiting])
        failed = progress.failures(broken)
        report(directory, self.config.experiment or "sweep", failed, placed)
        return returned

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

    def _launch(self, jobs: list[list[str]]) -> tuple[Sequence[Any], str | None]:
        """Run the jobs; what each returned, and why the launcher itself broke if it did (a worker was killed)."""
        if not jobs:
            return [], None
        try:
            return self.launcher.launch(jobs, initial_job_idx=0), None
        except Exception as error:
            log.debug("launcher", exc_info=True)
            return [], f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _values(override: Override) -> list[str]:
    """The values of one override as text for another command line; one unless it sweeps."""
    if not override.is_sweep_override():
        return [override.get_value_element_as_str()]
    if not override.is_discrete_sweep():
        raise UserError(f"{override.input_line}: only lists of values can be swept here, as in a,b or range(0,5).")
    return [str(value) for value in override.sweep_string_iterator()]
