"""Does RL improve the policy? Success on the same held-out episodes before and after, for every run of a sweep.

    python -m bt_policy experiment=babyai arm=rlvr,ppo seed=11,12,13,14,15
    python benchmarks/babyai_rl.py outputs/bt_policy/DIR...

Episodes are paired: those of the last adapter (not of the best, which was chosen on some of them) against those of the
policy that the run began with. A run's interval is over episodes; an arm's is over its training seeds, with Student's
quantile.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bt_policy.app import build_policy
from bt_policy.babyai.evaluation import gain, greedy
from bt_policy.babyai.task import held_out_starts
from bt_policy.rounds import joined
from common.distributed import World
from common.report.statistics import interval


def successes(cfg: DictConfig, episodes: int) -> list[bool]:
    """Whether each held-out episode ends well, played greedily with the configured adapter."""
    policy = build_policy(cfg, list(cfg.model.levels), World())
    starts = held_out_starts(list(cfg.data.levels), episodes)
    return [episode.success for episode in greedy(policy, policy.encoder, starts, cfg.data.memory)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", type=Path, nargs="+", help="directories of finished sweeps")
    parser.add_argument("--episodes", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before: dict[str, list[bool]] = {}
    gains: dict[str, list[float]] = defaultdict(list)
    print("| arm | seed | before | after | gain, points (95% over episodes) | seconds of training |")
    print("|---|---|---|---|---|---|")
    for path in sorted(path for sweep in arguments.sweeps for path in sweep.glob("*/seed=*/result.json")):
        run = path.parent
        cfg = joined(OmegaConf.load(run / ".hydra" / "config.yaml"), run)  # type: ignore[arg-type]
        key = f"{cfg.model.adapter} {cfg.data.levels}"
        if key not in before:
            before[key] = successes(cfg, arguments.episodes)
        cfg.model.adapter = str(run / "checkpoints" / "last")
        after = successes(cfg, arguments.episodes)
        figure, seconds = gain(after, before[key]), json.loads(path.read_text())["seconds"]
        gains[cfg.arm].append(100 * figure.mean)
        print(
            f"| {cfg.arm} | {cfg.seed} | {sum(before[key]) / len(after):.3f} | {sum(after) / len(after):.3f} "
            f"| {100 * figure.mean:+.1f} ({100 * figure.low:+.1f} .. {100 * figure.high:+.1f}) | {seconds:.0f} |",
            flush=True,
        )
    for arm, points in gains.items():
        mean, half = interval(points)
        spread = "" if half is None else f" ({mean - half:+.1f} .. {mean + half:+.1f})"
        print(f"\n{arm}: {mean:+.1f} points{spread} over {len(points)} training seeds")


if __name__ == "__main__":
    main()
