"""The parts of a tiny Qwen3.5: a real `Qwen3_5ForConditionalGeneration` of about 0.4 M parameters, its tokenizer, its
image processor and its chat template. `make.py` trains one of these; tests build random ones.

Left out of the large model: the large vocabulary (here the bytes, a few merges of the prompt's own words and Qwen's
special tokens), the video side of the processor, and tools and system turns in the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration, Qwen3_5Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
PLAIN = ["<think>", "</think>"]

# A user turn with one picture and the generation prompt, as Qwen renders them, without the line breaks: with the 49
# tokens of a frame a sequence then fits into 64 tokens, the gated delta net's chunk, and a forward takes half the
# time.
CHAT_TEMPLATE = """\
{%- for message in messages %}<|im_start|>{{ message.role }}\
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% elif part.type == 'text' %}{{ part.text }}\
{% endif %}{% endfor %}{% endif %}<|im_end|>\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<think>\
{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}{% endif %}"""


def tokenizer(texts: Iterable[str], vocab_size: int = 384) -> Qwen3_5Tokenizer:
    """A byte-level BPE with Qwen's pre-tokenizer (digits are one token each), learned from `texts`."""
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL) - len(PLAIN),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    made = Qwen3_5Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        additional_special_tokens=SPECIAL[1:],
        chat_template=CHAT_TEMPLATE,
    )
    made.add_tokens(PLAIN)
    return made


def image_processor(patch: int = 8) -> Qwen2VLImageProcessorPil:
    """Frames keep their own size: nothing below 16 x 16 or above 1024 x 1024 pixels is resized."""
    return Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, size={"shortest_edge": 16 * 16, "longest_edge": 1024 * 1024},
        image_mean=[0.5] * 3, image_std=[0.5] * 3,
    )  # fmt: skip


def config(
    tokens: Qwen3_5Tokenizer, *, width: int = 64, layers: int = 4, interval: int = 4, patch: int = 8, grid: int = 14
) -> Qwen3_5Config:
    """Every kind of layer the 9B has: `interval` - 1 gated delta nets to one full attention, M-RoPE, vision merger."""
    ids = dict(zip(SPECIAL, tokens.convert_tokens_to_ids(SPECIAL), strict=True))
    return Qwen3_5Config(
        text_config={
            "vocab_size": len(tokens),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "max_position_embeddings": 1024,
            "initializer_range": 0.1,
            "full_attention_interval": interval,
            "tie_word_embeddings": True,
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.25,
                "mrope_section": [4, 2, 2],
                "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_heads": 2,
            "patch_size": patch,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": width,
            "num_position_embeddings": grid * grid,
            "initializer_range": 0.1,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )


def model(settings: Qwen3_5Config, seed: int = 0) -> Qwen3_5ForConditionalGeneration:
    """Random weights from `seed`; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = Qwen3_5ForConditionalGeneration(settings)
    return made.float().eval()


def save(
    directory: Path, made: Qwen3_5ForConditionalGeneration, tokens: Qwen3_5Tokenizer, images: Qwen2VLImageProcessorPil
) -> None:
    """One folder, laid out as a model from the hub."""
    made.save_pretrained(directory, safe_serialization=True)
    tokens.save_pretrained(directory)
    images.save_pretrained(directory)
