"""Checkpoints: what is read back is what was saved, and a kill at any instant leaves a whole one."""

from __future__ import annotations

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from common import files
from common.checkpoint import Checkpoints, read_tensors, write_tensors
from common.distributed import World
from common.files import recover_directory, replace_directory, write_json, write_text


def save(checkpoints: Checkpoints, step: int, value: float = 1.0) -> None:
    checkpoints.save(step, weights={"policy": {"w": torch.full((3,), value)}}, optimizer={}, state={"value": value})


# ------------------------------------------------------------------ files


def test_a_file_keeps_its_old_content_when_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "deep" / "a.txt", "old")
    monkeypatch.setattr(files.os, "replace", raising)
    with pytest.raises(OSError, match="killed"):
        write_text(tmp_path / "deep" / "a.txt", "new")
    assert [(path.name, path.read_text()) for path in (tmp_path / "deep").iterdir()] == [("a.txt", "old")]


def test_json_is_strict_and_keeps_every_alphabet(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"+": float("nan"), "list": [math.inf, 0.1, (1, None)], "Größe": "\N{MINUS SIGN}"})
    text = (tmp_path / "a.json").read_text(encoding="utf-8")
    assert json.loads(text, parse_constant=pytest.fail) == {"+": None, "list": [None, 0.1, [1, None]], "Größe": "−"}
    assert "Größe" in text


def test_a_directory_is_replaced_as_a_whole(tmp_path: Path) -> None:
    target = tmp_path / "best"
    for content in ("one", "two"):
        with replace_directory(target) as directory:
            (directory / f"{content}.txt").write_text(content)
            assert not (target / f"{content}.txt").exists()
        assert [path.name for path in target.iterdir()] == [f"{content}.txt"]
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_stays_when_filling_its_replacement_fails(tmp_path: Path) -> None:
    target = tmp_path / "best"
    with replace_directory(target) as directory:
        (directory / "old").touch()
    with pytest.raises(FileNotFoundError), replace_directory(target) as directory:
        (directory / "new" / "missing").touch()
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("renames", [0, 1])
def test_a_kill_between_the_renames_of_a_directory_is_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    target = tmp_path / "best"
    with replace_directory(target) as directory:
        (directory / "old").touch()
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "rename", raising_after(renames))
        patch.setattr(files, "recover_directory", lambda _: None)  # a killed process does not clean up
        with pytest.raises(OSError, match="killed"), replace_directory(target) as directory:
            (directory / "new").touch()
    assert target.exists() == (renames == 0)
    recover_directory(target)
    assert [path.name for path in target.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [target]


# ------------------------------------------------------------------ tensors


def test_tensors_keep_their_bits_types_and_views(tmp_path: Path) -> None:
    matrix = torch.arange(6.0).reshape(2, 3)
    tensors = {
        "half": torch.tensor([1.0, math.nan]).bfloat16(), "transposed": matrix.T, "tied": matrix, "tied again": matrix,
        "count": torch.tensor(3), "empty": torch.empty(0, 4), "leaf": torch.ones(2, requires_grad=True),
    }  # fmt: skip
    write_tensors(tmp_path / "a.safetensors", tensors)
    read = read_tensors(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].nan_to_num(7), tensor.detach().nan_to_num(7)), name
    assert not read["leaf"].requires_grad


# ------------------------------------------------------------------ checkpoints


def test_a_checkpoint_reads_back_as_it_was_saved(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"best": -math.inf, "loss": 0.1 + 0.2, "names": ["+", "-"], "none": None}
    Checkpoints(tmp_path, World()).save(
        7, weights={"policy": model.state_dict()}, optimizer=optimizer.state_dict(), state=state
    )
    found = Checkpoints(tmp_path, World()).latest()
    assert found is not None
    assert (found.step, found.state) == (7, state)
    assert all(torch.equal(found.weights["policy"][name], tensor) for name, tensor in model.state_dict().items())
    other = torch.optim.AdamW(torch.nn.Linear(3, 2).parameters())
    other.load_state_dict(found.optimizer)
    expected = optimizer.state_dict()["state"]
    assert all(torch.equal(a[k], expected[i][k]) for i, a in other.state_dict()["state"].items() for k in a)


@pytest.mark.parametrize("name", ["a/b", "..", "add+sub", "100%", "Größe", "a b", "", ".hidden", "x.safetensors"])
def test_names_of_weights_survive_whatever_they_hold(tmp_path: Path, name: str) -> None:
    checkpoints = Checkpoints(tmp_path, World())
    checkpoints.save(1, weights={name: {"w": torch.ones(1)}}, optimizer={}, state={})
    found = checkpoints.latest()
    assert found is not None
    assert list(found.weights) == [name]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_the_newest_checkpoint_is_found_by_number_and_older_ones_go(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, World())
    for step in (20, 100, 1_000_000, 10_000_000):
        save(checkpoints, step)
        assert [path.name for path in checkpoints.root.iterdir()] == [f"step-{step:06d}"]
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 10_000_000


def test_a_run_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert Checkpoints(tmp_path, World()).latest() is None


@pytest.mark.parametrize("allowed", [0, 1, 2])
@pytest.mark.parametrize("step", [20, 40])
def test_a_kill_at_any_rename_leaves_a_whole_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, allowed: int
) -> None:
    save(Checkpoints(tmp_path, World()), 20, value=1.0)
    with monkeypatch.context() as patch:
        count = raising_after(allowed)
        for function in ("replace", "rename"):
            patch.setattr(files.os, function, counted(getattr(os, function), count))
        with pytest.raises(OSError, match="killed"):
            save(Checkpoints(tmp_path, World()), step, value=2.0)
    found = Checkpoints(tmp_path, World()).latest()
    assert found is not None
    assert (found.step, found.state["value"]) == (20, 1.0)
    assert torch.equal(found.weights["policy"]["w"], torch.ones(3))


def test_a_kill_between_the_renames_of_the_same_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(Checkpoints(tmp_path, World()), 20, value=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(files.os, "rename", raising_after(1))
        patch.setattr(files, "recover_directory", lambda _: None)
        with pytest.raises(OSError, match="killed"):
            save(Checkpoints(tmp_path, World()), 20, value=2.0)
    found = Checkpoints(tmp_path, World()).latest()
    assert found is not None
    assert found.state == {"value": 1.0}


def test_what_a_kill_left_behind_is_gone_after_the_next_start(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, World())
    for name in (".tmp-step-000020", ".old-step-000001"):
        (checkpoints.root / name).mkdir(parents=True)
    checkpoints = Checkpoints(tmp_path, World())
    save(checkpoints, 40)
    assert [path.name for path in checkpoints.root.iterdir()] == ["step-000040"]


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = Checkpoints(tmp_path, World())
    save(checkpoints, 20)
    damaged = checkpoints.root / "step-000040"
    damaged.mkdir()
    (damaged / "state.json").write_text('{"step": 40, "state": {}}')
    found = checkpoints.latest()
    assert found is not None
    assert found.step == 20
    assert "step-000040" in caplog.text


def test_a_pickle_with_code_is_not_loaded(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, World())
    save(checkpoints, 20)
    torch.save(Malicious(), checkpoints.root / "step-000020" / "optimizer.pt")
    assert checkpoints.latest() is None
    assert not Malicious.ran


def test_only_the_first_rank_writes_and_all_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(World, "barrier", lambda self: None)
    save(Checkpoints(tmp_path, World(rank=1, size=2)), 20)
    assert list(tmp_path.iterdir()) == []
    save(Checkpoints(tmp_path, World(rank=0, size=2)), 20)
    assert Checkpoints(tmp_path, World(rank=1, size=2)).latest() is not None


def test_all_ranks_fill_the_same_directory_before_it_replaces_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2, timeout=20)
    monkeypatch.setattr(World, "barrier", lambda self: together.wait() and None)
    seen: dict[int, bool] = {}

    def rank(number: int) -> None:
        checkpoints = Checkpoints(tmp_path, World(rank=number, size=2))
        with checkpoints.replacing(checkpoints.best_directory) as directory:
            (directory / f"rank{number}").touch()
        seen[number] = checkpoints.best_directory.exists()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {0: True, 1: True}
    assert sorted(path.name for path in (tmp_path / "checkpoints" / "best").iterdir()) == ["rank0", "rank1"]


# ------------------------------------------------------------------ failures on demand


class Malicious:
    ran = False

    def __reduce__(self) -> tuple[Any, ...]:
        return setattr, (Malicious, "ran", True)


def raising(*_: Any) -> None:
    raise OSError("killed")


def raising_after(allowed: int) -> Any:
    """os.rename that works `allowed` times."""
    left, rename = [allowed], os.rename

    def act(*arguments: Any) -> None:
        if left[0] == 0:
            raising()
        left[0] -= 1
        if len(arguments) == 2:
            rename(*arguments)

    return act


def counted(function: Any, count: Any) -> Any:
    """`function` as long as `count` allows it."""

    def act(*arguments: Any) -> None:
        count()
        function(*arguments)

    return act
