"""The configuration tree: where it is, which options it has for an application, and what every run's values must be.

Nothing here imports torch, so `--help` and a wrong value are answered at once. What only one application can judge is
in `<app>/check.py`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from common.errors import UserError, one_of

APPS = ("rlsim", "bt_policy")
CHOSEN = ("method", "experiment")  # groups without a default option: `+method=x` means `method=x`


def conf_directory() -> Path:
    """`conf/` beside the checkout, else the copy that the wheel carries inside `common`."""
    package = Path(__file__).resolve().parent
    for directory in (package.parent / "conf", package / "conf"):
        if (directory / "rlsim.yaml").is_file():
            return directory
    raise UserError(f"The configuration tree conf/ is missing beside {package}; install the package again.")


@cache
def read(path: Path) -> dict[str, Any]:
    """A configuration file as plain data, without its defaults list resolved."""
    return yaml.safe_load(path.read_text(encoding="utf-8")) or {}


def primary(app: str) -> dict[str, Any]:
    """The application's primary configuration file as plain data."""
    return read(conf_directory() / f"{app}.yaml")


def groups_of(app: str) -> list[str]:
    """The groups that the application's defaults list names, in its order, Hydra's own left out."""
    entries = [key for entry in primary(app)["defaults"] if isinstance(entry, dict) for key in entry]
    return [key for key in entries if not key.startswith("override ")]


def all_groups() -> list[str]:
    """Every group of the tree (of either application), building blocks too, Hydra's own left out."""
    return sorted(path.name for path in conf_directory().iterdir() if path.is_dir() and path.name != "hydra")


def place_of(group: str) -> str | None:
    """Where files of other groups put a building block: "method.objective" of conf/objective/; None for no block."""
    for outer in (group for app in APPS for group in groups_of(app)):
        for path in options(outer).values():
            for entry in read(path).get("defaults", []):
                key = next(iter(entry)) if isinstance(entry, dict) else ""
                if key.startswith(f"/{group}@"):
                    return f"{outer}.{key.partition('@')[2]}"
    return None


def options(group: str, extra: Iterable[Path] = ()) -> dict[str, Path]:
    """Option name -> file of a group, also from the user's own configuration directories."""
    folders = [directory / group for directory in (conf_directory(), *extra)]
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def owner(path: Path) -> str | None:
    """The application that an option is for; None where it serves both."""
    app = read(path).get("app")
    if app is None:  # it may build on another option of its group
        parents = [entry for entry in read(path).get("defaults", []) if isinstance(entry, str) and entry != "_self_"]
        nearby = [path.with_name(f"{name}.yaml") for name in parents]
        return next((owner(parent) for parent in nearby if parent.is_file()), None)
    return app


def options_for(app: str, group: str, extra: Iterable[Path] = ()) -> list[str]:
    """The options of a group that the application can use."""
    return [name for name, path in options(group, extra).items() if owner(path) in (None, app)]


def describe(path: Path) -> str:
    """The first comment of an option's file: what `--help` says of it."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ")
    return ""


def check_option(app: str, group: str, name: str, extra: Iterable[Path] = ()) -> None:
    """Refuse an option that does not exist, or that belongs to the other application."""
    known = options(group, extra)
    if name in known and owner(known[name]) not in (None, app):
        choices = options_for(app, group, extra)
        instead = f"for {app} choose one of {', '.join(choices)}" if choices else f"{app} has none"
        raise UserError(f"{group}={name} is for {owner(known[name])}; {instead}.")
    one_of(group, name, options_for(app, group, extra))


def choose_a_method(app: str) -> UserError:
    """What to say where no method was given."""
    return UserError(f"You must choose a method: method=<{' | '.join(options_for(app, 'method'))}>.")


def whole(field: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Refuse `value` unless it is a whole number >= `least` (or null where `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(
            f"{field}={_shown(value)} must be a whole number of at least {least}{' or null' if optional else ''}."
        )


def validate(cfg: DictConfig, app: str) -> None:
    """Refuse a composed configuration that cannot run: first what is common, then what the application knows."""
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    if OmegaConf.is_missing(cfg, "method"):
        raise choose_a_method(app)
    if not isinstance(cfg.method, DictConfig) or "name" not in cfg.method:
        raise UserError(f"method={cfg.method} is not a method; choose one of {', '.join(options_for(app, 'method'))}.")
    plain = resolved(cfg)
    whole("steps", plain["steps"], 1, optional=app_allows_null(app, "steps"))
    whole("seed", plain["seed"], 0)
    whole("threads", plain["threads"], 1)
    whole("eval_every", plain["eval_every"], 1, optional=True)
    whole("log_every", plain["log_every"], 1)
    one_of("wandb.mode", plain["wandb"]["mode"], ("offline", "online", "disabled"))
    _check_owners(plain, app)
    _check_optim(plain["method"].get("optim"))
    importlib.import_module(f"{app}.check").validate(cfg)


def validate_values(cfg: DictConfig, app: str) -> None:
    """`validate`, and then the method's own words and numbers, by building its trainer. This imports torch."""
    validate(cfg, app)
    importlib.import_module("common.run").build_trainer(cfg.method)


def app_allows_null(app: str, key: str) -> bool:
    """True where the application's own default of a key is null."""
    return primary(app).get(key) is None


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain data with every reference followed; a dangling or missing one is a UserError."""
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    except MissingMandatoryValue as error:
        raise UserError(f"{_field(error)} has no value; set it on the command line.") from error
    except OmegaConfBaseException as error:
        raise UserError(f"{_field(error)} cannot be worked out: {str(error).splitlines()[0]}.") from error
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _field(error: OmegaConfBaseException) -> str:
    """The full key an OmegaConf error is about."""
    found = re.search(r"full_key: (\S+)", str(error))
    return str(error.full_key or (found and found[1]) or "A setting")


def _check_owners(plain: Mapping[str, Any], app: str) -> None:
    """Whatever way a group got its content, it must be for this application."""
    if plain["app"] != app:
        raise UserError(f"experiment={plain.get('experiment')} is for {plain['app']}: run it with `-m {plain['app']}`.")
    for group, content in plain.items():
        if isinstance(content, Mapping) and content.get("app", app) != app:
            raise UserError(f"{group}={content.get('name')} is for {content['app']}, not for {app}.")


def _check_optim(optim: Any) -> None:
    """The numbers of an optimizer."""
    if not isinstance(optim, Mapping):
        raise UserError(f"method.optim={_shown(optim)} must hold the optimizer's settings, as in method.optim.lr=1e-4.")
    limits = {"lr": 0, "weight_decay": 0, "clip_norm": 0, "warmup": 0, "eps": 0, "epochs": 0}
    for key in optim.keys() & limits.keys():
        value, optional = optim[key], key in ("epochs", "clip_norm")
        if (value is None and optional) or (_number(value) and value >= limits[key]):
            continue
        raise UserError(f"method.optim.{key}={_shown(value)} must be a number of at least {limits[key]}.")
    if "rows_per_update" in optim:
        whole("method.optim.rows_per_update", optim["rows_per_update"], 1)
    if "micro_batch" in optim:
        whole("method.optim.micro_batch", optim["micro_batch"], 1, optional=True)


def _shown(value: Any) -> Any:
    """A value as the command line spells it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else value


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
