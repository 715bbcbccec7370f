"""One job: prepare the process, check, hand over to the application, and record how it went wrong if it did.

It runs in the process of the command line, in a reused worker of a parallel sweep, or on a cluster's node; a failure
travels back as one of two exceptions that every launcher can carry.
"""

from __future__ import annotations

import importlib
import logging
import os
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, open_dict

from common.config import validate
from common.errors import UserError
from common.files import write_json

log = logging.getLogger(__name__)
FAILURE = "error.json"  # what a failed job leaves beside its run.log


class JobError(Exception):
    """A job ended with an error that is not the user's; its traceback is in its run.log."""


def run_job(app: str, cfg: DictConfig) -> dict[str, Any]:
    """The function that Hydra calls, once a job."""
    from hydra.core.hydra_config import HydraConfig

    return train(app, cfg, Path(HydraConfig.get().runtime.output_dir))


def train(app: str, cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """Run one composed configuration in its directory."""
    (directory / FAILURE).unlink(missing_ok=True)
    try:
        validate(cfg, app)
        prepare_torch(cfg.threads)
        with open_dict(cfg):
            cfg.arms = {}  # the other arms of the experiment are no part of this run
        return importlib.import_module(f"{app}.app").run(cfg, directory)
    except UserError as error:
        _record(directory, str(error))
        raise
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"
        log.exception("The run failed.")
        _record(directory, sentence)
        raise JobError(
            f"The run failed with {sentence} (traceback in {os.path.relpath(directory / 'run.log')})."
        ) from error


def prepare_torch(threads: int) -> None:
    """The same bits whatever ran in this process before: thread counts and deterministic kernels."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(threads)
    if torch.get_num_interop_threads() != 1:
        try:
            torch.set_num_interop_threads(1)
        except RuntimeError:  # only possible before the first parallel work of a process; nothing here uses it
            log.debug("inter-op threads stay at %d", torch.get_num_interop_threads())
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False


def _record(directory: Path, sentence: str) -> None:
    """Keep the reason beside the run, for a sweep's summary, and in run.log; the screen gets it at the end."""
    if int(os.environ.get("RANK", 0)) > 0 or not directory.is_dir():
        return
    write_json(directory / FAILURE, {"error": sentence})
    record = log.makeRecord(log.name, logging.ERROR, __file__, 0, "%s", (sentence,), None)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)
