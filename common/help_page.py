"""The page behind `--help`: what an application can choose from, read from the configuration tree itself."""

from __future__ import annotations

import textwrap
from pathlib import Path

from common.config import conf_directory, describe, groups_of, options, options_for, owner, primary, read

WIDTH = 120
USAGE = """\
{title}

Usage
  {command} method=sft [key=value ...]      one run
  {command} -m method=sft seed=0,1,2        a sweep: every combination of the listed values
{experiment}  {command} resume=DIR                      continue a stopped run or sweep
  {command} --cfg job method=sft            show the configuration without running it

Choices (group=option; * is the default)
{choices}

Settings (key=value; those of a choice are <group>.<key>, as in model.{example_key}=...)
{settings}

Launchers of sweeps: hydra/launcher=basic (one after the other), joblib (this machine's cores; hydra.launcher.n_jobs=2),
submitit_slurm and ray where installed. Other flags are Hydra's: --hydra-help lists them.
"""


def page(app: str, command: str) -> str:
    """The whole text."""
    file = conf_directory() / f"{app}.yaml"
    experiments = options_for(app, "experiment")
    example = "single" if "single" in experiments else next(iter(experiments), None)
    model = options("model").get(str(_defaults(app).get("model")))
    keys = [key for key, value in _plain(model).items() if type(value) is int] or ["name"]
    return USAGE.format(
        title=describe(file).partition("   ")[0],
        command=command,
        experiment=f"  {command} {f'experiment={example}':<32}a prepared comparison\n" if example else "",
        example_key=keys[0],
        choices="\n".join(_group(app, group) for group in sorted(groups_of(app), key=_first_the_open_ones)),
        settings=_settings(file),
    )


def _first_the_open_ones(group: str) -> int:
    return {"method": 0, "experiment": 1}.get(group, 2)


def _defaults(app: str) -> dict[str, object]:
    return {key: value for entry in primary(app)["defaults"] if isinstance(entry, dict) for key, value in entry.items()}


def _plain(path: Path | None) -> dict[str, object]:

    return read(path) if path else {}


def _group(app: str, group: str) -> str:
    """A group's options with their first comment; the other application's are named after them."""
    mine, default = options_for(app, group), _defaults(app).get(group)
    known = options(group)
    width = max((len(name) for name in mine), default=0)
    lines = [f"  {group}"]
    for name in mine:
        lines.append(_hanging(f"   {'*' if name == default else ' '} {name:<{width}}  ", describe(known[name])))
    others = sorted(set(known) - set(mine))
    if others:
        lines.append(f"     ({', '.join(others)}: for {owner(known[others[0]])})")
    return "\n".join(lines)


def _settings(file: Path) -> str:
    """The primary configuration's own lines, which explain themselves, up to Hydra's section."""
    lines = file.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("app:")) + 1
    end = next((i for i, line in enumerate(lines) if line.startswith("hydra:")), len(lines))
    body = [line for line in lines[start:end] if line.strip() and not line.startswith("#")]
    pairs = [line.partition("  # ")[::2] for line in body]
    width = max(len(setting) for setting, _ in pairs if len(setting) < 32)
    return "\n".join(_hanging(f"  {setting:<{width}}  ", comment) for setting, comment in pairs)


def _hanging(head: str, text: str) -> str:
    """`head` and `text`, further lines of which stand under its beginning."""
    return textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)) if text else head.rstrip()
