"""The audit's command line; what it does stands in the package's docstring. `--help` needs no torch."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from common.config import check_option, conf_directory, resolved
from common.errors import UserError, at_least


class Parser(argparse.ArgumentParser):
    """Raises the project's own error instead of printing a usage text."""

    def error(self, message: str) -> NoReturn:
        """One sentence."""
        raise UserError(f"{message}; see python -m rlsim.audit --help.")


def parser() -> argparse.ArgumentParser:
    """The options."""
    found = Parser(
        prog="python -m rlsim.audit",
        description="What each objective's gradient is worth: bias, variance, direction, cost.",
    )
    found.add_argument(
        "--policy",
        type=Path,
        help="a run's directory, or one with model.safetensors (default: the warm student of the seed)",
    )
    found.add_argument("--teachers", default="add", help="an option of conf/teachers that has one for + (default: add)")
    found.add_argument("--seed", type=int, default=0, help="of the student, problems and samples (default: 0)")
    found.add_argument(
        "--updates", type=int, default=12, help="draws of each gradient; intervals shrink with its root (default: 12)"
    )
    found.add_argument("--rows", type=int, default=256, help="answers an update, a multiple of 16 (default: 256)")
    found.add_argument(
        "--claim-rows", type=int, default=4096, help="answers behind each claimed gradient (default: 4096)"
    )
    found.add_argument(
        "--prompts",
        type=int,
        default=8,
        help="one-digit problems whose answers are enumerated, at most 100 (default: 8)",
    )
    found.add_argument(
        "--moved", default="1,8", help="updates between writer and learner of the off-policy entries (default: 1,8)"
    )
    found.add_argument("--only", help="only objectives whose family or name contains this")
    found.add_argument("--out", type=Path, help="directory of the report (default: outputs/rlsim/<time>_audit)")
    return found


def checked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options as plain values; UserError where one cannot be."""
    values = vars(arguments)
    for name, least in {"seed": 0, "updates": 4, "rows": 16, "claim_rows": 512, "prompts": 1}.items():
        at_least(f"--{name.replace('_', '-')}", values[name], least, whole=True)
    if values["rows"] % 16:
        raise UserError(f"--rows={values['rows']} must be a multiple of 16, so that groups of 4, 8 and 16 fill it.")
    if values["prompts"] > 100:
        raise UserError(f"--prompts={values['prompts']} must be at most 100: there are no more one-digit problems.")
    words = str(values["moved"]).split(",")
    if not all(word.strip().isdigit() and int(word) > 0 for word in words):
        raise UserError(f"--moved={values['moved']} must be whole numbers of at least 1, such as 1,8.")
    check_option("rlsim", "teachers", values["teachers"])
    return {**values, "moved": tuple(sorted({int(word) for word in words}))}


def compose(teachers: str) -> dict[str, Any]:
    """The simulator's configuration with these teachers."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(conf_directory()), version_base="1.3"):
        cfg = resolved(hydra_compose("rlsim", ["method=sft", f"teachers={teachers}"]))
    if "+" not in cfg["teachers"]["by_subject"]:
        raise UserError(f"--teachers {teachers} has no teacher for +; choose add or weak.")
    return cfg


def run(values: dict[str, Any]) -> Path:
    """Audit and report; the picture's path."""
    from common import run_directory
    from common.job import prepare_torch

    cfg, out = compose(values["teachers"]), values.pop("out")
    prepare_torch(cfg["threads"])
    from rlsim.audit.auditing import Options, audit
    from rlsim.audit.report import write

    began = time.process_time()
    rows = audit(Options(**values), cfg)
    directory = out or run_directory.reserve("rlsim", "audit")
    return write(directory, rows, values, seconds=time.process_time() - began)


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(run(checked(parser().parse_args(arguments))))
        return 0
    except UserError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
