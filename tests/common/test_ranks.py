"""The same rows give the same update on any number of ranks: every method, in the mini world, over gloo."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import torch
import torch.multiprocessing as mp

from common.distributed import World, close_world, open_world
from common.trainers.context import Context
from tests.common.mini_world import CodeTask, Recorder, TablePolicy, teacher
from tests.common.trainer_cases import METHODS

ODD = {
    "rows_per_update": 28,
    "micro_batch": 8,
    "eps": 0.01,
}  # 7 units of 4 rows: no multiple of two or three ranks; the large eps keeps
# Adam from turning the rounding of a cancelled gradient into a whole step


class ShardedTask(CodeTask):
    """Samples only this rank's share and gathers the others', as a real task does."""

    def experience(self, policy, batch, group, *, temperature, uniforms_NA):  # type: ignore[no-untyped-def]
        units, _ = self.world.shard(len(batch))
        rows = (units[:, None] * group + torch.arange(group)).reshape(-1)
        whole = super().experience(policy, batch, group, temperature=temperature, uniforms_NA=uniforms_NA)
        mine = policy.sample(batch.prompts[units], group, temperature=temperature, uniforms_NA=uniforms_NA[rows])
        gathered = self.world.gather(mine.answers_NA, len(batch))
        assert torch.equal(gathered, whole.answers_NA)  # sampling does not see the split
        return whole


def run_all(world: World) -> dict[str, tuple[torch.Tensor, list]]:
    results = {}
    for name, method in METHODS.items():
        task = ShardedTask(world=world, partial=True)
        policy, recorder = TablePolicy(world=world), Recorder()
        teachers = {"a": teacher(task), "b": teacher(task)}
        run = Context(policy, task, world, steps=5, eval_every=2, teachers=teachers, recorder=recorder)
        method(**ODD).train(run)
        results[name] = (policy.table.detach().clone(), recorder.lines)
    return results


def _worker(rank: int, size: int, port: int, directory: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    world = open_world()
    assert (world.rank, world.size, world.mode) == (rank, size, "ddp")
    torch.save(run_all(world), Path(directory) / f"{size}-{rank}.pt")
    close_world()


def test_every_method_makes_the_same_updates_and_metrics_on_one_two_and_three_ranks(tmp_path: Path) -> None:
    alone = run_all(World())
    for size in (2, 3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        mp.spawn(_worker, (size, port, str(tmp_path)), nprocs=size)
        ranks = [torch.load(tmp_path / f"{size}-{rank}.pt", weights_only=True) for rank in range(size)]
        for name, (table, lines) in alone.items():
            for shared, _ in (rank[name] for rank in ranks):
                torch.testing.assert_close(
                    shared, table, rtol=1e-4, atol=2e-5, msg=lambda m, n=name, size=size: f"{n} on {size} ranks: {m}"
                )
                assert torch.equal(shared, ranks[0][name][0])
            for (step, mine), (at, whole) in zip(ranks[0][name][1], lines, strict=True):
                assert (step, mine.keys()) == (at, whole.keys()), name
                for key in whole:
                    assert abs(mine[key] - whole[key]) < 1e-3 * max(1.0, abs(whole[key])), (
                        f"{name} {key}: {mine[key]} {whole[key]}"
                    )
