"""The jobs of a sweep: checked before the first starts, followed while they run, summed up at the end.

Progress is read from the jobs' directories, so it works with every launcher that shares a file system with this
process: a job is done when its result.json appears, and has failed when its error.json does.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import yaml
from omegaconf import DictConfig, OmegaConf

from common.arms import Job
from common.config import validate_values, whole
from common.errors import UserError
from common.hydra_errors import COMPOSITION, explain, keys_of
from common.job import FAILURE, JobError
from common.tracking import clock

Compose = Callable[[Sequence[str]], DictConfig]
SIBLING = re.compile(r"arm://([^\s,'\"\]}]+)")  # a setting that names what another arm of the sweep leaves
POLL = 0.5  # seconds between looks at the jobs' directories


@dataclass(frozen=True)
class Placed:
    """A job with its seed and its directory."""

    job: Job
    seed: int
    directory: Path

    @property
    def name(self) -> str:
        """How a person calls it."""
        return f"{self.job.arm} seed={self.seed}"

    @property
    def finished(self) -> bool:
        """True where its result is there."""
        return (self.directory / "result.json").is_file()

    @property
    def begun(self) -> bool:
        """True where it was started at all."""
        return (self.directory / "run.log").is_file()

    @property
    def needs(self) -> set[str]:
        """The arms whose results its settings name (`model.teacher=arm://sft`)."""
        return {arm for text in self.job.overrides for arm in SIBLING.findall(text)}

    def beside(self, arm: str) -> Path:
        """The result of another arm of the sweep with the same seed."""
        return self.directory.parents[1] / arm / self.directory.name / "result.json"

    def overrides(self, *, quiet: bool) -> list[str]:
        """What the launcher gets. A job that was stopped resumes; a parallel one keeps its log to its file."""
        extra = [f"arm='{self.job.arm}'"]
        if quiet:
            extra.append("hydra/job_logging=file")
        if (self.directory / "checkpoints").is_dir():
            extra.append(f"resume='{self.directory.as_posix()}'")
        return [*self.job.overrides, *extra]


def check(app: str, jobs: Sequence[Job], compose: Compose, directory: Path) -> list[Placed]:
    """Compose and validate every job; the first that cannot run is a UserError and nothing is started.

    Jobs that differ in their seed alone are composed once: composing takes a quarter of a second.
    """
    seeds: dict[tuple[str, ...], int] = {}
    placed: list[Placed] = []
    for job in jobs:
        rest = tuple(text for text in job.overrides if not text.startswith("seed="))
        if rest in seeds and len(rest) < len(job.overrides):
            seed = yaml.safe_load(next(text for text in job.overrides if text.startswith("seed="))[len("seed=") :])
            whole("seed", seed, 0)
        else:
            seed = seeds[rest] = _checked(app, job, compose, alone=len(jobs) == 1).seed
        placed.append(Placed(job, seed, directory / job.arm / f"seed={seed}"))
    waves(placed)
    for earlier, later in _pairs(placed):
        raise UserError(
            f"Two jobs would write to {later.directory}: "
            f"{' '.join(earlier.job.overrides)} and {' '.join(later.job.overrides)}."
        )
    return placed


def waves(jobs: Sequence[Placed]) -> list[list[Placed]]:
    """The jobs in groups that can run side by side: each behind the arms of its seed that its settings name.

    UserError where a job needs an arm that is neither in the sweep nor done, or where arms need each other.
    """
    found: list[list[Placed]] = []
    left, done = list(jobs), {(job.job.arm, job.seed) for job in jobs if job.finished}
    while left:
        ready = [job for job in left if all((arm, job.seed) in done or job.beside(arm).is_file() for arm in job.needs)]
        if not ready:
            job = left[0]
            missing = sorted(job.needs - {other.job.arm for other in jobs if other.seed == job.seed})
            if missing:
                both = ",".join([*missing, job.job.arm])
                raise UserError(f"{job.name} learns from what the arm {missing[0]} leaves; run it too: arm={both}.")
            raise UserError(f"The arms {', '.join(sorted({one.job.arm for one in left}))} wait for each other.")
        found.append(ready)
        done |= {(job.job.arm, job.seed) for job in ready}
        left = [job for job in left if job not in ready]
    return found


def _checked(app: str, job: Job, compose: Compose, *, alone: bool) -> DictConfig:
    """A job's configuration, composed and valid."""
    try:
        cfg = compose([*job.overrides, f"arm='{job.arm}'"])
        validate_values(cfg, app)
    except COMPOSITION as error:
        said = str(explain(error, app, _keys(compose, job)))
        of_the_arm = said.startswith("method.") and not alone  # other settings exist in all arms or in none
        raise UserError(f"{job.arm}: {said}" if of_the_arm else said) from error
    except UserError as error:
        raise UserError(str(error) if alone else f"{job.arm}: {error}") from error
    return cfg


def _pairs(placed: Sequence[Placed]) -> list[tuple[Placed, Placed]]:
    """Jobs that share a directory."""
    first: dict[Path, Placed] = {}
    return [(first[p.directory], p) for p in placed if first.setdefault(p.directory, p) is not p]


def _keys(compose: Compose, job: Job) -> list[str]:
    """The settings that exist for a job, from its choices of options alone."""
    try:
        plain: Any = OmegaConf.to_container(
            compose([text for text in job.overrides if text.startswith("experiment=")]), resolve=False
        )
    except COMPOSITION:
        return []
    plain.pop("hydra")
    return keys_of(plain)


@dataclass
class Progress:
    """Prints a line as each job ends; a thread, so that it runs beside whatever the launcher does."""

    jobs: Sequence[Placed]
    directory: Path
    reported: set[str] = field(default_factory=set)

    def __enter__(self) -> Self:
        arms = len({job.job.arm for job in self.jobs})
        seeds = len({job.seed for job in self.jobs})
        known = [job for job in self.jobs if job.finished]
        self.reported = {job.name for job in known}
        done = f", {len(known)} done already" if known else ""
        _line(f"{len(self.jobs)} runs ({_count(arms, 'arm')}, {_count(seeds, 'seed')}{done}) in {self.directory}")
        for job in self.jobs:
            (job.directory / FAILURE).unlink(missing_ok=True)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if kind is None:
            self._look()

    def failures(self, broken: str | None) -> list[dict[str, Any]]:
        """The jobs without a result, each with its reason."""
        failed = []
        for job in self.jobs:
            if not job.finished:
                reason = _read(job.directory / FAILURE).get("error") or broken or "ended without a result"
                relative = job.directory.relative_to(self.directory).as_posix()
                failed.append({"arm": job.job.arm, "seed": job.seed, "directory": relative, "error": reason})
        return failed

    def _follow(self) -> None:
        while not self._stop.wait(POLL):
            self._look()

    def _look(self) -> None:
        """Report the jobs that ended since the last look."""
        for job in self.jobs:
            if job.name in self.reported:
                continue
            if job.finished:
                self._end(job, f"done: {_outcome(_read(job.directory / 'result.json'))}")
            elif (job.directory / FAILURE).is_file():
                self._end(job, f"FAILED: {_read(job.directory / FAILURE).get('error')}")

    def _end(self, job: Placed, text: str) -> None:
        self.reported.add(job.name)
        _line(f"[{len(self.reported)}/{len(self.jobs)}] {job.name} {text}")


def report(directory: Path, name: str, failed: list[dict[str, Any]], jobs: Sequence[Placed]) -> None:
    """Write the sweep's summary and picture; its path is the last line. Failed jobs are a JobError afterwards."""
    from common.report import write_sweep

    arms = list(dict.fromkeys(job.job.arm for job in jobs))
    picture = write_sweep(directory, name=name, failed=failed, arms=arms)
    _line(os.path.relpath(picture))
    if failed:
        first = failed[0]
        others = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        where = directory / first["directory"]
        raise JobError(
            f"{len(failed)} of {len(jobs)} runs failed: "
            f"{first['arm']} seed={first['seed']} ({first['error']}){others}; "
            f"see {where / 'run.log'}; resume={directory} runs what has no result again."
        )


def _read(file: Path) -> dict[str, Any]:
    """A small JSON file; {} where it is not there (or not yet)."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}


def _outcome(result: dict[str, Any]) -> str:
    """`+ 0.314 -> 0.937, in 0:21`."""
    start, final = result.get("start") or {}, result.get("final") or {}
    parts = []
    for key, value in final.items():
        if isinstance(value, float):
            before = start.get(key)
            parts.append(f"{key} {before:.3f} -> {value:.3f}" if isinstance(before, float) else f"{key} {value:.3f}")
    if isinstance(result.get("seconds"), (int, float)):
        parts.append(f"in {clock(result['seconds'])}")
    return ", ".join(parts) or "finished"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _line(text: str) -> None:
    print(text, flush=True)
