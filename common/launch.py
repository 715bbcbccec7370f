"""From the command line to a run, a sweep, or one sentence about what is wrong.

    python -m rlsim method=opd seed=1          python -m rlsim experiment=single
    python -m rlsim resume=outputs/rlsim/...   torchrun --nproc_per_node=2 -m bt_policy method=sft

Everything up to the first training step works without torch. Hydra composes and launches; around it stand our own
arguments (`common/command_line.py`), directories (`common/run_directory.py`), checks (`common/config.py`) and errors.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from common import run_directory
from common.command_line import CommandLine, parse, split
from common.config import conf_directory, validate, validate_values
from common.errors import UserError
from common.hydra_errors import COMPOSITION, explain, keys_of
from common.job import JobError, run_job
from common.resume import resume_run, sweep_arguments

PLUGINS = Path(__file__).resolve().parent / "plugins"
INTERRUPTED = 128 + signal.SIGINT
OTHERS_WAIT = 5  # seconds


def main(app: str) -> None:
    """Run an application's command line; leaves through SystemExit unless all went well."""
    code = launch(app, sys.argv[1:])
    if code:
        sys.exit(code)


def launch(app: str, arguments: Sequence[str]) -> int:
    """Do what the arguments say; the exit code."""
    signal.signal(signal.SIGTERM, _terminate)
    directory: list[Path] = []  # filled in as soon as it is known, for what is said at the end
    try:
        _dispatch(app, parse(arguments, app), directory)
        return 0
    except UserError as error:
        return _say(str(error))
    except JobError as error:  # its traceback is on the screen or in its run.log already
        return _say(str(error))
    except COMPOSITION as error:
        return _say(str(explain(error, app)))
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        where = f" Continue with: {command(app)} resume={directory[0]}" if directory and directory[0].exists() else ""
        _say(f"Interrupted.{where}")
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        for path in directory:
            run_directory.release(path)


def command(app: str) -> str:
    """How the user calls this application."""
    return f"python -m {app}" if sys.argv[0].endswith("__main__.py") else Path(sys.argv[0]).name


def _dispatch(app: str, line: CommandLine, directory: list[Path]) -> None:
    """Help, inspection, resuming, a sweep or a run."""
    if line.help:
        from common.help_page import page

        print(page(app, command(app)))
        return
    if line.inspect:
        _inspect(app, line)
        return
    if line.resume is not None:
        folder = Path(line.resume)
        if (folder / ".hydra").is_dir() or (folder / "multirun.yaml").is_file():
            directory.append(folder)  # never an empty one, which would be removed at the end
        if (folder / "multirun.yaml").is_file():
            line.overrides = sweep_arguments(folder, line.overrides)
            line.multirun = True
        else:
            resume_run(app, folder, line.overrides)
            return
    with _hydra(app) as hydra:
        _start(app, hydra, line, directory)


def composed(app: str, arguments: Sequence[str]) -> DictConfig:
    """The checked configuration of a command line, for a command that is not a run of training."""
    from hydra.types import RunMode

    line = parse(arguments, app)
    with _hydra(app) as hydra:
        cfg = _compose(app, hydra, [*line.overrides, *_search_path(line)], RunMode.RUN)
        validate(cfg, app)
        return cfg


def _start(app: str, hydra: Any, line: CommandLine, directory: list[Path]) -> None:
    """Compose and check; then take a directory and go."""
    from hydra.types import RunMode

    overrides = [*line.overrides, *_search_path(line)]
    swept = _deferred(overrides, hydra)
    kept = [text for text in swept if not (text.startswith("method.") and "=choice(" in text)]
    master = _compose(app, hydra, kept, RunMode.MULTIRUN)  # without what is swept
    if line.multirun or master.hydra.mode == RunMode.MULTIRUN:
        if "WORLD_SIZE" in os.environ:
            raise UserError("A sweep cannot run under torchrun: start its runs one at a time, or sweep without it.")
        placed = _placed(app, line, "hydra.sweep.dir", directory)
        hydra.multirun(app, partial(run_job, app), [*swept, *placed, "hydra.mode=MULTIRUN"])
        return
    validate_values(_compose(app, hydra, overrides, RunMode.RUN), app)
    placed = _placed(app, line, "hydra.run.dir", directory)
    if int(os.environ.get("RANK", 0)) > 0:
        placed += ["hydra.output_subdir=null", "hydra/job_logging=silent"]
    else:
        print(f"Writing to {directory[0] if directory else line.values('hydra.run.dir')[-1]}", flush=True)
    _run_alone(app, hydra, [*overrides, *placed])


def _deferred(overrides: Sequence[str], hydra: Any) -> list[str]:
    """The overrides of a sweep. Settings of a method that only its jobs choose become sweeps over one value.

    Hydra leaves those to the jobs; it would otherwise look for them in a configuration that has no method yet.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=hydra.config_loader)
    if any(split(text)[0] == "method" and not parser.parse_override(text).is_sweep_override() for text in overrides):
        return list(overrides)
    deferred = []
    for text in overrides:
        key, value = split(text)
        own = key.startswith("method.") and bool(value) and not parser.parse_override(text).is_sweep_override()
        deferred.append(f"{key}=choice({value})" if own else text)
    return deferred


def _run_alone(app: str, hydra: Any, overrides: list[str]) -> None:
    """One run. Its error is carried past Hydra, which would print a line of its own about it."""
    errors: list[Exception] = []

    def task(cfg: DictConfig) -> None:
        try:
            run_job(app, cfg)
        except Exception as error:
            errors.append(error)

    hydra.run(app, task, overrides)
    if errors:
        raise errors[0]


def _compose(app: str, hydra: Any, overrides: list[str], mode: Any) -> DictConfig:
    """The composed configuration; what cannot be composed is explained with the settings that exist."""
    try:
        return hydra.compose_config(app, list(overrides), run_mode=mode, validate_sweep_overrides=mode.name == "RUN")
    except COMPOSITION as error:
        raise explain(error, app, known_keys(app, hydra, overrides)) from error


def known_keys(app: str, hydra: Any, overrides: Sequence[str]) -> list[str]:
    """Every setting that exists with the choices of a command line, its plain values left out."""
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    from common.config import all_groups

    choices = [text for text in overrides if split(text)[0].partition("@")[0] in all_groups()]
    try:
        plain = OmegaConf.to_container(hydra.compose_config(app, choices, run_mode=RunMode.MULTIRUN), resolve=False)
    except COMPOSITION:
        return []
    assert isinstance(plain, dict)
    plain.pop("hydra")
    return keys_of(plain)  # type: ignore[arg-type]


def _placed(app: str, line: CommandLine, key: str, directory: list[Path]) -> list[str]:
    """The override that says where to write: the user's own directory, or a new one."""
    own = line.values(key)
    if own:
        if line.resume is None:
            run_directory.refuse_used(Path(own[-1].strip("'\"")))
        return []
    what = "-".join(line.values("experiment") or line.values("method") or ["sweep"])
    reserve = run_directory.shared if "WORLD_SIZE" in os.environ else run_directory.reserve
    directory.append(reserve(app, what))
    return [f"{key}={directory[0].as_posix()}"]


def _search_path(line: CommandLine) -> list[str]:
    """The user's own configuration directories, as Hydra takes them."""
    folders = ",".join(f"'file://{folder}'" for folder in line.folders)
    return [f"hydra.searchpath=[{folders}]"] if folders else []


@contextmanager
def _hydra(app: str) -> Iterator[Any]:
    """Hydra over our configuration tree, with our sweeper among its plugins."""
    _offer_plugins()
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    with initialize_config_dir(str(conf_directory()), job_name=app, version_base="1.3"):
        yield GlobalHydra.instance().hydra


def _offer_plugins() -> None:
    """Let Hydra's scan find our sweeper, here and in the processes that a launcher starts."""
    if str(PLUGINS) not in sys.path:
        sys.path.append(str(PLUGINS))
    inherited = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(PLUGINS) not in inherited:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, inherited), str(PLUGINS)])
    from hydra.core.plugins import Plugins
    from hydra_plugins.arms_sweeper import ArmsSweeper

    Plugins.instance().register(ArmsSweeper)  # the scan may have been before, if this process used Hydra already


def _inspect(app: str, line: CommandLine) -> None:
    """Hydra's own flags (--cfg, --info, --hydra-help, --shell-completion): its command line does them."""
    _offer_plugins()
    import hydra

    sys.argv = [sys.argv[0], *line.inspect, *line.overrides, *_search_path(line)]
    os.environ["HYDRA_FULL_ERROR"] = "1"  # it would print and leave; this way the error comes here

    def task(cfg: DictConfig) -> Any:  # only --experimental-rerun gets as far as calling it
        return run_job(app, cfg)

    hydra.main(config_path=str(conf_directory()), config_name=app, version_base="1.3")(task)()


def _terminate(signum: int, frame: Any) -> None:
    """A polite kill ends a run as Ctrl-C does, so that its children and its W&B run end with it."""
    raise KeyboardInterrupt


def _say(sentence: str) -> int:
    """One sentence on stderr; the exit code of an error.

    What all ranks found, rank 0 says: the others wait to be ended by torchrun, and speak only if that does not happen.
    """
    logging.shutdown()
    rank = int(os.environ.get("RANK", 0))
    if rank > 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(OTHERS_WAIT)
        sentence = f"[rank {rank}] {sentence}"
    print(sentence, file=sys.stderr, flush=True)
    return 1
