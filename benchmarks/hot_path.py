"""How much less the simulator computes than a plain forward over whole sequences: ratios, in one process.

    python benchmarks/hot_path.py                  # about a minute on one core
    python benchmarks/hot_path.py --repeats 15     # steadier

"plain" is `nn.TransformerEncoder` with every position of every row computed, and a whole forward for each written
character. Ours is what a run really executes: the policy, and the trainers with their bookkeeping. Both take turns, and
the smallest CPU time of each counts, so that neighbours on the machine matter little. A plain update is an update of
the reference simulator: write, score, step; "a run" adds an evaluation every 20 updates.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the plain model is the tests'

from common.distributed import World
from common.interfaces import Metrics, Policy
from common.optimizer import Optim
from common.seeding import uniforms
from common.trainers.context import Context
from common.trainers.opd import OPD
from common.trainers.rlvr import RLVR
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT
from rlsim.arithmetic import ArithmeticTask, right_answers
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy
from rlsim.pretrain import new_net
from rlsim.problems import Format
from tests.rlsim.encoder import Encoder

FORM = Format(digits=3, stop_at_end=False)
ROWS, GROUP, UPDATES, EVAL_EVERY = 256, 8, 4, 20
OPTIM = Optim(lr=5e-4, rows_per_update=ROWS, optimizer="adam")


class Quiet(ArithmeticTask):
    """The task without its evaluation, which is measured by itself."""

    def evaluate(self, policy: Policy) -> Metrics:
        """Nothing."""
        return {}


class Plain:
    """The same work with whole forwards."""

    def __init__(self, task: ArithmeticTask) -> None:
        shape = new_net(2, 64, 4, FORM, 0).shape
        self.task = task
        self.student, self.teacher = Encoder(shape, 0), Encoder(new_net(4, 128, 4, FORM, 1).shape, 1)
        self.adam = torch.optim.Adam(self.student.parameters(), lr=5e-4)

    @torch.no_grad()
    def write(self, model: Encoder, prompts: Tensor, greedy: bool) -> Tensor:
        """A whole forward for every character."""
        tokens = prompts
        for _ in range(FORM.answer_len):
            logits = model(tokens)[:, -1]
            chosen = logits.argmax(-1, keepdim=True) if greedy else torch.multinomial(logits.softmax(-1), 1)
            tokens = torch.cat([tokens, chosen], 1)
        return tokens[:, prompts.shape[1] :]

    def evaluate(self) -> None:
        """Greedy answers to all test problems."""
        prompts, answers, mask = self.task.asked["+"]
        right_answers(self.write(self.student, prompts, True), answers, mask).sum()

    def update(self, loss: Tensor) -> None:
        """One step of Adam."""
        self.adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.adam.step()

    def sft(self) -> None:
        """Copy the teacher's greedy answers."""
        prompts = self.task.batch(0, ROWS).prompts
        targets = self.write(self.teacher, prompts, True)
        self.update(F.cross_entropy(self.student.answer_logits(prompts, targets).flatten(0, 1), targets.flatten()))

    def rlvr(self) -> None:
        """Eight answers to each of 32 problems."""
        batch = self.task.batch(0, ROWS // GROUP)
        prompts, answers = (x.repeat_interleave(GROUP, 0) for x in (batch.prompts, batch.answers_BA))
        written = self.write(self.student, prompts, False)
        reward = (written == answers).all(1).float().view(-1, GROUP)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-6)
        logps = self.student.answer_logits(prompts, written).log_softmax(-1).gather(-1, written[..., None])[..., 0]
        self.update(-(advantage.view(-1, 1) * logps).mean())

    def opd(self) -> None:
        """Reverse KL to the teacher on the student's own answers."""
        prompts = self.task.batch(0, ROWS).prompts
        written = self.write(self.student, prompts, False)
        s = self.student.answer_logits(prompts, written).log_softmax(-1)
        with torch.no_grad():
            t = self.teacher.answer_logits(prompts, written).log_softmax(-1)
        self.update((s.exp() * (s - t)).sum(-1).mean())


def pairs(task: ArithmeticTask) -> dict[str, tuple[Callable[[], object], Callable[[], object], int]]:
    """name -> (plain, ours, how many times ours does what plain does once)."""
    plain = Plain(task)
    student = TinyGPTPolicy(new_net(2, 64, 4, FORM, 0))
    teacher = TinyGPTPolicy(new_net(4, 128, 4, FORM, 1)).freeze(torch.from_numpy(FORM.beginnings("+")))
    prompts, few = task.batch(0, ROWS).prompts, task.batch(0, ROWS // GROUP).prompts
    noise_NA = uniforms(0, "bench", 0, ROWS, FORM.answer_len)
    quiet = Quiet(FORM, task.curriculum, FORM.fixed(1, 1), seed=0)

    def train(method: SFT | RLVR | OPD) -> Callable[[], None]:
        context = Context(student, quiet, World(), steps=UPDATES, eval_every=10**9, teachers={"+": teacher})
        return lambda: method.train(context)

    return {
        "sample 256 problems": (
            lambda: plain.write(plain.student, prompts, False),
            lambda: student.sample(prompts, uniforms_NA=noise_NA),
            1,
        ),
        "sample 32 x 8": (
            lambda: plain.write(plain.student, few.repeat_interleave(GROUP, 0), False),
            lambda: student.sample(few, GROUP, uniforms_NA=noise_NA),
            1,
        ),
        "evaluate 2000 problems": (plain.evaluate, lambda: task.evaluate(student), 1),
        "SFT update": (plain.sft, train(SFT(OPTIM)), UPDATES),
        "RLVR update": (plain.rlvr, train(RLVR(OPTIM, Sampling(GROUP))), UPDATES),
        "OPD update": (plain.opd, train(OPD(OPTIM, Sampling(1))), UPDATES),
    }


def measure(repeats: int) -> dict[str, tuple[float, float]]:
    """name -> (plain, ours) in CPU milliseconds; both take turns."""
    task = ArithmeticTask(FORM, Curriculum.always("+"), FORM.fixed(12345, 2000), seed=0)
    found = {}
    for name, (plain, ours, times) in pairs(task).items():
        best = [float("inf"), float("inf")]
        for turn in range(repeats + 1):
            for i, call in enumerate((plain, ours)):
                began = time.process_time()
                call()
                if turn:  # the first is a warm-up
                    best[i] = min(best[i], (time.process_time() - began) * 1e3 / (times if i else 1))
        found[name] = (best[0], best[1])
    for method in ("SFT", "RLVR", "OPD"):
        evaluation, update = found["evaluate 2000 problems"], found[f"{method} update"]
        found[f"{method} run, an update"] = tuple(u + e / EVAL_EVERY for u, e in zip(update, evaluation, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="turns of each, after a warm-up")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(f"{'':24}{'plain ms':>10}{'ours ms':>10}{'ratio':>8}    ({args.threads} thread, CPU time)")
    for name, (plain, ours) in measure(args.repeats).items():
        print(f"{name:24}{plain:10.1f}{ours:10.1f}{plain / ours:7.1f}x")


if __name__ == "__main__":
    main()
