"""The accumulated gradient of one update, for any number of processes: run under torchrun it writes what it found.

python -m torch.distributed.run --nproc_per_node=2 tests/bt_policy/gradients.py ddp ROWS.jsonl OUT.safetensors
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bt_policy import rows as rows_module
from bt_policy.task import RowsTask
from common import parallel
from common.aggregation import token_weights
from common.distributed import World, close_world, open_world
from common.kl import KL
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.rlvr import policy_gradient_loss
from common.trainers.rollout import scaled
from common.trainers.scoring import score
from common.trainers.sft import imitation_loss, reference_rows
from tests.bt_policy.conftest import make_policy

ROWS = 11  # not a multiple of what two ranks or micro-batches of 2 and 8 take: padding and short batches occur


def found(world: World, rows_file: Path, micro_batches=(1, 2, 8), shuffled: bool = False) -> dict[str, Tensor]:
    """ "method/micro-batch/parameter" -> gradient, of SFT and of PPO."""
    policy = make_policy(world=world)
    rows, _, _ = rows_module.read(rows_file, levels=(4, 4, 4))
    task = RowsTask(rows[:ROWS], [], policy.encoder, seed=0, world=world)
    batch = task.batch(0, ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)) if shuffled else torch.arange(ROWS)
    result = {}
    messages = _count_messages(policy.wrapped)
    for size in micro_batches:
        context = Context(policy, task, world, steps=1)
        loop = Loop(context, Optim(lr=1e-3, rows_per_update=ROWS, micro_batch=size))
        examples = reference_rows(batch).select(order)
        examples = examples.with_extras(scale_NA=token_weights(examples.mask_NA, examples.weights))
        result |= _gradient(loop, examples, partial(imitation_loss, context), f"sft/{size}")
        before = messages.count
        result |= _gradient(loop, *_ppo(context, batch.rows.select(order)), f"ppo/{size}")
        assert messages.count - before <= 1, "gradients were synchronised before the last micro-batch"
    return result


class _Messages:
    """How often DDP has reduced its (one) bucket of gradients."""

    count = 0


def _count_messages(module) -> _Messages:
    messages = _Messages()
    if isinstance(module, DistributedDataParallel):
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def hook(state, bucket):
            messages.count += 1
            return allreduce_hook(None, bucket)

        module.register_comm_hook(None, hook)
    return messages


def _ppo(context, experience):
    objective = PolicyGradient(ratio="sequence", aggregate="sequence_mean", kl=KL(beta=0.02, aggregate="sequence_sum"))
    base = score(context.policy.frozen("base"), experience, context.world, 4)
    rows = experience.with_extras(
        old_logps_NA=base, ref_logps_NA=base, advantages_NA=experience.advantages[:, None] * experience.mask_NA
    )
    return scaled(rows, objective), lambda micro: policy_gradient_loss(context, objective, micro)


def _gradient(loop: Loop, rows, loss, name: str) -> dict[str, Tensor]:
    policy, world = loop.context.policy, loop.context.world
    micros = loop.micro_batches(rows)
    for i, micro in enumerate(micros):
        with policy.accumulate(last=i == len(micros) - 1):
            (loss(micro)[0] * world.size).backward()
    gradients = {f"{name}/{key}": parallel.full(p.grad) for key, p in policy.trainable()}
    loop.optimizer.zero_grad(set_to_none=True)
    return gradients


def main() -> None:
    """Command line: MODE ROWS OUT."""
    torch.set_num_threads(1)
    world = open_world(sys.argv[1])
    gradients = found(world, Path(sys.argv[2]))
    if world.main:
        save_file(gradients, sys.argv[3])
    world.barrier()
    close_world()


if __name__ == "__main__":
    main()
