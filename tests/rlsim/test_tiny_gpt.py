"""TinyGPT computes less than the plain forward, and the same numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from common.sampling import choose
from rlsim.tiny_gpt import Shape, TinyGPT
from tests.rlsim.encoder import Encoder

STUDENT, TEACHER = Shape(2, 64, 4, 14, 8, 5), Shape(4, 128, 4, 14, 8, 5)
ODD = Shape(3, 24, 3, 11, 4, 3)


def tokens(shape: Shape, prompts: int, group: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    prompts_BP = torch.randint(shape.vocab, (prompts, shape.prompt_len), generator=random)
    return prompts_BP, torch.randint(shape.vocab, (prompts * group, shape.answer_len), generator=random)


def choose_greedily(logits_NV: Tensor, position: int) -> tuple[Tensor, Tensor]:
    return choose(logits_NV)


def positions_computed(net: TinyGPT) -> list[int]:
    """Filled by the next forward: how many positions of a sequence the MLP of the blocks 1, 2 and 3 sees."""
    seen: list[int] = []
    for block in list(net.blocks)[1:]:
        block.up.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    return seen


@pytest.mark.parametrize("shape", [STUDENT, TEACHER, ODD])
def test_a_seed_gives_the_bits_of_a_transformer_encoder(shape: Shape) -> None:
    plain, net = Encoder(shape, seed=7).named(), TinyGPT(shape, seed=7)
    assert plain.keys() == net.state_dict().keys()
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, plain[name]), name


def test_building_a_model_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    TinyGPT(STUDENT, seed=11)
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("prompts", [1, 6, 7, 8])
@pytest.mark.parametrize("shape", [STUDENT, ODD])
def test_logits_equal_those_of_the_whole_forward(shape: Shape, prompts: int, group: int) -> None:
    prompts_BP, answers_NA = tokens(shape, prompts, group)
    expected = Encoder(shape, seed=2).answer_logits(prompts_BP, answers_NA, group)
    torch.testing.assert_close(TinyGPT(shape, 2)(prompts_BP, answers_NA, group), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("group", [1, 8])
def test_gradients_equal_those_of_the_whole_forward(group: int) -> None:
    plain, net = Encoder(STUDENT, seed=2), TinyGPT(STUDENT, 2)
    prompts_BP, answers_NA = tokens(STUDENT, 8, group)
    wanted = torch.randn(len(answers_NA), 5, 14, generator=torch.Generator().manual_seed(5)) / len(answers_NA)
    for model in (plain.answer_logits, net):
        (model(prompts_BP, answers_NA, group).log_softmax(-1) * wanted).sum().backward()
    expected = plain.named()
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name].grad, rtol=0, atol=2e-6, msg=lambda m, n=name: f"{n} {m}"
        )


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("known", [1, 4, 5])
def test_remembered_beginnings_give_the_logits_and_answers_of_the_whole_forward(known: int, group: int) -> None:
    prompts_BP, answers_NA = tokens(TEACHER, 6, group)
    expected = Encoder(TEACHER, seed=2).answer_logits(prompts_BP, answers_NA, group)
    written_NA, _ = TinyGPT(TEACHER, 2).write(prompts_BP, group, choose_greedily)
    net = TinyGPT(TEACHER, 2)
    net.remember(torch.cat([prompts_BP[:, :known], torch.full((1, known), 13)]).unique(dim=0))
    seen = positions_computed(net)
    torch.testing.assert_close(net(prompts_BP, answers_NA, group), expected, rtol=0, atol=1e-5)
    assert seen == [8 - known + group * 4] * 2 + [1 + group * 4]  # behind the beginning; the last block's answers
    assert torch.equal(net.write(prompts_BP, group, choose_greedily)[0], written_NA)


def test_one_unknown_beginning_makes_the_whole_batch_plain() -> None:
    prompts_BP, answers_NA = tokens(TEACHER, 6, 1)
    net = TinyGPT(TEACHER, 2)
    expected = net(prompts_BP, answers_NA)
    net.remember(prompts_BP[1:, :5])
    assert torch.equal(net(prompts_BP, answers_NA), expected)


def test_too_large_a_table_or_a_whole_prompt_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts_BP, answers_NA = tokens(TEACHER, 6, 1)
    net = TinyGPT(TEACHER, 2)
    expected = net(prompts_BP, answers_NA)
    net.remember(prompts_BP)
    monkeypatch.setattr("rlsim.tiny_gpt.REMEMBER_BYTES", 8 * 14**4 - 1)
    net.remember(prompts_BP[:, :4])
    assert torch.equal(net(prompts_BP, answers_NA), expected)


def test_the_last_answer_token_is_never_an_input() -> None:
    prompts_BP, answers_NA = tokens(STUDENT, 4, 2)
    other = answers_NA.clone()
    other[:, -1] = (other[:, -1] + 1) % 14
    net = TinyGPT(STUDENT)
    assert torch.equal(net(prompts_BP, answers_NA, 2), net(prompts_BP, other, 2))


def test_answers_of_one_prompt_do_not_see_each_other() -> None:
    prompts_BP, answers_NA = tokens(STUDENT, 4, 3)
    other = answers_NA.clone()
    other[1::3] = 5
    net = TinyGPT(STUDENT)
    before, after = net(prompts_BP, answers_NA, 3), net(prompts_BP, other, 3)
    assert torch.equal(before[0::3], after[0::3])
    assert torch.equal(before[2::3], after[2::3])
    assert not torch.equal(before[1::3], after[1::3])


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("shape", [STUDENT, ODD])
def test_writing_with_a_cache_sees_the_logits_of_the_whole_forward(shape: Shape, group: int) -> None:
    prompts_BP, _ = tokens(shape, 5, group)
    net, seen = TinyGPT(shape, 3), []

    def pick(logits_NV: Tensor, position: int) -> tuple[Tensor, Tensor]:
        seen.append(logits_NV)
        random = torch.Generator().manual_seed(position)
        return choose(logits_NV, uniforms_N=torch.rand(len(logits_NV), generator=random, dtype=torch.float64))

    answers_NA, _ = net.write(prompts_BP, group, pick)
    expected = Encoder(shape, seed=3).answer_logits(prompts_BP, answers_NA, group)
    torch.testing.assert_close(torch.stack(seen, 1), expected, rtol=0, atol=1e-5)
