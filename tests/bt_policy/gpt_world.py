"""TinyGPT on two-digit additions: the simulator's half of the thin slice."""

from __future__ import annotations

from common.distributed import World
from common.trainers.context import Context
from rlsim.arithmetic import ArithmeticTask
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import end_id, new_net
from rlsim.problems import Format


def context(recorder, **options) -> Context:
    """A random one-layer TinyGPT and fresh additions."""
    form = Format(digits=2)
    policy = TinyGPTPolicy(new_net(1, 32, 2, form, 0), end_id=end_id(form))
    task = ArithmeticTask(form, Curriculum.always(["+"]), form.fixed(1, 20), seed=0)
    return Context(policy, task, World(), steps=2, eval_every=1, recorder=recorder, **options)
