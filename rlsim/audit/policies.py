"""Whose gradient, whose answers: the audited policy, the same some updates later, and one that lags behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from common.distributed import World
from common.interfaces import Batch, Experience, Policy, Sample, Task
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import end_id, new_net
from rlsim.problems import Format


class Behind:
    """`policy` learns from what `writer`, some updates older, wrote.

    old: the writer's log-probs are also the old ones of the ratio (PPO's later epochs); without it only the sampler
    lags, and the trainer scores the old log-probs itself (a sampler with stale weights: the mismatch's case).
    """

    def __init__(self, policy: Policy, writer: Policy, *, old: bool) -> None:
        self._policy, self._writer, self._old = policy, writer, old

    def sample(
        self, prompts: Any, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """The writer's answers."""
        return self._writer.sample(prompts, group, temperature=temperature, uniforms_NA=uniforms_NA)

    def answer_logits(self, prompts: Any, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        """The policy's where a gradient is wanted; trainers score old log-probs without."""
        scorer = self._writer if self._old and not torch.is_grad_enabled() else self._policy
        return scorer.answer_logits(prompts, answers_NA, group=group)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


@dataclass(frozen=True)
class Subject:
    """What is audited: the policy, the same after n updates of RLVR (`later[n]`), its task and its teacher."""

    policy: Policy
    later: Mapping[int, Policy]
    task: Task
    teacher: Policy

    def at(self, updates: int) -> Policy:
        """The policy after this many updates."""
        return self.policy if updates == 0 else self.later[updates]


def later_policies(
    policy: TinyGPTPolicy, task: Task, form: Format, updates: list[int], lr: float, seed: int
) -> dict[int, TinyGPTPolicy]:
    """Copies of the policy after each of these numbers of RLVR updates (256 answers, groups of eight)."""
    found: dict[int, TinyGPTPolicy] = {}
    for n in updates:
        copy = duplicate(policy, form)
        optim = Optim(lr=lr, rows_per_update=256, optimizer="adam")
        RLVR(optim, Sampling(group=8)).train(Context(copy, task, World(), seed=seed, steps=n, eval_every=None))
        found[n] = copy
    return found


def duplicate(policy: TinyGPTPolicy, form: Format) -> TinyGPTPolicy:
    """A trainable copy."""
    shape = policy.shape
    copy = TinyGPTPolicy(new_net(shape.layers, shape.width, shape.heads, form, 0), end_id=end_id(form))
    copy.load_state(policy.state())
    return copy


class Unrewarded:
    """A task in which nothing is ever right, so that a penalty or a bonus is all that moves the policy."""

    def __init__(self, task: Task) -> None:
        self._task = task

    def experience(self, policy: Policy, batch: Batch, group: int, **settings: Any) -> Experience:
        """The task's rows with reward 0."""
        rows = self._task.experience(policy, batch, group, **settings)
        return replace(rows, rewards_N=torch.zeros(len(rows)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)
