"""Every preset of conf/method: an arm of experiment=methods, trained in the simulator, built for the VLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from common.config import conf_directory, options, validate
from common.run import build_trainer
from rlsim.app import run
from tests.rlsim.small import composed, small, small_teacher

PRESETS = sorted(options("method"))
ARMS = composed("experiment=methods", "method=sft").arms


def trainer(app: str, *overrides: str) -> Any:
    with initialize_config_dir(str(conf_directory()), version_base="1.3"):
        cfg = compose(app, list(overrides))
    validate(cfg, app)
    return build_trainer(cfg.method)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small teacher is trained once for all presets."""
    return tmp_path_factory.mktemp("cache")


def test_every_preset_is_an_arm_of_the_experiment_named_as_itself() -> None:
    assert sorted(ARMS) == PRESETS
    assert all(f"method={name}" in overrides for name, overrides in ARMS.items())


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_trains_in_the_simulator(preset: str, cache: Path, tmp_path: Path) -> None:
    teacher = small_teacher("add") if "teachers=add" in ARMS[preset] else []
    cfg = small(cache, *ARMS[preset], *teacher, "start=cold", "method.optim.rows_per_update=32")
    validate(cfg, "rlsim")
    (tmp_path / "run").mkdir()
    result = run(cfg, tmp_path / "run")
    assert (result["updates"], result["method"]) == (cfg.steps, preset)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_the_same_method_in_both_applications(preset: str) -> None:
    ours, theirs = trainer("rlsim", f"method={preset}"), trainer("bt_policy", f"method={preset}")
    assert type(ours) is type(theirs)
    assert ours.name == theirs.name == preset


@pytest.mark.parametrize(
    ("word", "where"),
    [
        ("method.objective.kind=jsd", ("opd", "objective", "kind")),
        ("method.objective.surrogate=cispo", ("ppo", "objective", "surrogate")),
        ("method.advantage.kind=rloo", ("grpo", "advantage", "kind")),
        ("method.objective.kl.estimator=k2", ("grpo", "objective", "kl", "estimator")),
        ("method.mismatch.treatment=truncate", ("ppo", "mismatch", "treatment")),
        ("method.objective.aggregate=constant", ("grpo", "objective", "aggregate")),
        ("method.on_failure=reference", ("rft", "on_failure")),
    ],
)
def test_one_word_changes_the_method_in_both_applications(word: str, where: tuple[str, ...]) -> None:
    method, *path = where
    for app in ("rlsim", "bt_policy"):
        usual, changed = trainer(app, f"method={method}"), trainer(app, f"method={method}", word)
        for name in path:
            usual, changed = getattr(usual, name), getattr(changed, name)
        assert changed == word.partition("=")[2] != usual
