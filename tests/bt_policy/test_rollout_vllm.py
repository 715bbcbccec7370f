"""Codes from vLLM servers that may be slow, failing, garbled or serve something else: right answers, or a sentence."""

from __future__ import annotations

import pytest
import torch

from bt_policy.rollout import client as client_module
from bt_policy.rollout.client import Client, Legal
from bt_policy.rollout.server import Server
from bt_policy.rollout.vllm import Served
from common.distributed import World
from common.errors import UserError
from common.seeding import uniforms
from common.trainers.scoring import score
from tests.bt_policy.conftest import make_policy
from tests.bt_policy.vllm_server import Engine, FakeVLLM

SETTINGS = {
    "start": False, "model": "", "gpus": [0], "arguments": [], "wait": 0.0, "timeout": 60.0, "retries": 2,
    "concurrency": 2, "max_logp_gap": 0.1, "compared": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return Engine(make_policy())


@pytest.fixture
def server(engine):
    with FakeVLLM(engine) as running:
        yield running


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr(client_module, "PAUSES", (0.01,))


@pytest.fixture(scope="module")
def trained():
    return make_policy()


def prompts(policy, n=3):
    import numpy as np

    from bt_policy.encoding import Prompts
    from bt_policy.frames import from_array

    rng = np.random.default_rng(0)
    frames = [from_array(rng.integers(0, 255, (32, 48, 3), dtype=np.uint8)) for _ in range(n)]
    return Prompts(frames, ["red ball", "blue box", "key"][:n], [None] * n, torch.ones(n, dtype=torch.bool))


def served(policy, tmp_path, *servers, **settings):
    addresses = [one if isinstance(one, str) else one.address for one in servers]
    return Served(policy=policy, world=World(), directory=tmp_path, servers=addresses, **SETTINGS | settings)


def write(policy, step=0, group=2, temperature=0.7):
    return policy.sample(
        prompts(policy), group, temperature=temperature, uniforms_NA=uniforms(0, "test", step, 3 * group, 3)
    )


def test_codes_come_back_with_the_log_probs_of_our_own_forward_at_that_temperature(trained, server, tmp_path):
    from common.interfaces import Experience

    policy = served(trained, tmp_path, server)
    sample = write(policy)
    rows = Experience(
        prompts(policy), sample.answers_NA, sample.mask_NA, ["s"] * 3, [0, 1, 2], group=2, temperature=0.7
    )
    assert torch.allclose(score(policy, rows, World()), sample.logps_NA, atol=1e-4)
    assert {request["temperature"] for request in server.requests} == {0.7}
    assert all(request["allowed_token_ids"] == policy.encoder.digit_ids[:4] for request in server.requests)
    assert all(request["chat_template_kwargs"] == {"enable_thinking": False} for request in server.requests)


def test_a_changed_adapter_is_published_once_under_a_new_name(server, tmp_path):
    trained = make_policy()
    policy = served(trained, tmp_path, server)
    write(policy)
    write(policy, step=1)
    with torch.no_grad():
        trained.trainable()[0][1].add_(0.5)
    write(policy, step=2)
    loaded = [body["lora_name"] for path, body in server.calls if path == "/v1/load_lora_adapter"]
    unloaded = [body["lora_name"] for path, body in server.calls if path == "/v1/unload_lora_adapter"]
    assert len(loaded) == len(set(loaded)) == 2
    assert unloaded == loaded[:1]
    assert server.requests[-1]["model"] == loaded[1]


@pytest.mark.parametrize("wrong", ["fail", "garbled", "adapter", "illegal", "short", "nan"])
def test_a_bad_answer_is_asked_for_again_and_the_codes_are_the_same(trained, server, tmp_path, wrong):
    right = write(served(trained, tmp_path, server))
    server.misbehave.append(wrong)
    again = write(served(trained, tmp_path, server))
    assert torch.equal(again.answers_NA, right.answers_NA)
    assert len(server.requests) == 2 * 6 + 1


def test_a_slow_answer_is_not_waited_for(trained, server, tmp_path):
    policy = served(trained, tmp_path, server)
    right = write(policy)  # the server knows the answers from here on
    server.misbehave.append("slow")
    policy._client.timeout = 3.0
    assert torch.equal(write(policy).answers_NA, right.answers_NA)
    assert len(server.requests) == 6 + 6 + 1
    assert policy._client.failures == 1


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("fail", r"failed 3 times; the last time it answered 500: out of memory"),
        ("adapter", r"answered with 'base' instead of the adapter 'bt-"),
        ("garbled", r"an answer that is not understood"),
        ("illegal", r"wrote token 0 at position 2, which is not a legal digit"),
    ],
)
def test_a_server_that_stays_bad_ends_the_run_with_what_it_did(trained, server, tmp_path, wrong, sentence):
    policy = served(trained, tmp_path, server)
    server.misbehave.extend([wrong] * 30)
    with pytest.raises(UserError, match=sentence):
        write(policy)


def test_several_servers_take_turns_and_stand_in_for_one_that_fails(trained, engine, tmp_path):
    with FakeVLLM(engine) as first, FakeVLLM(engine) as second:
        policy = served(trained, tmp_path, first, second)
        write(policy)
        assert len(first.requests) == len(second.requests) == 3
        first.misbehave.extend(["fail"] * 3)
        write(policy)
        assert len(first.requests) == 6
        assert len(second.requests) == 3 + 3 + 3


def test_no_server_is_a_sentence(trained, tmp_path):
    with pytest.raises(UserError, match=r"no vLLM server answers at http://127\.0\.0\.1:9; .* rollout=hf"):
        served(trained, tmp_path, "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"rollout\.servers is empty"):
        Client([], timeout=1.0, retries=0, concurrency=1)


def test_a_prompt_that_is_read_otherwise_is_refused(trained, server, tmp_path):
    server.misbehave.extend(["prompt"] * 6)
    with pytest.raises(UserError, match="different from token 4 on"):
        write(served(trained, tmp_path, server))


def test_log_probs_of_another_distribution_are_refused(trained, server, tmp_path):
    server.misbehave.extend(["raw"] * 6)
    with pytest.raises(UserError, match=r"more than rollout\.max_logp_gap=0\.1 apart"):
        write(served(trained, tmp_path, server))


def test_levels_that_differ_are_told_as_a_grammar():
    legal = Legal(tuple(range(10, 20)), (8, 8, 5))
    assert legal.parameters() == {"structured_outputs": {"regex": "[0-7][0-7][0-4]"}}
    legal.check([17, 10, 14])
    with pytest.raises(client_module.Refused, match="position 3"):
        legal.check([17, 10, 15])


def test_a_started_server_does_not_inherit_the_trainers_ranks_or_gpus(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    environment = Server.environment([2, 3])
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"RANK", "TORCHELASTIC_RUN_ID"} & environment.keys()
    command = Server.command("MODEL", "http://localhost:8123", ["--dtype", "bfloat16"])
    assert command[command.index("--port") + 1] == "8123"
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"


def test_greedy_codes_are_those_written_in_process(trained, server, tmp_path):
    theirs = served(trained, tmp_path, server).sample(prompts(trained))
    assert torch.equal(theirs.answers_NA, trained.sample(prompts(trained)).answers_NA)


def test_a_round_of_ppo_runs_through_the_servers(server, tmp_path):
    pytest.importorskip("minigrid")
    from common.trainers.context import Context
    from tests.bt_policy.test_rollout_rows import environment, ppo

    trained = make_policy()
    policy = served(trained, tmp_path, server)
    before = trained.state()
    ppo().train(Context(policy, environment(trained), World(), rounds=1, eval_every=None))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trained.state().items())
    assert policy.times["publish_seconds"] > 0
