"""A policy whose codes are written by vLLM and scored here: rollout=vllm.

The live adapter is laid in a folder of its own and loaded under a new name whenever its weights have changed (a name
that is loaded again can serve stale state). What comes back is checked where it could be wrong without being noticed:
the prompt's tokens against ours on the first batch of every adapter, and the summed log-probs of the first codes
against our own forward.

Log-probs must be those of the distribution that was sampled from (temperature and legal digits): start the servers with
`--logprobs-mode processed_logprobs`, as `rollout.start=true` does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bt_policy.encoding import Prompts
from bt_policy.rollout.client import Client, Legal, Request, Written
from bt_policy.rollout.server import Server
from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.errors import UserError, at_least
from common.files import replace_directory
from common.interfaces import Sample
from common.logprobs import token_logps

log = logging.getLogger(__name__)


class Served:
    """The policy it is given, except that servers write its codes."""

    def __init__(
        self,
        *,
        policy: VLMPolicy,
        world: World,
        directory: Path,
        servers: Sequence[str],
        start: bool,
        model: str,
        gpus: Sequence[int],
        arguments: Sequence[str],
        wait: float,
        timeout: float,
        retries: int,
        concurrency: int,
        max_logp_gap: float,
        compared: int,
    ) -> None:
        """conf/rollout/vllm.yaml says what each setting means."""
        at_least("rollout.retries", retries, 0, whole=True)
        at_least("rollout.concurrency", concurrency, 1, whole=True)
        at_least("rollout.timeout", timeout, 0.001)
        self._policy, self._world = policy, world
        self._folder, self._max_gap, self._compared = directory / "served", max_logp_gap, compared
        self._legal = Legal(tuple(policy.encoder.digit_ids), tuple(policy.levels))
        self._server = Server(model, servers[0], gpus, arguments, directory) if start and world.main else None
        self._client = Client(servers, timeout=timeout, retries=retries, concurrency=concurrency)
        self._client.ready(wait if start else 0.0)
        self._tag = world.gather_objects(f"bt-{os.getpid():x}-{int(time.time()):x}")[0]
        self._version: tuple[int, ...] | None = None
        self._number = 0
        self._unchecked = False
        self.times = {"publish_seconds": 0.0}

    def __getattr__(self, name: str) -> Any:
        """Scoring, training and saving are the policy's own."""
        return getattr(self._policy, name)

    # -- writing -----------------------------------------------------------------------------------------------------

    def sample(
        self, prompts: Prompts, group: int = 1, *, temperature: float = 1.0, uniforms_NA: Tensor | None = None
    ) -> Sample:
        """`group` codes to each prompt, from the servers. A row's random seed is its first uniform number."""
        self._publish()
        every = torch.arange(len(prompts)).repeat_interleave(group).tolist()
        seeds = [None] * len(every) if uniforms_NA is None else (uniforms_NA[:, 0].double() * 2**31).long().tolist()
        pictures = [frame.image() for frame in prompts.frames]
        texts = [self._policy.encoder.prompt(n, m) for n, m in zip(prompts.names, prompts.memories, strict=True)]
        requests = [
            Request(pictures[unit], texts[unit], seed, temperature) for unit, seed in zip(every, seeds, strict=True)
        ]
        written = self._client.write(self._name, requests, self._legal)
        answers_NA = torch.tensor([one.ids for one in written], device=self._policy.device)
        logps_NA = torch.tensor([one.logps for one in written], dtype=torch.float32, device=self._policy.device)
        if self._unchecked and uniforms_NA is not None:
            self._check(prompts[torch.tensor(every)], written, answers_NA, logps_NA, temperature)
            self._unchecked = False
        return Sample(answers_NA, logps_NA, torch.ones_like(answers_NA, dtype=torch.bool))

    @property
    def _name(self) -> str:
        return f"{self._tag}-{self._number:05d}"

    def _publish(self) -> None:
        """Lay down and load the live adapter if its weights are others than those that are served. Every rank calls."""
        version = tuple(parameter._version for _, parameter in self._policy.trainable())
        if version == self._version:
            return
        began = time.monotonic()
        before = None if self._version is None else self._name
        self._number += 1
        folder = self._folder / self._name
        if self._world.main:
            with replace_directory(folder) as partial:
                self._policy.save(partial)
            self._client.load(self._name, str(folder.resolve()))
            if before is not None:
                self._client.unload(before)
        else:
            self._policy.save(folder)  # a collective call; rank 0 writes
        self._world.barrier()
        self._version, self._unchecked = version, True
        self.times["publish_seconds"] += time.monotonic() - began

    # -- checks ------------------------------------------------------------------------------------------------------

    def _check(
        self, prompts: Prompts, written: Sequence[Written], answers_NA: Tensor, logps_NA: Tensor, temperature: float
    ) -> None:
        """The first codes of an adapter: the same prompt, and nearly the same log-probs, as our own forward has."""
        some = torch.arange(min(self._compared, len(prompts)))
        self._check_prompts(prompts[some], written)
        with torch.no_grad():
            logits_NAV = self._policy.answer_logits(prompts[some].masked(), answers_NA[some])
        ours_N = token_logps(logits_NAV, answers_NA[some], temperature).sum(-1)
        gap_N = (ours_N - logps_NA[some].sum(-1)).abs()
        worst = int(gap_N.argmax())
        log.info("%s: log-probs are off by %.4f a code, at most %.4f", self._name, gap_N.mean(), gap_N[worst])
        if float(gap_N[worst]) > self._max_gap:
            code = self._policy.encoder.code(answers_NA[worst].tolist())
            raise UserError(
                f"vLLM gives the code {code} the log-prob {float(logps_NA[worst].sum()):.3f}, the trainer "
                f"{float(ours_N[worst]):.3f}: more than rollout.max_logp_gap={self._max_gap} apart. Is the server "
                f"started with --logprobs-mode processed_logprobs, and does it serve the model that is trained?"
            )

    def _check_prompts(self, prompts: Prompts, written: Sequence[Written]) -> None:
        for row in range(len(prompts)):
            theirs = written[row].prompt_ids
            if theirs is None:
                log.warning("vLLM does not return prompt tokens (return_token_ids); they are not compared with ours")
                return
            _, grid = self._policy.vision(prompts.frames[row])
            ours = self._policy.encoder.encode(prompts.names[row], prompts.memories[row], grid).ids_P.tolist()
            if list(theirs) != ours:
                pairs = enumerate(zip(theirs, ours, strict=False))
                at = next((i for i, (one, other) in pairs if one != other), min(len(theirs), len(ours)))
                raise UserError(
                    f"vLLM reads the prompt {prompts.names[row]!r} as {len(theirs)} tokens, we as {len(ours)}, "
                    f"different from token {at + 1} on. Serve the same model folder, with its chat template and its "
                    f"picture sizes."
                )
