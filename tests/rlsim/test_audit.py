"""The audit: enumerated gradients are those of theory, sampled ones agree with them, and the report is complete."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch

from common.advantages import Advantage
from common.distributed import World
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.sft import SFT
from rlsim.audit import auditing, document
from rlsim.audit.__main__ import checked, compose, main, parser
from rlsim.audit.auditing import SMALL, Exact, Options, audit, small_problems
from rlsim.audit.entries import ITSELF, entries
from rlsim.audit.enumerated import EnumeratedPolicy, all_answers, every_answer, expected_advantages
from rlsim.audit.measure import compare, direction, draw
from rlsim.audit.policies import Subject, later_policies
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import end_id, new_net
from rlsim.problems import Format

MOVED = 3
ENTRIES = {f"{entry.family}: {entry.name}": entry for entry in entries([MOVED])}


def tiny(seed: int, sharpness: float = 1.0) -> TinyGPTPolicy:
    """A small random policy for one-digit problems whose distributions are not flat."""
    net = new_net(1, 8, 2, SMALL, seed)
    with torch.no_grad():
        net.head.weight *= sharpness
    return TinyGPTPolicy(net, end_id=end_id(SMALL))


@cache
def small_subject(*_: Any) -> Subject:
    """A policy that is sometimes right, what three large updates make of it, and a teacher that is no good."""
    policy, teacher = tiny(0), tiny(5, 6.0)
    task = auditing.ArithmeticTask(SMALL, Curriculum.always(["+"]), SMALL.fixed(0, 1), seed=0, purpose="audit")
    optim = Optim(lr=0.02, rows_per_update=64, optimizer="adam")
    SFT(optim, "reference").train(Context(policy, task, World(), steps=60, eval_every=None))
    later = later_policies(policy, task, SMALL, [MOVED], 0.02, 0)
    return Subject(policy, later, task, teacher.freeze())


@pytest.fixture(scope="module")
def exact() -> Exact:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(auditing, "_subject", lambda *_: small_subject())
        return Exact(Options(prompts=3, moved=(MOVED,)), {})


def figures(exact: Exact, name: str) -> tuple[float, float]:
    found = exact.figures(ENTRIES[name])["exact"]
    return found["cosine"], found["scale"]


UNBIASED = {  # entry: the scale of its expected gradient
    "copying: SFT, true answers": 1,
    "copying: RFT, G 8, repeats kept": None,
    "advantage: none": 1,
    "advantage: batch": None,
    "advantage: whiten": None,
    "advantage: rloo, G 4": 1,
    "advantage: rloo, G 16": 1,
    "advantage: centred (Dr. GRPO), G 4": 3 / 4,
    "advantage: centred (Dr. GRPO), G 8": 7 / 8,
    "advantage: rloo, G 8, token_mean": None,
    "advantage: rloo, G 8, constant": 1 / 3,
    f"ratio, {MOVED} updates off policy: sequence ratio, unclipped": 1,
    f"KL to the policy {MOVED} updates ago: k1 in the reward": 1,
    "KL to the teacher: k1 in the reward": 1,
    "distillation: full reverse KL (OPD)": 1,
    "distillation: full reverse KL, G 8": 1,
    "distillation: sampled token": 1,
    "distillation: full forward KL": 1,
}
BIASED = [
    f"ratio, {MOVED} updates off policy: no ratio (reinforce)",
    f"ratio, {MOVED} updates off policy: token ratio, clip .2 (PPO)",
    f"mismatch, sampler {MOVED} updates behind: off",
    f"mismatch, sampler {MOVED} updates behind: mask .5-2, token",
    "KL to the teacher: k2 in the reward",
    "KL to the teacher: k3 in the reward",
    "KL to the teacher: k2 in the loss",
    "KL to the teacher: k3 in the loss",
    "distillation: full reverse KL (OPD), against whole answers",
    "distillation: reverse KL, top 4, renormalised",
]


@pytest.mark.parametrize(("name", "scale"), UNBIASED.items())
def test_the_enumerated_gradient_of_what_is_unbiased_is_the_claimed_one(
    exact: Exact, name: str, scale: float | None
) -> None:
    found = figures(exact, name)
    assert found[0] == pytest.approx(1, abs=1e-5)
    assert scale is None or found[1] == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("name", BIASED)
def test_the_enumerated_gradient_of_what_is_biased_is_not(exact: Exact, name: str) -> None:
    assert figures(exact, name)[0] < 0.9999


def test_answers_of_all_lengths_are_listed_once_and_their_chances_add_up_to_one() -> None:
    answers_RA, mask_RA = all_answers(14, 3)
    assert len(answers_RA) == 13 * 13 * 14 + 13 + 1
    assert mask_RA.sum(-1).unique().tolist() == [1, 2, 3]
    batch = small_problems(4, 0)
    rows = every_answer(batch, EnumeratedPolicy(tiny(0, 3.0)))
    assert float(rows.weights.double().sum()) == pytest.approx(1, abs=1e-5)
    assert rows.rewards_N.view(4, -1).sum(-1).tolist() == [1.0] * 4  # one right answer each


def test_prefixes_give_the_logits_of_plain_scoring() -> None:
    policy, batch = tiny(0, 3.0), small_problems(2, 0)
    answers_NA = all_answers(14, 3)[0][::97].repeat(2, 1)
    group = len(answers_NA) // 2
    plain = policy.answer_logits(batch.prompts, answers_NA, group=group)
    torch.testing.assert_close(EnumeratedPolicy(policy).answer_logits(batch.prompts, answers_NA, group=group), plain)


@pytest.mark.parametrize("kind", ["group", "centred", "rloo"])
def test_expected_advantages_are_the_mean_over_all_groups(kind: str) -> None:
    rows = every_answer(small_problems(1, 0), EnumeratedPolicy(tiny(0, 3.0)))
    p, size, advantage = float((rows.weights * rows.rewards_N).sum()), 4, Advantage(kind)
    means = {0.0: 0.0, 1.0: 0.0}
    for own, *others in product([0.0, 1.0], repeat=size):
        chance = p ** sum(others) * (1 - p) ** (size - 1 - sum(others))
        one = torch.ones(size, 1).bool()
        value = advantage(torch.tensor([own, *others]), torch.zeros(size).long(), one, torch.ones(size))
        means[own] += chance * float(value[0, 0])
    found = expected_advantages(advantage, rows, size)
    for own, mean in means.items():
        assert found[rows.rewards_N == own].unique().tolist() == pytest.approx([mean], rel=1e-4)


@pytest.mark.parametrize(
    "name", ["advantage: group (GRPO), G 4", "distillation: sampled token", "KL to the teacher: k2 in the loss"]
)
def test_the_mean_of_sampled_gradients_approaches_the_enumerated_one(exact: Exact, name: str) -> None:
    entry = ENTRIES[name]
    subject, updates = small_subject(), 40

    class SmallTask:  # the task that samples, about the problems that are enumerated
        def batch(self, step: int, n: int, draw: int = 0) -> Any:
            batch = small_problems(3, 0)
            picked = torch.arange(3).repeat(-(-n // 3))[:n]
            return auditing.Batch(
                batch.prompts[picked], ["+"] * n, picked.tolist(), batch.answers_BA[picked], batch.mask_BA[picked]
            )

        def __getattr__(self, attribute: str) -> Any:
            return getattr(subject.task, attribute)

    task = SmallTask() if entry.rewarded else auditing.Unrewarded(SmallTask())
    found = draw(
        entry.method, subject.policy, task, updates=updates, rows=12 * 16, seed=0,
        teacher=subject.teacher, reference=subject.teacher,
    ).gradients_MD  # fmt: skip
    assert entry.writer == ITSELF
    true = exact.expected(entry)
    mean = found.mean(0)
    noise = float((found - mean).square().sum()) / (updates - 1) / updates  # expected squared distance of the mean
    assert float((mean - true).square().sum()) < 2 * noise
    assert direction(mean, true)[0] > 0.8


def test_figures_of_known_gaussian_draws_are_recovered_from_noisy_draws_of_the_claim() -> None:
    generator = torch.Generator().manual_seed(0)
    size, true = 500, torch.zeros(500)
    true[0] = 2.0
    expected = torch.zeros(500)
    expected[:2] = torch.tensor([3.0, 4.0])  # cosine .6 to the claim, scale 1.5
    draws = expected + 0.5 * torch.randn(200, size, generator=generator)
    claim = true + 0.1 * torch.randn(50, size, generator=generator)
    found = compare(draws, claim, rows=10)
    assert found.cosine == pytest.approx(0.6, abs=3 * found.cosine_interval / 1.96)
    assert found.cosine_interval < 0.05
    assert found.scale == pytest.approx(1.5, rel=0.05)
    assert found.answers == pytest.approx(10 * 500 * 0.25 / 9, rel=0.05)  # trace of the covariance / 3^2
    assert found.update_cosine == pytest.approx(3 / sqrt(25 + 125), rel=0.05)


def test_the_audit_is_the_same_again_with_the_same_seed_and_its_report_has_every_objective(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(auditing, "_subject", lambda *_: small_subject())
    options = Options(updates=4, rows=16, claim_rows=512, prompts=2, moved=(MOVED,), only="rloo, G 4")
    cfg = {"data": {"digits": 1, "pad_answers": False, "stop_at_end": True}}
    first, second = audit(options, cfg), audit(options, cfg)
    kept = [
        json.dumps([{k: v for k, v in row.items() if k != "time/cost"} for row in rows]) for rows in (first, second)
    ]
    assert kept[0] == kept[1]

    from rlsim.audit.report import table, write

    shown = {**vars(parser().parse_args([])), "moved": (1, 8)}
    shown.pop("out")
    picture = write(tmp_path, first, shown, seconds=1.0)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "audit.json").read_text())["objectives"][0]["name"] == "rloo, G 4"
    assert "| rloo, G 4 | expected reward | 1.000 | 1 |" in table(first, shown)


def test_every_entry_has_its_own_name() -> None:
    assert len(ENTRIES) == len(entries([MOVED]))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rows", "10"], "--rows=10 must be a whole number of at least 16."),
        (["--rows", "40"], "--rows=40 must be a multiple of 16"),
        (["--updates", "1"], "--updates=1 must be a whole number of at least 4."),
        (["--updates", "x"], "invalid int value: 'x'"),
        (["--prompts", "101"], "--prompts=101 must be at most 100"),
        (["--moved", "0,1"], "--moved=0,1 must be whole numbers"),
        (["--teachers", "addd"], "teachers=addd is not known"),
        (["--teachers", "none"], "--teachers none has no teacher for +"),
        (["--wrong"], "unrecognized arguments: --wrong"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    printed = capsys.readouterr()
    assert sentence in printed.err
    assert printed.err.count("\n") == 1
    assert printed.out == ""


def test_a_directory_without_a_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(auditing.UserError, match=r"has no model\.safetensors"):
        auditing.checkpoint(tmp_path, Format())


def test_a_runs_policy_of_another_number_of_digits_is_refused(tmp_path: Path) -> None:
    tiny(0).save(tmp_path / "checkpoints" / "best")
    with pytest.raises(auditing.UserError, match="3-digit"):
        auditing.checkpoint(tmp_path, Format())
    assert auditing.checkpoint(tmp_path, SMALL).shape.prompt_len == SMALL.prompt_len


def test_the_defaults_are_the_options_own() -> None:
    values = checked(parser().parse_args([]))
    values.pop("out")
    assert Options(**values) == Options()
    assert compose("weak")["teachers"]["name"] == "weak"


def test_the_documents_figures_are_the_audits() -> None:
    text = document.DOCUMENT.read_text(encoding="utf-8")
    rows = document.read(document.AUDIT)
    assert document.refreshed(text, rows) == text
    named = [row for row in rows if f"`{row['family']}: {row['name']}` |" in text]
    assert len(named) == len(rows)  # every audited objective is in the reference


def test_an_entry_that_was_not_audited_is_refused_in_the_document() -> None:
    with pytest.raises(auditing.UserError, match="names the entry advantage: dice"):
        document.refreshed("| dice | 1 | 1 | 1 | 1 | `advantage: dice` |", [])
