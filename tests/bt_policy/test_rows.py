"""Every way in which a row or a picture can be wrong has a defined outcome, said before a model is loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
from PIL import Image

from bt_policy import rows
from common.errors import UserError

GOOD = {"image": "a.png", "name": "red ball", "code": "012"}


@pytest.fixture
def folder(tmp_path):
    _picture().save(tmp_path / "a.png")
    return tmp_path


def _picture(mode="RGB", size=(32, 32)):
    rng = np.random.default_rng(0)
    return Image.fromarray(rng.integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)).convert(mode)


def _read(folder, *records, **options):
    path = folder / "rows.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return rows.read(path, levels=options.pop("levels", (4, 4, 4)), **options)


def _reasons(folder, *records, **options):
    return [(p.line, p.field, p.reason) for p in _read(folder, *records, **options)[1]]


BAD = {
    "no code": ({"code": None}, "code", "is missing"),
    "no name": ({"name": ""}, "name", "must be a text"),
    "a number as code": ({"code": 12}, "code", "must be a string of the digits"),
    "an unequal code": ({"code": "01"}, "code", "2 digits where 3"),
    "an Arabic digit": ({"code": "01٢"}, "code", "must be a string of the digits"),
    "a superscript digit": ({"code": "01²"}, "code", "must be a string of the digits"),
    "a digit above its level": ({"code": "014"}, "code", "digit 3 must be below its 4 levels"),
    "a NaN advantage": ({"adv": float("nan")}, "adv", "must be finite"),
    "an infinite advantage": ({"adv": float("-inf")}, "adv", "must be finite"),
    "an advantage in words": ({"adv": "high"}, "adv", "must be a number"),
    "a positive log-prob": ({"vllm_logp": 0.5}, "vllm_logp", "cannot be above 0"),
    "too few log-probs": ({"vllm_logp": [-1.0, -2.0]}, "vllm_logp", "2 log-probs for 3 digits"),
    "a memory of one string": ({"memory": ["01"]}, "memory", "two strings of 0 and 1"),
    "a memory of words": ({"memory": ["yes", "no"]}, "memory", "two strings of 0 and 1"),
    "another mask": ({"mask": [8, 8, 8]}, "mask", "not the configured codes.levels"),
    "a temperature of 0": ({"temperature": 0}, "temperature", "above 0"),
    "no such picture": ({"image": "b.png"}, "image", "b.png is not in"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_field_is_named_with_file_line_field_and_reason(folder, case):
    change, field, reason = BAD[case]
    (problem,) = _read(folder, GOOD, {**GOOD, **change})[1]
    assert (problem.line, problem.field) == (2, field)
    assert reason in problem.reason
    assert str(problem).startswith(f"{folder / 'rows.jsonl'}:2: {field}: ")


@pytest.mark.parametrize(
    ("text", "reason"), [("{", "is not JSON"), ("[1]", "is not a JSON object"), ("NaN", "is not a JSON")]
)
def test_a_line_that_is_no_object_is_a_bad_row(folder, text, reason):
    ((line, field, why),) = _reasons(folder, text, GOOD)
    assert (line, field) == (1, "line")
    assert reason in why


def test_a_line_that_is_not_utf8_is_a_bad_row(folder):
    path = folder / "rows.jsonl"
    path.write_bytes(b'{"name": "\xff"}\n' + json.dumps(GOOD).encode() + b"\n")
    found, problems, _ = rows.read(path, levels=(4, 4, 4))
    assert len(found) == 1
    assert problems[0].reason == "is not UTF-8"


def test_a_bom_crlf_and_blank_lines_are_no_part_of_the_rows(folder):
    path = folder / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode() + b"\r\n\r\n  \r\n" + json.dumps(GOOD).encode())
    found, problems, _ = rows.read(path, levels=(4, 4, 4))
    assert not problems
    assert [row.line for row in found] == [1, 4]


def test_optional_fields_are_read(folder):
    full = {**GOOD, "memory": ["01", "10"], "adv": -1, "vllm_logp": [-1, -2, -3], "temperature": 0.7, "mask": [4, 4, 4]}
    (row,) = _read(folder, full)[0]
    assert (row.memory, row.adv, row.logps, row.temperature, row.mask) == (
        ("01", "10"), -1.0, (-1.0, -2.0, -3.0), 0.7, (4, 4, 4),
    )  # fmt: skip
    (row,) = _read(folder, {**GOOD, "vllm_logp": -4.5})[0]
    assert row.logps == -4.5


def test_without_levels_the_first_code_gives_the_length_and_every_digit_is_legal(folder):
    assert _reasons(folder, {**GOOD, "code": "0989"}, GOOD, levels=None) == [
        (2, "code", "'012' has 3 digits where 4 are expected")
    ]


ACCEPTED = {
    "palette": lambda path: _picture("P").save(path),
    "grey": lambda path: _picture("L").save(path),
    "alpha": lambda path: _picture("RGBA").save(path),
    "black and white": lambda path: _picture("1").save(path),
    "CMYK": lambda path: _picture("CMYK").save(path, format="JPEG"),
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_pictures_that_are_read_as_rgb(folder, kind):
    ACCEPTED[kind](folder / "a.png")
    (row,), problems, _ = _read(folder, GOOD)
    assert not problems
    assert row.frame.image().mode == "RGB"
    assert row.frame.image() == Image.open(folder / "a.png").convert("RGB")


def _truncate(path):
    _picture(size=(200, 200)).save(path)
    path.write_bytes(path.read_bytes()[:3000])


REFUSED = {
    "empty": (lambda path: path.write_bytes(b""), "is empty (0 bytes)"),
    "text": (lambda path: path.write_text("hello"), "is not a picture"),
    "cut off": (_truncate, "cut off"),
    "huge": (lambda path: Image.new("1", (6000, 6000)).save(path), "more than data.max_pixels"),
    "a thread": (lambda path: Image.new("L", (4000, 2)).save(path), "at most 1 : 200"),
    "16-bit": (lambda path: Image.fromarray(np.full((32, 32), 40000, np.uint16)).save(path), "8 bits a channel"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "is not a file"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_pictures_that_are_bad_rows(folder, kind):
    make, reason = REFUSED[kind]
    make(folder / "a.png")
    ((line, field, why),) = _reasons(folder, GOOD)
    assert (line, field) == (1, "image")
    assert reason in why


def test_an_exif_orientation_is_not_applied_and_said(folder, caplog):
    exif = Image.Exif()
    exif[0x0112] = 6
    _picture(size=(48, 32)).save(folder / "a.png", exif=exif)
    (row,), problems, _ = _read(folder, GOOD)
    assert not problems
    assert row.frame.image().size == (48, 32)
    assert "EXIF orientation" in caplog.text


def test_a_picture_is_decoded_once_and_its_verdict_remembered_by_content(folder, monkeypatch):
    from bt_policy import pictures

    decoded = []
    plain = pictures.decode
    monkeypatch.setattr(pictures, "decode", lambda path: decoded.append(path) or plain(path))
    (folder / "b.png").write_bytes((folder / "a.png").read_bytes())
    cache = folder / "cache" / "pictures.json"
    for _ in range(2):
        found, problems, _ = _read(folder, GOOD, GOOD, {**GOOD, "image": "b.png"}, cache=cache)
        assert (len(found), problems) == (3, [])
    assert len(decoded) == 1
    assert len({row.frame.key for row in found}) == 1


def test_relative_pictures_are_looked_up_in_the_documented_order(folder, monkeypatch):
    for place, shade in (("root", 1), ("beside", 2), ("here", 3)):
        (folder / place).mkdir()
        Image.new("L", (32, 32), shade).save(folder / place / "p.png")
    monkeypatch.chdir(folder / "here")
    path = folder / "beside" / "rows.jsonl"
    path.write_text(json.dumps({**GOOD, "image": "p.png"}))

    def shade():
        return rows.read(path, image_root=folder / "root")[0][0].frame.image().getpixel((0, 0))[0]

    assert shade() == 1
    (folder / "root" / "p.png").unlink()
    assert shade() == 2
    (folder / "beside" / "p.png").unlink()
    assert shade() == 3


def test_ten_bad_rows_are_named_and_the_rest_counted(folder):
    found = _read(folder, GOOD, *[{**GOOD, "code": "9"}] * 14)
    with pytest.raises(UserError) as error:
        rows.accept(folder / "rows.jsonl", found, "error", None)
    message = str(error.value)
    assert message.startswith("14 bad rows:")
    assert message.count("rows.jsonl:") == 10
    assert "and 4 more" in message
    assert "data.on_bad_row=skip" in message


def test_skipped_rows_are_written_with_their_reason(folder):
    found = _read(folder, GOOD, {**GOOD, "code": "9"}, {**GOOD, "image": "none.png"})
    good = rows.accept(folder / "rows.jsonl", found, "skip", folder / "rejected.jsonl")
    assert len(good) == 1
    rejected = [json.loads(line) for line in (folder / "rejected.jsonl").read_text().splitlines()]
    assert [entry["line"] for entry in rejected] == [2, 3]
    assert rejected[0]["reason"].startswith("code: ")
    assert json.loads(rejected[1]["row"]) == {**GOOD, "image": "none.png"}


def test_a_file_without_a_usable_row_and_a_missing_file_are_errors(folder):
    with pytest.raises(UserError, match="no usable row"):
        rows.accept(folder / "rows.jsonl", _read(folder, {**GOOD, "code": "9"}), "skip", None)
    with pytest.raises(UserError, match="does not exist"):
        rows.read(folder / "none.jsonl")
