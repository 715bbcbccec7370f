"""The tracker: what lands in metrics.jsonl, in the log, on a terminal and in W&B."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import joblib
import pytest
import torch

from common import tracking, wandb_run
from common.distributed import World
from common.tracking import Tracker, clock, line, read_metrics
from tests.common.offline_wandb import offline_runs, tracked_job

OFFLINE = {"mode": "offline", "project": "test", "entity": None, "log_weights": False}
DISABLED = {**OFFLINE, "mode": "disabled"}


@pytest.fixture(autouse=True)
def _no_user_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


def make(directory: Path, wandb: dict[str, Any] = DISABLED, *, world: World | None = None, **changes: Any) -> Tracker:
    options: dict[str, Any] = {
        "name": "opd seed 0", "group": "rlsim/opd", "job_type": "opd", "tags": ["rlsim", "single"],
        "config": {"seed": 0, "a": {"b": [1]}},
    }  # fmt: skip
    return Tracker(directory, world or World(), wandb=wandb, total=40, **(options | changes))


# ------------------------------------------------------------------ metrics.jsonl


def test_an_entry_is_one_line_of_strict_json_in_a_fixed_order(tmp_path: Path) -> None:
    with make(tmp_path) as tracker:
        tracker.log(0, {"train/loss": float("nan"), "eval/acc/+": torch.tensor(0.5)}, {"seconds": 1.5})
        tracker.log(20, {"train/loss": float("inf"), "eval/acc/+": 1})
    first, second = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert re.fullmatch(
        r'\{"step": 0, "eval/acc/\+": 0.5, "train/loss": null, "time/elapsed": [\d.]+, "time/seconds": 1.5\}', first
    )
    assert json.loads(second) == {
        "step": 20,
        "eval/acc/+": 1,
        "train/loss": None,
        "time/elapsed": pytest.approx(0, abs=9),
    }


def test_an_entry_is_on_disk_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    with make(tmp_path) as tracker:
        tracker.log(0, {"a": 1.0})
        assert read_metrics(tmp_path)[0]["a"] == 1.0


def test_rewinding_drops_later_entries_and_half_a_line(tmp_path: Path) -> None:
    lines = ['{"step": 0, "a": 1}', '{"step": 20, "a": 2, "time/elapsed": 100.0}', '{"step": 40, "a": 3}', '{"step": 6']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert [entry["step"] for entry in read_metrics(tmp_path)] == [0, 20, 40]
    with make(tmp_path) as tracker:
        tracker.rewind(20)
        tracker.log(40, {"a": 4.0})
    entries = read_metrics(tmp_path)
    assert [(entry["step"], entry["a"]) for entry in entries] == [(0, 1), (20, 2), (40, 4.0)]
    assert 100 <= entries[-1]["time/elapsed"] < 110, "elapsed time goes on where the first part stopped"


def test_a_rank_that_is_not_the_first_leaves_nothing(tmp_path: Path) -> None:
    with make(tmp_path, OFFLINE, world=World(rank=1, size=2)) as tracker:
        tracker.log(0, {"a": 1.0})
        tracker.advance(1)
        tracker.rewind(0)
        tracker.table("t", ["a"], [[1]])
        tracker.summary({"a": 1})
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------ log lines and bar


def test_a_log_line_reads_by_itself() -> None:
    entry = {"eval/acc/+": 0.8123, "eval/acc/-": None, "eval/success": 0.5, "train/loss": 0.03214, "train/signal": 0.61}
    entry |= {"train/ratio_max": 9.0, "time/seconds": 4.0}
    said = line(120, 500, entry, 42.4)
    assert said == "step 120/500  acc + 0.812  success 0.500  loss 0.0321  signal 0.61  eta 0:42"
    assert line(7, None, {"eval/success": 1.0, "train/skipped": 0.0}, None) == "step 7  success 1.000"
    assert line(7, None, {"train/loss": 2.0, "train/skipped": 1.0}, None) == "step 7  loss 2  SKIPPED 1"


def test_the_clock_shows_hours_only_when_there_are_some() -> None:
    assert [clock(s) for s in (0, 42, 725, 11220)] == ["0:00", "0:42", "12:05", "3:07:00"]


def test_the_remaining_time_follows_the_pace_since_the_first_step_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(tracking.time, "monotonic", lambda: now[0])
    caplog.set_level(logging.INFO)
    with make(tmp_path) as tracker:
        tracker.rewind(10)
        for step in (10, 20):
            tracker.log(step, {"train/loss": 1.0})
            now[0] += 30
    assert [record.getMessage() for record in caplog.records] == ["step 10/40  loss 1", "step 20/40  loss 1  eta 1:00"]


TERMINAL = """
import logging, sys
from pathlib import Path
from types import SimpleNamespace
from common.tracking import Tracker
directory = Path(sys.argv[1])
handlers = [logging.StreamHandler(sys.stdout), logging.FileHandler(directory / "run.log")]
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)
about = {"name": "n", "group": "g", "job_type": "j", "tags": [], "config": {}, "wandb": {"mode": "disabled"}}
with Tracker(directory, SimpleNamespace(main=True), **about, total=3) as t:
    for step in range(4):
        t.advance(step)
        t.log(step, {"train/loss": 1.0 / (step + 1)})
"""


def test_a_terminal_gets_a_bar_and_the_log_file_plain_lines(tmp_path: Path) -> None:
    import pty

    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TERMINAL, str(tmp_path)], stdout=terminal, stderr=terminal, stdin=terminal
    )
    os.close(terminal)
    seen = b""
    while True:
        try:
            part = os.read(controller, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        seen += part
    assert process.wait() == 0, seen.decode()
    assert "| 0/3 [" in seen.decode(), seen
    logged = (tmp_path / "run.log").read_text()
    assert "\r" not in logged
    assert logged.splitlines()[-1] == "step 3/3  loss 0.25"


def test_without_a_terminal_nothing_is_drawn(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TERMINAL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert done.stdout.splitlines() == [f"step {s}/3  loss {1 / (s + 1):.3g}" for s in range(4)]


def test_disabled_wandb_and_torch_are_not_even_imported(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from types import SimpleNamespace
from common.tracking import Tracker
with Tracker(Path(sys.argv[1]), SimpleNamespace(main=True), name="n", group="g", job_type="j", tags=[], config={},
             wandb={"mode": "disabled"}, total=1) as tracker:
    tracker.log(0, {"a": 1.0})
print([name for name in ("wandb", "torch", "matplotlib") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ------------------------------------------------------------------ W&B


def test_wandb_records_the_run_its_curves_and_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with make(tmp_path, OFFLINE) as tracker:
        tracker.log(0, {"eval/acc/+": 0.25, "train/loss": float("nan")})
        tracker.log(20, {"eval/acc/+": 0.75})
        tracker.table("example", ["place", "wrote"], [["ones", "3"]])
        tracker.summary({"final/+": 0.75})
    (run,) = offline_runs(tmp_path)
    assert (run.name, run.group, run.job_type, run.tags) == ("opd seed 0", "rlsim/opd", "opd", ["rlsim", "single"])
    assert run.config["a"] == {"b": [1]}
    curve = [(entry["step"], entry["eval/acc/+"]) for entry in run.history if "eval/acc/+" in entry]
    assert curve == [(0, 0.25), (20, 0.75)]
    assert all("train/loss" not in entry for entry in run.history), "a value that is not a number has no point"
    assert run.axes["*"] == "step"
    assert run.summary["final/+"] == 0.75
    assert any("ones" in path.read_text() for path in tmp_path.rglob("example*.table.json"))
    assert run.exit_code == 0
    assert capfd.readouterr().err == "", "W&B itself says nothing"


def test_a_run_that_fails_is_a_failed_wandb_run_and_the_exception_passes(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), make(tmp_path, OFFLINE) as tracker:
        tracker.log(1 // 0, {})
    (run,) = offline_runs(tmp_path)
    assert run.exit_code == 1


def test_every_job_of_a_process_has_its_own_wandb_run(tmp_path: Path) -> None:
    for seed in range(3):
        with make(tmp_path / str(seed), OFFLINE, name=f"seed {seed}") as tracker:
            tracker.log(0, {"a": float(seed)})
    found = [run for seed in range(3) for run in offline_runs(tmp_path / str(seed))]
    assert [(run.name, run.history[0]["a"]) for run in found] == [("seed 0", 0), ("seed 1", 1), ("seed 2", 2)]
    assert len({run.identity for run in found}) == 3


def test_reused_workers_of_a_parallel_sweep_record_one_wandb_run_a_job(tmp_path: Path) -> None:
    workers = joblib.Parallel(n_jobs=2, return_as="list")(
        joblib.delayed(tracked_job)(str(tmp_path / str(seed)), seed) for seed in range(4)
    )
    assert len(set(workers) - {None}) <= 2, "workers are reused, which is what this is about"
    found = [offline_runs(tmp_path / str(seed)) for seed in range(4)]
    assert [[(run.name, run.exit_code) for run in runs] for runs in found] == [
        [(f"seed {seed}", int(seed == 1))] for seed in range(4)
    ]
    assert len({runs[0].identity for runs in found}) == 4


def test_a_run_that_an_earlier_job_left_open_is_not_continued(tmp_path: Path) -> None:
    left = make(tmp_path / "left", OFFLINE, name="left")
    left.__enter__()
    with make(tmp_path / "next", OFFLINE, name="next") as tracker:
        tracker.log(0, {"a": 1.0})
    (run,) = offline_runs(tmp_path / "next")
    assert run.name == "next"
    assert run.history[0]["a"] == 1.0
    assert offline_runs(tmp_path / "left")[0].exit_code == 1


def test_a_resumed_run_keeps_its_wandb_id(tmp_path: Path) -> None:
    for start in (0, 20):
        with make(tmp_path, OFFLINE) as tracker:
            tracker.rewind(start)
            tracker.log(start + 20, {"a": 1.0})
        time.sleep(1.1)  # W&B names its directory by the second
    first, second = offline_runs(tmp_path)
    assert first.identity == second.identity != ""
    assert [run.history[0]["step"] for run in (first, second)] == [20, 40]


def test_without_credentials_online_records_offline_and_never_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with make(tmp_path, {**OFFLINE, "mode": "online"}) as tracker:
        tracker.log(0, {"a": 1.0})
    assert "wandb login" in caplog.text
    assert len(offline_runs(tmp_path)) == 1


@pytest.mark.parametrize("broken", ["init", "login"])
def test_wandb_that_cannot_start_costs_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    import wandb

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("the service does not start")

    monkeypatch.setattr(wandb, broken, fail)
    with make(tmp_path, {**OFFLINE, "mode": "online" if broken == "login" else "offline"}) as tracker:
        tracker.log(0, {"a": 1.0})
    assert "the service does not start" in caplog.text
    assert len(read_metrics(tmp_path)) == 1


def test_wandb_that_is_not_installed_costs_a_warning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with make(tmp_path, OFFLINE) as tracker:
        tracker.log(0, {"a": 1.0})
    assert caplog.text.count("the run goes on without it") == 1
    assert len(read_metrics(tmp_path)) == 1


def test_wandb_that_breaks_in_the_middle_is_dropped_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        calls = 0

        def log(self, *_: Any) -> None:
            Broken.calls += 1
            raise ConnectionError("gone")

    monkeypatch.setattr(wandb_run, "_start", lambda *_: Broken())
    with make(tmp_path, OFFLINE) as tracker:
        tracker.log(0, {"a": 1.0})
        tracker.log(1, {"a": 1.0})
    assert Broken.calls == 1
    assert caplog.text.count("gone") == 1
    assert len(read_metrics(tmp_path)) == 2


def test_names_longer_than_the_server_takes_stay_distinct() -> None:
    long = [wandb_run._shorten("x" * 200 + end, 128) for end in "ab"]
    assert [len(text) for text in long] == [128, 128]
    assert long[0] != long[1]
    assert wandb_run._shorten("x" * 128, 128) == "x" * 128
