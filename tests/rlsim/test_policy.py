"""TinyGPT behind the Policy door: what is written, what is scored, what is kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from common.errors import UserError
from common.interfaces import Policy
from common.seeding import uniforms
from rlsim.policy import TinyGPTPolicy, load_policy
from rlsim.problems import END
from rlsim.tiny_gpt import Shape, TinyGPT
from tests.rlsim.encoder import Encoder

SHAPE = Shape(2, 16, 2, 14, 4, 3)
PROMPTS = torch.randint(14, (12, 4), generator=torch.Generator().manual_seed(0))


def policy(end_id: int | None = None, **changes: float) -> TinyGPTPolicy:
    """A random policy whose head is biased towards some tokens."""
    net = TinyGPT(SHAPE, seed=4)
    with torch.no_grad():
        net.head.weight.mul_(3)
        for token, bias in changes.items():
            net.head.bias[int(token.removeprefix("t"))] = bias
    return TinyGPTPolicy(net, end_id=end_id)


def test_it_is_a_policy() -> None:
    assert isinstance(policy(), Policy)


def test_log_probs_are_those_of_the_tempered_distribution_written_from() -> None:
    made, noise_NA = policy(), uniforms(0, "test", 0, 48, 3)
    sample = made.sample(PROMPTS, 4, temperature=0.7, uniforms_NA=noise_NA)
    logits_NAV = made.answer_logits(PROMPTS, sample.answers_NA, group=4)
    expected = (logits_NAV / 0.7).log_softmax(-1).gather(-1, sample.answers_NA[..., None])[..., 0]
    torch.testing.assert_close(sample.logps_NA, expected, rtol=0, atol=1e-5)
    assert sample.mask_NA.all()


def test_greedy_writing_takes_the_likeliest_token_of_the_whole_forward() -> None:
    plain = Encoder(SHAPE, seed=4)
    with torch.no_grad():
        plain.head.weight.mul_(3)
    tokens = PROMPTS
    for _ in range(3):
        tokens = torch.cat([tokens, plain(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(policy().sample(PROMPTS).answers_NA, tokens[:, 4:])


def test_a_row_is_written_the_same_whatever_is_written_beside_it() -> None:
    made, noise_NA = policy(END, t13=1.0), uniforms(0, "test", 0, 48, 3)
    whole = made.sample(PROMPTS, 4, uniforms_NA=noise_NA)
    for units in (torch.tensor([3]), torch.tensor([7, 2, 11]), torch.arange(5, 12)):
        rows = (units[:, None] * 4 + torch.arange(4)).reshape(-1)
        part = made.sample(PROMPTS[units], 4, uniforms_NA=noise_NA[rows])
        assert torch.equal(part.answers_NA, whole.answers_NA[rows])
        assert torch.equal(part.mask_NA, whole.mask_NA[rows])
        torch.testing.assert_close(part.logps_NA, whole.logps_NA[rows], rtol=0, atol=1e-5)


def test_first_tokens_appear_as_often_as_their_probability_says() -> None:
    made, n = policy(), 20000
    sample = made.sample(PROMPTS[:1], n, temperature=1.5, uniforms_NA=uniforms(3, "test", 0, n, 3))
    expected_V = (made.answer_logits(PROMPTS[:1], sample.answers_NA[:1])[0, 0] / 1.5).softmax(-1).detach()
    found_V = torch.bincount(sample.answers_NA[:, 0], minlength=14) / n
    error_V = (expected_V * (1 - expected_V) / n).sqrt()
    assert ((found_V - expected_V).abs() < 4.5 * error_V + 1e-9).all()
    assert (expected_V > 0.05).sum() >= 3  # it would be no test of a policy that always writes the same


def test_an_answer_ends_with_its_first_end_token() -> None:
    sample = policy(END, t13=2.5).sample(PROMPTS, 8, uniforms_NA=uniforms(1, "test", 0, 96, 3))
    lengths = sample.mask_NA.sum(1)
    assert set(lengths.tolist()) == {1, 2, 3}
    for answer, mask, logps in zip(sample.answers_NA, sample.mask_NA, sample.logps_NA, strict=True):
        ends = (answer == END).nonzero().flatten().tolist()
        length = ends[0] + 1 if ends else 3
        assert mask.tolist() == [True] * length + [False] * (3 - length)
        assert (answer[length:] == END).all()
        assert (logps[length:] == 0).all()


def test_without_an_end_every_position_is_written_and_scored() -> None:
    sample = policy(None, t13=2.5).sample(PROMPTS, 8, uniforms_NA=uniforms(1, "test", 0, 96, 3))
    early = (sample.answers_NA[:, 0] == END).nonzero().flatten()
    assert len(early) > 0
    assert sample.mask_NA.all()
    assert (sample.answers_NA[early, 1:] != END).any()


def test_writing_stops_once_every_row_has_ended() -> None:
    made, steps = policy(END, t13=50.0), []
    made._plain.blocks[0].step = lambda *args: steps.append(args)  # type: ignore[method-assign]
    sample = made.sample(PROMPTS)
    assert not steps
    assert (sample.answers_NA == END).all()
    assert sample.mask_NA.tolist() == [[True, False, False]] * 12


def test_writing_and_scoring_leave_no_gradient_behind_when_they_should_not() -> None:
    made = policy()
    assert not made.sample(PROMPTS).logps_NA.requires_grad
    answers = made.sample(PROMPTS).answers_NA
    made.answer_logits(PROMPTS, answers).sum().backward()  # what was cached while writing may enter a graph
    assert all(parameter.grad is not None for _, parameter in made.trainable())


def test_a_frozen_copy_stays_where_it_was() -> None:
    made = policy()
    start, answers = made.frozen("start"), made.sample(PROMPTS).answers_NA
    before = start.answer_logits(PROMPTS, answers)
    with torch.no_grad():
        for _, parameter in made.trainable():
            parameter.add_(0.1)
    assert torch.equal(start.answer_logits(PROMPTS, answers), before)
    assert not before.requires_grad
    assert start.trainable() == []
    with pytest.raises(UserError, match="only frozen copy is start"):
        made.frozen("base")


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    made = policy(END)
    made.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.json", "model.safetensors"]
    again = load_policy(tmp_path, end_id=END)
    assert again.shape == SHAPE
    for name, tensor in made.state().items():
        assert torch.equal(tensor, again.state()[name])


def test_weights_of_another_size_are_refused() -> None:
    state: dict[str, Tensor] = TinyGPTPolicy(TinyGPT(Shape(2, 32, 2, 14, 4, 3))).state()
    with pytest.raises(UserError, match="not a 2 x 16 TinyGPT's"):
        policy().load_state(state)
