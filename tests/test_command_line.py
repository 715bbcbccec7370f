"""The words of a command line: rewritten where both spellings mean one thing, refused where they cannot work."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.command_line import parse
from common.errors import UserError
from common.launch import composed


def overrides(*words: str, app: str = "rlsim") -> list[str]:
    return parse(words, app).overrides


@pytest.mark.parametrize("word", ["method=opd", "+method=opd", "++method=opd"])
@pytest.mark.parametrize("beside", [[], ["-m"], ["experiment=single"], ["+experiment=single"]])
def test_plus_method_and_method_are_the_same(word: str, beside: list[str]):
    assert overrides(word, *beside) == overrides("method=opd", *(text.lstrip("+") for text in beside))


def test_other_additions_keep_their_plus():
    assert overrides("method=sft", "+note=x", "++seed=1") == ["method=sft", "+note=x", "++seed=1"]


def test_a_map_whose_keys_are_the_users_needs_no_plus():
    words = ("method=mopd", "model.teachers={ball: a}", "model.teachers.box=b", "+model.teachers.key=c")
    assert overrides(*words, app="bt_policy") == [
        "method=mopd", "++model.teachers={ball: a}", "++model.teachers.box=b", "+model.teachers.key=c",
    ]  # fmt: skip
    cfg = composed("bt_policy", words)
    assert cfg.model.teachers == {"ball": "a", "box": "b", "key": "c"}
    with pytest.raises(UserError, match=r"model\.teachers\.box is not a setting of rlsim"):
        composed("rlsim", ["method=mopd", "model.teachers.box=b"])


REFUSED = [
    ("method=[sft,opd]", "method=[sft,opd]: a run has one method; -m method=sft,opd runs one after the other."),
    ("method=null", "You must choose a method: method=<"),
    ("method=", "You must choose a method: method=<"),
    ("~method", "You must choose a method: method=<"),
    ("model=null", "model needs an option: model=<gpt | gpt_4x128>."),
    ("model=gtp", "model=gtp is not known; choose one of gpt, gpt_4x128. Did you mean gpt?"),
    ("model=qwen3_5_tiny", "model=qwen3_5_tiny is for bt_policy; for rlsim choose one of gpt, gpt_4x128."),
    ("method=sft,xx", "method=xx is not known; choose one of "),
    ("experiment=single,cold", "experiment=single,cold: one experiment at a time; its arms and seeds are the sweep."),
    ("objective=x", "objective is a part of method: set its values (method.objective.<key>=...) or take another file"),
    ("steps", "steps is not a setting; write key=value."),
    ("resume=", "resume needs the directory of a run: resume=DIR."),
    ("--fast", "--fast is not a flag;"),
    ("--config-dir=/no/such", "--config-dir /no/such is not a directory."),
]


@pytest.mark.parametrize(("word", "sentence"), REFUSED)
def test_what_cannot_work_is_refused_in_a_sentence(word: str, sentence: str):
    with pytest.raises(UserError) as caught:
        overrides(word)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_group_of_the_other_application_is_refused():
    with pytest.raises(UserError, match=r"^curriculum is not a choice of bt_policy, which has model"):
        overrides("curriculum=mix", app="bt_policy")


@pytest.mark.parametrize("words", [("method=sft", "method=opd"), ("method=sft", "+method=sft")])
def test_a_choice_given_twice_is_refused(words: tuple[str, ...]):
    with pytest.raises(UserError, match="method is given twice"):
        overrides(*words)


def test_resume_is_taken_out_and_flags_are_sorted():
    line = parse(["-m", "+resume='a dir'", "seed=1"], "rlsim")
    assert (line.multirun, line.resume, line.overrides, line.inspect) == (True, "a dir", ["seed=1"], [])


@pytest.mark.parametrize("flags", [["--cfg", "job"], ["--info"], ["--info", "plugins"], ["-c", "hydra", "--resolve"]])
def test_the_flags_of_hydra_are_left_to_it(flags: list[str]):
    line = parse([*flags, "method=sft"], "rlsim")
    assert (line.inspect, line.overrides) == (flags, ["method=sft"])


def test_an_option_of_the_users_own_directory_is_known(tmp_path: Path):
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "mine.yaml").write_text("name: mine\n")
    line = parse(["--config-dir", str(tmp_path), "method=mine"], "rlsim")
    assert (line.overrides, line.folders) == (["method=mine"], [tmp_path.resolve()])
