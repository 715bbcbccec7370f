"""The command line before Hydra reads it: `+method=x` becomes `method=x`; what cannot work is refused in a sentence.

Hydra composes several options of a group silently, fails on `+method=` beside an experiment that sets a method, and
answers `method=null` with a traceback. All of that is decided here, from the words alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.config import (
    APPS,
    CHOSEN,
    all_groups,
    check_option,
    choose_a_method,
    groups_of,
    options_for,
    place_of,
    primary,
)
from common.errors import UserError

KEY = re.compile(r"(?P<prefix>~|\+{0,2})(?P<key>[A-Za-z_][\w./@:-]*)(?:=(?P<value>.*))?", re.DOTALL)


OPEN = {"bt_policy": ("model.teachers",), "rlsim": ()}  # maps whose keys are the user's: nothing to misspell
FLAGS = ("--cfg", "-c", "--package", "-p", "--resolve", "--info", "-i", "--hydra-help", "--version")
FLAGS += ("--shell-completion", "-sc", "--config-path", "-cp", "--config-name", "-cn", "--experimental-rerun")


@dataclass
class CommandLine:
    """What was typed, sorted."""

    overrides: list[str] = field(default_factory=list)  # for Hydra, rewritten
    multirun: bool = False  # -m
    help: bool = False  # -h
    resume: str | None = None  # resume=DIR
    folders: list[Path] = field(default_factory=list)  # --config-dir
    inspect: list[str] = field(default_factory=list)  # Hydra's own flags (--cfg job, --info ...): show, do not run

    def values(self, key: str) -> list[str]:
        """The values given for a key, a comma-separated list taken apart; [] where it is not given."""
        given = [split(text) for text in self.overrides]
        return [value for name, text in given if name == key for value in text.split(",")]


def split(override: str) -> tuple[str, str]:
    """("model.width", "64") of "+model.width=64"; the key is "" for what is not an override."""
    match = KEY.fullmatch(override)
    return (match["key"], match["value"] or "") if match else ("", "")


def parse(arguments: Sequence[str], app: str) -> CommandLine:
    """Sort the words of a command line and rewrite the overrides among them."""
    line, words = CommandLine(), iter(arguments)
    for word in words:
        if word in ("-m", "--multirun"):
            line.multirun = True
        elif word in ("-r", "--run"):
            pass
        elif word in ("-h", "--help"):
            line.help = True
        elif word in ("-cd", "--config-dir") or word.startswith("--config-dir="):
            folder = Path(word.partition("=")[2] if "=" in word else next(words, ""))
            if not folder.is_dir():
                raise UserError(f"--config-dir {folder} is not a directory.")
            line.folders.append(folder.resolve())
        elif word in ("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn"):
            line.inspect += [word, next(words, "")]
        elif word.startswith("-") and word.partition("=")[0] not in FLAGS:
            raise UserError(
                f"{word} is not a flag; `--help` shows how to call this, `--hydra-help` the flags of Hydra."
            )
        elif word.startswith("-") or (line.inspect[-1:] in (["--info"], ["-i"]) and "=" not in word):
            line.inspect.append(word)
        else:
            line.overrides.append(word)
    if not line.help:
        line.overrides = [text for word in line.overrides for text in _rewrite(word, line, app)]
        _refuse_repeated(line.overrides)
    return line


def _rewrite(word: str, line: CommandLine, app: str) -> list[str]:
    """An override as Hydra should see it; none where it is ours."""
    match = KEY.fullmatch(word)
    if match is None:
        return [word]  # Hydra says what is wrong with it
    prefix, key, value = match["prefix"], match["key"], match["value"]
    if value is None and prefix != "~":
        raise UserError(f"{word} is not a setting; write key=value. `--help` lists the settings and their options.")
    if key == "resume":
        if not value or value == "null":
            raise UserError("resume needs the directory of a run: resume=DIR.")
        line.resume = value.strip("'\"")
        return []
    if opened(word, app) != word:
        return [opened(word, app)]
    group = key.partition("@")[0]
    if group not in all_groups():
        return [word]
    return [_choice(prefix, key, value, line.folders, app)]


def opened(word: str, app: str) -> str:
    """The override, with the prefix that Hydra wants where it adds a key to a map of the user's."""
    key = re.split("=", word, maxsplit=1)[0]
    return f"++{word}" if any(key == one or key.startswith(f"{one}.") for one in OPEN[app]) else word


def _choice(prefix: str, key: str, value: str | None, folders: Sequence[Path], app: str) -> str:
    """The override of a group: one option of this application, or several to sweep over."""
    group = key.partition("@")[0]
    if group not in groups_of(app):
        _refuse_part(key, group, value, app)
    if value is None or not value or value == "null":
        if group == "method":
            raise choose_a_method(app)
        raise UserError(f"{group} needs an option: {group}=<{' | '.join(options_for(app, group, folders))}>.")
    if value.startswith(("[", "{")):
        several = f"; -m {group}={value.strip('[]').replace(' ', '')} runs one after the other" if "," in value else ""
        raise UserError(f"{group}={value}: a run has one {group}{several}.")
    if group == "experiment" and "," in value:
        raise UserError(f"experiment={value}: one experiment at a time; its arms and seeds are the sweep.")
    if re.fullmatch(r"[\w,. -]+", value):  # not glob(...), choice(...), a quoted text
        for name in value.split(","):
            check_option(app, group, name.strip(), folders)
    return f"{'' if group in CHOSEN else prefix}{key}={value}"


def _refuse_part(key: str, group: str, value: str | None, app: str) -> None:
    """A group that is not among the application's choices: of the other one, or a building block of other files."""
    if group in primary(app) or "@" in key:
        return
    if any(group in groups_of(other) for other in APPS):
        mine = ", ".join(name for name in groups_of(app) if name not in CHOSEN)
        raise UserError(f"{group} is not a choice of {app}, which has {mine}.")
    place = place_of(group) or f"{group}"
    raise UserError(
        f"{group} is a part of {place.partition('.')[0]}: set its values ({place}.<key>=...) "
        f"or take another file for it ({group}@{place}={value})."
    )


def _refuse_repeated(overrides: Sequence[str]) -> None:
    """A group that is chosen twice; Hydra's words for it do not help."""
    seen: dict[str, str] = {}
    for override in overrides:
        key = split(override)[0]
        if key in seen and key.partition("@")[0] in all_groups():
            raise UserError(f"{key} is given twice: {seen[key]} and {override}.")
        seen[key] = override
