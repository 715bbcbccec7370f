"""One job's Weights & Biases run, or nothing: the only file that knows W&B.

Offline unless told otherwise, never a prompt, never a reason for a training run to stop: where W&B is absent, cannot
start or breaks, there is one warning and the run goes on. Its own files lie under the run's directory (`wandb/`), with
the run's id, so that a resumed job continues the same W&B run.

Turned off because they cost seconds a job, or would record the machine: console capture, code and git saving, system
statistics, the list of installed packages.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from common.files import write_text

log = logging.getLogger(__name__)

LONGEST_NAME, LONGEST_TAG = 128, 64  # what the W&B server accepts
SETTINGS: dict[str, Any] = {  # a version of W&B that does not know one is not given it
    "silent": True,
    "quiet": True,
    "console": "off",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "program": "",
    "host": "",
    "x_disable_stats": True,
    "x_disable_meta": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
}


class WandbRun:
    """A started W&B run, or an inert stand-in: every method may always be called."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    @property
    def active(self) -> bool:
        """True while W&B records."""
        return self._run is not None

    def log(self, step: int, values: Mapping[str, float | int | None]) -> None:
        """One history entry. The x axis of every chart is the logged `step`, so a resumed run may repeat steps."""
        known = {name: value for name, value in values.items() if value is not None}
        self._attempt(lambda run: run.log({"step": step, **known}))

    def summary(self, values: Mapping[str, Any]) -> None:
        """Set values of the run's summary."""
        self._attempt(lambda run: run.summary.update(dict(values)))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Log a table."""

        def add(run: Any) -> None:
            import wandb

            run.log({name: wandb.Table(columns=list(columns), data=[list(row) for row in rows])})

        self._attempt(add)

    def artifact(self, name: str, kind: str, directory: Path) -> None:
        """Log a directory's files as an artifact."""

        def add(run: Any) -> None:
            import wandb

            item = wandb.Artifact(f"{name}-{run.id}", type=kind)
            item.add_dir(str(directory))
            run.log_artifact(item)

        self._attempt(add)

    def finish(self, *, failed: bool) -> None:
        """End the run, marked failed where its job failed. Nothing is recorded afterwards."""
        self._attempt(lambda run: run.finish(exit_code=1 if failed else 0))
        self._run = None

    def _attempt(self, action: Callable[[Any], None]) -> None:
        if self._run is None:
            return
        try:
            action(self._run)
        except Exception as error:
            log.warning("W&B stopped recording this run (%s: %s); metrics.jsonl goes on.", type(error).__name__, error)
            self._run = None


def start(
    directory: Path,
    *,
    options: Mapping[str, Any],
    name: str,
    group: str,
    job_type: str,
    tags: Sequence[str],
    config: Mapping[str, Any],
) -> WandbRun:
    """Start (or, where `directory` has one, continue) the W&B run of a job.

    options: `mode` (offline | online | disabled), `project`, `entity`; config: a resolved plain dict.
    """
    if options.get("mode") == "disabled":
        return WandbRun()
    described = {
        "name": _shorten(name, LONGEST_NAME),
        "group": _shorten(group, LONGEST_NAME),
        "job_type": _shorten(job_type, LONGEST_NAME),
        "tags": [_shorten(tag, LONGEST_TAG) for tag in tags if tag],
        "config": dict(config),
        "project": options.get("project"),
        "entity": options.get("entity"),
    }
    try:
        return WandbRun(_start(Path(directory), options.get("mode", "offline") == "online", described))
    except Exception as error:  # whatever W&B raises, training goes on
        log.warning("W&B did not start (%s: %s); the run goes on without it.", type(error).__name__, error)
        return WandbRun()


def _start(directory: Path, online: bool, described: Mapping[str, Any]) -> Any:
    if not online:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # its crash reports go over the network, offline too
    logging.getLogger("wandb").setLevel(logging.ERROR)
    import wandb

    if online and not _logged_in(wandb):
        log.warning("Nobody is logged in to W&B, so it records offline. Log in with `wandb login` or WANDB_API_KEY.")
        online = False
    if wandb.run is not None:  # left by a job that died in this process; the next init would return it
        wandb.run.finish(exit_code=1)
    identity = directory / "wandb" / "run-id"
    known = identity.read_text(encoding="utf-8").strip() if identity.exists() else None
    run = wandb.init(
        mode="online" if online else "offline",
        dir=str(directory),
        id=known,
        resume="allow" if online and known else None,  # offline it is ignored; the id ties the parts
        settings=wandb.Settings(
            **{key: value for key, value in SETTINGS.items() if key in wandb.Settings.model_fields}
        ),
        **described,
    )
    write_text(identity, run.id)
    run.define_metric("step", hidden=True)
    run.define_metric("*", step_metric="step")
    return run


def _logged_in(wandb: Any) -> bool:
    """True where W&B has credentials; never asks for them."""
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except TypeError:  # versions whose login() cannot be told not to ask
        return bool(wandb.api.api_key)


def _shorten(text: str, most: int) -> str:
    """`text`, or its beginning and a digest, so that two long names stay two names."""
    return text if len(text) <= most else f"{text[: most - 9]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
