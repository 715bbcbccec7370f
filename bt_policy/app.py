"""One run of the vision-language model: read and check the rows, load the model, train, leave what a user expects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig

from bt_policy import adapters, loading, prompt, rows
from bt_policy.encoding import Encoder
from bt_policy.loading import located
from bt_policy.task import RowsTask
from bt_policy.vlm import BASE, VLMPolicy
from common.distributed import World
from common.errors import UserError
from common.interfaces import Policy
from common.run import Parts, execute


def run(cfg: DictConfig, directory: Path) -> dict[str, Any]:
    """Train as `cfg` says, in `directory`; the content of result.json."""
    return execute(cfg, directory, partial(build, cfg, directory))


def build(cfg: DictConfig, directory: Path, world: World) -> Parts:
    """Rows first: whatever is wrong with them is said before a model is loaded."""
    train, valid = read_rows(cfg, directory, world)
    levels = cfg.model.levels or [10] * len(train[0].code)
    policy = build_policy(cfg, levels, world)
    task = RowsTask(
        train, valid, policy.encoder, seed=cfg.seed, world=world, reward=cfg.data.reward, eval_rows=cfg.model.eval_rows
    )
    return Parts(policy, task, teachers=Teachers(cfg, task.subjects, policy), reference=partial(policy.frozen, "ref"))


def read_rows(cfg: DictConfig, directory: Path, world: World) -> tuple[list[rows.Row], list[rows.Row]]:
    """Checked training and validation rows. Rank 0 looks at the pictures first; the others profit from its verdicts."""
    found = []
    levels = cfg.model.levels
    for name in ("train", "valid"):
        path = cfg.data[name]
        if path is None:
            found.append([])
            continue
        read = partial(
            rows.read, Path(path), levels=levels, image_root=Path(cfg.data.image_root) if cfg.data.image_root else None,
            max_pixels=cfg.data.max_pixels, cache=Path(cfg.cache_dir) / "pictures.json",
        )  # fmt: skip
        rejected = directory / f"rejected.{name}.jsonl" if world.main else None
        good = rows.accept(Path(path), read(), cfg.data.on_bad_row, rejected)
        levels = levels or [10] * len(good[0].code)
        found.append(good)
    return found[0], found[1]


def build_policy(cfg: DictConfig, levels: list[int], world: World) -> VLMPolicy:
    """The base with its adapters: the live one, the reference, and the teachers that the configuration names."""
    settings = cfg.model
    base, tokenizer, images = loading.load(
        settings.path, dtype=settings.dtype, device=world.device, attention=settings.attention, kernels=settings.kernels,
        images=settings.images,
    )  # fmt: skip
    reference = settings.adapter if settings.ref == "adapter" else settings.ref
    others = {name: folder for name, folder in {"ref": reference, **_teachers(cfg)}.items() if folder not in (None, BASE)}
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
    named = {f"teacher.{subject}": folder for subject, folder in cfg.model.teachers.items()}
    return {"teacher": cfg.model.teacher, **named} if cfg.model.teacher is not None else named


class Teachers(Mapping[str, Policy]):
    """Subject -> frozen adapter, looked up when a method first asks. A subject without a teacher is a UserError."""

    def __init__(self, cfg: DictConfig, subjects: Sequence[str], policy: VLMPolicy) -> None:
        self._names, self._subjects, self._policy = _teachers(cfg), list(subjects), policy
        self._found: dict[str, Policy] = {}

    def __getitem__(self, subject: str) -> Policy:
        name = f"teacher.{subject}" if f"teacher.{subject}" in self._names else "teacher"
        if name not in self._names:
            raise UserError(f"No teacher for {subject!r}: give model.teacher=ADAPTER (or base), or model.teachers.{subject}=ADAPTER.")
        return self._found.setdefault(name, self._policy.frozen(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._subjects)

    def __len__(self) -> int:
        return len(self._subjects)
