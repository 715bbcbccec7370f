"""Exact enumeration, sampler mismatch: which weights make another engine's answers count as the policy's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.aggregation import token_weights
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from tests.common.enumerated import Enumerated, bias, cosine, gradient

EVERYTHING = float("inf")


def corrected(policy: Enumerated, mismatch: Mismatch) -> tuple[Tensor, Tensor]:
    """(minus the expected gradient with answers of a sampler half a nat away, the gradient of the expected reward)."""
    table, rewards, mask = policy.table(1), policy.rewards(), policy.mask_RA
    with torch.no_grad():
        sampler = table + 0.5 * policy.table(2)
        rollout, chance = policy.logps(sampler), policy.probs(sampler)
        advantages = (rewards - (chance * rewards).sum())[:, None] * mask
    logps = policy.logps(table)
    used, keep, _ = mismatch(logps.detach(), rollout, mask, torch.ones(len(mask)))
    loss = PolicyGradient()(logps, logps.detach(), advantages, mask, importance_NA=used).terms["pg"]
    weights = token_weights(keep, chance, "sequence_sum")
    true = gradient((policy.probs(table) * rewards).sum(), table)
    return -gradient((loss * weights).sum(), table), true


@pytest.mark.parametrize("name", ["fixed", "stopping"])
def test_whole_sequence_weights_are_exactly_unbiased(request, name: str) -> None:
    policy = request.getfixturevalue(name)
    for treatment in ("truncate", "mask"):
        found, true = corrected(policy, Mismatch(treatment, "sequence", low=0.0, high=EVERYTHING))
        assert bias(found, true) < 2e-6


@pytest.mark.parametrize(
    ("mismatch", "expected"),
    [
        (Mismatch("off"), (0.5233, 0.8860)),
        (Mismatch("truncate", "sequence", high=2.0), (0.2016, 0.9795)),
        (Mismatch("mask", "sequence", low=0.5, high=2.0), (0.6373, 0.8893)),
        (Mismatch("truncate", "token", high=EVERYTHING), (0.3936, 0.9546)),
        (Mismatch("truncate", "token", high=2.0), (0.4213, 0.9408)),
        (Mismatch("mask", "token", low=0.5, high=2.0), (0.4912, 0.8996)),
        (Mismatch("truncate", "geometric", high=EVERYTHING), (0.3510, 0.9411)),
    ],
)
def test_every_other_correction_is_biased_by_this_much(
    fixed: Enumerated, mismatch: Mismatch, expected: tuple[float, float]
) -> None:
    found, true = corrected(fixed, mismatch)
    assert (bias(found, true), cosine(found, true)) == pytest.approx(expected, abs=1e-4)
