"""The two halves of the loop apart: a round from a file is the round in process, bit by bit; kills leave whole rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

pytest.importorskip("minigrid")

from bt_policy import rows as rows_module
from bt_policy.babyai import ROOM_6
from bt_policy.babyai import task as task_module
from bt_policy.babyai.task import BabyAITask
from bt_policy.rollout import fingerprints
from bt_policy.rollout.writer import write
from bt_policy.task import RowsTask
from common.advantages import Advantage
from common.distributed import World
from common.errors import UserError
from common.kl import KL
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.ppo import PPO
from common.trainers.rollout import Sampling
from tests.bt_policy.conftest import make_policy

SAMPLING = Sampling(group=4, temperature=0.9)
LEVELS = (4, 4, 4)


def environment(policy, **options):
    options = {"episodes": 6, "states": "start", "decisions": 2, "reward": "progress", "held_out": 2} | options
    return BabyAITask(policy.encoder, levels=[ROOM_6], seed=0, **options)


def ppo():
    objective = PolicyGradient(ratio="sequence", aggregate="sequence_mean", kl=KL(beta=0.02, aggregate="sequence_sum"))
    return PPO(Optim(lr=1e-3, rows_per_update=16), SAMPLING, rows_per_round=24, epochs=2, objective=objective)


def write_round(policy, out, task=None, **options):
    task = task or environment(policy)
    said = options.pop("said", [])
    settings = {"levels": LEVELS, "seed": 0, "number": 0, "rows": 24, "sampling": SAMPLING, "advantage": Advantage()}
    return write(out, task, policy, **settings | options, say=said.append)


def test_a_round_from_a_file_gives_the_same_adapter_bits_as_the_round_in_process(tmp_path, monkeypatch):
    monkeypatch.setattr(task_module, "BLOCK", 3)
    here, there = make_policy(), make_policy()
    before = here.state()
    ppo().train(Context(here, environment(here), World(), rounds=1, eval_every=None))

    path = write_round(there, tmp_path)
    rows, problems, _ = rows_module.read(path, levels=LEVELS)
    assert not problems
    offline = RowsTask(rows, [], there.encoder, seed=0)
    ppo().train(Context(there, offline, World(), eval_every=None))

    for name, tensor in here.state().items():
        assert torch.equal(tensor, there.state()[name]), name
    assert any(not torch.equal(tensor, before[name]) for name, tensor in here.state().items())


def test_a_row_records_how_it_was_sampled(tmp_path):
    policy = make_policy()
    row = json.loads(write_round(policy, tmp_path).read_text().splitlines()[0])
    assert row["temperature"] == 0.9
    assert row["mask"] == [4, 4, 4]
    assert row["adapter"] == fingerprints.of_adapter(policy.state())
    assert row["template"] == fingerprints.of_template(policy.encoder)
    assert len(row["vllm_logp"]) == 3
    assert {"adv", "reward", "subject"} <= row.keys()


def test_rows_of_another_adapter_or_template_are_refused_with_the_reason(tmp_path):
    policy = make_policy()
    rows, _, _ = rows_module.read(write_round(policy, tmp_path), levels=LEVELS)
    marks = {"adapter": fingerprints.of_adapter(policy.state()), "template": fingerprints.of_template(policy.encoder)}
    fingerprints.check(rows, **marks)
    with pytest.raises(UserError, match=r"line 1 of data\.train: adapter: .* another adapter"):
        fingerprints.check(rows, **marks | {"adapter": "0" * 16})
    with pytest.raises(UserError, match=r"line 1 of data\.train: template: .* another prompt template"):
        fingerprints.check(rows, **marks | {"template": "0" * 16})
    fingerprints.check([replace(rows[0], adapter=None, template=None)], adapter="x", template="y")


def test_only_missing_blocks_are_played_again_and_the_file_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(task_module, "BLOCK", 2)
    policy, said = make_policy(), []
    whole = write_round(policy, tmp_path / "whole", said=said).read_text()
    assert len(said) == 3

    task, played = environment(policy), []
    genuine = task.play

    def stopping(*arguments, **options):
        if len(played) == 2:
            raise KeyboardInterrupt
        played.append(1)
        return genuine(*arguments, **options)

    task.play = stopping
    with pytest.raises(KeyboardInterrupt):
        write_round(policy, tmp_path / "cut", task)
    assert not (tmp_path / "cut" / "train.jsonl").exists()
    again = []
    assert write_round(policy, tmp_path / "cut", said=again).read_text() == whole
    assert [line.split(":")[0] for line in again] == ["block 3 of 3"]
    finished = []
    write_round(policy, tmp_path / "cut", said=finished)
    assert finished == []


def test_rows_of_another_round_in_the_same_directory_are_not_overwritten(tmp_path):
    policy = make_policy()
    write_round(policy, tmp_path)
    with pytest.raises(UserError, match="already holds rows of another round"):
        write_round(policy, tmp_path, number=1)


def test_other_rounds_play_other_random_numbers(tmp_path):
    policy = make_policy()
    first = write_round(policy, tmp_path / "0").read_text()
    assert write_round(policy, tmp_path / "1", number=1).read_text() != first


KILLED = """
import sys
from pathlib import Path
from bt_policy.babyai import task as task_module
task_module.BLOCK = 1
from tests.bt_policy.conftest import make_policy
from tests.bt_policy.test_rollout_rows import write_round
write_round(make_policy(), Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_killed_process_leaves_whole_rows_only(tmp_path):
    process = subprocess.Popen([sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)])
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("parts/*/*.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    parts = [path for path in tmp_path.glob("parts/*/*.jsonl") if not path.name.startswith(".")]
    assert parts
    for path in parts:
        for line in path.read_text().splitlines():
            assert json.loads(line)["steps"]
