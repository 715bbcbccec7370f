"""20 SFT and 20 PPO updates of the tiny model beside the earlier trainer's loop, written anew from its description.

Its faults do not act here: every micro-batch has equally many rows and every accumulation window is full. Then losses,
gradient norms, the final adapter and the statistics must agree; what is printed is the largest difference.

    python benchmarks/bt_reference.py
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from bt_policy import adapters, loading, prompt, rows
from bt_policy.encoding import Encoder
from bt_policy.rows import Row
from bt_policy.task import RowsTask
from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.kl import KL
from common.objectives import PolicyGradient
from common.optimizer import Optim
from common.trainers.context import Context
from common.trainers.ppo import PPO, minibatches
from common.trainers.rollout import Sampling
from common.trainers.sft import SFT

UPDATES, ROWS, LR = 20, 8, 1e-3
CLIP, BETA, WARMUP = 0.2, 0.02, 10
TOLERANCE = {"loss": 1e-4, "grad_norm": 1e-3, "adapter": 1e-3, "stats": 1e-3}
TINY = Path(str(files("bt_policy"))) / "tiny"


class Lines:
    """Keeps the metrics of every update."""

    def __init__(self) -> None:
        self.found: list[dict[str, float]] = []

    def log(self, step: int, values: Any, times: Any = None) -> None:
        if "train/loss" in values:
            self.found.append(dict(values))

    def advance(self, step: int) -> None:
        """Nothing."""

    def rewind(self, step: int) -> None:
        """Nothing."""


def plain_forward(model: Any, encoder: Encoder, some: Sequence[Row], answers_NA: Tensor) -> Tensor:
    """(N, A) log-probs of the answers by the model's own forward on right-padded rows, pictures and all."""
    pixels, grids = zip(*(encoder.pixels(row.frame) for row in some), strict=True)
    prompts = [
        encoder.encode(row.name, row.memory, tuple(grid[0].tolist())) for row, grid in zip(some, grids, strict=True)
    ]
    sequences = [torch.cat([p.ids_P, a]) for p, a in zip(prompts, answers_NA, strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=encoder.pad_id)
    lengths = torch.tensor([len(s) for s in sequences])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    types = (ids == model.config.image_token_id).int()
    logits = model(
        input_ids=ids, attention_mask=mask, mm_token_type_ids=types, pixel_values=torch.cat(pixels),
        image_grid_thw=torch.cat(grids), use_cache=False,
    ).logits  # fmt: skip
    at = lengths[:, None] - answers_NA.shape[1] - 1 + torch.arange(answers_NA.shape[1])
    kept = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1])).float()
    return kept.log_softmax(-1).gather(-1, answers_NA[..., None])[..., 0]


def reference_sft(model: Any, encoder: Encoder, batches: Sequence[Sequence[Row]]) -> list[dict[str, float]]:
    """Cross entropy on the code and its end; AdamW, ten updates of warm-up, then cosine."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR)
    lines = []
    for update, some in enumerate(batches):
        loss = -plain_forward(model, encoder, some, _codes(encoder, some, end=True)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LR * min(1, (update + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * update / len(batches)))
        optimizer.step()
        lines.append({"loss": loss.item(), "grad_norm": float(norm)})
    return lines


def reference_ppo(
    model: Any, encoder: Encoder, some: Sequence[Row], epochs: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Old and reference log-probs once, then epochs of the clipped sequence ratio and k3; two forwards an update."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR / 10)
    answers = _codes(encoder, some, end=False)
    with torch.no_grad():
        old = torch.cat([plain_forward(model, encoder, [row], answers[i : i + 1]) for i, row in enumerate(some)])
        with model.disable_adapter():
            ref = torch.cat([plain_forward(model, encoder, [row], answers[i : i + 1]) for i, row in enumerate(some)])
    parameters_back = [p.requires_grad_(True) for p in parameters]
    adv = torch.tensor([row.adv for row in some])
    lines: list[dict[str, float]] = []
    stats: list[list[float]] = []
    for updates in epochs:
        stats = []
        for positions in updates:
            total = 0.0
            for part in (positions[: ROWS // 2], positions[ROWS // 2 :]):
                lp = plain_forward(model, encoder, [some[i] for i in part], answers[part])
                ratio = (lp.sum(1) - old[part].sum(1)).exp()
                pg = -torch.min(ratio * adv[part], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[part])
                gap = ref[part] - lp
                kl = (gap.exp() - gap - 1).sum(1)
                loss = (pg + BETA * kl).mean() / 2
                loss.backward()
                total += loss.item()
                stats.append([pg.mean().item(), kl.mean().item(), ((ratio - 1).abs() > CLIP).float().mean().item()])
            norm = torch.nn.utils.clip_grad_norm_(parameters_back, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            lines.append({"loss": total, "grad_norm": float(norm)})
    means = torch.tensor(stats).mean(0).tolist()
    return lines, {"pg_loss": means[0], "kl": means[1], "clip_frac": means[2]}


def _codes(encoder: Encoder, some: Sequence[Row], end: bool) -> Tensor:
    return torch.tensor([encoder.code_ids(row.code, end=end) for row in some])


def fresh() -> tuple[Any, Encoder]:
    """The shipped base and its encoder."""
    base, tokenizer, images = loading.load(str(TINY / "base"), dtype="float32", device=torch.device("cpu"))
    return base, Encoder(tokenizer, images, prompt.from_config("{name}"), base)


def ours(adapter: Path) -> VLMPolicy:
    """Our policy continuing the adapter."""
    base, encoder = fresh()
    model = adapters.attach(
        base, adapter=adapter, others={}, seed=0, r=8, alpha=16, dropout=0.0, modules=adapters.MODULES
    )
    return VLMPolicy(model, encoder, [4, 4, 4])


def theirs(adapter: Path) -> tuple[Any, Encoder]:
    """Plain PEFT on the same weights."""
    base, encoder = fresh()
    base.requires_grad_(False)
    return PeftModel.from_pretrained(base, adapter, is_trainable=True), encoder


def train(policy: VLMPolicy, some: Sequence[Row], method: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Our trainer's lines and report."""
    lines = Lines()
    context = Context(
        policy,
        RowsTask(some, [], policy.encoder, seed=0),
        World(),
        steps=UPDATES,
        eval_every=10**9,
        log_every=1,
        recorder=lines,
    )
    context.reference = lambda: policy.frozen("base")
    method.train(context)
    return [
        {name.removeprefix("train/"): value for name, value in line.items()} for line in lines.found
    ], context.report


def compare(
    name: str, mine: list[dict[str, float]], other: list[dict[str, float]], policy: VLMPolicy, model: Any
) -> bool:
    """Print the largest differences; True where all are within the tolerance."""
    weights = {adapters.file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    differences = {
        key: max(abs(a[key] - b[key]) / max(1e-3, abs(b[key])) for a, b in zip(mine, other, strict=True))
        for key in ("loss", "grad_norm")
    }
    moved = max(float((tensor - weights[n].detach()).abs().max()) for n, tensor in policy.state().items())
    differences["adapter"] = moved / (LR * UPDATES)
    for key, value in differences.items():
        print(f"{name:4} {key:10} largest relative gap in {UPDATES} updates {value:.2e} (bound {TOLERANCE[key]:.0e})")
    return all(value <= TOLERANCE[key] for key, value in differences.items())


def run_sft(adapter: Path, some: Sequence[Row]) -> bool:
    """20 updates of SFT on both sides."""
    some = some[: UPDATES * ROWS]
    policy = ours(adapter)
    optim = Optim(lr=LR, rows_per_update=ROWS, weight_decay=0.01, warmup=WARMUP, schedule="cosine", epochs=1)
    mine, _ = train(policy, some, SFT(optim, targets="reference"))
    by_line = {row.line: row for row in some}
    task = RowsTask(some, [], policy.encoder, seed=0)
    batches = [[by_line[i] for i in task.batch(step, ROWS).row_ids] for step in range(UPDATES)]
    model, encoder = theirs(adapter)
    return compare("sft", mine, reference_sft(model, encoder, batches), policy, model)


def run_ppo(adapter: Path, some: Sequence[Row]) -> bool:
    """20 updates of PPO, two epochs, on both sides; rows are scored over the full vocabulary, as the reference does."""
    some = [replace(row, mask=None) for row in some[: UPDATES * ROWS // 2]]
    policy = ours(adapter)
    objective = PolicyGradient(ratio="sequence", aggregate="sequence_mean", kl=KL(beta=BETA, aggregate="sequence_sum"))
    optim = Optim(lr=LR / 10, rows_per_update=ROWS, micro_batch=ROWS // 2, weight_decay=0.01)
    mine, report = train(policy, some, PPO(optim, Sampling(group=1), epochs=2, objective=objective))
    by_line = {row.line: i for i, row in enumerate(some)}
    batch = RowsTask(some, [], policy.encoder, seed=0).batch(0, len(some))
    epochs = [
        [[by_line[line] for line in part.row_ids] for part in minibatches(batch.rows, ROWS, 0, 0, epoch)]
        for epoch in range(2)
    ]
    model, encoder = theirs(adapter)
    other, stats = reference_ppo(model, encoder, some, epochs)
    last = report["rounds"][-1]["epochs"][-1]
    found = {"pg_loss": last["pg_loss"], "kl": last["kl"] * 3, "clip_frac": last["ratio_outside"]}
    gaps = {key: abs(found[key] - value) / max(1e-3, abs(value)) for key, value in stats.items()}
    for key in gaps:
        print(f"ppo  {key:10} {found[key]:+.5f} beside {stats[key]:+.5f}")
    return compare("ppo", mine, other, policy, model) and max(gaps.values()) <= TOLERANCE["stats"]


def main() -> None:
    """Both comparisons; exit code 1 where something differs."""
    torch.set_num_threads(1)
    supervised = rows.read(TINY / "rollouts" / "valid.jsonl", levels=[4, 4, 4])[0]
    recorded = rows.read(TINY / "rollouts" / "train.jsonl", levels=[4, 4, 4])[0]
    checks: list[tuple[Callable[[Path, Sequence[Row]], bool], Sequence[Row]]] = [
        (run_sft, supervised),
        (run_ppo, recorded),
    ]
    with tempfile.TemporaryDirectory() as folder:
        ours(TINY / "adapter").save(Path(folder) / "start")
        agreed = [check(Path(folder) / "start", some) for check, some in checks]
    print("agree" if all(agreed) else "DIFFER")
    raise SystemExit(0 if all(agreed) else 1)


if __name__ == "__main__":
    main()
