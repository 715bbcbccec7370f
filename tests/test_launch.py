"""From a command line to runs, with a stand-in for the application: what is written, said and returned.

The stand-in trains nothing, so these run in this process; the last tests start the real commands.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from common import run_directory
from common.errors import UserError
from common.launch import launch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def undisturbed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A fresh working directory, and the process as it was: launching sets handlers, signals and thread counts."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
    monkeypatch.setattr("common.job.prepare_torch", lambda threads: None)
    root, handler = logging.getLogger(), signal.getsignal(signal.SIGTERM)
    kept, level = list(root.handlers), root.level
    yield
    signal.signal(signal.SIGTERM, handler)
    for extra in [h for h in root.handlers if h not in kept]:
        root.removeHandler(extra)
        extra.close()
    root.handlers[:] = kept
    root.setLevel(level)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> list[DictConfig]:
    """Stands in for `rlsim.app`; the configurations it was given. seed=13 fails, seed=14 is the user's mistake."""
    seen: list[DictConfig] = []

    def run(cfg: DictConfig, directory: Path) -> dict:
        seen.append(cfg)
        logging.getLogger("app").info("seed %d", cfg.seed)
        if cfg.seed == 13:
            raise ValueError("broken on purpose")
        if cfg.seed == 14:
            raise UserError("Fourteen is not allowed.")
        if cfg.seed == 15:
            raise KeyboardInterrupt
        result = {
            "app": cfg.app, "method": cfg.method.name, "teachers": "add", "curriculum": "add", "arm": cfg.arm,
            "seed": cfg.seed, "steps": cfg.steps, "start": {"+": 0.25}, "final": {"+": 0.5}, "seconds": 1.0,
            "curve": [{"step": 0, "+": 0.25, "signal": None}, {"step": cfg.steps, "+": 0.5, "signal": None}],
            "warm": {"steps": 1, "+": 0.25}, "batch": 256, "group": 8, "lr": 5e-4, "directory": ".",
        }  # fmt: skip
        points = [{"step": 0, "eval/acc/+": 0.25}, {"step": cfg.steps, "eval/acc/+": 0.5}]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
        (directory / "result.json").write_text(json.dumps(result))
        return result

    monkeypatch.setitem(sys.modules, "rlsim.app", types.SimpleNamespace(run=run))
    return seen


@pytest.fixture
def unpainted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of a sweep without its picture, which takes seconds."""
    monkeypatch.setattr("common.report.plots.draw_sweep", lambda *args, **kwargs: None)


def only(pattern: str) -> Path:
    found = list(Path().glob(pattern))
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("words", [["-m", "method=rlvr,ppo", "start=cold"], ["experiment=single", "arm=rlvr,opd"]])
def test_a_setting_of_the_method_reaches_every_job_of_a_sweep_over_methods(app: list[DictConfig], words: list[str]):
    quiet = ["seed=0", "hydra/launcher=basic", "method.optim.lr=0.25", "method.optim.betas=[0.8,0.9]"]
    launch("rlsim", [*words, *quiet])
    assert len(app) == 2
    assert {cfg.method.optim.lr for cfg in app} == {0.25}
    assert {tuple(cfg.method.optim.betas) for cfg in app} == {(0.8, 0.9)}


def test_a_setting_that_one_method_of_a_sweep_lacks_is_refused_in_its_name(
    app: list[DictConfig], capsys: pytest.CaptureFixture[str]
):
    assert launch("rlsim", ["-m", "method=opd,rlvr", "method.objective.kind=jsd"]) == 1
    assert capsys.readouterr().err.startswith("rlvr: method.objective.kind is not a setting of rlsim.")
    assert app == []


def test_a_run_has_its_own_directory_named_by_time_and_method(app: list[DictConfig]):
    assert launch("rlsim", ["+method=opd", "seed=3", "steps=7"]) == 0
    directory = only("outputs/rlsim/*_opd")
    assert (app[0].method.name, app[0].seed, app[0].steps) == ("opd", 3, 7)
    assert {path.name for path in directory.iterdir()} == {".hydra", "run.log", "metrics.jsonl", "result.json"}
    assert "seed 3" in (directory / "run.log").read_text()


def test_a_mistake_leaves_no_directory_behind(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    for words in (["method=sft", "steps=0"], ["-m", "method=sft", "steps=3,0"], ["experiment=single", "sede=1,2"], []):
        assert launch("rlsim", words) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.count("\n") == 1
    assert app == []
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("method=sft stpes=3", "stpes is not a setting of rlsim. Did you mean steps?"),
        ("method=sft data.digitz=3", "data.digitz is not a setting of rlsim. Did you mean data.digits?"),
        ("method=sft seed=0,1", "seed=0,1 lists several values: add -m"),
        ("method=sft +seed=1", "seed exists already: write seed=... without the +."),
        ("method=sft steps=[1", "steps=[1 cannot be read: "),
        ("method=sft hydra/launcher=jblib", "hydra/launcher=jblib is not known; choose one of "),
        ("experiment=single stpes=3 seed=0,1", "stpes is not a setting of rlsim. Did you mean steps?"),
        ("experiment=single sede=0,1", "sede is not a setting of rlsim. Did you mean seed?"),
        ("-m method=sft steps=1,-1", "sft-steps=-1: steps=-1 must be a whole number of at least 1."),
        ("-m method=sft seed=interval(0,3)", "seed=interval(0,3): only lists of values can be swept here"),
        ("-m arm=x method=sft", "arm= picks among the arms of an experiment, and this sweep has none."),
        ("--cfg job method=sft stpes=3", "stpes is not a setting of rlsim."),
        ("resume=nowhere", "resume=nowhere: there is no run (no nowhere/.hydra/config.yaml)."),
    ],
)
def test_a_mistake_is_one_sentence(
    words: str,
    sentence: str,
    app: list[DictConfig],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(sys, "argv", ["rlsim"])
    assert launch("rlsim", words.split()) == 1
    said = capsys.readouterr().err
    assert said.startswith(sentence)
    assert said.count("\n") == 1
    assert app == []


def test_a_directory_in_use_is_refused(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    words = ["method=sft", "hydra.run.dir=mine"]
    assert launch("rlsim", words) == 0
    assert launch("rlsim", words) == 1
    assert capsys.readouterr().err.startswith("mine is not empty; choose another directory, or continue that run with")


def test_two_launches_in_the_same_second_get_two_directories():
    taken = {run_directory.reserve("rlsim", "opd") for _ in range(5)}
    assert len(taken) == 5
    assert all(path.is_dir() for path in taken)


def test_an_error_of_the_program_keeps_its_traceback_in_the_log(
    app: list[DictConfig], capsys: pytest.CaptureFixture[str]
):
    assert launch("rlsim", ["method=sft", "seed=13"]) == 1
    directory = only("outputs/rlsim/*_sft")
    log = (directory / "run.log").read_text()
    assert "Traceback" in log
    assert "broken on purpose" in log
    assert capsys.readouterr().err.startswith(
        "The run failed with ValueError: broken on purpose (traceback in outputs/"
    )


def test_the_users_mistake_inside_a_run_has_no_traceback(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    assert launch("rlsim", ["method=sft", "seed=14"]) == 1
    said = capsys.readouterr()
    assert said.err == "Fourteen is not allowed.\n"
    assert "Traceback" not in said.out + only("outputs/rlsim/*/run.log").read_text()


def test_an_interrupted_run_says_how_to_go_on(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    assert launch("rlsim", ["method=sft", "seed=15"]) == 130
    said = capsys.readouterr().err
    assert said.startswith("Interrupted. Continue with: ")
    assert said.rstrip().endswith(f"resume={only('outputs/rlsim/*_sft')}")


BASIC = "hydra/launcher=basic"


def test_an_experiment_runs_every_arm_for_every_seed(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    assert launch("rlsim", ["experiment=single", BASIC, "steps=5", "seed=0,1"]) == 0
    directory = only("outputs/rlsim/*_single")
    runs = [(arm, seed) for arm in ("sft", "rlvr", "opd") for seed in (0, 1)]
    assert [(cfg.arm, cfg.seed) for cfg in app] == runs
    assert all((directory / arm / f"seed={seed}" / "run.log").is_file() for arm, seed in runs)
    assert [cfg.teachers.name for cfg in app] == ["add", "add", "none", "none", "add", "add"]
    assert all(cfg.steps == 5 and not cfg.arms for cfg in app)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("6 runs (3 arms, 2 seeds) in outputs/")
    assert "[6/6] opd seed=1 done: + 0.250 -> 0.500, in 0:01" in said
    assert said[-1] == str(directory / "curves.png")
    assert Path(said[-1]).is_file()


@pytest.mark.usefixtures("unpainted")
def test_a_plain_sweep_is_laid_out_and_reported_like_an_experiment(app: list[DictConfig]):
    assert launch("rlsim", ["-m", "+method=opd", "teachers=add,weak", "seed=range(0,2)", "steps=5"]) == 0
    directory = only("outputs/rlsim/*_opd")
    assert [f"{cfg.arm} {cfg.seed}" for cfg in app] == ["opd-add 0", "opd-add 1", "opd-weak 0", "opd-weak 1"]
    summary = json.loads((directory / "results" / "sweep.json").read_text())
    assert {arm: len(runs) for arm, runs in summary["runs"].items()} == {"opd-add": 2, "opd-weak": 2}
    assert "opd-weak" in (directory / "summary.md").read_text()


@pytest.mark.usefixtures("unpainted")
def test_the_command_line_narrows_and_widens_an_experiment(app: list[DictConfig]):
    assert launch("rlsim", ["experiment=multi", BASIC, "arm=mopd", "seed=4", "steps=3"]) == 0
    assert launch("rlsim", ["experiment=single", BASIC, "+method=ppo", "seed=4", "steps=3"]) == 0
    assert [(cfg.arm, cfg.method.name, cfg.seed, cfg.experiment) for cfg in app] == [
        ("mopd", "mopd", 4, "multi"),
        ("ppo", "ppo", 4, "single"),
    ]
    assert app[1].data.stop_at_end is False  # the new arm is run with the experiment's settings


@pytest.mark.usefixtures("unpainted")
def test_one_failing_job_leaves_the_others_and_is_named(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    assert launch("rlsim", ["-m", "method=sft", "seed=12,13,14,16", "steps=3"]) == 1
    directory = only("outputs/rlsim/*_sft")
    assert [cfg.seed for cfg in app] == [12, 13, 14, 16]
    log = (directory / "sft/seed=13/run.log").read_text()
    assert "Traceback" in log
    assert "broken on purpose" in log
    assert "Fourteen is not allowed." in (directory / "sft/seed=14/run.log").read_text()
    said = capsys.readouterr()
    assert said.err.startswith("2 of 4 runs failed: sft seed=13 (ValueError: broken on purpose) and 1 more; see ")
    assert said.err.count("\n") == 1
    assert said.out.splitlines()[-1].endswith("curves.png")
    assert "broken on purpose" in (directory / "summary.md").read_text()


@pytest.mark.usefixtures("unpainted")
def test_a_resumed_sweep_runs_only_what_has_no_result(app: list[DictConfig]):
    assert launch("rlsim", ["-m", "method=sft", "seed=12,13", "steps=3"]) == 1
    directory = only("outputs/rlsim/*_sft")
    (directory / "sft" / "seed=13" / "checkpoints").mkdir()
    assert launch("rlsim", [f"resume={directory}"]) == 1
    assert [cfg.seed for cfg in app] == [12, 13, 13]
    assert (app[1].resume, app[2].resume) == (None, str(directory / "sft" / "seed=13"))
    assert launch("rlsim", [f"resume={directory}", "steps=9"]) == 1
    assert len(app) == 3


def test_resume_continues_with_the_runs_own_configuration(app: list[DictConfig], capsys: pytest.CaptureFixture[str]):
    assert launch("rlsim", ["method=opd", "seed=3", "steps=7", "data.digits=2"]) == 0
    directory = only("outputs/rlsim/*_opd")
    assert launch("rlsim", [f"resume={directory}", "steps=9"]) == 0
    assert (app[1].seed, app[1].steps, app[1].data.digits, app[1].resume) == (3, 9, 2, str(directory))
    assert OmegaConf.load(directory / ".hydra" / "config.yaml").steps == 9
    assert (directory / "run.log").read_text().count("seed 3") == 2
    assert launch("rlsim", [f"resume={directory}"]) == 0
    assert len(app) == 2  # it was complete
    assert "is complete" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["seed=4", "threads=2", "method=sft"])
def test_what_decides_the_numbers_cannot_change_on_resuming(
    word: str, app: list[DictConfig], capsys: pytest.CaptureFixture[str]
):
    assert launch("rlsim", ["method=opd", "steps=7"]) == 0
    assert launch("rlsim", [f"resume={only('outputs/rlsim/*_opd')}", "steps=9", word]) == 1
    assert f"goes on as it began, without {word}; only steps," in capsys.readouterr().err
    assert len(app) == 1


def test_a_sweep_under_torchrun_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch("rlsim", ["-m", "method=sft", "seed=0,1"]) == 1
    assert capsys.readouterr().err.startswith("A sweep cannot run under torchrun:")


def real(*words: str, cwd: Path, module: str = "rlsim", **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"} | environment
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", module, *words], cwd=cwd, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("words", [["--help"], ["--cfg", "job", "method=sft"], ["--info", "config", "method=sft"]])
@pytest.mark.parametrize("module", ["rlsim", "bt_policy"])
def test_questions_are_answered_without_torch(words: list[str], module: str, tmp_path: Path):
    done = real(*words, cwd=tmp_path, module=module)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if "|" in line}
    assert done.returncode == 0
    assert "rlvr" in done.stdout or "sft" in done.stdout
    assert "common.launch" in imported
    assert imported & {"torch", "transformers", "wandb", "matplotlib"} == set()


def test_help_shows_the_applications_own_choices(tmp_path: Path):
    text = real("--help", cwd=tmp_path).stdout
    assert text.index("* gpt ") < text.index("(qwen3_5_9b, qwen3_5_tiny, qwen3_5_tiny_rounds: for bt_policy)")
    assert all(f" {name} " in text for name in ("sft", "rlvr", "ppo", "opd", "mopd", "single", "cold", "weak", "multi"))


TINY = ["start=cold", "steps=2", "eval_every=2", "data.test.size=8", "model.width=16", "data.validation.size=8"]


@pytest.mark.slow
def test_a_parallel_sweep_of_the_real_command_ends_with_its_picture(tmp_path: Path):
    done = real("experiment=cold", "arm=rlvr", "seed=0,1", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (tmp_path / lines[-1]).is_file()
    assert sum(line.startswith("[") and " done: " in line for line in lines) == 2


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_parallel_sweep_leaves_no_process(tmp_path: Path, how: signal.Signals):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    words = [sys.executable, "-m", "rlsim", "experiment=cold", "arm=rlvr", "steps=100000"]
    process = subprocess.Popen(
        words, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(tmp_path.glob("outputs/rlsim/*/*/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.2)
    os.killpg(process.pid, how) if how == signal.SIGINT else process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.startswith("Interrupted. Continue with: python -m rlsim resume=outputs/")
    assert "Traceback" not in said
    assert _alive(process.pid) == []


def _alive(group: int) -> list[str]:
    """Processes of a group that still run (a zombie does not)."""
    rows = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True).stdout.splitlines()
    return [row for row in rows if row.split()[0] == str(group) and not row.split()[1].startswith("Z")]


@pytest.mark.slow
def test_the_ranks_of_torchrun_share_one_directory(tmp_path: Path):
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "rlsim", "method=rlvr", *TINY]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/rlsim/*"))) == 1
    assert len(list(tmp_path.glob("outputs/rlsim/*/result.json"))) == 1
    assert done.stdout.count("step 0/2") == 1
