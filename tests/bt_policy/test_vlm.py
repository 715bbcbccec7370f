"""The VLM policy scores as the plain forward does, samples as it scores, and switches adapters without side effects."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from bt_policy import rows as rows_module
from bt_policy.scorer import Vision
from bt_policy.task import prompts
from common.logprobs import token_logps
from common.seeding import uniforms


@pytest.fixture(scope="module")
def some_rows(rows_file):
    found, problems, _ = rows_module.read(rows_file, levels=(4, 4, 4))
    assert not problems
    return found[:8]


def _answers(policy, rows, end=False):
    return torch.tensor([policy.encoder.code_ids(row.code, end=end) for row in rows])


def _plain(policy, row, end):
    """Log-probs by the model's own forward on one unpadded row, as Qwen's processor lays it out."""
    encoder, base = policy.encoder, policy.scorer.base
    pixels, grid = encoder.pixels(row.frame)
    text = encoder.text(row.name, row.memory) + row.code + "<|im_end|>"
    text = text.replace("<|image_pad|>", "<|image_pad|>" * (int(grid.prod()) // 4))
    ids = torch.tensor([encoder.tokenizer(text).input_ids])
    types = (ids == base.config.image_token_id).int()
    with torch.no_grad():
        logits = base(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=types,
            pixel_values=pixels,
            image_grid_thw=grid,
        ).logits
    logps = logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    return logps[-(len(row.code) + 1) :][: len(row.code) + end]


@pytest.mark.parametrize("end", [False, True])
def test_log_probs_of_padded_rows_equal_the_plain_forward(policy, some_rows, end):
    answers = _answers(policy, some_rows, end)
    with torch.no_grad():
        ours = token_logps(policy.answer_logits(prompts(some_rows), answers), answers)
    plain = torch.stack([_plain(policy, row, end) for row in some_rows])
    torch.testing.assert_close(ours, plain, atol=1e-5, rtol=0)


def test_tokens_and_pixels_equal_those_of_qwens_own_processor(policy, some_rows):
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    class WithoutVideo(Qwen3VLProcessor):
        def __init__(self, image_processor, tokenizer, chat_template=None):
            super().__init__(image_processor, tokenizer, None, chat_template=chat_template)

    encoder = policy.encoder
    processor = WithoutVideo(encoder.images, encoder.tokenizer, encoder.tokenizer.chat_template)
    for row in some_rows:
        text = encoder.text(row.name, row.memory)
        made = processor(text=[text], images=[row.frame.image()], return_tensors="pt")
        pixels, grid = encoder.pixels(row.frame)
        encoded = encoder.encode(row.name, row.memory, tuple(grid[0].tolist()))
        assert torch.equal(made["input_ids"][0], encoded.ids_P)
        assert torch.equal(made["pixel_values"], pixels)
        assert torch.equal(made["image_grid_thw"], grid)


def test_log_probs_do_not_depend_on_the_batch(policy, some_rows):
    answers = _answers(policy, some_rows)
    with torch.no_grad():
        together = token_logps(policy.answer_logits(prompts(some_rows), answers), answers)
        order = torch.tensor([5, 0, 3])
        fewer = token_logps(policy.answer_logits(prompts(some_rows)[order], answers[order]), answers[order])
        grouped = token_logps(
            policy.answer_logits(prompts(some_rows), answers.repeat_interleave(2, 0), group=2),
            answers.repeat_interleave(2, 0),
        )
    torch.testing.assert_close(fewer, together[order], atol=1e-5, rtol=0)
    torch.testing.assert_close(grouped[::2], together, atol=1e-5, rtol=0)


def test_sampled_log_probs_equal_scoring_under_the_same_mask_and_temperature(policy, some_rows):
    asked = prompts(some_rows).masked()
    sample = policy.sample(asked, 3, temperature=0.7, uniforms_NA=uniforms(0, "test", 0, 24, 3))
    assert sample.answers_NA.shape == (24, 3)
    with torch.no_grad():
        logits = policy.answer_logits(asked, sample.answers_NA, group=3)
    torch.testing.assert_close(sample.logps_NA, token_logps(logits, sample.answers_NA, 0.7), atol=1e-5, rtol=0)


def test_only_legal_digits_are_written(policy, some_rows):
    policy.levels = [2, 3, 1]
    sample = policy.sample(prompts(some_rows).masked(), 16, uniforms_NA=uniforms(0, "test", 0, 128, 3))
    codes = [policy.encoder.code(ids) for ids in sample.answers_NA.tolist()]
    assert {code[0] for code in codes} == {"0", "1"}
    assert {code[1] for code in codes} == {"0", "1", "2"}
    assert {code[2] for code in codes} == {"0"}


def test_a_row_is_sampled_alike_whatever_is_beside_it(policy, some_rows):
    noise = uniforms(0, "test", 0, 16, 3)
    asked = prompts(some_rows).masked()
    together = policy.sample(asked, 2, uniforms_NA=noise)
    policy.sample_rows = 3
    apart = policy.sample(asked, 2, uniforms_NA=noise)
    assert torch.equal(together.answers_NA, apart.answers_NA)


def test_rows_without_a_recorded_mask_are_scored_over_the_full_vocabulary(policy, some_rows):
    answers = _answers(policy, some_rows)
    with torch.no_grad():
        free = policy.answer_logits(prompts(some_rows), answers)
        masked = policy.answer_logits(prompts(some_rows).masked(), answers)
    assert torch.isfinite(free).all()
    assert torch.isfinite(masked).sum() == 8 * 3 * 4
    kept = torch.isfinite(masked)
    torch.testing.assert_close(free[kept], masked[kept])


def test_each_distinct_frame_is_encoded_once(policy, some_rows):
    answers = _answers(policy, some_rows)
    twice = [*some_rows, *some_rows]
    with torch.no_grad():
        policy.answer_logits(prompts(twice), answers.repeat(2, 1))
        policy.sample(prompts(some_rows).masked())
    assert policy.vision.computed == len(some_rows)


def test_frames_that_are_read_ahead_in_threads_and_dropped_from_the_cache_give_the_same_bits(policy, some_rows):
    plain = [policy.vision(row.frame)[0] for row in some_rows]
    vision = Vision(policy.scorer.base.model.visual, policy.encoder, nullcontext, budget=1, readers=2)
    for _ in range(2):
        vision.read_ahead([row.frame for row in some_rows])
        assert all(torch.equal(vision(row.frame)[0], one) for row, one in zip(some_rows, plain, strict=True))
    assert vision.computed == 2 * len(some_rows)


def test_a_switch_of_adapters_changes_the_output_and_nothing_else(policy, some_rows):
    answers = _answers(policy, some_rows)
    asked = prompts(some_rows)
    start = policy.frozen("start")
    policy.answer_logits(asked, answers).logsumexp(-1).sum().backward()
    before = [(p.grad.clone(), p.detach().clone()) for _, p in policy.trainable()]
    live = policy.answer_logits(asked, answers).detach()
    base = policy.frozen("base").answer_logits(asked, answers)
    assert not base.requires_grad
    assert (base - live).abs().max() > 1e-3
    assert torch.equal(start.answer_logits(asked, answers), live)
    for (grad, value), (_, parameter) in zip(before, policy.trainable(), strict=True):
        assert torch.equal(grad, parameter.grad)
        assert torch.equal(value, parameter)
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(0.01)
    assert torch.equal(start.answer_logits(asked, answers), live)
    assert (policy.answer_logits(asked, answers) - live).abs().max() > 1e-3


def test_checkpointed_gradients_equal_plain_ones_also_with_a_teacher_asked_in_between(some_rows):
    from tests.bt_policy.conftest import make_policy

    found = []
    for checkpointing in (False, True):
        policy = make_policy(checkpointing=checkpointing)
        answers = _answers(policy, some_rows)
        logits = policy.answer_logits(prompts(some_rows), answers)
        policy.frozen("base").answer_logits(prompts(some_rows), answers)
        token_logps(logits, answers).sum().backward()
        found.append([p.grad for _, p in policy.trainable()])
    for plain, checkpointed in zip(*found, strict=True):
        torch.testing.assert_close(plain, checkpointed, atol=1e-6, rtol=1e-5)


def test_state_and_load_state_are_inverse(policy, some_rows):
    state = policy.state()
    with torch.no_grad():
        for _, parameter in policy.trainable():
            parameter.add_(1)
    policy.load_state(state)
    assert all(torch.equal(tensor, policy.state()[name]) for name, tensor in state.items())
    assert len(state) == 30  # two matrices a module: eight modules of the delta net, seven of the attention layer
    assert "base_model.model.model.language_model.layers.0.linear_attn.in_proj_a.lora_A.weight" in state
