"""Rows of a file as a `Task`: recorded experience, or prompts whose codes a policy's own samples are verified against.

With advantages in the rows the task is offline: an epoch is one pass in an order drawn from (seed, epoch), and PPO
learns from the rows as they are. Without, RLVR, OPD and MOPD sample codes and compare them with the row's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bt_policy.encoding import Encoder, Prompts
from bt_policy.rows import Row
from common.distributed import World
from common.errors import UserError
from common.interfaces import Batch, Experience, Metrics, Policy
from common.rollout import sample_sharded
from common.seeding import torch_rng


class RowsTask:
    """Training rows, validation rows, and how a code is judged."""

    def __init__(
        self,
        train: Sequence[Row],
        valid: Sequence[Row],
        encoder: Encoder,
        *,
        seed: int,
        world: World | None = None,
        reward: str = "exact",
        eval_rows: int = 64,
    ) -> None:
        """reward: "exact" (1: the whole code is right) or "digits" (the share of right ones)."""
        self.train, self.valid, self.encoder, self.seed = list(train), list(valid), encoder, seed
        self.world, self.reward, self.eval_rows = world or World(), reward, eval_rows
        self.subjects = sorted({row.subject for row in self.train})
        self.size: int | None = len(self.train)
        with_adv = sum(row.adv is not None for row in self.train)
        if 0 < with_adv < len(self.train):
            raise UserError(
                f"{len(self.train) - with_adv} of {len(self.train)} training rows have no adv; "
                "all or none must have it."
            )
        self.offline = with_adv > 0
        self.temperature = _temperature(self.train) if self.offline else 1.0

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        """The rows of update `step` when every update takes `n`; the last of an epoch takes what is left.

        `draw` > 0 asks for other rows in place of those (dynamic sampling).
        """
        per_epoch = -(-len(self.train) // n)
        epoch, within = divmod(step, per_epoch)
        order = torch.randperm(len(self.train), generator=torch_rng(self.seed, f"rows/order {draw}", epoch))
        if self.offline and n >= len(self.train):
            order = torch.arange(len(self.train))  # a recorded round as it was sampled; the method shuffles it itself
        rows = [self.train[i] for i in order[within * n : (within + 1) * n].tolist()]
        answers_BA = self._codes(rows, end=True)
        return Batch(
            prompts=prompts(rows),
            subjects=[row.subject for row in rows],
            row_ids=[row.line for row in rows],
            answers_BA=answers_BA,
            mask_BA=torch.ones_like(answers_BA, dtype=torch.bool),
            rows=self._recorded(rows) if self.offline else None,
        )

    def _recorded(self, rows: Sequence[Row]) -> Experience:
        """The rows as experience. Only code tokens are scored: `<|im_end|>` was never a choice of the sampler's."""
        answers_NA = self._codes(rows, end=False)
        return Experience(
            prompts=prompts(rows),
            answers_NA=answers_NA,
            mask_NA=torch.ones_like(answers_NA, dtype=torch.bool),
            subjects=[row.subject for row in rows],
            row_ids=[row.line for row in rows],
            temperature=self.temperature,
            rollout_logps=self._rollout_logps(rows),
            advantages=torch.tensor([row.adv for row in rows], dtype=torch.float32, device=self.world.device),
        )

    def _codes(self, rows: Sequence[Row], end: bool) -> Tensor:
        return torch.tensor([self.encoder.code_ids(row.code, end=end) for row in rows], device=self.world.device)

    def _rollout_logps(self, rows: Sequence[Row]) -> Tensor | None:
        """(N, A) where every row of the file has per-token log-probs, (N,) sums where each has some, None otherwise."""
        found = [row.logps for row in self.train]
        if any(one is None for one in found):
            return None
        per_token = all(isinstance(one, tuple) for one in found)
        values = [row.logps if per_token or not isinstance(row.logps, tuple) else sum(row.logps) for row in rows]
        return torch.tensor(values, dtype=torch.float32, device=self.world.device)

    def experience(
        self, policy: Policy, batch: Batch, group: int, *, temperature: float, uniforms_NA: Tensor
    ) -> Experience:
        """Each rank samples its share; the rows of all ranks come back, judged against the rows' codes."""
        asked = batch.prompts.masked()
        sample = sample_sharded(policy, asked, group, temperature, uniforms_NA, self.world)
        assert batch.answers_BA is not None
        right_NA = sample.answers_NA == batch.answers_BA[:, : policy.answer_len].repeat_interleave(group, 0)
        return Experience(
            prompts=asked,
            answers_NA=sample.answers_NA,
            mask_NA=sample.mask_NA,
            subjects=batch.subjects,
            row_ids=batch.row_ids,
            group=group,
            temperature=temperature,
            rollout_logps=sample.logps_NA,
            rewards_N=right_NA.all(1).float() if self.reward == "exact" else right_NA.float().mean(1),
        )

    def evaluate(self, policy: Policy) -> Metrics:
        """Teacher-forced argmax over the full vocabulary on this rank's validation rows.

        The whole code is right exactly where greedy writing, unmasked, would produce it.
        """
        if not self.valid:
            return {}
        positions, weight = self.world.shard(len(self.valid))
        sums = torch.zeros(3)
        for part in torch.arange(len(positions)).split(self.eval_rows):
            rows = [self.valid[i] for i in positions[part].tolist()]
            answers_NA = self._codes(rows, end=False)
            with torch.no_grad():
                logits_NAV = policy.answer_logits(prompts(rows).masked(False), answers_NA)
            right_NA = (logits_NAV.argmax(-1) == answers_NA).float().cpu() * weight[part][:, None]
            sums += torch.tensor([right_NA.amin(1).sum(), right_NA.sum(), weight[part].sum() * answers_NA.shape[1]])
        whole, digit, asked = sums.tolist()
        return {"acc/code": (whole, asked / len(self.valid[0].code)), "acc/digit": (digit, asked)}

    def score(self, metrics: Mapping[str, float]) -> float:
        """Whole-code accuracy; digits decide among equals."""
        return metrics["acc/code"] + 1e-3 * metrics["acc/digit"]


def prompts(rows: Sequence[Row]) -> Prompts:
    """The rows' prompts; each is scored as it was sampled: under the legal mask where one is recorded."""
    return Prompts(
        [row.frame for row in rows],
        [row.name for row in rows],
        [row.memory for row in rows],
        torch.tensor([row.mask is not None for row in rows]),
    )


def _temperature(rows: Sequence[Row]) -> float:
    found = {1.0 if row.temperature is None else row.temperature for row in rows}
    if len(found) > 1:
        raise UserError(
            f"the training rows were sampled at temperatures {sorted(found)}; "
            "put each temperature in a file of its own."
        )
    return found.pop()
