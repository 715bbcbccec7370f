"""The cache: built once, shared by processes, never read half-written."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest

from common.cache import cached, key_of

FORK = multiprocessing.get_context("fork")


def slow_build(directory: Path) -> None:
    """Says in the directory above that it ran, and takes its time."""
    with open(directory.parent / "builds.txt", "a") as file:
        file.write(f"{os.getpid()}\n")
    (directory / "a.txt").write_text("half")
    time.sleep(0.5)
    (directory / "b.txt").write_text("whole")


def hang(directory: Path) -> None:
    """Writes something and never ends."""
    (directory / "a.txt").write_text("half")
    (directory.parent / "started").touch()
    time.sleep(600)


def ask(root: Path, results: list) -> None:
    entry = cached(root, "thing", {"x": 1}, slow_build, "a thing")
    results.append((entry / "b.txt").read_text())


def test_the_key_depends_on_content_not_on_order() -> None:
    assert key_of({"a": 1, "b": {"c": [1, 2], "d": 0.5}}) == key_of({"b": {"d": 0.5, "c": [1, 2]}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})
    assert key_of({"a": [1, 2]}) != key_of({"a": [2, 1]})


def test_an_entry_is_built_once_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = cached(tmp_path, "thing", {"x": 1}, slow_build, "a thing")
    assert "a thing: not in the cache yet" in caplog.text
    assert "a thing: ready after" in caplog.text
    caplog.clear()
    assert cached(tmp_path, "thing", {"x": 1}, slow_build, "a thing") == first
    assert caplog.text == ""
    assert cached(tmp_path, "thing", {"x": 2}, slow_build, "a thing") != first
    assert len((tmp_path / "builds.txt").read_text().splitlines()) == 2


def test_two_processes_that_want_the_same_build_it_once(tmp_path: Path) -> None:
    with FORK.Manager() as manager:
        results = manager.list()
        workers = [FORK.Process(target=ask, args=(tmp_path, results)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert list(results) == ["whole"] * 3
    assert len((tmp_path / "builds.txt").read_text().splitlines()) == 1


def test_a_builder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(directory: Path) -> None:
        (directory / "a.txt").write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached(tmp_path, "thing", {}, fail, "a thing")
    assert [path.suffix for path in tmp_path.iterdir()] in ([], [".lock"])
    assert (cached(tmp_path, "thing", {}, slow_build, "a thing") / "b.txt").exists()


def test_a_builder_that_is_killed_leaves_no_entry_and_no_lock(tmp_path: Path) -> None:
    worker = FORK.Process(target=cached, args=(tmp_path, "thing", {}, hang, "a thing"))
    worker.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert list(tmp_path.glob(".tmp-*/a.txt"))  # it did leave something
    entry = cached(tmp_path, "thing", {}, slow_build, "a thing")
    assert sorted(path.name for path in entry.iterdir()) == ["a.txt", "b.txt", "spec.json"]
    assert not list(tmp_path.glob(".tmp-*"))
