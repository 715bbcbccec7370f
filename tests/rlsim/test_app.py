"""From a configuration to what a run leaves, on one-digit arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.distributed import World
from rlsim.app import build, run
from rlsim.check import validate
from tests.rlsim.small import composed, small, small_teacher

SPECIALISTS = [*small_teacher("add"), *small_teacher("sub")]


def go(directory: Path, cache: Path, *overrides: str) -> tuple[dict, list[dict]]:
    directory.mkdir()
    cfg = small(cache, *overrides)
    validate(cfg)
    result = run(cfg, directory)
    assert json.loads((directory / "result.json").read_text())["final"] == result["final"]
    return result, [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "overrides",
    [
        ["method=sft", *small_teacher("add")],
        ["method=sft", "method.targets=reference", "teachers=none", "data.pad_answers=false"],
        ["method=rlvr", "teachers=none", "curriculum=cascade", "data.pad_answers=false"],
        ["method=ppo", "teachers=none", "curriculum=mix", "data.stop_at_end=false"],
        ["method=opd", "start=cold", *small_teacher("add")],
        ["method=mopd", "teachers=specialists", "curriculum=mix", *SPECIALISTS],
    ],
)
def test_a_run_leaves_its_result(tmp_path: Path, overrides: list[str]) -> None:
    result, lines = go(tmp_path / "run", tmp_path / "cache", *overrides)
    subjects = {"+"} if "curriculum" not in " ".join(overrides) else {"+", "-"}
    assert set(result["start"]) == set(result["final"]) == subjects
    assert [line["step"] for line in lines] == [0, 2, 4]
    assert result["warm"]["steps"] == 0 if "start=cold" in overrides else result["warm"]["steps"] > 0
    assert (tmp_path / "run" / "checkpoints" / "last" / "model.safetensors").exists()


def test_the_same_seed_gives_the_same_lines_with_a_cold_and_a_warm_cache(tmp_path: Path) -> None:
    overrides = ["method=opd", *small_teacher("add"), "seed=2"]
    found = [go(tmp_path / str(i), tmp_path / cache, *overrides)[1] for i, cache in enumerate(["a", "a", "b"])]
    kept = [[{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines] for lines in found]
    assert kept[0] == kept[1] == kept[2]


def test_the_start_of_a_cold_run_is_the_accuracy_of_the_student_that_is_trained(tmp_path: Path) -> None:
    result, _ = go(tmp_path / "run", tmp_path / "cache", "method=rlvr", "start=cold", "teachers=none")
    assert result["warm"] == {"steps": 0, **result["start"]}


def test_a_method_that_asks_no_teacher_trains_none(tmp_path: Path) -> None:
    go(tmp_path / "run", tmp_path / "cache", "method=rlvr")  # teachers=add is configured, but nobody asks
    assert not list((tmp_path / "cache").glob("teacher-*"))


def test_the_card_shows_the_first_addition_that_the_student_gets_wrong(tmp_path: Path) -> None:
    result, _ = go(tmp_path / "run", tmp_path / "cache", "method=opd", *small_teacher("add"))
    card = result["example"]
    assert card["verifier"] == 0
    assert card["true_answer"] != card["student_answer"]
    left, right = card["problem"].rstrip("=").split("+")
    assert int(card["true_answer"]) == int(left) + int(right)
    assert [place["place"] for place in card["places"]] == ["ones", "tens"]
    written = "".join(place["student_wrote"] for place in card["places"])
    assert (written.partition("$")[0][::-1].lstrip("0") or "0") == card["student_answer"]
    for place in card["places"]:
        assert 0 <= place["teacher_prob_of_that"] <= 1
        assert place["student_prob"] >= 1 / 14 - 1e-3  # it wrote its likeliest token
    assert any(place["student_wrote"] != place["true"] for place in card["places"])


@pytest.mark.parametrize("overrides", [["method=rlvr"], ["method=sft", "method.targets=reference", "teachers=none"]])
def test_there_is_no_card_without_a_teacher_to_show(tmp_path: Path, overrides: list[str]) -> None:
    cfg = small(tmp_path, *overrides)
    parts = build(cfg, World())
    assert "example" not in parts.facts
    assert parts.tables == {}


def test_the_default_configuration_is_the_references() -> None:
    cfg = composed("method=opd")
    assert (cfg.model.layers, cfg.model.width, cfg.model.heads) == (2, 64, 4)
    assert (cfg.steps, cfg.eval_every, cfg.method.optim.lr, cfg.method.optim.rows_per_update) == (500, 20, 5e-4, 256)
    assert (cfg.start.target, cfg.start.check_every) == (0.30, 5)
    spec = cfg.teachers.specs.add
    assert (spec.model.layers, spec.model.width, spec.target, spec.check_every, spec.seed) == (4, 128, 0.995, 100, 1)
