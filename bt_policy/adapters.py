"""LoRA adapters: made, loaded, copied and written with the key names and the configuration that PEFT and vLLM load."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from common.errors import UserError
from common.seeding import stream

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The language model's linear layers, those of the gated delta nets included; the vision tower is untouched.
MODULES = (
    r"model.language_model.*\.(q_proj|k_proj|v_proj|o_proj|in_proj_qkv|in_proj_z|in_proj_b|in_proj_a|out_proj"
    r"|gate_proj|up_proj|down_proj)$"
)
_ADAPTER = re.compile(r"(\.lora_[A-Za-z]+(?:_[a-z]+)?)\.[^.]+(\.weight)?$")


def attach(
    base: Any,
    *,
    adapter: Path | None,
    others: Mapping[str, Path],
    seed: int,
    r: int,
    alpha: int,
    dropout: float,
    modules: str | Sequence[str],
) -> PeftModel:
    """`base` with a live adapter "default" (new, or a folder's), the `others` and an empty slot "start"."""
    base.requires_grad_(False)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers by a name that will change
        torch.manual_seed(stream(seed, "lora"))
        if adapter is None:
            fresh = LoraConfig(
                r=r, lora_alpha=alpha, lora_dropout=dropout, task_type="CAUSAL_LM", target_modules=modules
            )
            model = get_peft_model(base, fresh)
        else:
            check_folder(adapter, base)
            model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
        for name, folder in others.items():
            check_folder(folder, base)
            model.load_adapter(folder, adapter_name=name)
        model.add_adapter("start", model.peft_config["default"])
        model.set_adapter("default")
    return model


def check_folder(folder: Path, base: Any) -> None:
    """Refuse a folder that is not a LoRA adapter of this base, before PEFT says it in forty lines."""
    if not (folder / CONFIG).is_file() or not (folder / WEIGHTS).is_file():
        raise UserError(f"{folder} is not an adapter: it needs {CONFIG} and {WEIGHTS}.")
    modules = dict(base.named_modules())
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = list(file.keys())
        for key in names:
            if not key.endswith("lora_A.weight"):
                continue
            module = modules.get(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            if module is None or module.weight.shape[1] != file.get_slice(key).get_shape()[1]:
                wanted = PeftConfig.from_pretrained(folder).base_model_name_or_path
                raise UserError(
                    f"The adapter {folder} does not fit the model (first at {key}); "
                    f"it was made for {wanted}: choose that with model=."
                )


def freeze_all_but(model: Any, adapter: str) -> None:
    """Only the named adapter's LoRA weights may be trained."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name and f".{adapter}." in name)


@torch.no_grad()
def copy(model: Any, source: str, target: str) -> None:
    """Copy one adapter's weights over another's; shards stay where they are."""
    weights = dict(model.named_parameters())
    for name, parameter in weights.items():
        if f".{target}." in name and "lora_" in name:
            parameter.copy_(weights[name.replace(f".{target}.", f".{source}.")])


def file_name(parameter: str) -> str:
    """The name of an adapter's parameter in an adapter file: without the adapter's own name."""
    return _ADAPTER.sub(r"\1\2", parameter)


def write(directory: Path, model: Any, state: Mapping[str, Tensor]) -> None:
    """The adapter's weights and configuration in `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, directory / WEIGHTS, metadata={"format": "pt"}
    )
    settings = model.peft_config["default"]
    was, settings.inference_mode = settings.inference_mode, True
    settings.save_pretrained(directory)
    settings.inference_mode = was
