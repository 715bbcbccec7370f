"""One run of the vision-language model: read and check the rows, load the model, train, leave what a user expects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from bt_policy import acting, adapters, loading, prompt, results, rounds, rows
from bt_policy.acting import acts, environment, sampler
from bt_policy.encoding import Encoder
from bt_policy.places import located
from bt_policy.rollout import fingerprints
from bt_policy.rows import Row
from bt_policy.task import RowsTask
from bt_policy.vlm import BASE, VLMPolicy
from common.distributed import World
from common.errors import UserError
from common.interfaces import Policy, Task
from common.run import Parts, execute
from common.trainers.context import Context

log = logging.getLogger(__name__)


def run(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """Train as `cfg` says, in `directory`; the content of result.json."""
    if cfg.out is not None:
        results.check_out(Path(cfg.out), directory)
    result = execute(rounds.bounded(cfg), directory, partial(build, rounds.joined(cfg, directory), directory))
    stats = result.pop("stats", None)
    if stats:
        log.info("PPO_DONE %s", json.dumps(stats))
    return result


def build(cfg: DictConfig, directory: Path, world: World) -> Parts:
    """Rows, or the environment's settings, first: what is wrong with them is said before a model is loaded."""
    train, valid = ([], []) if acts(cfg) else read_rows(cfg, directory, world)
    if acts(cfg):
        acting.check(cfg)
    levels = list(cfg.model.levels or (cfg.data.code_levels if acts(cfg) else [10] * len(train[0].code)))
    policy = build_policy(cfg, levels, world)
    task: Task
    if acts(cfg):
        task = environment(cfg, policy, world)
    else:
        task = RowsTask(
            train, valid, policy.encoder,
            seed=cfg.seed, world=world, reward=cfg.data.reward, eval_rows=cfg.model.eval_rows,
        )  # fmt: skip
        if task.offline and not cfg.data.any_adapter:
            marks = fingerprints.of_adapter(policy.state()), fingerprints.of_template(policy.encoder)
            fingerprints.check(train, adapter=marks[0], template=marks[1])

    def finish(result: dict[str, Any], context: Context) -> None:
        if world.main:
            out = None if cfg.out is None else Path(cfg.out)
            result["stats"] = results.write(directory, out, result, cfg.method.name, len(levels), len(valid))
            if acts(cfg):
                rounds.write(directory, result)

    return Parts(
        sampler(cfg, policy, world, directory),
        task,
        teachers=Teachers(cfg, task.subjects, policy),
        reference=partial(policy.frozen, "ref"),
        optimizer_state=_optimizer(cfg),
        finish=finish,
    )


def _optimizer(cfg: DictConfig) -> Path | None:
    if cfg.model.optimizer != "auto":
        return None if cfg.model.optimizer is None else Path(cfg.model.optimizer)
    adapter = None if cfg.model.adapter is None else Path(located(cfg.model.adapter))
    return results.optimizer_beside(adapter, cfg.method.name)


def read_rows(cfg: DictConfig, directory: Path, world: World) -> tuple[list[Row], list[Row]]:
    """Checked training and validation rows, made first where the data are BabyAI's.

    Rank 0 looks at the pictures first; the others profit from its verdicts.
    """
    paths = {name: None if cfg.data[name] is None else Path(located(cfg.data[name])) for name in ("train", "valid")}
    if paths["train"] is None:
        train, valid = _default_rows(cfg)
        paths = {"train": train, "valid": paths["valid"] or valid}
    if not world.main:
        world.barrier()
    found: dict[str, list[Row]] = {}
    levels = cfg.model.levels
    for name, path in paths.items():
        found[name] = [] if path is None else _read(cfg, path, levels, directory / f"rejected.{name}.jsonl", world)
        levels = levels or [10] * len(found["train"][0].code)
    if world.main:
        world.barrier()
    return found["train"], found["valid"]


def _default_rows(cfg: DictConfig) -> tuple[Path, Path]:
    """The rows of a run that names none: recorded ones where the method needs them, else the expert's."""
    recorded = cfg.data.recorded.get(cfg.method.name)
    if recorded is not None:
        return Path(located(recorded.train)), Path(located(recorded.valid))
    from bt_policy import babyai

    made = Path(cfg.data.directory) / f"{cfg.data.level}_{cfg.data.rows}_{cfg.data.valid_rows}"
    return babyai.ensure(made, level=cfg.data.level, train=cfg.data.rows, valid=cfg.data.valid_rows)


def _read(cfg: DictConfig, path: Path, levels: Sequence[int] | None, rejected: Path, world: World) -> list[Row]:
    """One file's rows. Where the configured model cannot read them, the sentence names the setting."""
    root = None if cfg.data.image_root is None else Path(cfg.data.image_root)
    pixels = min(cfg.data.max_pixels, cfg.model.frame_pixels or cfg.data.max_pixels)
    read = rows.read(
        path, levels=levels, image_root=root, max_pixels=pixels, cache=Path(cfg.cache_dir) / "pictures.json"
    )
    try:
        return rows.accept(path, read, cfg.data.on_bad_row, rejected if world.main else None)
    except UserError as error:
        if cfg.model.levels is None and cfg.model.frame_pixels is None:
            raise
        raise UserError(
            f"{error}\nmodel={cfg.model.name} reads codes with the levels {list(cfg.model.levels or [])} and "
            f"frames of up to {pixels} pixels; for rows of another model name it, e.g. model=qwen3_5_9b."
        ) from None


def build_policy(cfg: DictConfig, levels: list[int], world: World) -> VLMPolicy:
    """The base with its adapters: the live one, the reference, and the teachers that the configuration names."""
    settings = cfg.model
    base, tokenizer, images = loading.load(
        settings.path, dtype=settings.dtype, device=world.device, attention=settings.attention,
        kernels=settings.kernels,
        images=settings.images,
    )  # fmt: skip
    reference = settings.adapter if settings.ref == "adapter" else settings.ref
    others = {
        name: folder for name, folder in {"ref": reference, **_teachers(cfg)}.items() if folder not in (None, BASE)
    }
    model = adapters.attach(
        base,
        adapter=None if settings.adapter is None else Path(located(settings.adapter)),
        others={name: Path(located(folder)) for name, folder in others.items()},
        seed=cfg.seed,
        **settings.lora,
    )
    encoder = Encoder(tokenizer, images, prompt.from_config(**cfg.prompt), base)
    aliases = {name: BASE for name in ("ref", *_teachers(cfg)) if name not in others}
    return VLMPolicy(
        model, encoder, levels, world=world, aliases=aliases, checkpointing=settings.checkpointing,
        autocast=getattr(torch, settings.autocast) if settings.autocast else None,
        vision_cache=int(settings.vision_cache_gib * 2**30), sample_rows=settings.eval_rows,
    )  # fmt: skip


def _teachers(cfg: DictConfig) -> dict[str, str | None]:
    """Adapter name -> folder of every teacher: one for all subjects, or one a subject."""
    named = {_teacher_of(subject): folder for subject, folder in cfg.model.teachers.items()}
    return {"teacher": cfg.model.teacher, **named} if cfg.model.teacher is not None else named


def _teacher_of(subject: str) -> str:
    """The name that a subject's teacher has among the model's adapters; PyTorch allows no dot in it."""
    return f"teacher_{subject}".replace(".", "_")


class Teachers(Mapping[str, Policy]):
    """Subject -> frozen adapter, looked up when a method first asks. A subject without a teacher is a UserError."""

    def __init__(self, cfg: DictConfig, subjects: Sequence[str], policy: VLMPolicy) -> None:
        self._names, self._subjects, self._policy = _teachers(cfg), list(subjects), policy
        self._found: dict[str, Policy] = {}

    def __getitem__(self, subject: str) -> Policy:
        name = _teacher_of(subject) if _teacher_of(subject) in self._names else "teacher"
        if name not in self._names:
            raise UserError(
                f"No teacher for {subject!r}: give model.teacher=ADAPTER (or base), "
                f"or model.teachers.{subject}=ADAPTER."
            )
        return self._found.setdefault(name, self._policy.frozen(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._subjects)

    def __len__(self) -> int:
        return len(self._subjects)
