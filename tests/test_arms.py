"""An experiment's arms and a command line become jobs."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.arms import expand
from common.errors import UserError

ARMS = {
    "mix-rlvr": ["method=rlvr", "curriculum=mix"],
    "cascade-rlvr": ["method=rlvr", "curriculum=cascade"],
    "mopd": ["method=mopd", "teachers=specialists"],
}
GROUPS = ("method", "teachers", "curriculum")


def jobs(settings: dict[str, list[str]], arms: dict[str, list[str]] = ARMS) -> list[tuple[str, set[str]]]:
    return [(job.arm, set(job.overrides)) for job in expand(arms, settings, GROUPS)]


def names(settings: dict[str, list[str]], arms: dict[str, list[str]] = ARMS) -> list[str]:
    return list(dict.fromkeys(name for name, _ in jobs(settings, arms)))


def test_every_arm_runs_once_per_seed():
    found = jobs({"seed": ["0", "1"]})
    assert [name for name, _ in found] == ["mix-rlvr"] * 2 + ["cascade-rlvr"] * 2 + ["mopd"] * 2
    assert found[0][1] == {"method=rlvr", "curriculum=mix", "seed=0"}
    assert found[-1][1] == {"method=mopd", "teachers=specialists", "seed=1"}


def test_a_method_narrows_to_the_arms_that_have_it():
    assert names({"method": ["rlvr"]}) == ["mix-rlvr", "cascade-rlvr"]
    assert names({"method": ["mopd", "rlvr"]}) == ["mix-rlvr", "cascade-rlvr", "mopd"]


def test_a_method_that_no_arm_has_becomes_an_arm():
    assert jobs({"method": ["ppo"], "seed": ["3"]}) == [("ppo", {"method=ppo", "seed=3"})]
    assert names({"method": ["ppo", "mopd"]}) == ["mopd", "ppo"]


def test_arms_are_picked_by_name():
    assert names({"arm": ["mopd", "mix-rlvr"]}) == ["mix-rlvr", "mopd"]
    with pytest.raises(UserError, match=r"arm=mopt is not known.*Did you mean mopd\?"):
        jobs({"arm": ["mopt"]})


def test_arm_and_method_that_exclude_each_other_are_refused():
    with pytest.raises(UserError, match="method=rlvr and arm=mopd leave no arm to run"):
        jobs({"arm": ["mopd"], "method": ["rlvr"]})


def test_another_setting_replaces_that_of_the_arms():
    assert all("teachers=weak" in overrides and len(overrides) <= 3 for _, overrides in jobs({"teachers": ["weak"]}))


def test_a_swept_setting_multiplies_every_arm_and_names_it():
    assert names({"teachers": ["add", "weak"], "arm": ["mopd"]}) == ["mopd-add", "mopd-weak"]
    assert names({"steps": ["5", "10"], "arm": ["mopd"]}) == ["mopd-steps=5", "mopd-steps=10"]


def test_a_sweep_without_arms_is_named_by_its_choices():
    assert names({"method": ["opd"], "seed": ["0", "1"]}, {}) == ["opd"]
    assert names({"method": ["opd"], "teachers": ["add", "weak"], "seed": ["0"]}, {}) == ["opd-add", "opd-weak"]
    assert names({"method": ["rlvr", "mopd"], "curriculum": ["mix", "cascade"]}, {}) == [
        "rlvr-mix", "rlvr-cascade", "mopd-mix", "mopd-cascade",
    ]  # fmt: skip


def test_the_same_job_twice_is_refused():
    with pytest.raises(UserError, match="Two jobs of the sweep are the same"):
        jobs({"seed": ["1", "1"]})


def test_an_arm_may_add_a_key_and_the_command_line_may_replace_it():
    arms = {"a": ["+method=opd", "++model.teachers={ball: x}"]}
    assert jobs({}, arms) == [("a", {"method=opd", "++model.teachers={ball: x}"})]
    assert jobs({"++model.teachers": ["{ball: y}"]}, arms) == [("a", {"method=opd", "++model.teachers={ball: y}"})]


def test_an_arm_that_is_no_list_of_overrides_is_refused():
    with pytest.raises(UserError, match=r"arms\.a: method is not key=value"):
        jobs({}, {"a": ["method"]})


words = st.text("abcxyz0123", min_size=1, max_size=3)
settings = st.dictionaries(
    st.sampled_from(["seed", "teachers", "steps", "model.width"]), st.lists(words, min_size=1, max_size=3, unique=True)
)


@given(settings, st.dictionaries(words, words, max_size=4))
def test_the_jobs_are_the_product_of_arms_and_values_each_once(swept: dict[str, list[str]], methods: dict[str, str]):
    arms = {name: [f"method={method}"] for name, method in methods.items()}
    found = expand(arms, {**swept, "method": list(dict.fromkeys(methods.values()))} if arms else swept, GROUPS)
    expected = max(len(arms), 1)
    for values in swept.values():
        expected *= len(values)
    assert len(found) == expected
    assert len({(job.arm, job.overrides) for job in found}) == expected
    for job in found:
        pairs = dict(override.split("=", 1) for override in job.overrides)
        assert all(pairs[key] in values for key, values in swept.items())
        assert re.fullmatch(r"[\w.=+-]+", job.arm)  # it is a directory's name
        if arms:
            assert any(job.arm.startswith(name) and pairs["method"] == method for name, method in methods.items())
