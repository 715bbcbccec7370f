"""The audit itself: build the two subjects, take every entry's gradients in both, compare, time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.distributed import World
from common.errors import UserError
from common.interfaces import Batch, Policy
from common.optimizer import Optim
from common.seeding import numpy_rng
from rlsim.arithmetic import ArithmeticTask, tensors
from rlsim.audit.claims import flat_gradient, sampled_claim
from rlsim.audit.entries import ITSELF, OLD, REWARD, SAMPLER, Entry, entries
from rlsim.audit.enumerated import EnumeratedPolicy, EnumeratedTask, exact_claim, without_reward_penalty
from rlsim.audit.measure import Draws, compare, direction, draw
from rlsim.audit.policies import Behind, Subject, Unrewarded, later_policies
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy, load_policy
from rlsim.pretrain import end_id
from rlsim.problems import Format
from rlsim.start import student
from rlsim.teachers import Teachers

log = logging.getLogger(__name__)

ANY = Optim(lr=0.0, rows_per_update=1)
OPERATION = "+"
SMALL = Format(digits=1, pad_answers=False)  # one- and two-digit sums: answers of two and of three tokens


@dataclass(frozen=True)
class Options:
    """What the command line may change."""

    policy: Path | None = None  # a directory with model.safetensors; None: the warm student of the seed
    teachers: str = "add"
    seed: int = 0
    updates: int = 12  # draws of each gradient
    rows: int = 256  # answers a draw
    claim_rows: int = 4096  # answers behind a sampled claim
    prompts: int = 8  # one-digit problems that are enumerated, of 100
    moved: tuple[int, ...] = (1, 8)
    only: str | None = None  # entries whose family or name contains this


def audit(options: Options, cfg: dict[str, Any]) -> list[dict[str, Any]]:
    """One row of figures an entry; `cfg` is the composed configuration of the simulator."""
    every, only = entries(options.moved), options.only
    chosen = [entry for entry in every if only is None or only in f"{entry.family}: {entry.name}"]
    if not chosen:
        families = dict.fromkeys(entry.family for entry in every)
        raise UserError(f"--only {options.only} matches no objective; the families are {'; '.join(families)}.")
    sampled, exact = Sampled(options, cfg), Exact(options, cfg)
    unit = sampled.draws(every[0]).seconds
    rows = []
    for i, entry in enumerate(chosen, 1):
        log.info("%d of %d: %s, %s", i, len(chosen), entry.family, entry.name)
        found = {"family": entry.family, "name": entry.name, "claim": entry.claim}
        rows.append(found | exact.figures(entry) | sampled.figures(entry, unit))
    return rows


def _settle(
    subject: Subject, entry: Entry, wrap: Callable[[Policy], Policy] = lambda policy: policy
) -> tuple[Policy, Policy, Policy]:
    """(the policy that learns, who wrote the answers, the reference or teacher that the claim is about)."""
    learner, start = subject.at(entry.moved), subject.at(0)
    writer = learner if entry.writer == ITSELF else start
    other = start if entry.reference == "start" else subject.teacher
    return wrap(learner), wrap(writer), wrap(other)


def _acting(entry: Entry, learner: Policy, writer: Policy) -> Policy:
    assert entry.writer in (ITSELF, OLD, SAMPLER)
    return learner if entry.writer == ITSELF else Behind(learner, writer, old=entry.writer == OLD)


class Sampled:
    """The real task: fresh problems, sampled answers."""

    def __init__(self, options: Options, cfg: dict[str, Any]) -> None:
        data = cfg["data"]
        self.form = Format(data["digits"], data["pad_answers"], data["stop_at_end"])
        self.options = options
        self.subject = _subject(options, cfg, self.form, options.policy)
        self._claim = cache(self._new_claim)
        self._last: tuple[object, Draws] | None = None

    def figures(self, entry: Entry, unit: float) -> dict[str, Any]:
        """Direction, noise and cost of an entry; `unit` is the seconds of an update that cost 1."""
        draws = self.draws(entry)
        compared = compare(draws.gradients_MD, self._claim(entry.claim, entry.moved, entry.to), self.options.rows)
        reward = compare(draws.gradients_MD, self._claim(REWARD, entry.moved, "teacher"), self.options.rows)
        return {"sampled": asdict(compared), "reward": asdict(reward), "time/cost": draws.seconds / unit}

    def draws(self, entry: Entry) -> Draws:
        """Gradients of an entry's updates."""
        if self._last is None or self._last[0] != entry.gradient:
            learner, writer, other = _settle(self.subject, entry)
            task = self.subject.task if entry.rewarded else Unrewarded(self.subject.task)
            found = draw(
                entry.method, _acting(entry, learner, writer), task, updates=self.options.updates,
                rows=self.options.rows, seed=self.options.seed, teacher=self.subject.teacher, reference=other,
            )  # fmt: skip
            self._last = entry.gradient, found
        return self._last[1]

    def _new_claim(self, claim: str, moved: int, to: str) -> Tensor:
        policy = self.subject.at(moved)
        other = self.subject.at(0) if to == "start" else self.subject.teacher
        draws = max(2, self.options.claim_rows // 256)
        return sampled_claim(claim, policy, other, self.subject.task, draws=draws, rows=256, seed=self.options.seed)


class Exact:
    """One-digit problems: every answer."""

    def __init__(self, options: Options, cfg: dict[str, Any]) -> None:
        self.subject = _subject(options, cfg, SMALL, None)
        self.batch = small_problems(options.prompts, options.seed)
        self._claim = cache(self._new_claim)

    def figures(self, entry: Entry) -> dict[str, Any]:
        """Direction and scale of an entry's expected gradient, where it can be enumerated."""
        if not entry.exact:
            return {"exact": None}
        found = self.expected(entry)
        cosine, scale = direction(found, self._claim(entry.claim, entry.moved, entry.to))
        return {"exact": {"cosine": cosine, "scale": scale}}

    def expected(self, entry: Entry) -> Tensor:
        """(D,) the expected gradient of an entry."""
        learner, writer, other = _settle(self.subject, entry, _enumerated)
        task = EnumeratedTask(self.batch, writer, entry.method(ANY), rewarded=entry.rewarded, reference=other)
        return draw(
            lambda optim: without_reward_penalty(entry.method(optim)), _acting(entry, learner, writer), task, updates=1,
            rows=10**9, seed=0, teacher=_enumerated(self.subject.teacher), reference=other,
        ).gradients_MD[0]  # fmt: skip

    def _new_claim(self, claim: str, moved: int, to: str) -> Tensor:
        policy = _enumerated(self.subject.at(moved))
        other = _enumerated(self.subject.at(0) if to == "start" else self.subject.teacher)
        return flat_gradient(exact_claim(claim, policy, other, self.batch), policy)


def _enumerated(policy: Policy) -> EnumeratedPolicy:
    assert isinstance(policy, TinyGPTPolicy)
    return EnumeratedPolicy(policy)


def small_problems(n: int, seed: int) -> Batch:
    """n different one-digit problems as one batch."""
    pairs = numpy_rng(seed, "audit problems").permutation(100)[:n]
    prompts_BP, answers_BA, mask_BA = tensors([SMALL.write(pairs // 10, pairs % 10, OPERATION)], torch.device("cpu"))
    return Batch(prompts_BP, [OPERATION] * n, pairs.tolist(), answers_BA, mask_BA)


def _subject(options: Options, cfg: dict[str, Any], form: Format, given: Path | None) -> Subject:
    """The policy, its teacher and its task, from the cache where they are there already."""
    world, curriculum = World(), Curriculum.always([OPERATION])
    validation = (cfg["data"]["validation"]["seed"], cfg["data"]["validation"]["size"])
    model = {name: cfg["model"][name] for name in ("layers", "width", "heads")}
    specs = cfg["teachers"]["specs"]
    if form == SMALL:  # a small task needs no large teacher
        specs = {name: {**spec, "model": model} for name, spec in specs.items()}
    teachers = Teachers(cfg["teachers"]["by_subject"], specs, form, validation, cfg["cache_dir"], world)
    if given is None:
        policy, _ = student(cfg["start"], model, curriculum, form, validation, cfg["cache_dir"], options.seed, world)
    else:
        policy = checkpoint(given, form)
    task = ArithmeticTask(form, curriculum, form.fixed(0, 1), seed=options.seed, purpose="audit")
    lr = cfg["model"]["recipe"]["rl"]["lr"]
    later = later_policies(policy, task, form, list(options.moved), lr, options.seed)
    return Subject(policy, later, task, teachers[OPERATION])


def checkpoint(directory: Path, form: Format) -> TinyGPTPolicy:
    """A trained policy: a directory with model.safetensors, or a run's, whose best one is taken."""
    places = [directory, directory / "checkpoints" / "best"]
    found = next((place for place in places if (place / "model.safetensors").is_file()), None)
    if found is None:
        raise UserError(
            f"--policy {directory} has no model.safetensors, there or in checkpoints/best; give a run's directory."
        )
    policy = load_policy(found, end_id=end_id(form))
    if policy.shape.prompt_len != form.prompt_len:
        raise UserError(
            f"--policy {directory} reads prompts of {policy.shape.prompt_len} characters, but the task's have "
            f"{form.prompt_len}; audit a run on {form.digits}-digit problems."
        )
    return policy
