"""What all methods share: updates with one denominator, evaluation, checkpoints, resuming. Methods call it.

    loop = Loop(context, self.optim)
    for step in loop.steps():                 # evaluates, logs and saves where due
        rows = ...                            # an Experience: the same on every rank
        loop.update(rows, loss)               # loss(micro) -> sum over its weighted tokens, metrics

An update splits its rows into this rank's share and that into micro-batches. Token weights are computed from all rows
before the first forward (`common/aggregation.py`), so neither split changes the gradient beyond rounding. A non-finite
loss or gradient never reaches the weights.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from common.errors import UserError
from common.interfaces import Experience, Metrics
from common.optimizer import Optim, clip_gradients, load_optimizer_state, optimizer_state
from common.schedule import lr_factor
from common.trainers.context import Context

log = logging.getLogger(__name__)

LossFunction = Callable[[Experience], tuple[Tensor, Metrics]]
MOST_SKIPS = 5  # non-finite updates in a row before the run stops


class Pool:
    """Metrics as sums and counts, added up until they are reported."""

    def __init__(self) -> None:
        self.sums: Metrics = {}

    def add(self, metrics: Metrics) -> None:
        """Add sums and counts name by name."""
        for name, (total, count) in metrics.items():
            before = self.sums.get(name, (0.0, 0.0))
            self.sums[name] = (before[0] + float(total), before[1] + float(count))

    def take(self, world: object) -> dict[str, float]:
        """Means over everything added on every rank since the last call. A collective call."""
        pooled, self.sums = world.pool(self.sums), {}  # type: ignore[attr-defined]
        return {name: total / count for name, (total, count) in pooled.items() if count}


class Loop:
    """The state of a run: the number of updates made, the optimizer, and what is pooled until the next log line."""

    def __init__(self, context: Context, optim: Optim) -> None:
        self.context, self.optim = context, optim
        self.parameters = context.policy.trainable()
        self.optimizer = optim.build(self.parameters)
        if context.optimizer_state is not None:
            saved = torch.load(context.optimizer_state, map_location="cpu", weights_only=True)
            load_optimizer_state(self.optimizer, self.parameters, saved, str(context.optimizer_state))
        size = context.task.size
        self.updates_per_epoch = None if size is None else max(1, math.ceil(size / optim.rows_per_update))
        self.horizon = self._horizon()
        self.step = 0
        self.round = 0
        self.train, self.epoch = Pool(), Pool()  # since the last log line; since `epoch_report`
        self.last_eval: dict[str, float] = {}
        self.first_eval: dict[str, float] = {}
        self.best: float | None = None
        self._skips = 0
        self._stopped = False
        self._evaluated_at = self._logged_at = -1
        self._round_start: tuple[int, dict[str, Tensor]] | None = None
        self._pending: dict[str, Tensor] | None = None  # weights to return to once a resumed round is prepared again
        self._started = time.monotonic()
        if context.resume:
            self._resume()

    # ------------------------------------------------------------------ the course of a run

    @property
    def done(self) -> bool:
        """True when no further update is to be made."""
        return self._stopped or (self.horizon is not None and self.step >= self.horizon)

    def steps(self) -> Iterator[int]:
        """The numbers of the updates still to be made; each turn must call `update` once."""
        self._begin()
        while not self.done:
            yield self.step
        self._end()

    def rounds(self) -> Iterator[int]:
        """The numbers of the rollout rounds still to be made; each turn may call `update` any number of times.

        A resumed round is prepared again from the weights it began with (sampling is a function of seed and round).
        Then `round_progress` returns to the weights of the checkpoint.
        """
        self._begin()
        limit = self.context.rounds
        while not self.done and (limit is None or self.round < limit):
            if self._pending is None:
                self._round_start = (self.step, self._weights())
            yield self.round
            if self.step == self._round_start[0] and not self.done and limit is None:
                raise UserError("a rollout round made no update; method.rows_per_round gives no rows to learn from.")
            self.round += 1
            self._after_round()
        self._end()

    @property
    def round_batch(self) -> int:
        """The number by which this round asks the task for its batch.

        A finite task counts batches, so that rounds follow each other through its rows. An endless one gets the updates
        made when the round began, by which its curriculum goes.
        """
        if self.context.task.size is not None or self._round_start is None:
            return self.round
        return self._round_start[0]

    def round_progress(self) -> int:
        """Updates of this round already made (0 unless resumed inside it); call once the round's rows are scored."""
        if self._pending is not None:
            self.context.policy.load_state(self._pending)
            self._pending = None
        return self.step - (self._round_start or (self.step, {}))[0]

    def update(self, rows: Experience | None, loss: LossFunction) -> None:
        """One optimizer step on the rows (None: a counted update that changes nothing), then whatever is due."""
        if rows is None or len(rows) == 0:
            self.count({"empty_update": (1.0 / self.context.world.size, 1.0 / self.context.world.size)})
        else:
            self._step(rows, loss)
        self.step += 1
        self.context.recorder.advance(self.step)
        self._after_update()

    def count(self, metrics: Metrics) -> None:
        """Add training metrics (sum, count) of this rank to what the next log line and epoch report pool."""
        self.train.add(metrics)
        self.epoch.add(metrics)

    def count_once(self, values: dict[str, float]) -> None:
        """Add metrics that every rank holds alike, weighing each once over the ranks."""
        share = 1.0 / self.context.world.size
        self.count({name: (value * share, share) for name, value in values.items()})

    def epoch_report(self) -> dict[str, float]:
        """Training metrics pooled over all ranks and micro-batches since the last call."""
        return self.epoch.take(self.context.world)

    # ------------------------------------------------------------------ one update

    def micro_batches(self, rows: Experience) -> list[Experience]:
        """This rank's share of the rows, in micro-batches; units that only pad the share weigh zero."""
        units, weight = self.context.world.shard(rows.units)
        mine = rows.select(units).weighed(weight.repeat_interleave(rows.group))
        per = len(units) if self.optim.micro_batch is None else max(1, self.optim.micro_batch // rows.group)
        return [mine.select(part) for part in torch.arange(len(units)).split(per)]

    def _step(self, rows: Experience, loss: LossFunction) -> None:
        policy, world = self.context.policy, self.context.world
        micros = self.micro_batches(rows)
        total, pool = 0.0, Pool()
        for i, micro in enumerate(micros):
            with policy.accumulate(last=i == len(micros) - 1):
                value, metrics = loss(micro)
                # DDP and FSDP average over ranks; the token weights already hold the whole denominator
                (value * world.size).backward()
            total += float(value.detach())
            pool.add(metrics)
        norm = clip_gradients(self.parameters, self.optim.clip_norm)
        total = world.sum([total])[0]
        if math.isfinite(total) and math.isfinite(norm):
            lr = self.optim.lr * lr_factor(self.optim.schedule, self.step, self.horizon, self.optim.warmup)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self._skips = 0
            self.count(pool.sums)
            self.count_once({"loss": total, "grad_norm": norm, "lr": lr, "skipped": 0.0})
        else:
            self._skip(rows, total, norm)
        self.optimizer.zero_grad(set_to_none=True)

    def _skip(self, rows: Experience, total: float, norm: float) -> None:
        self._skips += 1
        self.count_once({"skipped": 1.0})
        log.warning("update %d skipped: loss %s, gradient norm %s; weights are unchanged", self.step, total, norm)
        if self._skips >= MOST_SKIPS:
            ids = ", ".join(map(str, rows.row_ids[:20]))
            raise UserError(
                f"{self._skips} updates in a row had a non-finite loss or gradient; "
                f"the last had rows {ids}. Lower method.optim.lr or look at these rows."
            )

    # ------------------------------------------------------------------ evaluation, log lines, checkpoints

    def _horizon(self) -> int | None:
        """Updates of the whole run: the smaller of steps and epochs; None where only rounds bound it."""
        bounds = [] if self.context.steps is None else [self.context.steps]
        if self.optim.epochs is not None and self.updates_per_epoch is not None:
            bounds.append(math.ceil(self.optim.epochs * self.updates_per_epoch))
        if not bounds and self.context.rounds is None:
            raise UserError("nothing bounds this run; give steps=N, method.optim.epochs=E or rounds=R.")
        return min(bounds) if bounds else None

    def _due(self, every: int | None) -> bool:
        if every is None and self._by_rounds:
            return self.done
        if every is None:
            every = self.updates_per_epoch
        return self.done or (every is not None and every > 0 and self.step % every == 0)

    @property
    def _by_rounds(self) -> bool:
        """Whether evaluations come once a round of sampling instead of once an epoch."""
        return self.context.rounds is not None and not self.context.task.offline

    def _after_round(self) -> None:
        """The state between rounds: nothing of the round before has to be prepared again."""
        self._round_start = None
        if self.context.eval_every is None and self._by_rounds and self._evaluated_at != self.step:
            self._evaluate_and_log()
            self.save_checkpoint()

    def _begin(self) -> None:
        if self.step == 0:
            self._evaluate_and_log()

    def _after_update(self) -> None:
        evaluate = self._due(self.context.eval_every)
        if evaluate:
            self._evaluate_and_log()
            self.save_checkpoint()
        elif self.context.log_every is not None and self._due(self.context.log_every):
            self._log({})

    def _end(self) -> None:
        if self._evaluated_at != self.step:
            self._evaluate_and_log()
            self.save_checkpoint()
        self.context.report.update(start=self.first_eval, final=self.last_eval, updates=self.step, best_score=self.best)

    def _evaluate_and_log(self) -> None:
        context, began = self.context, time.monotonic()
        with torch.no_grad():
            pooled = context.world.pool(context.task.evaluate(context.policy))
        self.last_eval = {name: total / count for name, (total, count) in pooled.items() if count}
        self.first_eval = self.first_eval or self.last_eval
        self._evaluated_at = self.step
        self._log({f"eval/{name}": value for name, value in self.last_eval.items()}, time.monotonic() - began)
        score = context.task.score(self.last_eval) if self.last_eval else None
        if score is not None and (self.best is None or score > self.best):
            self.best = score
            self._keep("best_directory")
        if context.stop is not None and self.last_eval and context.stop(self.last_eval):
            self._stopped = True

    def _log(self, values: dict[str, float], eval_seconds: float = 0.0) -> None:
        trained = {f"train/{name}": value for name, value in self.train.take(self.context.world).items()}
        times = {"seconds": time.monotonic() - self._started, "eval_seconds": eval_seconds}
        for part in (self.context.task, self.context.policy):  # how long the world took, where it says so
            times |= getattr(part, "times", {})
        if torch.cuda.is_available():
            times["gpu_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.context.recorder.log(self.step, {**values, **trained}, times)

    def _keep(self, name: str) -> None:
        if self.context.checkpoints is not None:
            with self.context.checkpoints.replacing(getattr(self.context.checkpoints, name)) as directory:
                self.context.policy.save(directory)

    # ------------------------------------------------------------------ stopping and resuming

    def save_checkpoint(self) -> None:
        """Everything a resumed run needs to give the same bits as one that was not stopped. A collective call."""
        context = self.context
        if context.checkpoints is None:
            return
        weights = {"policy": self._weights()}
        if self._round_start is not None:
            weights["round"] = self._round_start[1]
        state = {
            "round": self.round,
            "round_step": None if self._round_start is None else self._round_start[0],
            "best": self.best,
            "first_eval": self.first_eval,
            "last_eval": self.last_eval,
            "skips": self._skips,
            "stopped": self._stopped,
            "train": {name: list(pair) for name, pair in context.world.pool(self.train.sums).items()},
            "epoch": {name: list(pair) for name, pair in context.world.pool(self.epoch.sums).items()},
            "report": context.report,
        }
        optimizer = optimizer_state(self.optimizer, self.parameters)
        context.checkpoints.save(self.step, weights=weights, optimizer=optimizer, state=state)
        self._keep("last_directory")

    def _weights(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.context.policy.state().items()}

    def _resume(self) -> None:
        context = self.context
        checkpoint = None if context.checkpoints is None else context.checkpoints.latest()
        if checkpoint is None:
            log.info("nothing to resume from: starting at the beginning")
            context.recorder.rewind(-1)
            return
        state = checkpoint.state
        self.step, self.round = checkpoint.step, state["round"]
        self.best, self._skips, self._stopped = state["best"], state["skips"], state["stopped"]
        self.first_eval, self.last_eval = state["first_eval"], state["last_eval"]
        self._evaluated_at = self.step
        if context.world.main:  # pooled sums were saved once; they are taken back once
            self.train.add({name: (pair[0], pair[1]) for name, pair in state["train"].items()})
            self.epoch.add({name: (pair[0], pair[1]) for name, pair in state["epoch"].items()})
        context.report.update(state["report"])
        load_optimizer_state(self.optimizer, self.parameters, checkpoint.optimizer, "the checkpoint")
        if "round" in checkpoint.weights and state["round_step"] is not None:
            self._round_start = (state["round_step"], checkpoint.weights["round"])
            self._pending = checkpoint.weights["policy"]
            context.policy.load_state(checkpoint.weights["round"])
        else:
            context.policy.load_state(checkpoint.weights["policy"])
        context.recorder.rewind(self.step)
        log.info("resumed after update %d", self.step)
