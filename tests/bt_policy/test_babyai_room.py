"""The environment: deterministic, its verifier agrees with brute force, its memory says what happened."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

pytest.importorskip("minigrid")

from bt_policy.babyai import HELD_OUT, ROOM_6, ROOM_8, STAY, Room, ensure, expert
from bt_policy.babyai.memory import Memory
from common.errors import UserError


@pytest.fixture(scope="module")
def decisions():
    return list(expert(ROOM_8, range(12), memory=4))


def at(decision, room=None):
    room = room or Room(ROOM_8)
    room.reset(decision.seed)
    room.act(decision.prefix)
    return room


def least_actions(room, seed, prefix, most=4):
    """The least number of actions until success, by trying every sequence of up to `most`."""
    for length in range(1, most + 1):
        for digits in itertools.product("0123", repeat=length):
            room.reset(seed)
            room.act(prefix)
            room.act("".join(digits))
            if room.success:
                return length
    return None


def test_a_state_is_its_seed_and_the_actions_since(decisions):
    room = Room(ROOM_8)
    for decision in decisions:
        at(decision, room)
        assert np.array_equal(room.cells, decision.cells)
        assert np.array_equal(room.frame, decision.frame)
        assert (room.name, room.in_view) == (decision.name, decision.in_view)


def test_a_frame_is_what_minigrids_own_wrapper_draws():
    import gymnasium
    from minigrid.wrappers import RGBImgPartialObsWrapper

    wrapped, room = RGBImgPartialObsWrapper(gymnasium.make(ROOM_8), tile_size=16), Room(ROOM_8)
    for seed in range(4):
        observation, _ = wrapped.reset(seed=seed)
        room.reset(seed)
        assert np.array_equal(room.frame, observation["image"])
        for digit in (0, 2, 1):
            observation = wrapped.step({0: 0, 1: 1, 2: 2}[digit])[0]
            room.step(digit)
            assert np.array_equal(room.frame, observation["image"])


def test_the_distance_is_what_trying_everything_finds(decisions):
    room, compared = Room(ROOM_8), 0
    for decision in decisions[::5]:
        left = at(decision, room).to_go
        if left <= 4:
            assert least_actions(room, decision.seed, decision.prefix) == left
            compared += 1
    assert compared >= 5


def test_the_verifier_accepts_every_code_of_the_expert_that_sees_its_target(decisions):
    room = Room(ROOM_8)
    seen = [d for d in decisions if d.in_view]
    assert all(at(d, room).judge(d.code)[0] for d in seen)


def test_the_verifier_refuses_a_detour_and_standing_still(decisions):
    far = next(d for d in decisions if d.in_view and at(d).to_go >= 4 and d.code[0] == "2")
    assert at(far).judge("201") == (False, 1)
    assert at(far).judge(str(STAY) * 3) == (False, 0)


def test_what_is_left_of_a_code_after_success_is_not_carried_out(decisions):
    last = next(d for d in decisions if at(d).to_go == 1)
    room = at(last)
    right, nearer = room.judge(last.code[0] + "00")
    assert (right, nearer, room.success, room.steps) == (True, 1, True, len(last.prefix) + 1)


def test_the_expert_arrives_in_every_held_out_episode_and_its_rewards_are_positive():
    room = Room(ROOM_6)
    for seed in range(HELD_OUT, HELD_OUT + 5):
        found = list(expert(ROOM_6, [seed]))
        room.reset(seed)
        room.act("".join(d.code[0] for d in found))
        assert room.success
        assert room.reward > 0.5


def test_training_rows_and_held_out_rows_share_no_seed(tmp_path):
    train, valid = ensure(tmp_path / "rows", level=ROOM_6, train=20, valid=10)
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert len(rows) == 20
    assert all((train.parent / row["image"]).is_file() for row in rows)
    first = next(iter(expert(ROOM_6, [HELD_OUT])))
    assert json.loads(valid.read_text().splitlines()[0])["code"] == first.code
    before = train.stat().st_mtime_ns
    assert ensure(tmp_path / "rows", level=ROOM_6, train=20, valid=10) == (train, valid)
    assert train.stat().st_mtime_ns == before


def test_memory_holds_the_last_decisions_newest_last():
    memory = Memory(3)
    assert memory.strings == ("", "")
    for moved, in_view in ((True, False), (False, False), (True, True), (True, True)):
        memory.add(moved=moved, in_view=in_view)
    assert memory.strings == ("011", "011")


def test_the_experts_memory_says_which_of_its_decisions_moved_it(decisions):
    for decision in decisions:
        assert len(decision.memory[0]) == len(decision.memory[1]) == min(4, len(decision.prefix) // 3)
    later = next(d for d in decisions if len(d.prefix) == 3)
    assert later.memory[0] == ("1" if "2" in later.prefix else "0")


def test_a_level_may_be_given_another_size():
    room = Room("BabyAI-GoToObj-v0?room_size=10")
    room.reset(0)
    assert room.env.grid.width == 10
    with pytest.raises(UserError, match="is not a level"):
        Room("BabyAI-GoToObj-v0?colour=3")


def test_a_level_with_another_kind_of_mission_is_refused_in_a_sentence():
    with pytest.raises(UserError, match="only levels whose mission is to go to an object"):
        Room("BabyAI-PickupLoc-v0").reset(0)
    with pytest.raises(UserError, match="not a level"):
        Room("BabyAI-Nowhere-v0")
