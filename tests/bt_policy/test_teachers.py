"""MOPD's teachers: an adapter for each subject on the same frozen base."""

from __future__ import annotations

import torch
from omegaconf import OmegaConf

from bt_policy import adapters
from bt_policy.app import Teachers, _teachers
from bt_policy.vlm import VLMPolicy
from tests.bt_policy.conftest import make_policy


def test_each_subject_is_taught_by_its_own_adapter(tmp_path):
    policies = {subject: make_policy(seed=seed) for seed, subject in enumerate(("ball", "a.dotted.subject"), start=1)}
    for subject, policy in policies.items():
        policy.save(tmp_path / subject)
    cfg = OmegaConf.create({"model": {"teacher": None, "teachers": {s: str(tmp_path / s) for s in policies}}})
    student = make_policy()
    base = student.scorer.peft.unload()
    others = _teachers(cfg)
    model = adapters.attach(
        base, adapter=None, others={n: tmp_path / s for n, s in zip(others, policies, strict=True)},
        seed=0, r=4, alpha=8, dropout=0.0, modules=adapters.MODULES,
    )  # fmt: skip
    policy = VLMPolicy(model, student.encoder, (4, 4, 4))
    teachers = Teachers(cfg, list(policies), policy)
    weights = dict(policy.scorer.peft.named_parameters())
    for subject in policies:
        saved = policies[subject].state()
        name = teachers[subject].name
        served = {adapters.file_name(n): w for n, w in weights.items() if f".{name}." in n}
        assert served.keys() == saved.keys()
        assert all(torch.equal(served[key], saved[key]) for key in saved)
    assert teachers["ball"] is not teachers["a.dotted.subject"]
