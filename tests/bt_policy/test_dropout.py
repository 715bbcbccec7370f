"""LoRA's dropout acts in a training forward and nowhere else: not in a teacher, not in scoring, not in sampling."""

from __future__ import annotations

import pytest
import torch

from bt_policy import adapters
from bt_policy import rows as rows_module
from bt_policy.task import prompts
from common.seeding import uniforms
from tests.bt_policy.conftest import make_base, make_policy


@pytest.fixture(scope="module")
def dropping():
    """A policy whose adapter drops half of its inputs."""
    base, encoder = make_base()
    model = adapters.attach(base, adapter=None, others={}, seed=0, r=4, alpha=8, dropout=0.5, modules=adapters.MODULES)
    for name, parameter in model.named_parameters():
        if "lora_B.default" in name:
            parameter.data.normal_(0, 0.5, generator=torch.Generator().manual_seed(1))
    return make_policy(model=model, encoder=encoder)


@pytest.fixture(scope="module")
def asked(rows_file):
    return prompts(rows_module.read(rows_file, levels=(4, 4, 4))[0][:4])


def test_only_a_training_forward_drops_out_also_between_teachers(dropping, asked):
    answers = torch.tensor([dropping.encoder.code_ids("123", end=False)] * 4)
    teacher = dropping.frozen("start")
    taught, trained, scored = [], [], []
    for _ in range(2):
        trained.append(dropping.answer_logits(asked, answers).detach())
        taught.append(teacher.answer_logits(asked, answers))
        with torch.no_grad():
            scored.append(dropping.answer_logits(asked, answers))
    assert (trained[0] - trained[1]).abs().max() > 1e-2
    assert torch.equal(taught[0], taught[1])
    assert torch.equal(scored[0], scored[1])
    assert torch.equal(taught[0], scored[0])


def test_sampling_does_not_drop_out(dropping, asked):
    noise = uniforms(0, "test", 0, 4, 3)
    dropping.answer_logits(
        asked, torch.tensor([dropping.encoder.code_ids("123", end=False)] * 4)
    )  # training mode is on
    first, second = (dropping.sample(asked.masked(), uniforms_NA=noise) for _ in range(2))
    assert torch.equal(first.logps_NA, second.logps_NA)
