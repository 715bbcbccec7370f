"""Does the simulator do what the reference script does? Step by step, and arm by arm.

    python benchmarks/fidelity.py --reference PATH/rlsim.py        # steps: loss and gradient of each method
    for e in single cold weak multi; do python -m rlsim experiment=$e seed=0,1,2,3,4,5,6,7,8,9; done
    python benchmarks/fidelity.py --reference PATH/rlsim.py --sweeps outputs/rlsim/DIR...  # arms; --write FILE.md

Steps: with equal weights and an equal batch, SFT, RLVR and OPD must give the reference's loss and gradient to 1e-5.
Sampling is taken out of the comparison: both score the same written answers. Arms: the mean final accuracy of each arm
and subject must lie within max(3 standard errors of the difference, 0.03) of what the reference's result files say;
arms that learn from the weak teacher are compared by how far they end from their own teacher. Seeds and arms may be
spread over several sweeps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.advantages import Advantage
from common.aggregation import token_weights
from common.distillation import Distillation
from common.distributed import World
from common.interfaces import Experience
from common.mismatch import Mismatch
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.opd import OPD
from common.trainers.rlvr import policy_gradient_loss
from common.trainers.rollout import Sampling, prepare, scaled
from common.trainers.sft import imitation_loss
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import new_net
from rlsim.problems import Format

TOLERANCE = 1e-5
MARK = "<!-- what follows is written by benchmarks/fidelity.py -->"
FORM = Format(digits=3, pad_answers=True, stop_at_end=False)
PARTS = {"self_attn.out_proj": "out", "linear1": "up", "linear2": "down", "norm1": "norm1", "norm2": "norm2"}


def load_reference(path: Path) -> ModuleType:
    """The reference script as a module."""
    spec = importlib.util.spec_from_file_location("reference_rlsim", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def our_name(name: str) -> str:
    """The reference's parameter name in our model."""
    if not name.startswith("blocks.layers."):
        return name
    _, _, number, rest = name.split(".", 3)
    if rest.startswith("self_attn.in_proj_"):
        return f"blocks.{number}.qkv.{rest.removeprefix('self_attn.in_proj_')}"
    part, kind = rest.rsplit(".", 1)
    return f"blocks.{number}.{PARTS[part]}.{kind}"


def pair(reference: ModuleType, seed: int, teacher: bool = False) -> tuple[Any, TinyGPTPolicy, float]:
    """The reference's model and ours from the same torch seed, and the largest difference of their first weights."""
    torch.manual_seed(seed)
    theirs = reference.teacher() if teacher else reference.student()
    layers, width = (4, 128) if teacher else (2, 64)
    ours = TinyGPTPolicy(new_net(layers, width, 4, FORM, seed))
    state = ours.state()
    gap = max(float((p.detach() - state[our_name(name)]).abs().max()) for name, p in theirs.named_parameters())
    return theirs, ours, gap


def steps(reference: ModuleType) -> list[tuple[str, float, float, float]]:
    """(method, our loss, |difference of the losses|, largest |difference of a gradient|) on a batch of 256 answers."""
    theirs, ours, gap = pair(reference, seed=0)
    their_teacher, our_teacher, _ = pair(reference, seed=1, teacher=True)
    if gap > 0:
        raise SystemExit(f"first weights of the same seed differ by {gap}")
    rng = np.random.default_rng(7)
    prompts, answers = reference.problems(32, "+", rng)
    rows = prompts.repeat_interleave(8, 0)
    written = reference.write(theirs, rows)[:, reference.PROMPT_LEN :]
    right = torch.rand(256, 1, generator=torch.Generator().manual_seed(3)) < 0.4  # an untrained student is never right
    written = torch.where(right, answers.repeat_interleave(8, 0), written)

    captured: dict[str, Any] = {}

    def capture(opt: object, model: torch.nn.Module, loss: Tensor) -> None:
        model.zero_grad()
        loss.backward()
        captured.update(loss=loss.item(), grads={our_name(n): p.grad.clone() for n, p in model.named_parameters()})

    sequences = torch.cat([rows, written], 1)
    reference.update = capture
    reference.write = lambda model, prompts, greedy=False: sequences
    result = []
    for name, call in (
        ("sft", lambda: reference.step_sft(theirs, None, rows, written)),
        ("rlvr", lambda: reference.step_rlvr(theirs, None, prompts, answers)),
        ("opd", lambda: reference.step_opd(theirs, None, rows, ["+"] * 256, {"+": their_teacher})),
    ):
        call()
        loss, grads = our_step(name, ours, our_teacher, prompts, answers, written)
        worst = max(float((grads[key] - value).abs().max()) for key, value in captured["grads"].items())
        result.append((name, loss, abs(loss - captured["loss"]), worst))
    return result


def our_step(
    name: str, policy: TinyGPTPolicy, teacher: TinyGPTPolicy, prompts: Tensor, answers: Tensor, written: Tensor
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of our trainer's own loss function on the same rows; a prompt is computed once a group."""
    rewards_N = (written == answers.repeat_interleave(8, 0)).all(1).float()
    mask_NA = torch.ones_like(written, dtype=torch.bool)
    rows = Experience(prompts, written, mask_NA, ["+"] * 32, list(range(32)), group=8, rewards_N=rewards_N)
    optim = Optim(lr=5e-4, rows_per_update=256)
    context = Context(policy, None, World(), teachers={"+": teacher})  # type: ignore[arg-type]
    if name == "rlvr":
        objective = PolicyGradient(surrogate="reinforce")
        rows, _ = prepare(
            context, rows, objective=objective, advantage=Advantage(), mismatch=Mismatch(), reference=None,
            micro_batch=None, score_old=False,
        )  # fmt: skip
        loss, _ = policy_gradient_loss(context, objective, scaled(rows, objective))
    else:
        rows = rows.with_extras(scale_NA=token_weights(mask_NA, rows.weights))
        if name == "sft":
            loss, _ = imitation_loss(context, rows)
        else:
            loss, _ = OPD(optim, Sampling(group=8), Distillation())._loss(context, rows)
    for _, parameter in policy.trainable():
        parameter.grad = None
    loss.backward()
    return float(loss), {n: p.grad.clone() for n, p in policy.trainable() if p.grad is not None}


def finals(sweep: dict[str, Any]) -> dict[tuple[str, str], list[float]]:
    """(arm, subject) -> final accuracy of each seed, from a result file of either program."""
    found: dict[tuple[str, str], list[float]] = {}
    for arm, runs in sweep["runs"].items():
        for run in runs:
            for subject in ("+", "-"):
                if subject in run["curve"][-1]:
                    found.setdefault((arm, subject), []).append(run["curve"][-1][subject])
    return found


def compare(theirs: list[float], ours: list[float]) -> tuple[float, bool]:
    """The allowed distance of the means, max(3 standard errors of the difference, 0.03), and whether it is kept."""
    errors = [float(np.var(x, ddof=1)) / len(x) if len(x) > 1 else 0.0 for x in (theirs, ours)]
    allowed = max(3 * math.sqrt(sum(errors)), 0.03)
    return allowed, abs(float(np.mean(theirs)) - float(np.mean(ours))) <= allowed


def merged(sweeps: list[Path]) -> dict[str, dict[tuple[str, str], list[float]]]:
    """Experiment -> what `finals` gives, over all sweeps of it: seeds and arms may have been run apart.

    `rlvr` of `weak` is the same computation as that of `single`, bit for bit: the one with more seeds counts for both.
    """
    found: dict[str, dict[tuple[str, str], list[float]]] = {}
    for directory in sweeps:
        for path in sorted((directory / "results").glob("*.json")):
            for key, values in finals(json.loads(path.read_text())).items():
                found.setdefault(path.stem, {}).setdefault(key, []).extend(values)
    if "weak" in found:
        found["weak"]["rlvr", "+"] = max(
            (found.get(name, {}).get(("rlvr", "+"), []) for name in ("weak", "single")), key=len
        )
    return found


def arms(reference: Path, sweeps: list[Path], weak_accuracy: float | None) -> tuple[list[str], bool]:
    """Markdown rows of every arm and subject, and whether all of them agree."""
    lines, all_kept = [], True
    for name, mine in merged(sweeps).items():
        theirs = finals(json.loads((reference / f"{name}.json").read_text()))
        for key, their_values in theirs.items():
            arm, subject = key
            our_values, note = mine[key], ""
            if arm.endswith("-weak") and weak_accuracy is not None:
                their_values = [value - their_weak(reference) for value in their_values]
                our_values = [value - weak_accuracy for value in our_values]
                note = " (minus its teacher's)"
            allowed, kept = compare(their_values, our_values)
            all_kept &= kept
            lines.append(
                f"| {name} | {arm}{note} | {subject} | {np.mean(their_values):.3f} ({len(their_values)}) "
                f"| {np.mean(our_values):.3f} ({len(our_values)}) "
                f"| {np.mean(our_values) - np.mean(their_values):+.3f} "
                f"| {allowed:.3f} | {'yes' if kept else '**no**'} |"
            )
    return lines, all_kept


def their_weak(reference: Path) -> float:
    """Test accuracy of the reference's weak teacher."""
    return json.loads((reference / "teachers" / "accuracy.json").read_text())["add-weak"]["+"]


def weak_runs(sweeps: list[Path], cache: Path) -> list[tuple[str, int, float, float]]:
    """(method, updates of the teacher, final accuracy, the teacher's test accuracy) of every run with a weak teacher.

    A run names its teacher by the report of its training; the weights are looked up in the cache.
    """
    known: dict[str, float] = {}
    found = []
    for path in sorted(path for directory in sweeps for path in directory.glob("*/*/result.json")):
        result = json.loads(path.read_text())
        for name, report in (result.get("teacher_reports") or {}).items():
            if "weak" in name:
                mark = json.dumps(report, sort_keys=True)
                known.setdefault(mark, accuracy_of(report, cache))
                found.append((result["method"], report["steps"], result["final"]["+"], known[mark]))
    return found


def accuracy_of(report: dict[str, float], cache: Path) -> float:
    """Test accuracy on addition of the cached teacher with this report."""
    from rlsim.arithmetic import ArithmeticTask
    from rlsim.curriculum import Curriculum
    from rlsim.policy import load_policy

    for path in cache.glob("teacher-*/report.json"):
        if json.loads(path.read_text()) == report:
            task = ArithmeticTask(FORM, Curriculum.always(["+"]), FORM.fixed(12345, 2000), seed=0)
            right, asked = task.evaluate(load_policy(path.parent, end_id=None))["acc/+"]
            return right / asked
    raise SystemExit(f"no teacher with the report {report} in {cache}; give --cache")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reference", type=Path, required=True, help="the reference script; its results lie beside it")
    parser.add_argument("--sweeps", type=Path, nargs="*", default=[], help="directories of finished experiments")
    parser.add_argument("--weak-teachers", type=Path, nargs="*", default=[], help="sweeps over other weak teachers")
    parser.add_argument("--cache", type=Path, default=Path("outputs/cache"))
    parser.add_argument("--write", type=Path, help="replace the tables in this file, below its mark")
    args = parser.parse_args()
    measured = steps(load_reference(args.reference))
    text = ["| step | our loss | difference of the loss | largest difference of a gradient |", "|---|---|---|---|"]
    text += [f"| {name} | {loss:.6f} | {gap:.1e} | {worst:.1e} |" for name, loss, gap, worst in measured]
    good = all(gap <= TOLERANCE and worst <= TOLERANCE for _, _, gap, worst in measured)
    if args.sweeps:
        weak = next((teacher for _, _, _, teacher in weak_runs(args.sweeps, args.cache)), None)
        rows, kept = arms(args.reference.parent / "results", args.sweeps, weak)
        good &= kept
        text += ["", "| experiment | arm | subject | reference (n) | ours (n) | difference | allowed | within |"]
        text += ["|---|---|---|---|---|---|---|---|", *rows]
        if weak is not None:
            theirs = their_weak(args.reference.parent / "results")
            text += ["", f"The weak teacher's own test accuracy: reference {theirs:.3f}, ours {weak:.3f}."]
    if args.weak_teachers:
        text += ["", "| weak teacher, stopped after | its test accuracy | method | student | difference |"]
        text += ["|---|---|---|---|---|"]
        text += [
            f"| {updates} updates | {teacher:.3f} | {method} | {student:.3f} | {student - teacher:+.3f} |"
            for method, updates, student, teacher in weak_runs(args.weak_teachers, args.cache)
        ]
    print("\n".join(text))
    if args.write:
        prose = args.write.read_text(encoding="utf-8").split(MARK)[0] if args.write.exists() else ""
        args.write.write_text(f"{prose}{MARK}\n" + "\n".join(text) + "\n", encoding="utf-8")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
