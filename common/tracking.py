"""What a run tells the world, behind one object: metrics.jsonl, log lines, a progress bar, Weights & Biases.

    with Tracker(directory, world, name="opd seed 0", ..., total=500) as tracker:
        tracker.log(20, {"eval/acc/+": 0.41, "train/loss": 0.8}, times={"seconds": 3.2})
        tracker.advance(21)

Every rank makes one; only rank 0's does anything. metrics.jsonl holds a JSON object a line: `step`, then the values in
alphabetical order. All that is not a function of configuration and seed has a name under `time/`, so two runs of the
same configuration differ in nothing else. No result depends on W&B: metrics.jsonl has all of it.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

from common import wandb_run
from common.files import finite, write_text

if TYPE_CHECKING:
    from common.distributed import World

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
# Of the train/ metrics, those a log line shows. The rest is in metrics.jsonl and in W&B.
HEADLINE = ("loss", "signal", "reward", "kl", "entropy", "grad_norm")
MOST_EVALS = 8  # on a log line


class Tracker:
    """Records one run. A context manager: leaving it through an exception marks the W&B run failed."""

    def __init__(
        self,
        directory: Path,
        world: World,
        *,
        name: str,
        group: str,
        job_type: str,
        tags: Sequence[str],
        config: Mapping[str, Any],
        wandb: Mapping[str, Any],
        total: int | None,
    ) -> None:
        self.path = Path(directory) / METRICS
        self.total = total
        self._main = world.main
        self._wandb = wandb_run.WandbRun()
        self._wandb_arguments: dict[str, Any] = {
            "options": wandb, "name": name, "group": group, "job_type": job_type, "tags": tags, "config": config,
        }  # fmt: skip
        self._file: TextIO | None = None
        self._bar: Any = None
        self._stack = ExitStack()
        self._origin: tuple[int, float] | None = None  # first step seen and when, for the remaining time
        self._began = 0.0  # monotonic clock, moved back by what a resumed run had used already

    def __enter__(self) -> Self:
        if self._main:
            self._began = time.monotonic()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a", encoding="utf-8")
            self._wandb = wandb_run.start(self.path.parent, **self._wandb_arguments)
            if _on_terminal():
                self._open_bar()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._file is not None:
            self._file.close()
        self._wandb.finish(failed=kind is not None)

    def log(self, step: int, values: Mapping[str, float], times: Mapping[str, float] | None = None) -> None:
        """One line of metrics.jsonl, one W&B entry, one log line. NaN is written as null.

        `times` are written as `time/<name>`; `time/elapsed`, seconds of this run without its interruptions, is added.
        """
        if not self._main:
            return
        entry = finite({name: _plain(values[name]) for name in sorted(values)})
        times = {**(times or {}), "elapsed": round(time.monotonic() - self._began, 3)}
        entry |= finite({f"time/{name}": _plain(times[name]) for name in sorted(times)})
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **entry}, ensure_ascii=False, allow_nan=False) + "\n")
            self._file.flush()
        self._wandb.log(step, entry)
        self.advance(step)
        log.info("%s", line(step, self.total, entry, self._remaining(step)))

    def advance(self, step: int) -> None:
        """Move the progress bar; without a terminal there is none."""
        if not self._main:
            return
        if self._origin is None:
            self._origin = (step, time.monotonic())
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """A W&B table; nothing without W&B."""
        self._wandb.table(name, columns, rows)

    def summary(self, values: Mapping[str, Any]) -> None:
        """Values of the W&B run's summary; nothing without W&B."""
        self._wandb.summary(finite(dict(values)))

    def weights(self, directory: Path) -> None:
        """Keep a directory of weights as a W&B artifact, where `wandb.log_weights` asks for it."""
        if self._wandb_arguments["options"].get("log_weights"):
            self._wandb.artifact("weights", "model", directory)

    def rewind(self, step: int) -> None:
        """A run resumes at `step`: what was recorded after it, or half a last line, is dropped from metrics.jsonl."""
        if not self._main:
            return
        kept = [(text, entry) for text, entry in _entries(self.path) if entry["step"] <= step]
        if kept:
            self._began = time.monotonic() - (kept[-1][1].get("time/elapsed") or 0.0)
        if self._file is not None:
            self._file.close()
        write_text(self.path, "".join(text + "\n" for text, _ in kept))
        if self._file is not None:
            self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._origin = None
        if self._bar is not None:
            self._bar.initial = self._bar.n = step
            self._bar.refresh()

    def _remaining(self, step: int) -> float | None:
        """Seconds to the end at the pace so far; None where unknown."""
        if self.total is None or self._origin is None or step <= self._origin[0]:
            return None
        first, began = self._origin
        return (time.monotonic() - began) / (step - first) * max(self.total - step, 0)

    def _open_bar(self) -> None:
        from tqdm import tqdm
        from tqdm.contrib.logging import logging_redirect_tqdm

        self._stack.enter_context(logging_redirect_tqdm())  # log lines go above the bar instead of through it
        columns, rows = shutil.get_terminal_size()  # 80 x 24 where the terminal does not say; tqdm would draw nothing
        self._bar = self._stack.enter_context(
            tqdm(total=self.total, unit="step", ncols=columns, nrows=rows, leave=False)
        )


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    """The entries of a run's metrics.jsonl, in the order written; [] where there is none. Half a line is left out."""
    return [entry for _, entry in _entries(Path(directory) / METRICS)]


def line(step: int, total: int | None, entry: Mapping[str, float | None], remaining: float | None) -> str:
    """One log line: `step 120/500  acc + 0.812  loss 0.0321  signal 0.61  eta 0:42`."""
    position = f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"
    evals = [name for name in entry if name.startswith("eval/")]
    evals.sort(key=lambda name: not name.startswith("eval/acc/"))  # accuracies first, otherwise as they come
    shown = [(name.removeprefix("eval/").replace("/", " "), entry[name], "{:.3f}") for name in evals[:MOST_EVALS]]
    shown += [(name, entry[f"train/{name}"], "{:.3g}") for name in HEADLINE if f"train/{name}" in entry]
    parts = [position, *(f"{name} {form.format(value)}" for name, value, form in shown if value is not None)]
    if entry.get("train/skipped"):
        parts.append(f"SKIPPED {entry['train/skipped']:g}")  # updates that were not finite: rare, and worth a look
    if remaining is not None and remaining >= 1:
        parts.append(f"eta {clock(remaining)}")
    return "  ".join(parts)


def clock(seconds: float) -> str:
    """`0:42`, `12:05`, `3:07:00`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Whole lines of a metrics file with what they say."""
    if not path.exists():
        return []
    found = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            entry = json.loads(text)
        except json.JSONDecodeError:  # the line that was being written when the run was killed
            continue
        if isinstance(entry, dict) and "step" in entry:
            found.append((text, entry))
    return found


def _plain(value: Any) -> Any:
    """A Python number from a tensor's or an array's element."""
    return value.item() if hasattr(value, "item") else value


def _on_terminal() -> bool:
    """True where a progress bar can be seen; the workers of a parallel sweep would draw over each other."""
    return sys.stderr.isatty() and multiprocessing.current_process().name == "MainProcess"
