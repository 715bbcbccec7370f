"""A vLLM server that the run starts, and ends with it: on GPUs of its own, told apart from the trainer's."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import UserError

log = logging.getLogger(__name__)


class Server:
    """`python -m vllm.entrypoints.openai.api_server` in a process group of its own; its output is in vllm.log."""

    def __init__(
        self, model: str, address: str, gpus: Sequence[int], arguments: Sequence[str], directory: Path
    ) -> None:
        if importlib.util.find_spec("vllm") is None:
            raise UserError(
                "rollout.start=true needs vLLM in this environment; install it, or start a server elsewhere and give "
                "its address in rollout.servers."
            )
        directory.mkdir(parents=True, exist_ok=True)
        self._log = open(directory / "vllm.log", "ab")  # noqa: SIM115  (lives as long as the server)
        command = self.command(model, address, arguments)
        log.info("starting vLLM on GPUs %s: %s", list(gpus), " ".join(command))
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=self.environment(gpus), start_new_session=True
        )
        atexit.register(self.stop)

    @staticmethod
    def command(model: str, address: str, arguments: Sequence[str]) -> list[str]:
        """The server's command line. Log-probs are those of the distribution that is sampled from."""
        place = urlsplit(address)
        return [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model,
            "--host", place.hostname or "localhost", "--port", str(place.port or 8000),
            "--enable-lora", "--logprobs-mode", "processed_logprobs", *arguments,
        ]  # fmt: skip

    @staticmethod
    def environment(gpus: Sequence[int]) -> dict[str, str]:
        """The trainer's environment without what torchrun put into it, and with the server's own GPUs."""
        ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
        kept = {k: v for k, v in os.environ.items() if k not in ranks and not k.startswith("TORCHELASTIC")}
        return kept | {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus)),
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        }

    def stop(self) -> None:
        """End the server."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._log.close()
