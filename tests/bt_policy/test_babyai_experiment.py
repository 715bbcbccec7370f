"""experiment=babyai from end to end, as short as it goes: arms that learn from what other arms left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("minigrid")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SHORT = (
    "rounds=1", "data.episodes=6", "data.rows_per_round=8", "data.held_out=4", "data.levels=[BabyAI-GoToObjS6-v1]",
    "method.optim.rows_per_update=8", "hydra/launcher=basic", "wandb=disabled",
)  # fmt: skip
ARMS = {"sft", "sft-ball", "sft-box", "sft-key", "rlvr", "ppo", "opd", "mopd", "opd-then-ppo"}


def test_every_arm_runs_behind_those_it_learns_from(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bt_policy", "experiment=babyai", f"hydra.sweep.dir={tmp_path}", *SHORT]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    results = {path.parent.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/*/result.json")}
    assert results.keys() == ARMS
    assert all("success" in result["final"] for result in results.values())
    assert (tmp_path / "rounds.png").stat().st_size > 10_000
    ended = {arm: (tmp_path / arm / "seed=0" / "result.json").stat().st_mtime for arm in ARMS}
    assert max(ended["sft"], ended["sft-key"]) < min(ended["opd"], ended["mopd"]) < ended["opd-then-ppo"]
