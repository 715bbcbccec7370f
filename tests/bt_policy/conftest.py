"""A random tiny Qwen3.5 with LoRA, and rows with frames to read: nothing is downloaded, nothing is trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

COLORS = ("red", "green", "blue", "purple")
KINDS = ("ball", "box", "key")


def make_rows(directory: Path, n: int, *, seed: int = 0, adv: bool = False, digits: int = 3, levels: int = 4) -> Path:
    """A jsonl of n rows with random frames of two sizes, names of different length and random codes."""
    rng = np.random.default_rng(seed)
    frames = directory / "frames"
    frames.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(n):
        side = 48 if i % 3 else 32
        Image.fromarray(rng.integers(0, 255, (side, 48, 3), dtype=np.uint8)).save(frames / f"{seed}-{i}.png")
        row = {
            "image": f"frames/{seed}-{i}.png",
            "name": f"{COLORS[i % 4]} {KINDS[i % 3]}" if i % 2 else "door",
            "code": "".join(str(d) for d in rng.integers(0, levels, digits)),
        }
        if i % 4 == 0:
            row["memory"] = ["0101", "11"]
        if adv:
            row |= {"adv": float(rng.normal()), "vllm_logp": float(-rng.exponential() - 3)}
        lines.append(json.dumps(row))
    path = directory / f"rows{seed}.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def composed(*overrides: str):
    """The application's configuration with these overrides."""
    from hydra import compose, initialize_config_dir

    from common.config import conf_directory

    with initialize_config_dir(version_base="1.3", config_dir=str(conf_directory())):
        return compose("bt_policy", list(overrides))


def make_base(*, seed: int = 0, width: int = 32):
    """(random model, encoder): one gated delta net and one full attention layer."""
    from bt_policy import prompt
    from bt_policy.encoding import Encoder
    from bt_policy.tiny import build

    tokens = build.tokenizer([f"user assistant Go to the {c} {k}. Code: Memory:" for c in COLORS for k in KINDS] * 4)
    base = build.model(build.config(tokens, width=width, layers=2, interval=2), seed)
    return base, Encoder(tokens, build.image_processor(), prompt.from_config("Go to the {name}. Code:"), base)


def make_policy(*, seed: int = 0, levels=(4, 4, 4), adapter=None, others=None, model=None, encoder=None, **options):
    """A VLMPolicy on random weights; options go to VLMPolicy. A new adapter is shaken so that it changes the output."""
    import torch

    from bt_policy import adapters
    from bt_policy.vlm import VLMPolicy

    if model is None:
        base, encoder = make_base()
        lora = {"r": 4, "alpha": 8, "dropout": 0.0, "modules": adapters.MODULES}
        model = adapters.attach(base, adapter=adapter, others=others or {}, seed=seed, **lora)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in model.named_parameters():
            if adapter is None and "lora_B.default" in name:
                parameter.data.normal_(0, 0.05, generator=generator)
    return VLMPolicy(model, encoder, levels, **options)


@pytest.fixture
def policy():
    """A fresh small policy."""
    return make_policy()


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    """24 supervised rows."""
    return make_rows(tmp_path_factory.mktemp("rows"), 24)
