"""A TinyGPT taught with true answers until it is good enough: how teachers and warm students are made, once each.

It is the SFT trainer on the true answers, ended by the first look at the validation problems that reaches the target.
The thread count is fixed and all randomness is named, so a model is the same bits whichever run needed it first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.cache import cached
from common.distributed import World
from common.files import write_json
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.sft import SFT
from rlsim.arithmetic import ArithmeticTask
from rlsim.curriculum import Curriculum
from rlsim.policy import TinyGPTPolicy, load_policy
from rlsim.problems import END, VOCAB, Format
from rlsim.tiny_gpt import Shape, TinyGPT

VERSION = 1  # of everything that a trained model's bits depend on and its specification does not name
REPORT = "report.json"


@dataclass(frozen=True)
class Recipe:
    """All that decides a pretrained model's weights."""

    layers: int
    width: int
    heads: int
    operations: tuple[str, ...]
    target: float  # mean validation accuracy over the operations at which training ends
    check_every: int  # updates between looks at it
    max_steps: int
    init_seed: int
    problem_seed: int
    purpose: str  # keeps the problems apart from those of a run with the same seed
    lr: float = 1e-3
    batch: int = 256
    threads: int = 1


def new_net(layers: int, width: int, heads: int, form: Format, seed: int) -> TinyGPT:
    """A TinyGPT with random weights for problems of this format."""
    return TinyGPT(Shape(layers, width, heads, len(VOCAB), form.prompt_len, form.answer_len), seed)


def end_id(form: Format) -> int | None:
    """The token at which an answer ends; None where all positions are written and scored."""
    return END if form.stop_at_end else None


def pretrained(
    recipe: Recipe, form: Format, validation: tuple[int, int], root: str | Path, what: str, world: World
) -> tuple[TinyGPTPolicy, dict[str, Any]]:
    """The trained policy and its report {"steps", accuracy by operation}, from the cache where it is there already.

    validation: (seed, size) of the fixed problems.  Every rank reads a whole copy and wraps it as `world` says.
    """
    # Fixed-width answers count to their last position either way: one model serves both settings.
    trained_as = replace(form, stop_at_end=form.stop_at_end or form.pad_answers)
    spec = {
        "version": VERSION,
        "torch": torch.__version__,
        "recipe": asdict(recipe),
        "format": asdict(trained_as),
        "validation": list(validation),
    }

    def build(directory: Path) -> None:
        # whoever asks for a teacher may be in the middle of a forward without gradient
        with threads(recipe.threads), torch.inference_mode(False), torch.enable_grad():
            policy, report = train(recipe, trained_as, validation)
        policy.save(directory)
        write_json(directory / REPORT, report)

    entry = cached(root, recipe.purpose.replace(" ", "-"), spec, build, what)
    report = json.loads((entry / REPORT).read_text(encoding="utf-8"))
    return load_policy(entry, end_id=end_id(form), world=world), report


def train(recipe: Recipe, form: Format, validation: tuple[int, int]) -> tuple[TinyGPTPolicy, dict[str, Any]]:
    """Train a model as its recipe says; its report tells how long it took and how good it is."""
    net = new_net(recipe.layers, recipe.width, recipe.heads, form, recipe.init_seed)
    policy = TinyGPTPolicy(net, end_id=end_id(form))
    curriculum = Curriculum.always(recipe.operations)
    task = ArithmeticTask(form, curriculum, form.fixed(*validation), seed=recipe.problem_seed, purpose=recipe.purpose)
    context = Context(
        policy,
        task,
        World(),
        seed=recipe.problem_seed,
        steps=recipe.max_steps,
        eval_every=recipe.check_every,
        stop=lambda metrics: task.score(metrics) >= recipe.target,
    )
    optim = Optim(lr=recipe.lr, rows_per_update=recipe.batch, optimizer="adam", clip_norm=1.0)
    SFT(optim, targets="reference").train(context)
    final = {name.removeprefix("acc/"): value for name, value in context.report["final"].items()}
    return policy, {"steps": context.report["updates"], **final}


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Another number of CPU threads inside the block: other counts give other bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
