"""The report of a sweep and of a run, on run directories with invented curves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.report import write_run, write_sweep
from common.report.__main__ import main
from common.report.curves import Arm, arms_of, measures_of, read_runs
from common.report.plots import spread
from common.report.statistics import interval
from tests.common.synthetic_runs import write_synthetic_run, write_synthetic_sweep

ARMS = {"sft": {"+": 0.95}, "rlvr": {"+": 0.6}, "opd": {"+": 0.9}}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    write_synthetic_sweep(tmp_path, ARMS, [0, 1, 2])
    return tmp_path


def cells(text: str) -> dict[str, dict[str, str]]:
    """The table of a summary: arm -> column -> cell."""
    lines = [[c.strip() for c in row.strip("|").split(" | ")] for row in text.splitlines() if row.startswith("|")]
    return {row[0]: dict(zip(lines[0], row, strict=True)) for row in lines[2:]}


def result(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "result.json").read_text())


# ------------------------------------------------------------------ a whole sweep


def test_a_sweep_leaves_numbers_a_table_and_a_picture(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = write_sweep(sweep, name="single", failed=[])
    assert picture == sweep / "curves.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = cells((sweep / "summary.md").read_text())
    assert cells(capsys.readouterr().out) == table
    for arm in ARMS:
        finals = [result(sweep / arm / f"seed={seed}")["final"]["+"] for seed in range(3)]
        mean, half = interval(finals)
        assert table[arm]["final +"] == f"{mean:.3f} ± {half:.3f}"
        assert table[arm]["n"] == "3"
        assert table[arm]["seconds"] == "101"
    assert table["rlvr"]["+ to 90%"] == ">500 (0/3)"


def test_the_results_file_has_the_schema_of_the_reference(sweep: Path) -> None:
    write_sweep(sweep, name="single", arms=["sft", "rlvr", "opd"])
    found = json.loads((sweep / "results" / "single.json").read_text())
    assert list(found)[:7] == ["steps", "seeds", "batch", "group", "lr", "warm", "runs"]
    assert (found["steps"], found["seeds"], found["batch"], found["group"], found["lr"]) == (500, 3, 256, 8, 5e-4)
    assert found["warm"] == [{"steps": 400 + seed, "+": 0.3} for seed in range(3)]
    assert list(found["runs"]) == ["sft", "rlvr", "opd"]
    for arm, runs in found["runs"].items():
        assert [(run["seed"], run["arm"], run["directory"]) for run in runs] == [
            (seed, arm, f"{arm}/seed={seed}") for seed in range(3)
        ]
        assert runs[1]["curve"] == result(sweep / arm / "seed=1")["curve"]
    assert found["failed"] == []
    assert "example" not in found


def test_curves_come_from_the_metrics_where_the_result_has_none(sweep: Path) -> None:
    for path in sweep.rglob("result.json"):
        stored = json.loads(path.read_text())
        del stored["curve"]
        path.write_text(json.dumps(stored))
    write_sweep(sweep, name="single")
    point = json.loads((sweep / "results" / "single.json").read_text())["runs"]["opd"][0]["curve"][1]
    logged = [json.loads(line) for line in (sweep / "opd" / "seed=0" / "metrics.jsonl").read_text().splitlines()][1]
    assert point == {"step": 20, "+": logged["eval/acc/+"], "signal": logged["train/signal"]}


def test_settings_that_differ_between_runs_are_not_given_for_all(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, "a", 0, ends={"+": 0.9}, lr=1e-3)
    write_synthetic_run(tmp_path, "b", 0, ends={"+": 0.9}, lr=1e-4, example={"problem": "1+1="})
    write_sweep(tmp_path, name="lr")
    found = json.loads((tmp_path / "results" / "lr.json").read_text())
    assert (found["lr"], found["batch"]) == (None, 256)
    assert found["example"] == {"problem": "1+1="}


def test_failed_and_unfinished_jobs_are_named_with_their_logs(sweep: Path) -> None:
    write_synthetic_run(sweep, "opd", 3, ends={"+": 0.9}, finished=False)
    write_synthetic_run(sweep, "opd", 4, ends={"+": 0.9}, finished=False)
    failed = [
        {"arm": "opd", "seed": 3, "directory": str(sweep / "opd" / "seed=3"), "error": "Traceback\nValueError: x"}
    ]
    write_sweep(sweep, name="single", failed=failed)
    text = (sweep / "summary.md").read_text()
    assert "- opd, seed 3: ValueError: x (log: opd/seed=3/run.log)" in text
    assert "- opd, seed 4: no result.json (log: opd/seed=4/run.log)" in text
    assert cells(text)["opd"]["n"] == "3", "half a run is in no mean"
    stored = json.loads((sweep / "results" / "single.json").read_text())["failed"]
    assert stored == [{**failed[0], "directory": "opd/seed=3"}]


def test_a_sweep_in_which_every_job_failed_still_has_its_report(tmp_path: Path) -> None:
    failed = [{"arm": "opd", "seed": 0, "directory": "opd/seed=0", "error": "UserError: no"}]
    assert write_sweep(tmp_path, name="none", failed=failed).exists()
    text = (tmp_path / "summary.md").read_text()
    assert "No run finished." in text
    assert "- opd, seed 0: UserError: no (log: opd/seed=0/run.log)" in text


def test_a_report_names_no_place_outside_its_sweep(sweep: Path) -> None:
    write_sweep(sweep, name="single", failed=[{"arm": "x", "seed": 0, "directory": str(sweep / "x"), "error": "e"}])
    for file in ("summary.md", "results/single.json"):
        assert str(sweep) not in (sweep / file).read_text()


def test_one_seed_has_no_interval_and_the_page_says_so(tmp_path: Path) -> None:
    write_synthetic_sweep(tmp_path, ARMS, [0])
    write_sweep(tmp_path, name="one")
    text = (tmp_path / "summary.md").read_text()
    assert "±" not in cells(text)["opd"]["final +"]
    assert "One seed has no interval." in text


def test_every_subject_and_other_evaluation_has_its_columns(tmp_path: Path) -> None:
    write_synthetic_sweep(tmp_path, {"sft": {"code": 0.8, "digit": 0.95, "success": 0.92}}, [0, 1], app="bt_policy")
    write_sweep(tmp_path, name="bt")
    assert list(cells((tmp_path / "summary.md").read_text())["sft"]) == [
        "arm", "n", "final code", "final digit", "final success", "start code", "start digit", "start success",
        "code to 90%", "digit to 90%", "success to 90%", "seconds",
    ]  # fmt: skip


def test_the_table_is_aligned_as_plain_text_whatever_arms_are_called(tmp_path: Path) -> None:
    write_synthetic_sweep(tmp_path, {"a|b": {"+": 0.5}, "teachers=add,curriculum=mix": {"+": 0.9}}, [0, 1])
    write_sweep(tmp_path, name="odd/name")
    rows = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("|")]
    assert len({len(row) for row in rows}) == 1
    assert rows[2].startswith("| a\\|b ")
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["odd%2Fname.json"]


# ------------------------------------------------------------------ reading


def test_a_run_without_a_result_takes_arm_and_seed_from_its_place(tmp_path: Path) -> None:
    write_synthetic_run(tmp_path, "opd/weak", 12, ends={"+": 0.9}, finished=False)
    (run,) = read_runs(tmp_path)
    assert (run.arm, run.seed, run.result) == ("opd/weak", 12, None)


def test_the_same_seed_twice_counts_once_and_the_newer_one_stays(tmp_path: Path) -> None:
    old = write_synthetic_run(tmp_path / "old", "opd", 0, ends={"+": 0.5})
    new = write_synthetic_run(tmp_path / "new", "opd", 0, ends={"+": 0.9})
    os.utime(old / "result.json", (1, 1))
    (arm,) = arms_of(read_runs(tmp_path))
    assert [run.directory for run in arm.runs] == [new]


def test_damaged_files_are_passed_over(sweep: Path, caplog: pytest.LogCaptureFixture) -> None:
    (sweep / "opd" / "seed=0" / "result.json").write_text('{"arm": "op')
    with open(sweep / "opd" / "seed=1" / "metrics.jsonl", "a") as file:
        file.write('{"step": 520, "eval/acc')
    arms = {arm.name: arm for arm in arms_of(read_runs(sweep))}
    assert [run.seed for run in arms["opd"].runs] == [1, 2]
    assert len(arms["opd"].runs[0].curve("acc/+")[0]) == 26
    assert "not readable" in caplog.text


def test_curves_with_the_same_steps_are_stacked_as_they_are(sweep: Path) -> None:
    arm = next(arm for arm in arms_of(read_runs(sweep)) if arm.name == "opd")
    xs, values_SP = arm.curves("acc/+")
    assert xs.tolist() == list(range(0, 501, 20))
    assert values_SP[2].tolist() == [p["+"] for p in result(sweep / "opd" / "seed=2")["curve"]]


def test_curves_with_other_steps_meet_where_all_seeds_are(tmp_path: Path) -> None:
    for seed, points in enumerate(([(0, 0.0), (10, 1.0)], [(0, 0.5), (4, 0.7), (8, 0.9), (12, 1.0)])):
        directory = tmp_path / "a" / f"seed={seed}"
        directory.mkdir(parents=True)
        lines = [json.dumps({"step": step, "eval/acc/+": value}) for step, value in points]
        (directory / "metrics.jsonl").write_text("\n".join(lines))
        (directory / "result.json").write_text(json.dumps({"arm": "a", "seed": seed, "final": {"+": points[-1][1]}}))
    (arm,) = arms_of(read_runs(tmp_path))
    xs, values_SP = arm.curves("acc/+")
    assert xs.tolist() == [0, 4, 8, 10]
    np.testing.assert_allclose(values_SP, [[0, 0.4, 0.8, 1.0], [0.5, 0.7, 0.9, 0.95]])


def test_curves_can_run_over_seconds(sweep: Path) -> None:
    arm = next(arm for arm in arms_of(read_runs(sweep)) if arm.name == "opd")
    xs, values_SP = arm.curves("acc/+", "time/elapsed")
    assert values_SP.shape == (3, len(xs))
    assert 60 < xs[-1] < 63
    assert write_sweep(sweep, name="single", x="time/elapsed").exists()


def test_a_null_in_a_curve_leaves_its_point_out(tmp_path: Path) -> None:
    directory = write_synthetic_run(tmp_path, "a", 0, ends={"+": 0.9}, steps=40)
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    lines[1]["eval/acc/+"] = None
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run,) = read_runs(tmp_path)
    assert run.curve("acc/+")[0].tolist() == [0, 40]


def test_arms_keep_a_given_order_and_otherwise_sort_as_people_do(tmp_path: Path) -> None:
    write_synthetic_sweep(tmp_path, {f"lr={n}": {"+": 0.5} for n in (10, 9, 100)}, [0], steps=20)
    runs = read_runs(tmp_path)
    assert [arm.name for arm in arms_of(runs)] == ["lr=9", "lr=10", "lr=100"]
    assert [arm.name for arm in arms_of(runs, ["lr=100", "missing"])] == ["lr=100", "lr=9", "lr=10"]


def test_accuracies_come_before_other_measures(tmp_path: Path) -> None:
    write_synthetic_sweep(tmp_path, {"a": {"success": 0.9, "digit": 0.9, "code": 0.5}}, [0], steps=20)
    assert measures_of(arms_of(read_runs(tmp_path))) == ["acc/code", "acc/digit", "success"]
    assert measures_of([Arm("none")]) == []


# ------------------------------------------------------------------ pictures


@pytest.mark.parametrize(("arms", "subjects"), [(1, "+"), (6, "+-"), (16, "abcd"), (40, "+-")])
def test_any_number_of_arms_and_subjects_is_drawn(tmp_path: Path, arms: int, subjects: str) -> None:
    ends = {f"arm {i} $x_{i}$": dict.fromkeys(subjects, i / arms) for i in range(arms)}
    write_synthetic_sweep(tmp_path, ends, [0, 1], steps=60)
    assert write_sweep(tmp_path, name="many").stat().st_size > 10_000


def test_the_same_runs_give_the_same_picture(sweep: Path) -> None:
    first = write_sweep(sweep, name="single").read_bytes()
    code = "import sys; from common.report import write_sweep; write_sweep(sys.argv[1], name='single')"
    settings = sweep / "matplotlibrc"
    settings.write_text("lines.linewidth: 9\nfont.size: 30\n")
    environment = {**os.environ, "MATPLOTLIBRC": str(settings)}
    subprocess.run([sys.executable, "-c", code, str(sweep)], env=environment, check=True, capture_output=True)
    assert (sweep / "curves.png").read_bytes() == first


def test_a_run_has_its_own_page_finished_or_not(tmp_path: Path) -> None:
    whole = write_synthetic_run(tmp_path, "opd", 0, ends={"+": 0.9, "-": 0.4, "success": 0.5})
    half = write_synthetic_run(tmp_path, "opd", 1, ends={"+": 0.9}, finished=False)
    long = write_synthetic_run(tmp_path, "opd", 2, ends={"+": 0.9}, steps=2000, every=1)
    (tmp_path / "empty").mkdir()
    for directory in (whole, half, long, tmp_path / "empty"):
        assert write_run(directory) == directory / "curves.png"


def test_labels_are_pushed_apart_and_stay_inside() -> None:
    wanted = [0.99, 1.0, 0.5, 0.98, 0.02]
    placed = spread(wanted, 0.06, -0.02, 1.02)
    assert placed[2] == 0.5
    assert placed[4] == 0.02
    ordered = sorted(placed)
    assert min(b - a for a, b in pairwise(ordered)) == pytest.approx(0.06)
    assert np.argsort(placed).tolist() == np.argsort(wanted).tolist()
    assert max(placed) == pytest.approx(1.02)


def test_many_equal_labels_share_the_space_there_is() -> None:
    placed = spread([0.0] * 5, 0.1, 0.0, 1.0)
    np.testing.assert_allclose(sorted(placed), [0, 0.1, 0.2, 0.3, 0.4])


def test_a_report_needs_no_torch_and_a_reader_no_matplotlib(sweep: Path) -> None:
    code = (
        "import sys; from common.report import write_sweep; before = 'matplotlib' in sys.modules;"
        "write_sweep(sys.argv[1], name='single');"
        "print(before, 'torch' in sys.modules, 'matplotlib.pyplot' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sweep)], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False False False"


# ------------------------------------------------------------------ command line


def test_the_command_rebuilds_a_sweep_after_seeds_were_added(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = [{"arm": a, "seed": 3, "directory": f"{a}/seed=3", "error": "e"} for a in ("opd", "rlvr")]
    write_sweep(sweep, name="single", arms=["sft", "rlvr", "opd"], failed=failed)
    write_synthetic_run(sweep, "opd", 3, ends={"+": 0.9})
    assert main([str(sweep)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(sweep / "curves.png")
    found = json.loads((sweep / "results" / "single.json").read_text())
    assert list(found["runs"]) == ["sft", "rlvr", "opd"], "the order stays"
    assert len(found["runs"]["opd"]) == 4
    assert [entry["arm"] for entry in found["failed"]] == ["rlvr"], "what has a result has not failed"


def test_the_command_draws_the_page_of_a_run(sweep: Path) -> None:
    assert main([str(sweep / "opd" / "seed=0")]) == 0
    assert (sweep / "opd" / "seed=0" / "curves.png").exists()


@pytest.mark.parametrize("place", ["missing", "empty"])
def test_the_command_says_in_a_sentence_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / place)]) == 1
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
