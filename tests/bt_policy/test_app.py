"""From a configuration to what a run leaves: the default commands, a round loop around `out=`, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from safetensors.torch import load_file

from bt_policy.app import run
from bt_policy.check import validate
from common.errors import UserError
from common.job import prepare_torch
from tests.bt_policy.conftest import composed, make_base, make_rows


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A base model in a folder, training, validation and recorded rows."""
    from bt_policy.tiny import build

    folder = tmp_path_factory.mktemp("world")
    base, encoder = make_base()
    build.save(folder / "base", base, encoder.tokenizer, encoder.images)
    return {
        "base": folder / "base",
        "train": make_rows(folder / "a", 12, seed=1),
        "valid": make_rows(folder / "b", 5, seed=2),
        "recorded": make_rows(folder / "c", 12, seed=3, adv=True),
    }


def config(world, *overrides: str, rows: str = "train") -> DictConfig:
    given = {override.split("=")[0] for override in overrides}
    defaults = {
        "model.path": world["base"],
        "model.prompt": "'Go to the {name}. Code:'",
        "model.adapter": "null",
        "model.teacher": "base",
        "model.lora.r": 4,
        "data.train": world[rows],
        "data.valid": world["valid"],
        "cache_dir": world["base"].parent / "cache",
        "wandb.mode": "disabled",
        "method.optim.rows_per_update": 8,
        "method.optim.micro_batch": 4,
    }
    return composed(*overrides, *(f"{k}={v}" for k, v in defaults.items() if k not in given))


def go(directory: Path, cfg: DictConfig) -> tuple[dict, list[dict]]:
    directory.mkdir(parents=True)
    validate(cfg)
    prepare_torch(1)
    result = run(cfg, directory)
    return result, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def bits(lines):
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def test_sft_leaves_adapter_optimizer_valid_json_and_the_accuracies(world, tmp_path):
    out = tmp_path / "out"
    result, lines = go(tmp_path / "run", config(world, "method=sft", f"out={out}", "method.optim.epochs=2"))
    assert [line["step"] for line in lines if "eval/acc/code" in line] == [0, 2, 4]
    assert set(result["start"]) == set(result["final"]) == {"code", "digit"}
    assert {path.name for path in out.iterdir()} == {
        "adapter_model.safetensors", "adapter_config.json", "optimizer.pt", "valid.json", "run.json",
    }  # fmt: skip
    valid = json.loads((out / "valid.json").read_text())
    assert (valid["rows"], valid["updates"]) == (5, 4)
    assert valid["code_acc"] == round(result["final"]["code"], 4)
    last = load_file(tmp_path / "run" / "checkpoints" / "last" / "adapter_model.safetensors")
    assert all(torch.equal(tensor, last[name]) for name, tensor in load_file(out / "adapter_model.safetensors").items())
    assert (tmp_path / "run" / "checkpoints" / "best" / "adapter_config.json").is_file()


def test_the_same_seed_gives_the_same_bits(world, tmp_path):
    runs = [go(tmp_path / name, config(world, "method=sft", "steps=2"))[1] for name in "ab"]
    assert bits(runs[0]) == bits(runs[1])


def test_a_run_that_is_stopped_and_resumed_gives_the_same_bits(world, tmp_path):
    sft = ["method=sft", "method.optim.epochs=3", "eval_every=1", "method.optim.schedule=constant"]
    _, whole = go(tmp_path / "whole", config(world, *sft))
    go(tmp_path / "parts", config(world, *sft, "steps=3"))
    cfg = config(world, *sft, f"resume={tmp_path / 'parts'}")
    run(cfg, tmp_path / "parts")
    resumed = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    assert bits(resumed) == bits(whole)


def test_a_loop_of_ppo_rounds_continues_adapter_and_optimizer(world, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    go(tmp_path / "sft", config(world, "method=sft", "steps=2", f"out={tmp_path / 'SFT'}"))
    adapter = tmp_path / "SFT"
    for number in (1, 2):
        out = tmp_path / f"ROUND_{number}"
        out.mkdir()
        (out / "train.jsonl").write_text("not ours")
        ppo = [
            "method=ppo",
            f"model.adapter={adapter}",
            f"model.ref={tmp_path / 'SFT'}",
            f"out={out}",
            "data.valid=null",
        ]
        go(tmp_path / f"run{number}", config(world, *ppo, rows="recorded"))
        adapter = out
        stats = json.loads((out / "stats.json").read_text())
        assert set(stats) >= {"pg_loss", "kl", "clip_frac", "logp_gap", "logp_gap_abs", "rows", "train_s"}
        assert stats["rows"] == 12
        assert len(stats["epochs"]) == 2
        assert caplog.messages[-1].startswith("PPO_DONE {")
        assert json.loads(caplog.messages[-1].removeprefix("PPO_DONE ")) == stats
        steps = {state["step"].item() for state in torch.load(out / "optimizer.pt", weights_only=True).values()}
        assert steps == {4.0 * number}, "two epochs of two updates a round, counted on"


def test_out_refuses_the_files_of_another_run_and_leaves_other_files_alone(world, tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"already holds optimizer\.pt of another run"):
        run(config(world, "method=sft", "steps=1", f"out={tmp_path}"), tmp_path)


@pytest.mark.parametrize("method", ["opd", "rlvr", "mopd"])
def test_methods_that_sample_train_on_rows(world, tmp_path, method):
    result, lines = go(tmp_path / "run", config(world, f"method={method}", "steps=2"))
    assert result["updates"] == 2
    assert "train/loss" in lines[-1]


def test_rows_of_another_model_are_refused_with_the_sentence_that_names_model(world, tmp_path):
    longer = make_rows(tmp_path, 3, digits=4)
    with pytest.raises(UserError, match=r"name it, e\.g\. model=qwen3_5_9b") as error:
        go(tmp_path / "run", config(world, "method=sft", f"data.train={longer}"))
    assert "4 digits where 3 are expected" in str(error.value)


def test_bad_rows_are_said_before_the_model_is_loaded(world, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"image": "no.png", "name": "x", "code": "000"}\n')
    with pytest.raises(UserError, match="1 bad row:"):
        go(tmp_path / "run", config(world, "method=sft", f"data.train={path}", "model.path=nowhere"))


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("nowhere", r"model\.path=nowhere: there is no such folder in .*, and it is no name on the hub"),
        ("nobody/nothing", r"model\.path=nobody/nothing has no weights: there is no such folder in "),
    ],
)
def test_missing_weights_are_one_sentence_that_says_where_they_are_looked_for(
    world, tmp_path, monkeypatch, path, sentence
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # its variable is read at import only
    with pytest.raises(UserError, match=sentence):
        go(tmp_path / "run", config(world, "method=sft", f"model.path={path}"))


WRONG = {
    "data.on_bad_row=ignore": "data.on_bad_row=ignore",
    "data.train=none.jsonl": "data.train=none.jsonl does not exist",
    "prompt.function=no.such": "prompt.function=no.such cannot be imported",
    "prompt.template='{target}'": "uses fields other than {name}",
    "model.levels=[4,11]": "between 2 and 10 levels",
    "model.lora.r=0": "model.lora.r=0",
}


@pytest.mark.parametrize("override", WRONG)
def test_a_wrong_value_is_one_sentence(world, override):
    with pytest.raises(UserError) as error:
        validate(config(world, "method=sft", override))
    assert WRONG[override] in str(error.value)
