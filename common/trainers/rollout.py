"""From a policy to rows with advantages: what RLVR and PPO share before their first update.

sample (or take an offline task's rows) -> replace groups without signal, if asked -> score old and reference -> penalty
in
the reward -> advantages -> importance weights of the sampler mismatch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from common.advantages import Advantage, refuse_non_finite, signal
from common.aggregation import token_weights
from common.errors import UserError, at_least, is_number
from common.interfaces import Batch, Experience, Policy
from common.kl import KL, kl_estimate
from common.logprobs import sum_tokens
from common.mismatch import Mismatch, answer_gap
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.seeding import uniforms
from common.trainers.context import Context
from common.trainers.scoring import score


@dataclass(frozen=True)
class Sampling:
    """How a round's rows are sampled."""

    group: int  # answers a prompt
    temperature: float = 1.0
    resample: int = 0  # dynamic sampling (DAPO): further draws that may replace groups without signal

    def __post_init__(self) -> None:
        at_least("method.sampling.group", self.group, 1, whole=True)
        at_least("method.sampling.resample", self.resample, 0, whole=True)
        if not is_number(self.temperature) or not self.temperature > 0:
            raise UserError(
                f"method.sampling.temperature={self.temperature} must be positive; evaluation is greedy already."
            )


def sample(context: Context, step: int, rows: int | None, sampling: Sampling, draw: int = 0) -> Experience:
    """Rows of one round: an offline task's recorded ones, else `group` answers to each of rows / group problems."""
    task = context.task
    if task.offline:
        recorded = task.batch(step, rows or task.size or 0).rows
        assert recorded is not None, "an offline task's batch carries its rows"
        return finite(recorded)
    problems = max(1, rows // sampling.group) if rows is not None else task.size or 1
    return answer(context, task.batch(step, problems, draw), step, sampling, draw)


def answer(context: Context, batch: Batch, step: int, sampling: Sampling, draw: int = 0) -> Experience:
    """`group` sampled answers to each problem, judged; a function of the weights and (seed, step, draw)."""
    policy = context.policy
    noise_NA = uniforms(context.seed, f"rollout {draw}", step, len(batch) * sampling.group, policy.answer_len)
    return finite(
        context.task.experience(policy, batch, sampling.group, temperature=sampling.temperature, uniforms_NA=noise_NA)
    )


def finite(rows: Experience) -> Experience:
    """The rows, unless a reward or an advantage is NaN or infinite: UserError with the row's id."""
    ids = [i for i in rows.row_ids for _ in range(rows.group)]
    if rows.rewards_N is not None:
        refuse_non_finite(rows.rewards_N, ids)
    if rows.advantages is not None:
        per_row = rows.advantages if rows.advantages.dim() == 1 else sum_tokens(rows.advantages, rows.mask_NA)
        refuse_non_finite(per_row, ids, "advantage")
    return rows


def problems_of(context: Context, step: int, optim: Optim, sampling: Sampling) -> Batch:
    """The problems of one update that samples `group` answers to each."""
    return context.task.batch(step, max(1, optim.rows_per_update // sampling.group))


def groups_of(rows: Experience) -> torch.Tensor:
    """(N,) group numbers: the task's own, else one a unit."""
    if rows.groups_N is not None:
        return rows.groups_N
    return torch.arange(rows.units).repeat_interleave(rows.group)


def sample_with_signal(
    context: Context, step: int, rows: int | None, sampling: Sampling
) -> tuple[Experience, dict[str, float]]:
    """`sample`, with units without signal replaced by later draws that have some, at most `resample` times."""
    kept = sample(context, step, rows, sampling)
    if context.task.offline or kept.rewards_N is None:
        return kept, {}
    metrics = {"reward": float(kept.rewards_N.double().mean()), "signal": _signal_share(kept)}
    if sampling.resample and kept.groups_N is None:
        drawn = 1
        while drawn <= sampling.resample and not bool(_units_with_signal(kept).all()):
            kept = _fill(kept, sample(context, step, rows, sampling, drawn))
            drawn += 1
        metrics |= {"resample_draws": float(drawn - 1), "signal_used": _signal_share(kept)}
    return kept, metrics


def _units_with_signal(rows: Experience) -> torch.Tensor:
    marks_N = signal(rows.rewards_N, groups_of(rows).to(rows.rewards_N.device), rows.weights)
    return marks_N.view(rows.units, rows.group).any(-1).cpu()


def _signal_share(rows: Experience) -> float:
    """Share of the groups that hold different rewards."""
    groups = groups_of(rows).to(rows.rewards_N.device)
    marks = signal(rows.rewards_N, groups, rows.weights)
    return len(groups[marks].unique()) / max(1, len(groups.unique()))


def _fill(kept: Experience, fresh: Experience) -> Experience:
    """Units of `kept` without signal replaced, first to first, by units of `fresh` with signal."""
    lacking = (~_units_with_signal(kept)).nonzero().flatten()
    offered = _units_with_signal(fresh).nonzero().flatten()
    n = min(len(lacking), len(offered))
    order = torch.arange(kept.units)
    order[lacking[:n]] = kept.units + offered[:n]
    return concatenate(kept, fresh).select(order)


def concatenate(first: Experience, second: Experience) -> Experience:
    """The units of both, where prompts are tensors or offer `+`. Both carry the same optional fields."""
    prompts = (
        torch.cat([first.prompts, second.prompts])
        if isinstance(first.prompts, torch.Tensor)
        else first.prompts + second.prompts
    )

    def both(name: str) -> torch.Tensor | None:
        mine, other = getattr(first, name), getattr(second, name)
        return None if mine is None else torch.cat([mine, other])

    return replace(
        first,
        prompts=prompts,
        subjects=first.subjects + second.subjects,
        row_ids=first.row_ids + second.row_ids,
        **{
            name: both(name)
            for name in ("answers_NA", "mask_NA", "weight_N", "rollout_logps", "rewards_N", "advantages")
        },
        groups_N=None,
        extras={name: torch.cat([tensor, second.extras[name]]) for name, tensor in first.extras.items()},
    )


def prepare(
    context: Context,
    rows: Experience,
    *,
    objective: PolicyGradient,
    advantage: Advantage,
    mismatch: Mismatch,
    reference: Policy | None,
    micro_batch: int | None,
    score_old: bool,
) -> tuple[Experience, dict[str, float]]:
    """Rows with old_logps_NA, ref_logps_NA where there is a reference, advantages_NA, importance_NA and its mask.

    `score_old` False skips the scoring forward where nothing needs it: old is then the policy itself, at ratio 1.
    """
    metrics: dict[str, float] = {}
    if score_old:
        rows = rows.with_extras(old_logps_NA=score(context.policy, rows, context.world, micro_batch))
    if reference is not None:
        rows = rows.with_extras(ref_logps_NA=score(reference, rows, context.world, micro_batch))
    advantages_NA = _advantages(rows, advantage, objective.kl)
    if mismatch.treatment != "off":
        mismatch.require(rows.rollout_logps)
    if rows.rollout_logps is not None and score_old:
        old_NA = rows.extras["old_logps_NA"]
        used_NA, keep_NA, metrics = mismatch(old_NA, rows.rollout_logps, rows.mask_NA, rows.weights)
        gap_N = answer_gap(old_NA, rows.rollout_logps, rows.mask_NA)[rows.weights > 0].double()
        metrics |= {"mismatch/logp_gap": float(gap_N.mean()), "mismatch/logp_gap_abs": float(gap_N.abs().mean())}
        rows = replace(rows, mask_NA=keep_NA)
        if mismatch.treatment != "off":
            rows = rows.with_extras(importance_NA=used_NA)
    return rows.with_extras(advantages_NA=advantages_NA), metrics


def _advantages(rows: Experience, advantage: Advantage, kl: KL) -> torch.Tensor:
    if rows.advantages is not None:
        if kl.in_reward:
            raise UserError(
                "objective.kl.placement=reward needs rewards, but these rows carry advantages; use placement=loss."
            )
        given = rows.advantages if rows.advantages.dim() == 2 else rows.advantages[:, None].expand_as(rows.mask_NA)
        return given.float() * rows.mask_NA
    assert rows.rewards_N is not None, "rows carry rewards or advantages"
    penalty_NA = None
    if kl.in_reward:
        penalty_NA = kl.beta * kl_estimate(rows.extras["old_logps_NA"], rows.extras["ref_logps_NA"], kl.estimator)
    return advantage(rows.rewards_N, groups_of(rows).to(rows.rewards_N.device), rows.mask_NA, rows.weights, penalty_NA)


def scaled(rows: Experience, objective: PolicyGradient) -> Experience:
    """The rows of one update with the token weights of each of the objective's terms."""
    scales = {
        f"scale_{term}_NA": token_weights(rows.mask_NA, rows.weights, objective.aggregate_of(term), objective.constant)
        for term in ("pg", "kl", "entropy")
    }
    return rows.with_extras(**scales)
