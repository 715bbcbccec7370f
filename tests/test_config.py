"""Every option of every group composes, and what it names can be called with what it gives."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, open_dict

from common import config
from common.arms import expand
from common.command_line import opened
from common.errors import UserError
from common.sweep import check

APPS = config.APPS


def composed(app: str, *overrides: str) -> DictConfig:
    """The configuration of a command line's overrides."""
    with initialize_config_dir(str(config.conf_directory()), version_base="1.3"):
        return compose(app, list(overrides))


def choices() -> Iterator[tuple[str, str, str]]:
    """(application, group, option) for everything that `--help` offers."""
    for app in APPS:
        for group in config.groups_of(app):
            for option in config.options_for(app, group):
                yield app, group, option


def targets(tree: Any, path: str = "") -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(where, class, arguments) of every `_target_` in plain configuration."""
    if isinstance(tree, Mapping):
        if "_target_" in tree:
            yield path, tree["_target_"], {key: value for key, value in tree.items() if not key.startswith("_")}
        for key, value in tree.items():
            yield from targets(value, f"{path}.{key}".strip("."))


def overrides_for(group: str, option: str) -> list[str]:
    """An option alone; a method beside it, since every run has one."""
    return [f"{group}={option}", *([] if group == "method" else ["method=sft"])]


@pytest.mark.parametrize(("app", "group", "option"), list(choices()))
def test_every_option_composes_resolves_and_its_targets_accept_their_arguments(app: str, group: str, option: str):
    cfg = composed(app, *overrides_for(group, option))
    with open_dict(cfg):
        cfg.arm = "an-arm"
    found = list(targets(config.resolved(cfg)))
    assert any(where == "method" for where, *_ in found)
    for where, target, arguments in found:
        if target.startswith(("common.", "rlsim.", "bt_policy.")):
            try:
                inspect.signature(get_class(target)).bind(**arguments)
            except TypeError as error:
                pytest.fail(f"{group}={option}: {where}: {target}: {error}")


@pytest.mark.parametrize("group", [g for g in config.all_groups() if config.place_of(g)])
def test_every_building_block_fits_where_it_is_used(group: str):
    place = config.place_of(group)
    outer = place.partition(".")[0]
    for app in APPS:
        if outer not in config.groups_of(app):
            continue
        users = [
            option
            for option, path in config.options(outer).items()
            if f"/{group}@{place.partition('.')[2]}" in path.read_text() and config.owner(path) in (None, app)
        ]
        for block in config.options(group):
            for user in users[:1]:
                beside = [] if outer == "method" else ["method=sft"]
                cfg = composed(app, f"{outer}={user}", f"{group}@{place}={block}", *beside)
                node = config.resolved(cfg)
                assert list(targets(node))
                for _, target, arguments in targets(node):
                    if target.startswith("common."):
                        inspect.signature(get_class(target)).bind(**arguments)


@pytest.mark.parametrize(("app", "group", "option"), list(choices()))
def test_every_option_says_in_a_line_what_it_is(app: str, group: str, option: str):
    assert len(config.describe(config.options(group)[option])) > 5


@pytest.mark.parametrize("app", APPS)
def test_every_setting_of_the_primary_configuration_is_explained(app: str):
    text = (config.conf_directory() / f"{app}.yaml").read_text()
    body = text[text.index("\napp:") : text.index("\nhydra:")]
    settings = [line for line in body.splitlines() if line and not line.startswith("#")]
    assert len(settings) > 8
    assert [line for line in settings if "  # " not in line] == []


@pytest.mark.parametrize(
    ("app", "experiment"), [(app, name) for app in APPS for name in config.options_for(app, "experiment")]
)
def test_every_arm_of_every_experiment_is_a_valid_run(app: str, experiment: str, tmp_path: Path):
    with initialize_config_dir(str(config.conf_directory()), version_base="1.3"):
        arms = compose(app, [f"experiment={experiment}"]).arms
        assert arms
        opened_arms = {arm: [opened(text, app) for text in overrides] for arm, overrides in arms.items()}
        jobs = expand(opened_arms, {"experiment": [experiment], "seed": ["0"]}, config.all_groups())
        placed = check(app, jobs, lambda overrides: compose(app, list(overrides)), tmp_path)
    assert [job.job.arm for job in placed] == list(arms)


def test_the_experiments_have_the_arms_of_the_reference():
    arms = {name: list(composed("rlsim", f"experiment={name}").arms) for name in ("single", "cold", "weak", "multi")}
    assert arms == {
        "single": ["sft", "rlvr", "opd"],
        "cold": ["rlvr", "opd"],
        "weak": ["rlvr", "opd-weak", "sft-weak"],
        "multi": ["mix-rlvr", "cascade-rlvr", "mopd", "opd-add-teacher-only"],
    }


@pytest.mark.parametrize("experiment", ["single", "cold", "weak", "multi"])
def test_the_experiments_run_as_long_and_score_as_much_as_the_reference(experiment: str):
    cfg = composed("rlsim", f"experiment={experiment}", "method=rlvr")
    optim = cfg.method.optim
    assert (cfg.steps, cfg.eval_every, cfg.data.stop_at_end, cfg.data.digits) == (500, 20, False, 3)
    assert (optim.optimizer, optim.lr, optim.rows_per_update, optim.clip_norm) == ("adam", 5e-4, 256, 1.0)
    assert cfg.method.sampling.group == 8


def test_an_option_of_the_other_application_is_named_as_such():
    with pytest.raises(UserError, match=r"model=qwen3_5_tiny is for bt_policy; for rlsim choose one of gpt, gpt_4x128"):
        config.check_option("rlsim", "model", "qwen3_5_tiny")


def test_an_option_that_builds_on_another_belongs_to_the_same_application():
    assert config.owner(config.options("model")["gpt_4x128"]) == "rlsim"


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("steps=-1", "steps=-1 must be a whole number of at least 1."),
        ("steps=abc", "steps=abc must be a whole number of at least 1."),
        ("steps=1.5", "steps=1.5 must be a whole number of at least 1."),
        ("steps=true", "steps=true must be a whole number of at least 1."),
        ("steps=null", "steps=null must be a whole number of at least 1."),
        ("threads=0", "threads=0 must be a whole number of at least 1."),
        ("seed=x", "seed=x must be a whole number of at least 0."),
        ("eval_every=0", "eval_every=0 must be a whole number of at least 1 or null."),
        ("wandb.mode=no", "wandb.mode=no is not known; choose one of offline, online, disabled."),
        ("method.optim.lr=-1", "method.optim.lr=-1 must be a number of at least 0."),
        ("method.optim.lr=nan", "method.optim.lr=nan must be a number of at least 0."),
        ("method.optim.rows_per_update=0", "method.optim.rows_per_update=0 must be a whole number of at least 1."),
        ("method.optim=null", "method.optim=null must hold the optimizer's settings, as in method.optim.lr=1e-4."),
        ("model.recipe.sft=null", "method.optim.optimizer cannot be worked out"),
    ],
)
def test_a_wrong_value_is_one_sentence(override: str, sentence: str):
    with pytest.raises(UserError) as caught:
        config.validate(composed("rlsim", "method=sft", override), "rlsim")
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_run_without_a_method_lists_them_all():
    with pytest.raises(UserError) as caught:
        config.validate(composed("rlsim"), "rlsim")
    assert str(caught.value).startswith("You must choose a method: method=<")
    assert all(name in str(caught.value) for name in ("sft", "rlvr", "ppo", "opd", "mopd"))


def test_both_applications_offer_the_same_methods():
    assert config.options_for("rlsim", "method") == config.options_for("bt_policy", "method")
