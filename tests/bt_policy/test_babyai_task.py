"""BabyAI as a task: episodes become rows with the rewards that were promised, on any number of ranks, by seed alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("minigrid")

from bt_policy.babyai import ROOM_6, ROOM_8
from bt_policy.babyai.episodes import Choice, Start, as_expert, at_random, play
from bt_policy.babyai.task import BabyAITask, held_out_starts, summed
from common.distributed import World
from common.errors import UserError
from common.seeding import uniforms
from common.trainers.rollout import Sampling
from tests.bt_policy.conftest import make_policy


def test_only_the_named_kinds_are_learned_from_and_all_are_evaluated(policy):
    task = task_of(policy, kinds=["ball", "key"], episodes=12, held_out=24)
    assert task.subjects == ["ball", "key"]
    assert len(task.pool) == 12
    assert {name for name in task.evaluate(policy) if name.startswith("success/")} == {
        "success/ball", "success/box", "success/key",
    }  # fmt: skip


@pytest.fixture(scope="module")
def policy():
    return make_policy()


class Unconnected(World):
    """A rank whose sums are its own: enough for what needs no exchange."""

    def sum(self, values):
        return list(values)


def task_of(policy, **options):
    options = {"levels": [ROOM_6], "seed": 0, "episodes": 6, "held_out": 6, "decisions": 3, "states": "start"} | options
    return BabyAITask(policy.encoder, **options)


def experience(policy, task, n=3, group=4, step=0):
    noise = uniforms(0, "test", step, n * group, policy.answer_len)
    return task.experience(policy, task.batch(step, n), group, temperature=1.0, uniforms_NA=noise)


def test_every_decision_of_every_episode_is_a_row(policy):
    task = task_of(policy)
    rows = experience(policy, task)
    assert len(task.played) == 12
    assert len(rows) == sum(len(episode.steps) for episode in task.played) == rows.units
    assert rows.groups_N.unique().tolist() == [0, 3, 6]
    assert bool(rows.prompts.legal_B.all())
    assert rows.rollout_logps.shape == rows.answers_NA.shape


def test_the_recorded_log_probs_are_those_of_scoring_the_rows(policy):
    from common.trainers.scoring import score

    rows = experience(policy, task_of(policy))
    assert torch.allclose(score(policy, rows, World()), rows.rollout_logps, atol=1e-4)


def test_the_same_seed_gives_the_same_rows_and_another_gives_others(policy):
    first, again = experience(policy, task_of(policy)), experience(policy, task_of(policy))
    assert torch.equal(first.answers_NA, again.answers_NA)
    assert [f.key for f in first.prompts.frames] == [f.key for f in again.prompts.frames]
    other = experience(policy, task_of(policy, seed=1))
    assert [f.key for f in first.prompts.frames] != [f.key for f in other.prompts.frames]


def test_an_episode_is_the_same_whatever_is_played_beside_it(policy):
    starts = held_out_starts([ROOM_8], 5)
    together = play(starts, at_random(3), decisions=4)
    first = play(starts[:1], at_random(3), decisions=4)[0]
    assert [step.choice for step in first.steps] == [step.choice for step in together[0].steps]
    assert first.success == together[0].success


def test_what_a_decision_is_worth(policy):
    task = task_of(policy, reward="progress", gamma=0.5)
    episode = play([Start(ROOM_6, 0)], lambda live, _: [Choice("222")] * len(live), decisions=3)[0]
    episode.steps = [replace(episode.steps[0], nearer=n) for n in (3, 0, 1)]
    assert task.values(episode) == pytest.approx([1 + 0.5 * (0 + 0.5 / 3), 0.5 / 3, 1 / 3])
    episode.success, episode.reward = True, 0.8
    assert task_of(policy, gamma=None).values(episode) == [1.0, 1.0, 1.0]
    assert task_of(policy, gamma=0.5).values(episode) == [0.25, 0.5, 1.0]
    assert task_of(policy, gamma=1.0, reward="level").values(episode) == pytest.approx([0.8, 0.8, 0.8])


def test_single_decisions_are_groups_of_one_prompt_judged_by_the_shortest_path(policy):
    task = task_of(policy, decisions=1, states="expert", reward="shortest", gamma=0.0)
    rows = experience(policy, task, n=5, group=8)
    assert (rows.group, rows.units, len(rows), rows.groups_N) == (8, 5, 40, None)
    again = task.batch(0, 5)
    for row in range(0, 40, 3):
        start = task.pool[again.row_ids[row // 8]][0]
        code = policy.encoder.code(rows.answers_NA[row].tolist())
        replayed = play([start], lambda live, _, code=code: [Choice(code)] * len(live), decisions=1)[0]
        assert replayed.steps[0].on_path == bool(rows.rewards_N[row])


def test_the_experts_states_come_with_its_codes(policy):
    task = task_of(policy, states="expert")
    batch = task.batch(0, 4)
    for unit, answers in enumerate(batch.answers_BA[:, :3].tolist()):
        assert policy.encoder.code(answers) == task.pool[batch.row_ids[unit]][1].code
    assert task.size == len(task.pool) > 6
    assert task_of(policy, states="start").batch(0, 4).answers_BA is None


def test_only_frames_with_the_target_teach_when_asked(policy):
    task = task_of(policy, in_view=True, levels=[ROOM_8], episodes=12)
    rows = experience(policy, task, n=12, group=2)
    seen = [step.in_view for episode in task.played for step in episode.steps]
    assert rows.weights.bool().tolist() == seen
    assert not all(seen)


def test_an_epoch_asks_every_state_once_and_the_next_one_in_another_order(policy):
    task = task_of(policy)
    first = [i for step in range(2) for i in task.batch(step, 4).row_ids]
    second = [i for step in range(2, 4) for i in task.batch(step, 4).row_ids]
    assert sorted(first) == sorted(second) == list(range(6))
    assert first != second


def test_memory_reaches_the_prompt_and_grows(policy):
    task = task_of(policy, memory=2)
    rows = experience(policy, task)
    first, second = task.played[0].steps[:2] if len(task.played[0].steps) > 1 else task.played[1].steps[:2]
    assert first.memory == ("", "")
    assert second.memory[1] == "01"[first.in_view]
    assert all(memory is not None for memory in rows.prompts.memories)


def test_the_expert_is_the_ceiling_and_chance_the_floor():
    starts = held_out_starts([ROOM_6], 20)
    expert = summed(play(starts, as_expert(), decisions=10), ["all"] * 20)
    chance = summed(play(starts, at_random(0), decisions=6), ["all"] * 20)
    assert expert["success"] == (20.0, 20.0)
    assert chance["success"][0] < 12
    assert expert["success/all"] == (20.0, 20.0)


def test_evaluation_pools_to_the_same_over_two_ranks(policy):
    whole = task_of(policy, held_out=5).evaluate(policy)
    parts = [task_of(policy, held_out=5, world=Unconnected(rank=rank, size=2)).evaluate(policy) for rank in range(2)]
    for name, (total, count) in whole.items():
        assert sum(part.get(name, (0, 0))[0] for part in parts) == pytest.approx(total)
        assert sum(part.get(name, (0, 0))[1] for part in parts) == count


def test_training_never_meets_a_held_out_seed(policy):
    task = task_of(policy, episodes=40)
    assert max(start.seed for start, _ in task.pool) < min(start.seed for start in held_out_starts([ROOM_6], 100))


def test_a_wrong_word_is_a_sentence(policy):
    with pytest.raises(UserError, match=r"data\.reward=sucess .* Did you mean success"):
        task_of(policy, reward="sucess")


@pytest.mark.parametrize("method", ["sft", "rlvr", "ppo", "opd"])
def test_every_method_trains_on_it(method):
    from common.kl import KL
    from common.objectives import PolicyGradient
    from common.optimizer import Optim
    from common.trainers.context import Context
    from common.trainers.opd import OPD
    from common.trainers.ppo import PPO
    from common.trainers.rlvr import RLVR
    from common.trainers.sft import SFT

    policy, optim, sampling = make_policy(), Optim(lr=1e-3, rows_per_update=12), Sampling(group=4)
    task = task_of(policy, states="expert" if method == "sft" else "start", reward="progress")
    trainers = {
        "sft": SFT(optim, targets="reference"),
        "rlvr": RLVR(optim, sampling),
        "ppo": PPO(optim, sampling, rows_per_round=12, epochs=1, objective=PolicyGradient(kl=KL(beta=0.1))),
        "opd": OPD(optim, sampling),
    }
    before = policy.state()
    teachers = dict.fromkeys(task.subjects, policy.frozen("base"))
    trainers[method].train(Context(policy, task, World(), steps=2, eval_every=2, teachers=teachers))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in policy.state().items())
