"""What the environment's and the sampler's configuration files name exists, and takes what they hold."""

from __future__ import annotations

import inspect

import pytest
from hydra.utils import get_class

from bt_policy import acting, app
from bt_policy.acting import settings
from common.config import options_for
from common.distributed import World
from common.errors import UserError
from common.launch import composed


@pytest.mark.parametrize("data", ["episodes", "decisions"])
@pytest.mark.parametrize("method", options_for("bt_policy", "method"))
def test_every_method_composes_with_the_loop(data, method):
    cfg = composed("bt_policy", [f"method={method}", f"data={data}", "rounds=2"])
    acting.check(cfg)


@pytest.mark.parametrize("rollout", options_for("bt_policy", "rollout"))
def test_every_sampler_takes_what_its_file_holds(rollout):
    cfg = composed("bt_policy", ["method=ppo", "data=episodes", f"rollout={rollout}"])
    assert ("sampler" in cfg.rollout) == (rollout != "hf")  # hf is the policy itself
    if "sampler" in cfg.rollout:
        inspect.signature(get_class(cfg.rollout.sampler)).bind(
            policy=None, world=None, directory=None, **settings(cfg.rollout)
        )


def test_rounds_become_updates_for_a_method_without_rounds_of_its_own():
    from bt_policy.rounds import bounded

    extra = ["data=episodes", "rounds=3", "model.recipe.rows_per_round=256"]
    sft = bounded(composed("bt_policy", ["method=sft", "method.optim.rows_per_update=32", *extra]))
    assert (sft.steps, sft.eval_every, sft.method.optim.epochs) == (24, 8, None)
    ppo = bounded(composed("bt_policy", ["method=ppo", *extra]))
    assert (ppo.rounds, ppo.steps, ppo.method.rows_per_round) == (3, None, 256)


def test_an_environment_that_does_not_exist_is_a_sentence():
    from bt_policy.acting import environment

    cfg = composed("bt_policy", ["method=ppo", "data=episodes", "data.environment=nowhere.Task"])
    with pytest.raises(UserError, match=r"data\.environment=nowhere\.Task cannot be imported"):
        environment(cfg, type("Policy", (), {"encoder": None})(), None)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("data.reward=sucess", r"data\.reward=sucess .* Did you mean success"),
        ("data.kinds=[bal]", r"data\.kinds=bal .* Did you mean ball"),
        ("data.episodes=0", r"data\.episodes=0 must be a whole number"),
        ("data.levels=[BabyAI-GoToObj-v9]", "BabyAI-GoToObj-v9"),
        ("+data.colour=red", "does not take these settings: .*colour"),
    ],
)
def test_a_wrong_setting_is_a_sentence_before_a_model_is_looked_for(wrong, sentence, tmp_path):
    cfg = composed("bt_policy", ["method=ppo", "data=episodes", "rounds=1", "model.path=nowhere", wrong])
    with pytest.raises(UserError, match=sentence):
        app.build(cfg, tmp_path, World())
