"""Sampling shared among the ranks: each writes the answers of its own prompts, and all end up with all of them."""

from __future__ import annotations

import torch
from torch import Tensor

from common.distributed import World
from common.interfaces import Policy, Prompts, Sample


def sample_sharded(
    policy: Policy, prompts: Prompts, group: int, temperature: float, uniforms_NA: Tensor | None, world: World
) -> Sample:
    """`policy.sample` over all ranks: N = B * group rows, the same whatever the number of ranks. A collective call.

    `uniforms_NA` holds the numbers of all N rows; None writes greedily.
    """
    n = len(prompts)
    if world.size == 1:
        return policy.sample(prompts, group, temperature=temperature, uniforms_NA=uniforms_NA)
    units, _ = world.shard(n)
    rows = (units[:, None] * group + torch.arange(group)).reshape(-1)
    mine = None if uniforms_NA is None else uniforms_NA[rows]
    sample = policy.sample(prompts[units], group, temperature=temperature, uniforms_NA=mine)
    answers_NA, logps_NA = world.gather(sample.answers_NA, n), world.gather(sample.logps_NA, n)
    return Sample(answers_NA, logps_NA, world.gather(sample.mask_NA.to(torch.uint8), n).bool())
