"""Classic bugs, injected one at a time into a copy of the project: which test catches each?

Each mutant is an exact replacement of text; a text that is no longer found stops the script, so that the list cannot
rot. The relevant tests run on the copy until the first one fails. The table is Markdown.

    python benchmarks/mutants.py                         # all of them, some minutes
    python benchmarks/mutants.py --only "KL sign"        # those whose name contains it
    python benchmarks/mutants.py --write docs/mutants.md
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("common", "rlsim", "bt_policy", "conf", "tests", "pyproject.toml", "constraints.txt", "Makefile", "README.md")
LEAST_SHARE = 19 / 20


@dataclass(frozen=True)
class Mutant:
    """A bug: in `path`, `old` becomes `new`. `tests` are pytest's arguments, cheapest first."""

    name: str
    path: str
    old: str
    new: str
    tests: tuple[str, ...]


def math(*names: str) -> tuple[str, ...]:
    return tuple(f"tests/common/test_{name}.py" for name in names)


GRADIENTS = math("trainer_gradients")
RANKS = math("ranks")

MUTANTS = [
    # -- scoring
    Mutant("logits shifted by one", "common/logprobs.py", "logps_NAV.gather(-1, tokens_NA[..., None])",
           "logps_NAV.roll(1, -2).gather(-1, tokens_NA[..., None])", math("logprobs", "enumeration")),
    Mutant("a token is its own input", "rlsim/tiny_gpt.py", "answers_NA[:, :-1].reshape", "answers_NA[:, 1:].reshape",
           ("tests/rlsim/test_tiny_gpt.py", "tests/rlsim/test_policy.py")),
    Mutant("temperature missing in scoring", "common/trainers/scoring.py",
           "token_logps(logits, part.answers_NA, part.temperature)", "token_logps(logits, part.answers_NA)", GRADIENTS),
    Mutant("mask missing in scoring", "common/logprobs.py", "return values_NA.masked_fill(~mask_NA, 0.0).sum(-1)",
           "return values_NA.sum(-1)", math("logprobs", "mismatch")),
    Mutant("double softmax", "common/logprobs.py", "else wide).log_softmax(-1)",
           "else wide).softmax(-1).log_softmax(-1)", math("logprobs")),
    Mutant("EOS unscored", "rlsim/policy.py", "ends_NA.cumsum(1) - ends_NA == 0", "ends_NA.cumsum(1) == 0",
           ("tests/rlsim/test_policy.py",)),
    Mutant("train-mode teacher", "bt_policy/vlm.py", "self._train(torch.is_grad_enabled())", "self._train(True)",
           ("tests/bt_policy/test_dropout.py",)),
    # -- who is compared with whom
    Mutant("stale reference: the policy itself", "common/trainers/rlvr.py", 'else context.policy.frozen("start")',
           "else context.policy", GRADIENTS),
    Mutant("teacher of the wrong subject", "common/trainers/scoring.py",
           "by_policy[id(teachers[subject])].append(unit)", "by_policy[id(teachers[rows.subjects[0]])].append(unit)",
           GRADIENTS),
    Mutant("SFT teacher of the wrong subject", "common/trainers/sft.py", "context.teachers[subject].sample",
           "context.teachers[subjects[0]].sample", GRADIENTS),
    Mutant("ratio from the sampler's log-probs", "common/trainers/rollout.py",
           "old_logps_NA=score(context.policy, rows, context.world, micro_batch)", "old_logps_NA=rows.rollout_logps",
           GRADIENTS),
    Mutant("mixture averages log-probs", "common/distillation.py",
           "teachers_KNAV.logsumexp(0) - math.log(len(teachers_KNAV))", "teachers_KNAV.mean(0)", math("distillation")),
    # -- denominators
    Mutant("padding rows counted", "common/aggregation.py", "mask_NA.float() * weight_N[:, None]", "mask_NA.float()",
           math("aggregation")),
    Mutant("rows that pad a rank counted", "common/interfaces.py", "if name.startswith(SCALE) else tensor",
           "if False else tensor", RANKS),
    Mutant("wrong denominator under accumulation", "common/trainers/sft.py",
           'cross_entropy(logps_NA) * micro.extras["scale_NA"]',
           "cross_entropy(logps_NA) * token_weights(micro.mask_NA, micro.weights)",
           (*math("trainers"), "-k", "micro_batch and sft")),
    Mutant("wrong denominator over ranks", "common/trainers/loop.py", "(value * world.size).backward()",
           "value.backward()", RANKS),
    Mutant("dropped tokens stay in the denominator", "common/trainers/rollout.py",
           "rows = replace(rows, mask_NA=keep_NA)", "pass", GRADIENTS),
    # -- advantages
    Mutant("advantage sign", "common/objectives.py", "return -advantages_NA * logps_NA",
           "return advantages_NA * logps_NA", math("objectives", "enumeration")),
    Mutant("biased std", "common/advantages.py", "(count_G - ddof).clamp(min=1)", "count_G.clamp(min=1)",
           math("advantages")),
    Mutant("off-by-one group", "common/trainers/rollout.py", "repeat_interleave(rows.group)\n",
           "repeat_interleave(rows.group).roll(1)\n", GRADIENTS),
    Mutant("rloo keeps its own reward", "common/advantages.py", "count_G / (count_G - 1).clamp(min=1)",
           "count_G / count_G.clamp(min=1)", math("advantages")),
    Mutant("no signal found by std == 0", "common/advantages.py",
           "return centred.float().masked_fill(~signal(rewards_N, groups_N, weight_N), 0.0)", "return centred.float()",
           math("advantages", "extremes")),
    Mutant("rank-local normalisation", "common/advantages.py", "picked = values[counted].double()",
           "import os\n    picked = values[counted].double()"
           '[int(os.environ.get("RANK", 0)) :: int(os.environ.get("WORLD_SIZE", 1))]', RANKS),
    Mutant("penalty after whitening", "common/advantages.py",
           "        counted = mask_NA & (weight_N > 0)[:, None]\n"
           "        return whiten(reward_to_go(rewards_NA, mask_NA), counted, ddof=self.ddof, eps=self.eps)",
           "        counted = mask_NA & (weight_N > 0)[:, None]\n"
           "        paid_NA = rewards_NA if penalty_NA is None else rewards_NA + penalty_NA.nan_to_num()\n"
           "        white = whiten(reward_to_go(paid_NA, mask_NA), counted, ddof=self.ddof, eps=self.eps)\n"
           "        return white + reward_to_go(rewards_NA - paid_NA, mask_NA)", math("advantages")),
    # -- objectives
    Mutant("clip on the wrong side", "common/objectives.py", "-torch.minimum(ratio * advantages",
           "-torch.maximum(ratio * advantages", math("objectives")),
    Mutant("dual clip for every sign", "common/objectives.py", "torch.where(advantages < 0, torch.minimum(loss",
           "torch.where(advantages != 0, torch.minimum(loss", math("objectives")),
    Mutant("detached gradient", "common/objectives.py", "old_logps_NA, mask_NA, self.ratio).exp()",
           "old_logps_NA, mask_NA, self.ratio).exp().detach()", math("objectives", "enumeration")),
    Mutant("CISPO differentiates its weight", "common/objectives.py", "-ratio.detach().clamp", "-ratio.clamp",
           math("objectives")),
    Mutant("GSPO sums instead of averaging", "common/objectives.py", "else mean_tokens(gap_NA, mask_NA)",
           "else sum_tokens(gap_NA, mask_NA)", math("objectives")),
    Mutant("KL sign", "common/kl.py", "x = ref_logps - logps", "x = logps - ref_logps", math("kl")),
    Mutant("entropy punished", "common/objectives.py", "-self.entropy_bonus * entropy_NA",
           "self.entropy_bonus * entropy_NA", math("objectives")),
    Mutant("importance weight upside down", "common/mismatch.py", "(old_logps_NA - rollout_logps).masked_fill",
           "(rollout_logps - old_logps_NA).masked_fill", math("mismatch")),
    Mutant("forward and reverse KL exchanged", "common/distillation.py", 'reverse_kl if self.kind == "reverse_kl"',
           'reverse_kl if self.kind != "reverse_kl"', math("distillation")),
    Mutant("JSD weighs the wrong sides", "common/distillation.py", "beta * to_teacher + (1 - beta) * to_student",
           "(1 - beta) * to_teacher + beta * to_student", math("distillation")),
    Mutant("DPO prefers the rejected", "common/preference.py", "reward_P2[:, 0] - reward_P2[:, 1]",
           "reward_P2[:, 1] - reward_P2[:, 0]", math("preference")),
    # -- the loop
    Mutant("schedule off by one", "common/schedule.py", "min(1.0, (update + 1) / warmup)",
           "min(1.0, update / warmup)", math("schedule")),
    Mutant("schedule one update ahead", "common/trainers/loop.py", "lr_factor(self.optim.schedule, self.step,",
           "lr_factor(self.optim.schedule, self.step + 1,", GRADIENTS),
    Mutant("optimizer state lost on resume", "common/trainers/loop.py",
           'load_optimizer_state(self.optimizer, self.parameters, checkpoint.optimizer, "the checkpoint")', "pass",
           (*math("trainers"), "-k", "resumed and sft_reference")),
    Mutant("a non-finite step reaches the weights", "common/trainers/loop.py",
           "if math.isfinite(total) and math.isfinite(norm):", "if True:", (*math("trainers"), "-k", "non_finite")),
    Mutant("every round draws the same numbers", "common/trainers/rollout.py", 'f"rollout {draw}", step,',
           'f"rollout {draw}", 0,', GRADIENTS),
]  # fmt: skip


def copy_project(target: Path) -> None:
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)


def run_tests(copy: Path, tests: tuple[str, ...]) -> tuple[bool, str]:
    """(all passed, the first failing test). Anything but passing or failing stops the script."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--tb=line",
        "-p",
        "no:cacheprovider",
        "--timeout=1800",
        *tests,
    ]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return True, ""
    failed = re.search(r"^FAILED (\S+?)(?:\[.*)?(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None or "Timeout" in done.stdout:
        raise SystemExit(f"pytest could not run {' '.join(tests)}:\n{done.stdout[-2000:]}{done.stderr[-1000:]}")
    return False, failed[1]


def mutate(copy: Path, mutant: Mutant) -> str:
    """Inject the bug; the file's text as it was. Stops where the text to replace is not there exactly once."""
    path = copy / mutant.path
    text = path.read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: found {text.count(mutant.old)} times in {mutant.path}:\n{mutant.old}")
    changed = text.replace(mutant.old, mutant.new)
    compile(changed, mutant.path, "exec")
    path.write_text(changed, encoding="utf-8")
    return text


def table(results: list[tuple[Mutant, str]]) -> str:
    caught = sum(bool(test) for _, test in results)
    lines = [
        "# Mutants",
        "",
        f"{caught} of {len(results)} bugs, injected one at a time, are caught by a test:",
        "",
        "    python benchmarks/mutants.py --write docs/mutants.md",
        "",
        "| bug | in | first test that fails |",
        "|---|---|---|",
    ]
    for mutant, test in results:
        shown = "**survives**"
        if test:
            file, _, name = test.rpartition("::")
            shown = f"`{file.removeprefix('tests/')}`: {name.removeprefix('test_').replace('_', ' ')}"
        lines.append(f"| {mutant.name} | `{mutant.path}` | {shown} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--write", type=Path, help="write the table to this file")
    parser.add_argument("--trust", action="store_true", help="skip the check that the unchanged copy passes")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if arguments.only.lower() in mutant.name.lower()]
    results = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory)
        copy_project(copy)
        for mutant in chosen:  # all texts are there before the first minute is spent
            (copy / mutant.path).write_text(mutate(copy, mutant), encoding="utf-8")
        files = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests if test.startswith("tests/")))
        passed, failing = (True, "") if arguments.trust else run_tests(copy, files)
        if not passed:
            raise SystemExit(f"the unchanged project already fails {failing}")
        print("the unchanged project passes", flush=True)
        for mutant in chosen:
            original = mutate(copy, mutant)
            passed, test = run_tests(copy, mutant.tests)
            (copy / mutant.path).write_text(original, encoding="utf-8")
            results.append((mutant, test))
            print(f"{'SURVIVES' if passed else 'caught  '}  {mutant.name}: {test}", flush=True)
    text = table(results)
    print(text)
    if arguments.write:
        arguments.write.write_text(text, encoding="utf-8")
    return 0 if sum(bool(test) for _, test in results) >= LEAST_SHARE * len(results) else 1


if __name__ == "__main__":
    raise SystemExit(main())
