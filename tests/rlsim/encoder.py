"""The plain architecture: `nn.TransformerEncoder` over the whole sequence, every position computed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlsim.tiny_gpt import Shape

NAMES = {
    "self_attn.in_proj_weight": "qkv.weight",
    "self_attn.in_proj_bias": "qkv.bias",
    "self_attn.out_proj.weight": "out.weight",
    "self_attn.out_proj.bias": "out.bias",
    "linear1.weight": "up.weight",
    "linear1.bias": "up.bias",
    "linear2.weight": "down.weight",
    "linear2.bias": "down.bias",
}


class Encoder(nn.Module):
    """Logits at every position, from torch seed `seed`."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tok = nn.Embedding(shape.vocab, shape.width)
        self.pos = nn.Embedding(shape.positions, shape.width)
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 4 * shape.width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocab)

    def forward(self, tokens_NT: Tensor) -> Tensor:
        t = tokens_NT.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(t)
        return self.head(self.norm(self.layers(self.tok(tokens_NT) + self.pos.weight[:t], mask=mask, is_causal=True)))

    def answer_logits(self, prompts_BP: Tensor, answers_NA: Tensor, group: int = 1) -> Tensor:
        """Every row by itself, every position computed."""
        tokens_NT = torch.cat([prompts_BP.repeat_interleave(group, 0), answers_NA], 1)
        return self(tokens_NT)[:, prompts_BP.shape[1] - 1 : -1]

    def named(self) -> dict[str, nn.Parameter]:
        """Parameters under TinyGPT's names."""
        found = {}
        for name, parameter in self.named_parameters():
            if name.startswith("layers.layers."):
                _, _, number, rest = name.split(".", 3)
                name = f"blocks.{number}.{NAMES.get(rest, rest)}"
            found[name] = parameter
        return found
