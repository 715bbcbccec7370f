"""The base model, its tokenizer and its image processor, from a folder, the package itself or the hub."""

from __future__ import annotations

import importlib.util
import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as hf_logging

from bt_policy.places import located
from common.errors import UserError

log = logging.getLogger(__name__)
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")  # owner/model


def load(
    path: str, *, dtype: str, device: torch.device, attention: str = "sdpa", kernels: bool = False, images: str = "pil"
) -> tuple[Any, Any, Any]:
    """(model, tokenizer, image processor). UserError says where weights were looked for. `dtype` is a torch name."""
    where = located(path)
    if not Path(where).is_dir() and not HUB_NAME.fullmatch(path):  # the hub would be asked for half a minute
        raise UserError(f"model.path={path}: there is no such folder in {Path.cwd()}, and it is no name on the hub.")
    if device.type == "cuda" and not kernels:
        _warn_about_kernels()
    hf_logging.disable_progress_bar()
    if device.type == "cpu":
        hf_logging.set_verbosity_error()  # a CPU has no fused kernels to miss
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "attn_implementation": attention}
    if kernels and device.type == "cuda":
        options["use_kernels"] = True
    try:
        model = Qwen3_5ForConditionalGeneration.from_pretrained(where, device_map={"": device}, **options)
        tokenizer = AutoTokenizer.from_pretrained(where)
        return model.eval(), tokenizer, _image_processor(where, images)
    except (OSError, ValueError) as error:
        if Path(where).is_dir() and (Path(where) / "config.json").is_file():
            raise UserError(f"The model in {where} cannot be loaded: {error}.") from error
        raise UserError(
            f"model.path={path} has no weights: there is no such folder in {Path.cwd()}, and the hub or its cache has "
            f"none either; download the model and set model.path=FOLDER."
        ) from error


def _image_processor(where: str, images: str) -> Any:
    """PIL reads pictures alike everywhere; "auto" takes torchvision where installed (pixels differ by <= 0.008)."""
    if images == "auto" and importlib.util.find_spec("torchvision") is not None:
        from transformers import AutoImageProcessor

        return AutoImageProcessor.from_pretrained(where)
    return Qwen2VLImageProcessorPil.from_pretrained(where)


def _warn_about_kernels() -> None:
    missing = [name for name in ("fla", "causal_conv1d") if importlib.util.find_spec(name) is None]
    if missing:
        line = "!" * 100
        log.warning(
            "%s\n%s not installed: three of four layers run in plain torch, MANY TIMES SLOWER.\n"
            "pip install flash-linear-attention causal-conv1d\n%s",
            line, " and ".join(missing), line,
        )  # fmt: skip
