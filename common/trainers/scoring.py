"""Log-probs that a method computes once for its rows, without gradient: old, reference and teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from common.distillation import mix
from common.distributed import World
from common.interfaces import Experience, Policy
from common.logprobs import gather_tokens, log_probs, token_logps


@torch.no_grad()
def score(policy: Policy, rows: Experience, world: World, micro_batch: int | None = None) -> Tensor:
    """(N, A) float32 log-probs of the rows' tokens under `policy`, on every rank; ranks share the forwards."""
    units, _ = world.shard(rows.units)
    per = len(units) if micro_batch is None else max(1, micro_batch // rows.group)
    parts = []
    for chosen in units.split(per):
        part = rows.select(chosen)
        logits = policy.answer_logits(part.prompts, part.answers_NA, group=part.group)
        parts.append(token_logps(logits, part.answers_NA, part.temperature))
    return world.gather(torch.cat(parts), rows.units)


@torch.no_grad()
def teacher_log_probs(teachers: Mapping[str, Policy], rows: Experience, world: World, mixture: bool = False) -> Tensor:
    """(N, A, V) log-probs of each row's teacher on the row's own tokens: its subject's, or the mean probability of all.

    A policy that teaches several subjects is asked once. Over several ranks every teacher is asked on every rank, if
    need be
    about a row that it does not teach, because a sharded teacher's forward is a collective call.
    """
    if mixture:
        distinct = {id(teacher): teacher for teacher in teachers.values()}.values()
        every = torch.arange(rows.units)
        return mix(torch.stack([_ask(teacher, rows, every) for teacher in distinct]))
    by_policy: dict[int, list[int]] = {}
    policies: dict[int, Policy] = {}
    for subject in sorted(teachers) if world.size > 1 else sorted(set(rows.subjects)):
        policies[id(teachers[subject])] = teachers[subject]
        by_policy.setdefault(id(teachers[subject]), [])
    for unit, subject in enumerate(rows.subjects):
        by_policy[id(teachers[subject])].append(unit)
    result: Tensor | None = None
    for key, units in by_policy.items():
        answer = _ask(policies[key], rows, torch.tensor(units or [0]))
        if result is None:
            result = answer.new_empty(len(rows), *answer.shape[1:])
        if units:
            result[rows.rows_of(torch.tensor(units)).to(result.device)] = answer
    assert result is not None, "rows without a unit have no teacher to ask"
    return result


def _ask(teacher: Policy, rows: Experience, units: Tensor) -> Tensor:
    part = rows if len(units) == rows.units else rows.select(units)
    return log_probs(teacher.answer_logits(part.prompts, part.answers_NA, group=part.group), part.temperature)


def written(logps_NAV: Tensor, rows: Experience) -> Tensor:
    """(N, A) log-probs of the rows' own tokens."""
    return gather_tokens(logps_NAV, rows.answers_NA)


def masked_mean(values_NA: Tensor, mask_NA: Tensor, weight_N: Tensor) -> tuple[float, float]:
    """(sum, count) over the scored tokens of rows that count; other positions may hold anything."""
    weight_NA = mask_NA * weight_N[:, None]
    total = (values_NA.detach().float().masked_fill(~mask_NA, 0.0) * weight_NA).sum()
    return float(total), float(weight_NA.sum())
