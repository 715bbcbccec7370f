"""Every method in the mini world: it learns, however its rows are split, and it resumes to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from common.checkpoint import Checkpoints
from common.distributed import World
from common.errors import UserError
from common.interfaces import Batch, Experience
from common.kl import KL
from common.objectives import PolicyGradient
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.ppo import PPO
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling, sample_with_signal
from common.trainers.sft import SFT
from tests.common.mini_world import PROMPTS, CodeTask, Recorder, TablePolicy, teacher
from tests.common.trainer_cases import GROUP, METHODS, optim


def context(directory: Path | None = None, **changes: Any) -> Context:
    """A run of the mini world: 12 updates, evaluated every 4."""
    task = changes.pop("task", None) or CodeTask(partial=True)
    policy = changes.pop("policy", None) or TablePolicy()
    checkpoints = None if directory is None else Checkpoints(directory, World())
    teachers = {"a": teacher(task), "b": teacher(task)}
    settings = {"steps": 12, "eval_every": 4, "teachers": teachers, "recorder": Recorder(), "checkpoints": checkpoints}
    return Context(policy, task, World(), **{**settings, **changes})


@torch.no_grad()
def expected_reward(policy: TablePolicy, task: CodeTask) -> float:
    """Mean over prompts of the share of right tokens, exactly: along the policy's own prefixes."""
    total = 0.0
    for prompt in range(PROMPTS):
        reach = torch.zeros(policy.table.shape[-2])
        reach[-1] = 1.0
        for t in range(policy.answer_len):
            step = policy.table[prompt, t].softmax(-1)
            token = reach @ step
            total += float(token[task.codes[prompt, t]])
            reach = torch.cat([token, torch.zeros(1)])
    return total / (PROMPTS * policy.answer_len)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_raises_the_exact_expected_reward(name: str) -> None:
    # dpo and rft need whole answers to pass sometimes; the others learn from partial credit
    run = context(task=CodeTask(partial=name not in ("dpo", "rft")), steps=60, eval_every=60)
    before = expected_reward(run.policy, run.task)
    METHODS[name]().train(run)
    assert expected_reward(run.policy, run.task) > before + 0.1


@pytest.mark.parametrize("name", METHODS)
def test_a_run_stopped_anywhere_and_resumed_gives_the_bits_of_one_that_was_not(name: str, tmp_path: Path) -> None:
    whole = context(tmp_path / "whole", eval_every=3)
    METHODS[name]().train(whole)
    # the schedule's horizon is the whole run's, so a stop is simulated, not configured
    for stop_at in (3, 9):  # a PPO round is 4 updates: both lie inside one
        stopped = context(tmp_path / f"at{stop_at}", eval_every=3)
        stopped.recorder.log = _stop_after(stopped.recorder, stop_at)  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            METHODS[name]().train(stopped)
        resumed = context(tmp_path / f"at{stop_at}", eval_every=3, resume=True)
        resumed.recorder.lines = list(stopped.recorder.lines)
        METHODS[name]().train(resumed)
        assert torch.equal(resumed.policy.table, whole.policy.table)
        assert resumed.recorder.lines == whole.recorder.lines
        assert resumed.report == whole.report


def _stop_after(recorder: Recorder, step: int) -> Any:
    log = Recorder.log

    def interrupted(at: int, values: dict[str, float], times: dict[str, float] | None = None) -> None:
        if at > step:
            raise KeyboardInterrupt
        log(recorder, at, values, times)

    return interrupted


@pytest.mark.parametrize("name", METHODS)
def test_the_gradient_does_not_depend_on_the_micro_batch(name: str) -> None:
    gradients = []
    for micro_batch in (None, 1, 2, 8, 12):
        run = context(steps=1, eval_every=1)
        kept = _keep_gradient(run.policy)
        METHODS[name](micro_batch=micro_batch, clip_norm=None).train(run)
        gradients.append(kept[0])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-4, atol=1e-7)
    assert gradients[0].abs().max() > 1e-4


def _keep_gradient(policy: TablePolicy) -> list[Tensor]:
    """The accumulated gradient at the end of each update's last micro-batch."""
    kept: list[Tensor] = []
    original = policy.accumulate

    from contextlib import contextmanager

    @contextmanager
    def recording(last: bool) -> Any:
        with original(last):
            yield
        if last:
            assert policy.table.grad is not None
            kept.append(policy.table.grad.clone())

    policy.accumulate = recording  # type: ignore[method-assign]
    return kept


def test_a_non_finite_loss_never_reaches_the_weights_and_five_in_a_row_stop_the_run_with_row_ids() -> None:
    run = context(steps=20)
    with torch.no_grad():
        run.policy.table[2] = torch.nan
    before = run.policy.table.detach().clone()
    with pytest.raises(UserError, match=r"5 updates in a row .* rows .*2"):
        SFT(optim(), targets="reference").train(run)
    assert torch.equal(run.policy.table.isnan(), before.isnan())
    assert torch.equal(run.policy.table.nan_to_num(), before.nan_to_num())


def test_one_bad_update_is_skipped_counted_and_the_run_goes_on() -> None:
    run = context(steps=4, eval_every=4)
    original, calls = run.policy.answer_logits, []

    def sometimes_nan(prompts: Tensor, answers_NA: Tensor, *, group: int = 1) -> Tensor:
        calls.append(1)
        logits = original(prompts, answers_NA, group=group)
        return logits * torch.nan if len(calls) == 2 else logits

    run.policy.answer_logits = sometimes_nan  # type: ignore[method-assign]
    SFT(optim(), targets="reference").train(run)
    assert run.recorder.lines[-1][1]["train/skipped"] == 0.25
    assert bool(run.policy.table.isfinite().all())


class Recorded(CodeTask):
    """Rows that were written earlier: advantages given, log-probs of the sampler recorded as sums."""

    offline = True

    def __init__(self, rows: int) -> None:
        super().__init__(partial=True)
        source = CodeTask(partial=True)
        batch = source.batch(0, rows)
        noise = torch.rand(rows, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        written = source.experience(TablePolicy(), batch, 1, temperature=1.0, uniforms_NA=noise)
        assert written.rollout_logps is not None
        assert written.rewards_N is not None
        self.rows = replace(
            written,
            rollout_logps=written.rollout_logps.sum(-1) - 0.5,
            advantages=written.rewards_N - 0.5,
            rewards_N=None,
        )
        self.size = rows
        self._batch = batch

    def batch(self, step: int, n: int, draw: int = 0) -> Batch:
        return replace(self._batch, rows=self.rows)


def test_recorded_rows_are_one_round_of_epochs_and_the_last_short_window_has_its_own_denominator() -> None:
    run = context(task=Recorded(40), steps=None, eval_every=None)
    PPO(optim(rows_per_update=16), Sampling(1), epochs=2).train(run)
    assert run.report["updates"] == 6  # 16 + 16 + 8 rows, twice
    assert len(run.report["rounds"]) == 1
    assert len(run.report["rounds"][0]["epochs"]) == 2
    assert run.report["rounds"][0]["mismatch/logp_gap"] == pytest.approx(0.5, abs=1e-5)


def test_ppo_begins_each_round_at_ratio_one_and_at_kl_zero_to_an_equal_reference() -> None:
    run = context(steps=1, eval_every=1)
    PPO(optim(), GROUP, 64, objective=PolicyGradient(kl=KL(0.1))).train(run)
    first = run.recorder.lines[-1][1]
    assert first["train/ratio"] == 1.0
    assert first["train/kl"] == 0.0
    assert first["train/clip_frac"] == 0.0
    assert first["train/approx_kl"] == 0.0
    assert first["train/grad_norm"] > 0


def test_the_kl_is_measured_to_the_start_even_after_a_resume(tmp_path: Path) -> None:
    method = PPO(optim(), GROUP, 64, objective=PolicyGradient(kl=KL(0.1)))
    method.train(context(tmp_path, steps=8))
    resumed = context(tmp_path, steps=12, resume=True)
    method.train(resumed)
    assert resumed.recorder.lines[-1][1]["train/kl"] > 1e-4


@pytest.mark.parametrize(("size", "asked"), [(None, [0, 4, 8]), (640, [0, 1, 2])])
def test_a_curriculum_sees_the_updates_made_and_finite_data_the_rounds(size: int | None, asked: list[int]) -> None:
    class Asked(CodeTask):
        def batch(self, step: int, n: int, draw: int = 0) -> Batch:
            seen.append(step)
            return super().batch(step, n, draw)

    seen: list[int] = []
    task = Asked(partial=True)
    task.size = size
    PPO(optim(), GROUP, rows_per_round=64, epochs=2).train(context(task=task, steps=12))
    assert seen == asked


def test_dynamic_sampling_replaces_groups_without_signal_and_counts_its_draws() -> None:
    run = context(task=CodeTask(partial=False))
    plain, measured = sample_with_signal(run, 0, 64, Sampling(group=4))
    filled, replaced = sample_with_signal(run, 0, 64, Sampling(group=4, resample=20))
    assert measured["signal"] == replaced["signal"] < 0.5
    assert replaced["signal_used"] > replaced["signal"]
    assert 1 <= replaced["resample_draws"] <= 20
    assert len(filled) == len(plain) == 64


def test_a_kl_reference_or_a_teacher_costs_no_forward_where_it_is_not_asked_for() -> None:
    run = context(steps=2, eval_every=2)
    RLVR(optim(), GROUP).train(run)
    assert run.policy.forwards == 2  # one a update: no old, no reference


def test_distillation_refuses_recorded_rows_in_a_sentence() -> None:
    with pytest.raises(UserError, match="recorded"):
        METHODS["opd"]().train(context(task=Recorded(8)))


def test_steps_and_epochs_bound_the_run_by_the_smaller() -> None:
    class Finite(CodeTask):
        size = 96

    def horizon(**bounds: Any) -> int | None:
        run = context(task=Finite(), steps=bounds["steps"])
        return Loop(run, optim(rows_per_update=32, epochs=bounds["epochs"])).horizon

    assert horizon(steps=None, epochs=2) == 6
    assert horizon(steps=4, epochs=2) == 4
    assert horizon(steps=40, epochs=0.5) == 2
    with pytest.raises(UserError, match="nothing bounds"):
        horizon(steps=None, epochs=None)


def test_early_stop_is_asked_before_the_first_update_too() -> None:
    run = context(steps=12, stop=lambda metrics: True)
    before = run.policy.table.detach().clone()
    SFT(optim(), targets="reference").train(run)
    assert torch.equal(run.policy.table, before)
    assert run.report["updates"] == 0


def test_an_experience_cut_into_units_keeps_rows_with_their_prompt() -> None:
    rows = Experience(
        torch.tensor([10, 11, 12]), torch.arange(12).view(6, 2), torch.ones(6, 2, dtype=torch.bool),
        ["a", "b", "c"], [0, 1, 2],
        group=2, rewards_N=torch.arange(6.0), extras={"x": torch.arange(6)},
    )  # fmt: skip
    part = rows.select(torch.tensor([2, 0]))
    assert part.prompts.tolist() == [12, 10]
    assert part.subjects == ["c", "a"]
    assert part.answers_NA[:, 0].tolist() == [8, 10, 0, 2]
    assert part.extras["x"].tolist() == [4, 5, 0, 1]
