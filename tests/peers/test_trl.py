"""Agreement with TRL, values and gradients to 1e-5, where it offers the same function.

Not part of `make test`: pip install -e '.[peers]', then python -m pytest -m peers tests/peers
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from common.advantages import Advantage
from common.aggregation import token_weights
from common.distillation import Distillation
from common.kl import KL
from common.logprobs import entropy, log_probs, token_logps
from common.objectives import PolicyGradient

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

LENGTHS = torch.tensor([5, 2, 4, 1])


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


MASK = torch.arange(5)[None] < LENGTHS[:, None]
OLD = -normal(1, 4, 5).abs() - 0.1
LOGPS = OLD + 0.5 * normal(2, 4, 5)
REFERENCE = OLD + 0.5 * normal(3, 4, 5)
ADVANTAGES = torch.tensor([1.5, -0.7, 0.4, -1.2])


def theirs(**options: Any) -> tuple[Tensor, Tensor]:
    """Value and gradient of TRL's GRPO loss of the rows above, with a trainer that only holds the options."""
    settings = {
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "delta": None,
    } | options
    logps = LOGPS.clone().requires_grad_()
    trainer = MagicMock()
    trainer._get_per_token_logps_and_entropies.return_value = (logps, torch.zeros_like(logps), None)
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    trainer.accelerator.num_processes = 1
    trainer.accelerator.gather.side_effect = lambda tensor: tensor
    trainer.args.delta, trainer.args.steps_per_generation = settings["delta"], 1
    trainer.args.use_bias_correction_kl = False
    for name in ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high", "beta"):
        setattr(trainer, name, settings[name])
    trainer.top_entropy_quantile, trainer.off_policy_mask_threshold = 1.0, None
    trainer.aux_loss_enabled = trainer.use_vllm = trainer._entropy_bonus_enabled = False
    trainer.current_gradient_accumulation_steps, trainer.max_completion_length = 1, 5
    inputs = {
        "prompt_ids": torch.zeros(4, 1).long(),
        "prompt_mask": torch.ones(4, 1).long(),
        "completion_ids": torch.zeros(4, 5).long(),
        "completion_mask": MASK.long(),
        "advantages": ADVANTAGES,
        "old_per_token_logps": OLD,
        "ref_per_token_logps": REFERENCE,
        "num_items_in_batch": MASK.sum(),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, MagicMock(), inputs)
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


def ours(objective: PolicyGradient) -> tuple[Tensor, Tensor]:
    logps = LOGPS.clone().requires_grad_()
    advantages = ADVANTAGES[:, None].expand_as(LOGPS)
    terms = objective(logps, OLD, advantages, MASK, ref_logps_NA=REFERENCE).terms
    weights = token_weights(MASK, torch.ones(4), objective.aggregate)
    loss = sum((term * weights).sum() for term in terms.values())
    return loss.detach(), torch.autograd.grad(loss, logps)[0]


@pytest.mark.parametrize(
    ("options", "objective"),
    [
        ({"loss_type": "grpo"}, PolicyGradient(aggregate="sequence_mean")),
        ({"loss_type": "grpo", "beta": 0.3}, PolicyGradient(aggregate="sequence_mean", kl=KL(0.3, "k3"))),
        ({"loss_type": "bnpo"}, PolicyGradient(aggregate="token_mean")),
        ({"loss_type": "dapo", "epsilon_high": 0.28}, PolicyGradient(clip_high=0.28, aggregate="token_mean")),
        ({"loss_type": "dr_grpo"}, PolicyGradient(aggregate="constant")),
        ({"loss_type": "grpo", "delta": 1.5}, PolicyGradient(dual_clip=1.5, aggregate="sequence_mean")),
        (
            {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
            PolicyGradient(ratio="sequence_mean", clip_low=3e-4, clip_high=4e-4, aggregate="sequence_mean"),
        ),
        # TRL's cap is the weight itself, ours is 1 + clip_high
        ({"loss_type": "cispo", "epsilon_high": 1.2}, PolicyGradient("cispo_cap", clip_high=0.2)),
    ],
)
def test_policy_gradients_agree_in_value_and_gradient(options: dict[str, Any], objective: PolicyGradient) -> None:
    for mine, peer in zip(ours(objective), theirs(**options), strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_generalised_jsd_agrees_in_value_and_gradient(beta: float, temperature: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    student, teacher = normal(4, 4, 5, 7), normal(5, 4, 5, 7)
    labels = torch.where(MASK, 0, -100)
    results = []
    for peer in (True, False):
        logits = student.clone().requires_grad_()
        if peer:
            loss = gkd.generalized_jsd_loss(logits, teacher, labels, beta, temperature, num_items_in_batch=MASK.sum())
        else:
            objective = Distillation("jsd", beta=beta, temperature=temperature)
            loss_NA = objective.divergence(log_probs(logits), log_probs(teacher))
            loss = (loss_NA * token_weights(MASK, torch.ones(4))).sum()
        results.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    for mine, peer in zip(*results, strict=True):
        torch.testing.assert_close(mine, peer, rtol=1e-5, atol=1e-6)


def test_token_log_probs_and_entropies_agree() -> None:
    utils = pytest.importorskip("trl.trainer.utils")
    logits, tokens = normal(6, 4, 5, 11), torch.arange(20).view(4, 5) % 11
    torch.testing.assert_close(token_logps(logits, tokens), utils.selective_log_softmax(logits, tokens))
    torch.testing.assert_close(entropy(log_probs(logits)), utils.entropy_from_logits(logits))


def test_group_advantages_agree_with_their_eps() -> None:
    rewards = normal(7, 12)
    grouped = rewards.view(3, 4)
    std = grpo_trainer.nanstd(grouped, dim=1)[:, None]
    peer = ((grouped - grouped.mean(1, keepdim=True)) / (std + 1e-4)).flatten()
    groups, mask = torch.arange(3).repeat_interleave(4), torch.ones(12, 1, dtype=torch.bool)
    mine = Advantage("group", eps=1e-4)(rewards, groups, mask, torch.ones(12))[:, 0]
    torch.testing.assert_close(mine, peer, rtol=1e-5, atol=1e-6)
