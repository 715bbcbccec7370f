"""What a run leaves besides its directory: valid.json, stats.json, and with `out=DIR` the flat layout of a PPO round.

DIR/adapter_model.safetensors, adapter_config.json      what the next round's model.adapter and vLLM load
DIR/optimizer.pt                                        what the next round of the same method continues
DIR/stats.json | valid.json                             figures; docs/migrating.md says what each key means
DIR/run.json                                            which run and which method wrote these files
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bt_policy.adapters import CONFIG, WEIGHTS
from common.errors import UserError
from common.files import write_bytes, write_json

log = logging.getLogger(__name__)

MARK, OPTIMIZER, STATS, VALID = "run.json", "optimizer.pt", "stats.json", "valid.json"
OURS = (WEIGHTS, CONFIG, OPTIMIZER, STATS, VALID, MARK)
FRESH = ("sft",)  # their optimizer's state belongs to a schedule that has ended


def check_out(out: Path, directory: Path) -> None:
    """Refuse an `out` that holds files of another run; anything else in it (train.jsonl, ...) is left alone."""
    found = [name for name in OURS if (out / name).exists()]
    if found and _mark(out).get("directory") != str(directory.resolve()):
        raise UserError(
            f"out={out} already holds {', '.join(found)} of another run; choose another directory or remove them."
        )


def claim(out: Path, directory: Path, method: str) -> None:
    """Note whose files are going to lie in `out`."""
    write_json(out / MARK, {"directory": str(directory.resolve()), "method": method})


def optimizer_beside(adapter: Path | None, method: str) -> Path | None:
    """optimizer.pt beside the adapter, if the same method wrote it (an unmarked one is PPO's); None to start afresh."""
    if adapter is None or not (adapter / OPTIMIZER).is_file() or method in FRESH:
        return None
    wrote = _mark(adapter).get("method", "ppo")
    return adapter / OPTIMIZER if wrote == method else None


def _mark(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / MARK).read_text())
    except (OSError, ValueError):
        return {}


def write(
    directory: Path, out: Path | None, result: Mapping[str, Any], method: str, digits: int, valid_rows: int
) -> dict[str, Any]:
    """Write the figures into the run's directory and everything into `out`; returns stats.json's content."""
    figures: dict[str, dict[str, Any]] = {}
    if "code" in result["final"]:
        figures[VALID] = valid(result, valid_rows)
        log.info("code accuracy %.3f -> %.3f, digits %.3f -> %.3f", *(
            result[when][name] for name in ("code", "digit") for when in ("start", "final")
        ))  # fmt: skip
    if result.get("rounds"):
        figures[STATS] = stats(result, digits)
    for name, content in figures.items():
        write_json(directory / name, content)
    if out is not None:
        claim(out, directory, method)
        for name in figures:
            _copy(directory / name, out / name)
        for name in (WEIGHTS, CONFIG):
            _copy(directory / "checkpoints" / "last" / name, out / name)
        for saved in (directory / "checkpoints").glob(f"step-*/{OPTIMIZER}"):
            _copy(saved, out / OPTIMIZER)
    return figures.get(STATS, {})


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        write_bytes(target, source.read_bytes())


def valid(result: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """valid.json with the reference's keys, and the accuracies before training."""
    return {
        "updates": result["updates"],
        "digit_acc": round(result["final"]["digit"], 4),
        "code_acc": round(result["final"]["code"], 4),
        "rows": rows,
        "before": {"digit_acc": round(result["start"]["digit"], 4), "code_acc": round(result["start"]["code"], 4)},
    }


def stats(result: Mapping[str, Any], digits: int) -> dict[str, Any]:
    """stats.json: the reference's keys with their old meaning, pooled over ranks; then what it did not have."""
    round_ = result["rounds"][-1]
    made = [metrics for metrics in round_["epochs"] if "pg_loss" in metrics]  # steps may end the run before an epoch
    epochs = [_epoch(metrics, digits) for metrics in made]
    last = made[-1] if made else {}
    old = {
        "pg_loss": last.get("pg_loss"),
        "kl": None if "kl" not in last else last["kl"] * digits,
        "clip_frac": last.get("ratio_outside"),
        "logp_gap": round_.get("mismatch/logp_gap"),
        "logp_gap_abs": round_.get("mismatch/logp_gap_abs"),
    }
    return {
        **{name: value if value is None else round(value, 4) for name, value in old.items()},
        "rows": round_["rows"],
        "train_s": round(result["seconds"]),
        "epochs": epochs,
        "mismatch": {name.removeprefix("mismatch/"): v for name, v in round_.items() if name.startswith("mismatch/")},
    }


def _epoch(metrics: Mapping[str, float], digits: int) -> dict[str, float]:
    """One epoch's pooled figures under names that say what they are; KLs per answer, in nats."""
    names = {
        "pg_loss": "pg_loss", "entropy": "entropy_per_token", "grad_norm": "grad_norm", "loss": "loss",
        "clip_frac": "clip_active", "clip_frac_high": "clip_active_high", "clip_frac_low": "clip_active_low",
        "ratio_outside": "ratio_outside", "ratio": "ratio_mean", "skipped": "skipped",
    }  # fmt: skip
    found = {new: metrics[old] for old, new in names.items() if old in metrics}
    found |= {f"{name}_per_answer": metrics[name] * digits for name in ("kl", "approx_kl") if name in metrics}
    return found
