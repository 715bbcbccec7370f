"""Every trainer's gradient, update by update, against the published formula written out by hand from the rows alone.

The mini world with answers that end at token 0, two different teachers, a sampler at temperature 0.7 and large steps: a
stale reference, a forgotten temperature, the other subject's teacher or an unscored end would all move a digit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from common.advantages import Advantage
from common.distillation import Distillation
from common.distributed import World
from common.interfaces import Batch, Experience, Sample
from common.kl import KL
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.preference import DPO as DPOObjective
from common.trainers.context import Context
from common.trainers.dpo import DPO
from common.trainers.loop import Loop
from common.trainers.opd import OPD
from common.trainers.ppo import PPO
from common.trainers.rft import RFT
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.common.mini_world import VOCAB, CodeTask, Recorder, TablePolicy
from tests.common.trainer_cases import optim

TEMPERATURE, END = 0.7, 0
SAMPLING = Sampling(group=4, temperature=TEMPERATURE)


def up_to_end(answers_NA: Tensor) -> Tensor:
    ends = (answers_NA == END).long()
    return ends.cumsum(-1) - ends == 0


class StoppingTask(CodeTask):
    """Answers end at token 0; the sampler's recorded log-probs are off by a pattern, as another engine's would be."""

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        batch = super().batch(step, n, draw)
        assert batch.answers_BA is not None
        return replace(batch, mask_BA=up_to_end(batch.answers_BA))

    def experience(self, policy: TablePolicy, batch: Batch, group: int, **rest: Any) -> Experience:
        rows = super().experience(policy, batch, group, **rest)
        assert rows.rollout_logps is not None
        off = 1.2 * torch.arange(rows.answers_NA.numel()).float().sin().view_as(rows.rollout_logps)
        return replace(rows, mask_NA=up_to_end(rows.answers_NA), rollout_logps=rows.rollout_logps + off)


@dataclass
class Update:
    """One optimizer step: the rows it was given, the table before it, the table at its round's start, the gradient."""

    rows: Experience
    table: Tensor
    gradient: Tensor = field(default_factory=lambda: torch.zeros(0))


class Watched(TablePolicy):
    """Keeps the gradient of each update; its teachers' greedy answers end at token 0 too."""

    updates: list[Update]

    @contextmanager
    def accumulate(self, last: bool) -> Iterator[None]:
        with super().accumulate(last):
            yield
        if last:
            self.updates[-1].gradient = self.table.grad.clone().double()  # type: ignore[union-attr]


class Teacher(TablePolicy):
    def sample(self, prompts: Tensor, group: int = 1, **rest: Any) -> Sample:
        sample = super().sample(prompts, group, **rest)
        return replace(sample, mask_NA=up_to_end(sample.answers_NA))


TEACHERS = {"a": Teacher(seed=11), "b": Teacher(seed=12)}


def train(method: Any, monkeypatch: pytest.MonkeyPatch, steps: int = 4, task: CodeTask | None = None) -> list[Update]:
    """The updates of a run of the mini world."""
    policy, updates, original = Watched(seed=3), [], Loop.update

    def update(self: Loop, rows: Experience | None, loss: Callable[..., Any]) -> None:
        if rows is not None:
            updates.append(Update(rows, policy.table.detach().clone().double()))
        original(self, rows, loss)

    policy.updates = updates
    monkeypatch.setattr(Loop, "update", update)
    context = Context(
        policy, task or StoppingTask(partial=True), World(), steps=steps, eval_every=steps, teachers=TEACHERS
    )
    method.train(context)
    return updates


def distributions(table: Tensor, rows: Experience, temperature: float = TEMPERATURE) -> Tensor:
    """(N, A, V) log-probs of the rows' positions under a table."""
    prompts_N = rows.prompts.repeat_interleave(rows.group)
    previous = torch.cat([torch.full_like(rows.answers_NA[:, :1], VOCAB), rows.answers_NA[:, :-1]], -1)
    logits = table[prompts_N[:, None], torch.arange(rows.answers_NA.shape[1]), previous]
    return (logits / temperature).log_softmax(-1)


def token_logps(table: Tensor, rows: Experience, temperature: float = TEMPERATURE) -> Tensor:
    return distributions(table, rows, temperature).gather(-1, rows.answers_NA[..., None])[..., 0]


def assert_gradients(updates: list[Update], loss: Callable[[Tensor, Update], Tensor], least: int = 2) -> None:
    """Each update's gradient is that of `loss(table, update)`, and is not nothing."""
    assert len(updates) >= least
    for update in updates:
        table = update.table.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(table, update), table)
        torch.testing.assert_close(update.gradient, expected, rtol=1e-4, atol=1e-6)
        assert expected.abs().max() > 1e-3


def group_advantages(rows: Experience, scale: bool = True) -> Tensor:
    """(R - mean) / (std + 1e-6) of each prompt's four answers, at every token."""
    assert rows.rewards_N is not None
    rewards = rows.rewards_N.double().view(-1, rows.group)
    centred = rewards - rewards.mean(-1, keepdim=True)
    return (centred / (rewards.std(-1, keepdim=True) + 1e-6) if scale else centred).view(-1, 1)


def big(**changes: Any) -> Any:
    return optim(lr=0.3, clip_norm=None, **changes)


def test_rlvr_is_reinforce_with_group_advantages_and_k3_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    method = RLVR(big(), SAMPLING, PolicyGradient("reinforce", kl=KL(0.3, "k3")))
    updates = train(method, monkeypatch)
    start = updates[0].table

    def loss(table: Tensor, update: Update) -> Tensor:
        logps, mask = token_logps(table, update.rows), up_to_end(update.rows.answers_NA)
        x = token_logps(start, update.rows) - logps
        token = -group_advantages(update.rows) * logps + 0.3 * (x.exp() - x - 1)
        return token[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=4)


def test_reinforce_pp_subtracts_k1_at_its_token_then_whitens_the_returns_of_the_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objective = PolicyGradient("reinforce", kl=KL(0.2, "k1", "reward"))
    updates = train(RLVR(big(), SAMPLING, objective, Advantage("whiten")), monkeypatch)
    start = updates[0].table

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        mask, logps = up_to_end(rows.answers_NA), token_logps(table, rows)
        penalty = 0.2 * (logps.detach() - token_logps(start, rows))
        returns = torch.zeros_like(penalty)
        assert rows.rewards_N is not None
        for i, length in enumerate(mask.sum(-1).tolist()):
            for t in range(length):
                returns[i, t] = rows.rewards_N[i] - penalty[i, t:length].sum()
        white = (returns - returns[mask].mean()) / (returns[mask].std() + 1e-6)
        return -(white * logps)[mask].sum() / mask.sum()

    assert_gradients(updates, loss)


def test_rloo_puts_k1_of_the_answer_in_the_reward_and_sums_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    objective = PolicyGradient("reinforce", aggregate="sequence_sum", kl=KL(0.2, "k1", "reward"))
    updates = train(RLVR(big(), SAMPLING, objective, Advantage("rloo")), monkeypatch)
    start = updates[0].table

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        mask, logps = up_to_end(rows.answers_NA), token_logps(table, rows)
        assert rows.rewards_N is not None
        rewards = rows.rewards_N - 0.2 * ((logps.detach() - token_logps(start, rows)) * mask).sum(-1)
        grouped = rewards.view(-1, 4)
        others = (grouped.sum(-1, keepdim=True) - grouped) / 3
        return -((grouped - others).view(-1, 1) * logps * mask).sum() / len(mask)

    assert_gradients(updates, loss)


@pytest.mark.parametrize("treatment", ["off", "truncate", "mask"])
def test_ppo_clips_the_ratio_to_the_rounds_start_and_weighs_by_the_samplers_mismatch(
    monkeypatch: pytest.MonkeyPatch, treatment: str
) -> None:
    """Rounds of two updates, two epochs each: the old policy changes every four updates, the reference never."""
    objective = PolicyGradient("clip", clip_low=0.2, clip_high=0.3, dual_clip=2.0, kl=KL(0.3, "k2"))
    mismatch = Mismatch(treatment, low=0.5, high=2.0)
    method = PPO(big(rows_per_update=16), SAMPLING, 32, 2, objective, mismatch=mismatch)
    updates = train(method, monkeypatch, steps=8)
    start, rounds = updates[0].table, [updates[0].table, updates[4].table]

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        old = token_logps(rounds[next(i for i, u in enumerate(updates) if u is update) // 4], rows)
        mask, logps = up_to_end(rows.answers_NA), token_logps(table, rows)
        assert rows.rollout_logps is not None
        weight = (old - rows.rollout_logps).exp()
        if treatment == "mask":
            mask = mask & (weight >= 0.5) & (weight <= 2.0)
        weight = {"off": torch.ones_like(weight), "truncate": weight.clamp(max=2.0), "mask": weight}[treatment]
        ratio, advantage = (logps - old).exp(), group_advantages(rows).expand_as(logps)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        surrogate = torch.where(advantage < 0, torch.maximum(surrogate, 2.0 * advantage), surrogate)
        token = -weight * surrogate + 0.3 * (token_logps(start, rows) - logps).square() / 2
        return token[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=8)


@pytest.mark.parametrize("ratio", ["sequence", "sequence_mean"])
def test_sequence_ratios_with_sequence_means_and_a_summed_kl_as_the_reference_script_has_them(
    monkeypatch: pytest.MonkeyPatch, ratio: str
) -> None:
    objective = PolicyGradient(
        "clip", ratio, aggregate="sequence_mean", kl=KL(0.1, "k3", "loss", aggregate="sequence_sum")
    )
    updates = train(
        PPO(big(rows_per_update=16), SAMPLING, 32, 2, objective, Advantage("centred")), monkeypatch, steps=4
    )
    start = updates[0].table

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        mask, logps, old = up_to_end(rows.answers_NA), token_logps(table, rows), token_logps(start, rows)
        gap = ((logps - old) * mask).sum(-1)
        r = (gap if ratio == "sequence" else gap / mask.sum(-1)).exp()
        advantage = group_advantages(rows, scale=False)[:, 0]
        x = (old - logps) * mask
        return (-torch.minimum(r * advantage, r.clamp(0.8, 1.2) * advantage) + 0.1 * (x.exp() - x - 1).sum(-1)).mean()

    assert_gradients(updates, loss, least=4)


def teacher_logps(rows: Experience) -> Tensor:
    """(N, A, V) of each row's own subject's teacher."""
    mine = [distributions(TEACHERS[subject].table.detach().double(), rows) for subject in ("a", "b")]
    is_a = torch.tensor([subject == "a" for subject in rows.subjects]).repeat_interleave(rows.group)
    return torch.where(is_a[:, None, None], *mine)


def test_opd_descends_jsd_to_each_subjects_own_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = train(OPD(big(), SAMPLING, Distillation("jsd", beta=0.2)), monkeypatch)

    def loss(table: Tensor, update: Update) -> Tensor:
        s, t = distributions(table, update.rows), teacher_logps(update.rows)
        mask, m = up_to_end(update.rows.answers_NA), (0.8 * s.exp() + 0.2 * t.exp()).log()
        token = 0.2 * (t.exp() * (t - m)).sum(-1) + 0.8 * (s.exp() * (s - m)).sum(-1)
        return token[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=4)


def test_opd_from_a_mixture_matches_the_mean_of_the_teachers(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = train(OPD(big(), SAMPLING, Distillation("reverse_kl"), teacher="mixture"), monkeypatch)

    def loss(table: Tensor, update: Update) -> Tensor:
        rows, mask = update.rows, up_to_end(update.rows.answers_NA)
        s = distributions(table, rows)
        t = (sum(distributions(t.table.detach().double(), rows).exp() for t in TEACHERS.values()) / 2).log()
        return (s.exp() * (s - t)).sum(-1)[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=4)


def test_mopd_weighs_the_written_token_by_teacher_over_student_plus_the_outcome(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    method = OPD(big(), SAMPLING, Distillation("sampled", outcome=0.5), mismatch=Mismatch("mask", low=0.5, high=2.0))
    updates = train(method, monkeypatch)

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        logps = token_logps(table, rows)
        t = teacher_logps(rows).gather(-1, rows.answers_NA[..., None])[..., 0]
        assert rows.rollout_logps is not None
        weight = (logps.detach() - rows.rollout_logps).exp()
        mask = up_to_end(rows.answers_NA) & (weight >= 0.5) & (weight <= 2.0)
        advantage = t - logps.detach() + 0.5 * group_advantages(rows)
        return -(weight * advantage * logps)[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=4)


def test_sft_copies_the_greedy_answer_of_each_subjects_own_teacher_up_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates = train(SFT(big()), monkeypatch)

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        own = [TEACHERS[subject].sample(rows.prompts[i : i + 1]) for i, subject in enumerate(rows.subjects)]
        rows = replace(rows, answers_NA=torch.cat([sample.answers_NA for sample in own]))
        mask = torch.cat([sample.mask_NA for sample in own])
        return -token_logps(table, rows, temperature=1.0)[mask].sum() / mask.sum()

    assert_gradients(updates, loss, least=4)


def test_rft_copies_each_distinct_passed_answer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    method = RFT(big(), Sampling(group=4), passing=0.6)
    updates = train(method, monkeypatch)

    def loss(table: Tensor, update: Update) -> Tensor:
        rows = update.rows
        mask, kept, seen = up_to_end(rows.answers_NA), [], set()
        assert rows.rewards_N is not None
        for i, reward in enumerate(rows.rewards_N.tolist()):
            answer = (i // 4, *rows.answers_NA[i][mask[i]].tolist())
            kept.append(reward >= 0.6 and answer not in seen)
            seen |= {answer} if reward >= 0.6 else set()
        mask = mask & torch.tensor(kept)[:, None]
        return -token_logps(table, rows, temperature=1.0)[mask].sum() / mask.sum()

    assert_gradients(updates, loss)


def test_dpo_prefers_the_first_right_to_the_first_wrong_answer_of_each_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    method = DPO(big(), SAMPLING, DPOObjective(beta=0.5), passing=0.6)
    updates = train(method, monkeypatch)
    start = updates[0].table

    def loss(table: Tensor, update: Update) -> Tensor:
        rows, mask = update.rows, up_to_end(update.rows.answers_NA)
        assert rows.rewards_N is not None
        right = rows.rewards_N.view(-1, 2) >= 0.6
        assert right[:, 0].all()
        assert not right[:, 1].any()
        gain = ((token_logps(table, rows) - token_logps(start, rows)) * mask).sum(-1).view(-1, 2)
        return torch.log1p((-0.5 * (gain[:, 0] - gain[:, 1])).exp()).mean()

    assert_gradients(updates, loss)


def test_update_n_is_made_at_the_rate_of_update_n() -> None:
    """Warmup 2 and a cosine over four updates: n = 0, 1, 2, 3 are not one ahead and not one behind."""
    recorder = Recorder()
    context = Context(TablePolicy(), CodeTask(), World(), steps=4, log_every=1, eval_every=4, recorder=recorder)
    SFT(optim(lr=0.5, warmup=2, schedule="cosine"), targets="reference").train(context)
    rates = [values["train/lr"] for _, values in recorder.lines if "train/lr" in values]
    cosine = [1.0, 0.853553, 0.5, 0.146447]
    assert rates == pytest.approx(
        [0.5 * rise * fall for rise, fall in zip([0.5, 1, 1, 1], cosine, strict=True)], abs=1e-5
    )


class SameProblems(StoppingTask):
    """The problems of step 0 at every step."""

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        return super().batch(0, n, draw)


def test_each_round_is_sampled_with_fresh_numbers_and_each_row_with_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    method = RLVR(optim(lr=0.0), Sampling(group=64), PolicyGradient("reinforce"))
    updates = train(method, monkeypatch, steps=3, task=SameProblems(partial=True))
    first = [update.rows.answers_NA for update in updates]
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[1], first[2])
    assert len(first[0].unique(dim=0)) > 3
