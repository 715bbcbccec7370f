"""Hydra's and OmegaConf's composition errors as one sentence: what is wrong, and the nearest that would be right."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from common.config import groups_of
from common.errors import UserError

COMPOSITION = (HydraException, OmegaConfBaseException)


def keys_of(tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Every dotted key of a configuration."""
    found = []
    for key, value in tree.items():
        found.append(f"{prefix}{key}")
        if isinstance(value, Mapping):
            found += keys_of(value, f"{prefix}{key}.")
    return found


def explain(error: Exception, app: str, keys: Iterable[str] = ()) -> UserError:
    """The sentence for a composition error; `keys` are the settings that exist."""
    text = str(error)
    if isinstance(error, OverrideParseException):
        return UserError(
            f"{error.override} cannot be read: {_first_line(error.message)}. Quote it or see Hydra's override grammar."
        )
    if found := re.match(r"Ambiguous value for argument '(.*?)'", text):
        return UserError(
            f"{found[1]} lists several values: add -m to run one after the other, or write a list as [a,b]."
        )
    if isinstance(error, MissingConfigException):
        return _unknown_option(error)
    if found := re.match(r"Could not override '(.*?)'\.\s*No match in the defaults list", text):
        return UserError(f"{found[1]} is not a choice of {app}, which has {', '.join(groups_of(app))}.")
    if found := re.match(r"Could not (?:override|delete from config\.) '?(.*?)'?\.?(?:\n|$)", text):
        return unknown_key(found[1], app, keys)
    if found := re.match(r"Could not append to config\. An item is already at '(.*?)'", text):
        return UserError(f"{found[1]} exists already: write {found[1]}=... without the +.")
    if found := re.match(r"Error merging override (.*)", text):
        return UserError(f"{found[1]} does not fit: {_first_line(str(error.__cause__))}.")
    if found := re.search(r"(?:Key|Attribute) '(.*?)' is not in struct", text):
        full = re.search(r"full_key: (\S+)", text)
        return unknown_key(full[1] if full else found[1], app, keys)
    return UserError(f"The configuration cannot be composed: {' '.join(text.split())}")


def unknown_key(key: str, app: str, keys: Iterable[str]) -> UserError:
    """A setting that does not exist, with the nearest one that does."""
    known = list(keys)
    near = get_close_matches(key, known, n=1, cutoff=0.6)
    last = key.rpartition(".")[2]
    near = near or [name for name in known if name.rpartition(".")[2] == last][:1]
    if not near:
        near = [
            n
            for n in known
            if n.rpartition(".")[2] in get_close_matches(last, {k.rpartition(".")[2] for k in known}, n=1)
        ][:1]
    hint = f" Did you mean {near[0]}?" if near else ""
    return UserError(f"{key} is not a setting of {app}.{hint} `--cfg job` shows all of them; +{key}=... would add it.")


def _unknown_option(error: MissingConfigException) -> UserError:
    """A file of a group that does not exist: on the command line, or in a defaults list."""
    missing, choices = error.missing_cfg_file or "", list(error.options or ())
    group, _, name = missing.rpartition("/")
    if not group:
        return UserError(_first_line(str(error)) + ".")
    near = get_close_matches(name, choices, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return UserError(
        f"{group}={name} is not known; choose one of {', '.join(choices) or '(nothing is installed)'}.{hint}"
    )


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".") if text.strip() else "no reason given"
