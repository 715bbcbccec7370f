"""What a wheel holds: the applications work from any directory, with their configuration tree inside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
def test_a_wheel_runs_from_any_directory_with_its_own_configuration(tmp_path: Path):
    built = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    elsewhere.mkdir()
    trees = [
        {path.relative_to(conf) for path in conf.rglob("*.yaml")} for conf in (ROOT / "conf", site / "common/conf")
    ]
    assert trees[0] == trees[1]
    env = os.environ | {"PYTHONPATH": str(site)}
    for module, words, expected in [
        ("rlsim", ["--help"], "specialists"),
        ("bt_policy", ["--help"], "qwen3_5_9b"),
        ("rlsim", ["--cfg", "job", "+method=opd", "experiment=single"], "name: opd"),
        ("rlsim", ["--info", "plugins"], "ArmsSweeper"),
    ]:
        done = subprocess.run(
            [sys.executable, "-m", module, *words], cwd=elsewhere, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert expected in done.stdout
    where = "from common.config import conf_directory; print(conf_directory())"
    found = subprocess.run([sys.executable, "-c", where], cwd=elsewhere, env=env, capture_output=True, text=True)
    assert found.stdout.strip() == str(site / "common" / "conf")


def test_the_pinned_versions_lie_in_the_stated_ranges():
    from packaging.requirements import Requirement

    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line)
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = [*project["dependencies"], *extras["test"], *extras["env"], *extras["slurm"]]
    for text in stated:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pins[wanted.name.lower()]), text


def test_the_pins_name_no_machine():
    lines = (ROOT / "constraints.txt").read_text().splitlines()[1:]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_make_alone_lists_its_commands():
    text = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True).stdout
    names = {line.split()[1] for line in text.splitlines()}
    assert names >= {"install", "demo", "test", "test-slow", "lint", "format", "experiments", "bench", "clean"}
