"""The faults of the earlier trainer (reference notes), one test each, where no other file here proves their absence.

Elsewhere: padding rows weigh zero, and communication on the last micro-batch only (test_invariance); resuming, the SFT
optimizer, the continued optimizer (test_app, test_adapters); the saved adapter acts (test_adapters); a frame is
opened and encoded once (test_vlm); clip fraction by the advantage's sign, one denominator, estimators of the KL
(tests/common).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bt_policy import results, rows
from bt_policy.task import RowsTask
from common.distributed import World
from common.mismatch import Mismatch
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.loop import Loop
from common.trainers.ppo import PPO
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from tests.bt_policy.conftest import composed, make_policy, make_rows
from tests.bt_policy.test_thin_slice import Recorder


def _task(policy, folder, n=12, adv=False, valid=0, **options):
    found = rows.read(make_rows(folder, n, adv=adv), levels=(4, 4, 4))[0]
    return RowsTask(found, found[:valid], policy.encoder, seed=0, **options)


def test_a_short_last_update_is_the_mean_over_its_own_rows(policy, tmp_path):
    """12 rows, 8 an update: the second has four, and its loss is theirs, not half of it."""
    task, recorder = _task(policy, tmp_path), Recorder()
    context = Context(policy, task, World(), eval_every=1, recorder=recorder)
    SFT(Optim(lr=0.0, rows_per_update=8, micro_batch=3, epochs=1), targets="reference").train(context)
    losses = [values["train/loss"] for _, values in recorder.lines if "train/loss" in values]
    expected = []
    for step in range(2):
        batch = task.batch(step, 8)
        with torch.no_grad():
            logps = policy.answer_logits(batch.prompts, batch.answers_BA).log_softmax(-1)
        expected.append(-logps.gather(-1, batch.answers_BA[..., None]).mean().item())
    assert len(task.batch(1, 8)) == 4
    assert losses == pytest.approx(expected, rel=1e-4)


def test_a_rank_without_validation_rows_counts_nothing_and_does_not_fail(policy, tmp_path):
    parts = [_task(policy, tmp_path, valid=3, world=World(rank, 5)).evaluate(policy) for rank in range(5)]
    whole = _task(policy, tmp_path, valid=3).evaluate(policy)
    for name, (total, count) in whole.items():
        assert sum(part[name][0] for part in parts) == total
        assert sum(part[name][1] for part in parts) == count
    assert parts[4]["acc/code"][1] == 0


def test_the_samplers_log_probs_are_used_where_the_correction_is_on(tmp_path):
    found = []
    for treatment, shift in (("off", 0.0), ("off", 1.0), ("truncate", 0.0), ("truncate", 1.0)):
        policy = make_policy()
        task = _task(policy, tmp_path, adv=True)
        task.train = [replace(row, logps=-17.0 - shift * (row.line % 2)) for row in task.train]
        context = Context(policy, task, World(), steps=1, eval_every=1)
        method = PPO(
            Optim(lr=1e-2, rows_per_update=12, optimizer="adamw", eps=1.0), Sampling(group=1), epochs=1,
            mismatch=Mismatch(treatment=treatment, level="sequence"),
        )  # fmt: skip
        method.train(context)
        found.append(torch.cat([tensor.flatten() for tensor in policy.state().values()]))
    assert torch.equal(found[0], found[1])
    assert not torch.allclose(found[2], found[3], atol=1e-7, rtol=0)


def test_stats_keep_the_old_keys_and_pool_the_epochs_apart():
    epoch = {"pg_loss": 0.25, "kl": 0.01, "ratio_outside": 0.5, "clip_frac": 0.125, "entropy": 1.0}
    round_ = {
        "rows": 64,
        "epochs": [{**epoch, "pg_loss": 9.0}, epoch],
        "mismatch/logp_gap": -0.1,
        "mismatch/logp_gap_abs": 0.2,
    }
    stats = results.stats({"rounds": [round_], "seconds": 12.4}, digits=3)
    old = {
        "pg_loss": 0.25,
        "kl": 0.03,
        "clip_frac": 0.5,
        "logp_gap": -0.1,
        "logp_gap_abs": 0.2,
        "rows": 64,
        "train_s": 12,
    }
    assert {name: stats[name] for name in old} == old
    assert [one["pg_loss"] for one in stats["epochs"]] == [9.0, 0.25]
    cut_short = results.stats({"rounds": [{**round_, "epochs": [epoch, {}]}], "seconds": 1.0}, digits=3)
    assert (cut_short["pg_loss"], len(cut_short["epochs"])) == (0.25, 1)
    assert stats["epochs"][1]["clip_active"] == 0.125


def test_micro_batches_of_unequal_size_weigh_their_rows_alike(policy, tmp_path):
    context = Context(policy, _task(policy, tmp_path), World(), steps=1)
    loop = Loop(context, Optim(lr=0.0, rows_per_update=12, micro_batch=5))
    from common.aggregation import token_weights
    from common.trainers.sft import reference_rows

    examples = reference_rows(context.task.batch(0, 12))
    examples = examples.with_extras(scale_NA=token_weights(examples.mask_NA, examples.weights))
    micros = loop.micro_batches(examples)
    assert [len(micro) for micro in micros] == [5, 5, 2]
    assert len({round(float(value), 9) for micro in micros for value in micro.extras["scale_NA"].flatten()}) == 1


def test_the_references_defaults_are_the_defaults_of_the_9b():
    sft, ppo = (composed(f"method={name}", "model=qwen3_5_9b", "data=rows").method for name in ("sft", "ppo"))
    model = composed("method=ppo", "model=qwen3_5_9b", "data=rows").model
    assert (sft.optim.lr, sft.optim.epochs, sft.optim.warmup, sft.optim.schedule) == (1e-4, 1, 10, "cosine")
    assert (sft.optim.micro_batch, sft.optim.rows_per_update, sft.optim.clip_norm) == (16, 32, 1.0)
    assert (ppo.optim.lr, ppo.epochs, ppo.optim.schedule) == (3e-6, 2, "constant")
    assert (ppo.optim.micro_batch, ppo.optim.rows_per_update) == (16, 64), "16 a GPU, accumulation 2, 2 GPUs"
    objective = ppo.objective
    assert (objective.clip_low, objective.clip_high, objective.ratio, objective.aggregate) == (
        0.2,
        0.2,
        "sequence",
        "sequence_mean",
    )
    assert (objective.kl.beta, objective.kl.estimator, objective.kl.placement, objective.kl.aggregate) == (
        0.02, "k3", "loss", "sequence_sum",
    )  # fmt: skip
    assert (model.lora.r, model.lora.alpha, model.lora.dropout, model.checkpointing) == (16, 32, 0.0, True)
    assert {sft.optim.optimizer, ppo.optim.optimizer} == {"adamw"}
