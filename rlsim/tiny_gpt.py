"""TinyGPT: a small decoder that reads a problem and writes its answer, with only the work that an answer needs.

Pre-norm blocks (GELU, biases, learned positions, final LayerNorm, head). Weights are drawn in the order in which
`nn.TransformerEncoder` draws them, and every block starts as a copy of the first: a torch seed gives the same bits.
Compared with a plain forward over P + A positions:

- a prompt is computed once, whatever its number of answers: `forward` lays them behind it as branches of one sequence
  (shared positions, a block mask), `write` keeps its keys and values;
- the last block's queries and MLP, the final norm and the head see only the positions that predict an answer token;
- the last answer token is never an input;
- the first block's queries, keys and values depend on (token, position) alone: computed for each pair, then looked up;
- what a frozen net computes for the beginning of a prompt is kept for all beginnings that it was told to `remember`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACK = 4  # sequences that share one attention matrix: fewer, larger multiplications. 1 = none
REMEMBER_BYTES = 128 * 2**20  # the largest table of remembered beginnings


@dataclass(frozen=True)
class Shape:
    """The sizes of a TinyGPT."""

    layers: int
    width: int
    heads: int
    vocab: int
    prompt_len: int
    answer_len: int

    @property
    def positions(self) -> int:
        """Positions with a learned embedding."""
        return self.prompt_len + self.answer_len


class Block(nn.Module):
    """Self-attention and MLP, each behind its norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.out = nn.Linear(width, width)  # drawn before qkv, as nn.MultiheadAttention does
        self.qkv = nn.utils.skip_init(nn.Linear, width, 3 * width)
        nn.init.xavier_uniform_(self.qkv.weight)
        nn.init.zeros_(self.qkv.bias)
        nn.init.zeros_(self.out.bias)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)

    def forward(
        self,
        hidden_BTD: Tensor,
        layout: Layout,
        first: int = 0,
        lookup: tuple[Tensor, Tensor] | None = None,
        cache: list[Tensor] | None = None,
        known_BKE: Tensor | None = None,
    ) -> Tensor:
        """(B, T - first, D): the positions from `first` on; all T are attended to, as far as `layout` allows.

        lookup: (table_RD, ids_BT) where hidden_BTD = table_RD[ids_BT].  cache: receives the (B, T, 3 * D) projections.
        known_BKE: the projections of the first K <= first positions, which `hidden_BTD` and `ids_BT` then leave out.
        """
        if lookup is None:
            qkv_BTE = self.qkv(self.norm1(hidden_BTD))
        else:
            qkv_BTE = F.embedding(lookup[1], self.qkv(self.norm1(lookup[0])))
        skipped = 0
        if known_BKE is not None:
            qkv_BTE, skipped = torch.cat([known_BKE, qkv_BTE], 1), known_BKE.shape[1]
        if cache is not None:
            cache.append(qkv_BTE)
        mixed_BQD = _attend(qkv_BTE, self.heads, layout, first)
        hidden_BQD = hidden_BTD[:, first - skipped :] + self.out(mixed_BQD)
        return self._mlp(hidden_BQD)

    def step(self, hidden_ND: Tensor, past_2THdN: Tensor, at: int) -> Tensor:
        """One more position of N sequences: (N, D). Its keys and values are put at `past[:, at]`.

        With the rows innermost, attention over a handful of positions is a few vectorised sums.
        """
        _, _, heads, d, n = past_2THdN.shape
        normed_ND = self.norm1(hidden_ND)
        qkv_3HdN = torch.addmm(self.qkv.bias[:, None], self.qkv.weight, normed_ND.t()).view(3, heads, d, n)
        past_2THdN[:, at] = qkv_3HdN[1:]
        keys_THdN, values_THdN = past_2THdN[:, : at + 1]
        scores_THN = (keys_THdN * (qkv_3HdN[0] * d**-0.5)).sum(2)
        mixed_HdN = (values_THdN * scores_THN.softmax(0)[:, :, None]).sum(0)
        return self._mlp(hidden_ND + self.out(mixed_HdN.view(-1, n).t()))

    def _mlp(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class TinyGPT(nn.Module):
    """`forward` scores given answers; `write` produces them."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.tok = nn.Embedding(shape.vocab, shape.width)
            self.pos = nn.Embedding(shape.positions, shape.width)
            first = Block(shape.width, shape.heads)
            self.norm = nn.LayerNorm(shape.width)
            self.head = nn.Linear(shape.width, shape.vocab)
        self.blocks = nn.ModuleList([first, *(copy.deepcopy(first) for _ in range(shape.layers - 1))])
        self._beginnings: Beginnings | None = None

    def forward(self, prompts_BP: Tensor, answers_NA: Tensor, group: int = 1) -> Tensor:
        """(N, A, V) logits that predict each answer token; N = B * group, the answers of a prompt adjacent."""
        (b, p), a = prompts_BP.shape, answers_NA.shape[1]
        inputs_BT = torch.cat([prompts_BP, answers_NA[:, :-1].reshape(b, group * (a - 1))], 1)
        hidden_BQD = self._blocks(inputs_BT, Layout(p, group, a - 1), p - 1)
        logits_BQV = self.head(self.norm(hidden_BQD))
        first_BG1V = logits_BQV[:, None, :1].expand(b, group, 1, -1)  # the same for all answers of a prompt
        later_BGAV = logits_BQV[:, 1:].reshape(b, group, a - 1, -1)
        return torch.cat([first_BG1V, later_BGAV], 2).flatten(0, 1)

    def _blocks(self, inputs_BT: Tensor, layout: Layout, first: int, cache: list[Tensor] | None = None) -> Tensor:
        """Final hidden states of the positions from `first` on."""
        positions = self.shape.positions
        table_RD = (self.tok.weight[:, None] + self.pos.weight).flatten(0, 1)
        ids_BT = inputs_BT * positions + layout.positions(inputs_BT.device)
        known = None if self._beginnings is None else self._beginnings.of(inputs_BT)
        skipped = 0 if known is None else known[0].shape[1]
        ids_BT = ids_BT[:, skipped:]
        hidden, last = F.embedding(ids_BT, table_RD), len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            hidden = block(
                hidden, layout, first if i == last else skipped, (table_RD, ids_BT) if i == 0 else None, cache,
                None if known is None else known[i],
            )  # fmt: skip
        return hidden

    @torch.no_grad()
    def remember(self, beginnings_RK: Tensor) -> None:
        """Keep what R beginnings of prompts give, so that later prompts begin behind them. Only for weights that stay.

        Nothing is kept where a prompt has no token behind its beginning, or where the table would be too large.
        """
        r, k = beginnings_RK.shape
        size = r * k * len(self.blocks) * self.blocks[0].qkv.weight[:, 0].nbytes
        if k >= self.shape.prompt_len or max(size, 8 * self.shape.vocab**k) > REMEMBER_BYTES:
            return
        self._beginnings, parts = None, []
        for rows_RK in beginnings_RK.split(256):
            cache: list[Tensor] = []
            self._blocks(rows_RK, Layout(k, 0, 0), k - 1, cache)
            parts.append(cache)
        tables = [torch.cat(part).flatten(1) for part in zip(*parts, strict=True)]
        self._beginnings = Beginnings(beginnings_RK, tables, self.shape.vocab)

    @torch.no_grad()
    def write(
        self,
        prompts_BP: Tensor,
        group: int,
        choose: Callable[[Tensor, int], tuple[Tensor, Tensor]],
        end_id: int | None = None,
        *,
        stop_early: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """(N, A) tokens and what else `choose` gave. `choose(logits_NV, position)` picks each token.

        Behind a row's first `end_id` stand `end_id` and 0; with `stop_early` it ends once every row is that far.
        """
        answer_len, p = self.shape.answer_len, prompts_BP.shape[1]
        cache: list[Tensor] = []
        hidden_B1D = self._blocks(prompts_BP, Layout(p, 0, 0), p - 1, cache)
        logits_NV = self.head(self.norm(hidden_B1D[:, 0])).repeat_interleave(group, 0)
        past = [self._past(qkv_BPE, group) for qkv_BPE in cache]
        tokens_NA = prompts_BP.new_full((len(logits_NV), answer_len), 0 if end_id is None else end_id)
        chosen_NA = logits_NV.new_zeros(len(logits_NV), answer_len)
        ended_N = torch.zeros(len(logits_NV), dtype=torch.bool, device=logits_NV.device)
        for i in range(answer_len):
            tokens_N, chosen_N = choose(logits_NV, i)
            if end_id is not None:
                tokens_N, chosen_N = tokens_N.masked_fill(ended_N, end_id), chosen_N.masked_fill(ended_N, 0.0)
                ended_N |= tokens_N == end_id
            tokens_NA[:, i], chosen_NA[:, i] = tokens_N, chosen_N
            if i == answer_len - 1 or (stop_early and bool(ended_N.all())):
                break
            hidden_ND = F.embedding(tokens_N, self.tok.weight) + self.pos.weight[p + i]
            for block, past_2THdN in zip(self.blocks, past, strict=True):
                hidden_ND = block.step(hidden_ND, past_2THdN, p + i)
            logits_NV = self.head(self.norm(hidden_ND))
        return tokens_NA, chosen_NA

    def _past(self, qkv_BPE: Tensor, group: int) -> Tensor:
        """(2, P + A - 1, H, d, N): a prompt's keys and values for each answer, with room for the answer's own."""
        b, p, _ = qkv_BPE.shape
        heads = self.shape.heads
        keys_values = qkv_BPE.view(b, p, 3, heads, -1)[:, :, 1:].permute(2, 1, 3, 4, 0)
        past = qkv_BPE.new_empty(2, p + self.shape.answer_len - 1, *keys_values.shape[2:4], b, group)
        past[:, :p] = keys_values[..., None]
        return past.flatten(-2)


class Beginnings:
    """The projections of every block for the first K positions of prompts that begin in one of R known ways."""

    def __init__(self, beginnings_RK: Tensor, tables_RE: list[Tensor], vocab: int) -> None:
        r, self._k = beginnings_RK.shape
        self._tables_RE = tables_RE
        self._place_K = vocab ** torch.arange(self._k, device=beginnings_RK.device)
        self._row = torch.full((vocab**self._k,), -1, device=beginnings_RK.device)
        self._row[self._number(beginnings_RK)] = torch.arange(r, device=beginnings_RK.device)

    def _number(self, tokens_BK: Tensor) -> Tensor:
        return (tokens_BK * self._place_K).sum(1)

    def of(self, inputs_BT: Tensor) -> list[Tensor] | None:
        """A (B, K, 3 * D) tensor a block, or None where a row begins in another way."""
        rows_B = self._row[self._number(inputs_BT[:, : self._k])]
        if bool((rows_B < 0).any()):
            return None
        return [F.embedding(rows_B, table_RE).unflatten(1, (self._k, -1)) for table_RE in self._tables_RE]


@dataclass(frozen=True)
class Layout:
    """Positions of one sequence: a prompt, then `branches` answers of `steps` tokens that do not see each other."""

    prompt: int
    branches: int
    steps: int

    def positions(self, device: torch.device) -> Tensor:
        """(T,) each input's position: every branch starts right after the prompt."""
        return _positions(self, device)

    def bias(self, first: int, pack: int, device: torch.device) -> Tensor:
        """(pack * Q, pack * T): 0 where a query (positions from `first` on) may look, else -inf."""
        return _bias(self, first, pack, device)


@lru_cache(maxsize=64)
def _positions(layout: Layout, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        branch = torch.arange(layout.prompt, layout.prompt + layout.steps, device=device)
        return torch.cat([torch.arange(layout.prompt, device=device), branch.repeat(layout.branches)])


@lru_cache(maxsize=64)
def _bias(layout: Layout, first: int, pack: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        position_T = _positions(layout, device)
        none = torch.full((layout.prompt,), -1, device=device)
        branch_T = torch.cat([none, torch.arange(layout.branches, device=device).repeat_interleave(layout.steps)])
        same_TT = (branch_T[:, None] == branch_T) | (branch_T == -1)
        visible_QT = (same_TT & (position_T[:, None] >= position_T))[first:]
        visible = torch.block_diag(*[visible_QT.float()] * pack) > 0
        return torch.zeros(visible.shape, device=device).masked_fill_(~visible, -math.inf)


def _attend(qkv_BTE: Tensor, heads: int, layout: Layout, first: int) -> Tensor:
    """(B, Q, D): attention of the positions from `first` on over all positions that `layout` lets them see."""
    b, t, e = qkv_BTE.shape
    d, q = e // (3 * heads), t - first
    pack = math.gcd(b, PACK) if t < 24 else 1
    rows = b // pack
    split = qkv_BTE.view(b, t, 3, heads, d)
    query, key, value = split[:, first:, 0], split[:, :, 1], split[:, :, 2]
    query = query.reshape(rows, pack * q, heads, d).transpose(1, 2)
    key, value = (x.view(rows, pack * t, heads, d).transpose(1, 2) for x in (key, value))
    bias = layout.bias(first, pack, qkv_BTE.device)
    mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    return mixed.transpose(1, 2).reshape(b, q, heads * d)
