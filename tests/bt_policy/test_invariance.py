"""The same rows give the same update: whatever the micro-batch, the order, the number of processes, DDP or FSDP2.

What is compared is the accumulated gradient: Adam's first step is nearly its sign, which would hide or exaggerate
errors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.distributed import World
from tests.bt_policy import gradients
from tests.bt_policy.conftest import make_rows

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return make_rows(tmp_path_factory.mktemp("recorded"), 12, adv=True)


@pytest.fixture(scope="module")
def single(recorded):
    return gradients.found(World(), recorded)


def _compare(found, expected):
    assert found.keys() == expected.keys()
    largest = {name.split("/")[0]: 0.0 for name in expected}
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=2e-6, rtol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
        largest[name.split("/")[0]] = max(largest[name.split("/")[0]], float(tensor.abs().max()))
    assert min(largest.values()) > 1e-3, "gradients that vanish would agree with anything"


def test_the_gradient_does_not_depend_on_the_micro_batch(single):
    whole = {name: tensor for name, tensor in single.items() if "/8/" in name}
    for size in (1, 2):
        _compare({name: single[name.replace("/8/", f"/{size}/")] for name in whole}, whole)


def test_the_gradient_does_not_depend_on_the_order_of_the_rows(single, recorded):
    shuffled = gradients.found(World(), recorded, micro_batches=(2,), shuffled=True)
    _compare(shuffled, {name: tensor for name, tensor in single.items() if "/2/" in name})


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_give_the_gradient_of_one(single, recorded, tmp_path, mode):
    out = tmp_path / "gradients.safetensors"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*command, str(ROOT / "tests/bt_policy/gradients.py"), mode, str(recorded), str(out)],
        check=True, env=environment, cwd=ROOT, timeout=280,
    )  # fmt: skip
    _compare(load_file(out), single)
