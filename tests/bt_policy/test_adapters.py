"""Adapters as users have them: plain PEFT writes and reads them, another model's are refused, what is saved acts."""

from __future__ import annotations

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

from bt_policy import adapters, results, rows
from bt_policy.task import RowsTask, prompts
from common.distributed import World
from common.errors import UserError
from common.optimizer import Optim, load_optimizer_state, optimizer_state
from common.trainers.context import Context
from common.trainers.sft import SFT
from tests.bt_policy.conftest import make_base, make_policy


@pytest.fixture
def some_rows(rows_file):
    return rows.read(rows_file, levels=(4, 4, 4))[0][:6]


def _answers(policy, found):
    return torch.tensor([policy.encoder.code_ids(row.code, end=False) for row in found])


def test_a_saved_adapter_is_loaded_by_plain_peft_with_equal_outputs(policy, some_rows, tmp_path):
    answers = _answers(policy, some_rows)
    with torch.no_grad():
        ours = policy.answer_logits(prompts(some_rows), answers)
    policy.save(tmp_path)
    base, encoder = make_base()
    model = PeftModel.from_pretrained(base, tmp_path)
    again = make_policy(model=model, encoder=encoder)
    with torch.no_grad():
        assert torch.equal(again.answer_logits(prompts(some_rows), answers), ours)


def test_the_files_keys_and_settings_are_those_that_vllm_loads(policy, tmp_path):
    import json

    policy.save(tmp_path)
    keys = load_file(tmp_path / adapters.WEIGHTS).keys()
    assert all(key.startswith("base_model.model.model.language_model.layers.") for key in keys)
    assert {key.rsplit(".", 2)[1] for key in keys} == {"lora_A", "lora_B"}
    settings = json.loads((tmp_path / adapters.CONFIG).read_text())
    assert (settings["peft_type"], settings["r"], settings["lora_alpha"]) == ("LORA", 4, 8)
    assert settings["inference_mode"] is True
    assert policy.scorer.peft.peft_config["default"].inference_mode is False


def test_an_adapter_that_does_not_act_is_not_saved(policy, some_rows, tmp_path, monkeypatch):
    policy.answer_logits(prompts(some_rows), _answers(policy, some_rows))
    for layer in policy._layers:
        monkeypatch.setattr(layer, "scaling", dict.fromkeys(layer.scaling, 0.0))
    with pytest.raises(RuntimeError, match="does not change the output"):
        policy.save(tmp_path)


def test_training_the_live_adapter_leaves_the_reference_bit_identical(some_rows, tmp_path):
    make_policy(seed=3).save(tmp_path / "ref")
    policy = make_policy(others={"ref": tmp_path / "ref"})
    weights = {n: p.clone() for n, p in policy.scorer.named_parameters() if ".ref." in n}
    assert weights
    task = RowsTask(some_rows, [], policy.encoder, seed=0)
    before = policy.state()
    SFT(Optim(lr=1e-2, rows_per_update=6), targets="reference").train(Context(policy, task, World(), steps=2))
    after = dict(policy.scorer.named_parameters())
    assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.state().items())


def test_an_adapter_of_another_model_is_refused_with_the_sentence_that_names_model(tmp_path):
    base, _ = make_base(width=64)
    other = get_peft_model(base, LoraConfig(r=4, task_type="CAUSAL_LM", target_modules=adapters.MODULES))
    other.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="choose that with model="):
        make_policy(adapter=tmp_path)
    with pytest.raises(UserError, match="is not an adapter"):
        make_policy(adapter=tmp_path / "nothing")


def test_an_adapter_and_optimizer_of_plain_peft_and_adamw_are_continued(some_rows, tmp_path):
    """As the reference leaves them: `optimizer.pt` is a state dict whose entries are known by position only."""
    base, encoder = make_base()
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", target_modules=adapters.MODULES))
    theirs = make_policy(model=model, encoder=encoder)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    answers = _answers(theirs, some_rows)
    for _ in range(2):
        theirs.answer_logits(prompts(some_rows), answers).logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(tmp_path, selected_adapters=["default"])
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")

    assert results.optimizer_beside(tmp_path, "ppo") == tmp_path / "optimizer.pt"
    ours = make_policy(adapter=tmp_path)
    continued = Optim(lr=1e-4, rows_per_update=6).build(ours.trainable())
    saved = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    load_optimizer_state(continued, ours.trainable(), saved, "optimizer.pt")
    by_name = optimizer_state(continued, ours.trainable())
    plain = {adapters.file_name(n): p for n, p in model.named_parameters() if p.requires_grad}
    assert by_name.keys() == plain.keys()
    for name, parameter in plain.items():
        assert torch.equal(by_name[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
        assert torch.equal(ours.state()[name], parameter)
    assert continued.param_groups[0]["lr"] == 1e-4


def test_an_optimizer_is_continued_by_the_method_that_wrote_it_and_never_from_sft(tmp_path):
    (tmp_path / "optimizer.pt").write_bytes(b"")
    assert results.optimizer_beside(tmp_path, "sft") is None
    results.claim(tmp_path, tmp_path, "sft")
    assert results.optimizer_beside(tmp_path, "ppo") is None
    results.claim(tmp_path, tmp_path, "ppo")
    assert results.optimizer_beside(tmp_path, "ppo") == tmp_path / "optimizer.pt"
    assert results.optimizer_beside(tmp_path, "rlvr") is None
    assert results.optimizer_beside(None, "ppo") is None
