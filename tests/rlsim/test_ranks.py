"""Two processes over gloo, replicated (DDP) and sharded (FSDP2), make the update that one process makes."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor

from common.distributed import World, close_world, open_world
from common.optimizer import Optim
from common.seeding import uniforms
from common.trainers.context import Context
from common.trainers.opd import OPD
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from rlsim.arithmetic import ArithmeticTask
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import new_net
from rlsim.problems import END, Format

FORM = Format(1, pad_answers=False)
# 9 units of 2 answers: no multiple of two ranks; the large eps keeps Adam from turning rounding into whole steps
OPTIM = Optim(lr=0.01, rows_per_update=18, micro_batch=6, eps=0.01, optimizer="adam")


class Recorded:
    """Keeps what a loop logs."""

    def __init__(self) -> None:
        self.lines: list[dict[str, float]] = []

    def log(self, step: int, values: dict[str, float], times: object = None) -> None:
        self.lines.append({"step": step, **values})

    def advance(self, step: int) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""


def trained(world: World) -> dict[str, Tensor]:
    """Weights, metrics, samples and a frozen copy's logits after a few updates of each method."""
    found: dict[str, Tensor] = {}
    for method in (
        SFT(OPTIM, targets="reference"),
        RLVR(OPTIM, Sampling(2)),
        OPD(OPTIM, Sampling(2)),
    ):
        task = ArithmeticTask(FORM, Curriculum.always("+-"), FORM.fixed(5, 25), seed=0, world=world)
        policy = TinyGPTPolicy(new_net(2, 16, 2, FORM, 3), end_id=END, world=world)
        teacher = TinyGPTPolicy(new_net(1, 16, 2, FORM, 4), end_id=END).freeze()
        recorder = Recorded()
        method.train(
            Context(
                policy, task, world, steps=2, eval_every=1, teachers={"+": teacher, "-": teacher}, recorder=recorder
            )
        )
        for name, tensor in policy.state().items():
            found[f"{method.name}/{name}"] = tensor
        for line in recorder.lines:
            found |= {f"{method.name}/{key} {line['step']}": torch.tensor(value) for key, value in line.items()}
    batch = task.batch(9, 9)
    noise_NA = uniforms(0, "test", 0, 18, FORM.answer_len)
    rows = task.experience(policy, batch, 2, temperature=1.0, uniforms_NA=noise_NA)
    found |= {"answers": rows.answers_NA, "mask": rows.mask_NA, "rewards": rows.rewards_N, "logps": rows.rollout_logps}
    found["frozen"] = policy.frozen("start").answer_logits(batch.prompts, batch.answers_BA).detach()
    policy.load_state({name: tensor + 1 for name, tensor in policy.state().items()})
    found["loaded"] = policy.state()["head.bias"]
    return found


def worker(rank: int, ports: dict[str, int], directory: str) -> None:
    torch.set_num_threads(1)
    for mode, port in ports.items():
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), **address)
        world = open_world(mode)
        assert (world.mode, world.size) == (mode, 2)
        torch.save(trained(world), Path(directory) / f"{mode}-{rank}.pt")
        close_world()


@pytest.mark.timeout(900)
def test_two_ranks_learn_what_one_learns(tmp_path: Path) -> None:
    ports = {}
    for mode in ("ddp", "fsdp"):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports[mode] = free.getsockname()[1]
    mp.spawn(worker, (ports, str(tmp_path)), nprocs=2)
    alone = trained(World())
    for mode in ports:
        first, second = (torch.load(tmp_path / f"{mode}-{rank}.pt", weights_only=True) for rank in range(2))
        assert first.keys() == second.keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(
                first[name], expected, rtol=2e-4, atol=2e-5, msg=lambda m, n=name, mode=mode: f"{mode} {n}: {m}"
            )
            assert torch.equal(first[name], second[name]), f"{mode} {name}"
