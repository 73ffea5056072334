"""tools/preprocess_data.py: deterministic and atomic."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from tools.preprocess_data import json_texts, main, stdlib_texts

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

pytestmark = pytest.mark.claims(
    "Long runs",
    "`tools/preprocess_data.py`: a dataset is written whole or not at all; `.gz`; damaged, non-UTF-8 and other bad input is "
    "one line",
    "works",
)

TEXTS = ["first document", "second é", "", "last"]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text, "id": 1}) for text in TEXTS) + "\n", encoding="utf-8")
    return path


def documents(prefix: Path) -> list[bytes]:
    dataset = IndexedDataset(str(prefix))
    return [bytes(int(token) for token in dataset[index]) for index in range(len(dataset))]


def test_json_lines(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = tmp_path / "out" / "data"
    assert main(["--input", str(lines), "--output-prefix", str(prefix)]) == 0
    assert documents(prefix) == [text.encode() for text in TEXTS if text]
    assert "3 documents, 27 tokens, ByteLevelTokenizer with a vocabulary of 256" in capsys.readouterr().out
    assert {path.name for path in prefix.parent.iterdir()} == {"data.bin", "data.idx"}


def test_end_of_document(lines: Path, tmp_path: Path) -> None:
    main(["--input", str(lines), "--append-eod", "--output-prefix", str(tmp_path / "data")])
    assert documents(tmp_path / "data") == [text.encode() + b"\0" for text in TEXTS]


def test_compressed_text(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, damaged = tmp_path / "texts.jsonl.gz", tmp_path / "damaged.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    damaged.write_bytes(packed.read_bytes()[:-12])
    assert main(["--input", str(packed), "--output-prefix", str(tmp_path / "data")]) == 0
    assert documents(tmp_path / "data") == [text.encode() for text in TEXTS if text]
    assert main(["--input", str(damaged), "--output-prefix", str(tmp_path / "other")]) == 2
    assert re.search(r"damaged\.jsonl\.gz is a damaged gzip file after line \d \(", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokenizer-type NullTokenizer", "--tokenizer-type NullTokenizer needs --vocab-size"),
        ("--tokenizer-type NullTokenizer --vocab-size 9", r"texts\.jsonl, line 1 cannot be tokenized: invalid literal for int"),
        ("--output-prefix /dev/null/data", "/dev/null: Not a directory|/dev/null: File exists"),
        ("--input .", r"--input \. does not exist, or is no regular file; give a file"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert main(["--input", str(lines), "--output-prefix", str(tmp_path / "data"), *flags.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("preprocess_data.py: error: ")
    assert re.search(message, line)


def test_json_that_is_nested_too_deeply_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "deep.jsonl").write_text("[" * 2**20)
    assert main(["--input", str(tmp_path / "deep.jsonl"), "--output-prefix", str(tmp_path / "data")]) == 2
    assert "line 1: JSON that is nested too deeply" in capsys.readouterr().err


def test_text_that_is_not_utf_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "latin1.jsonl").write_bytes('{"text": "é"}\n'.encode() + '{"text": "é"}\n'.encode("latin1"))
    assert main(["--input", str(tmp_path / "latin1.jsonl"), "--output-prefix", str(tmp_path / "data")]) == 2
    assert "line 2: byte 11 of the line, 0xe9, is not UTF-8; convert the file" in capsys.readouterr().err


def test_numbers_outside_of_the_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ids.jsonl").write_text('{"text": "1 2 300"}')
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "256", "--output-prefix", str(tmp_path / "data")]
    assert main(["--input", str(tmp_path / "ids.jsonl"), *flags]) == 2
    assert "line 1 has the token 300, outside of the vocabulary of 25" in capsys.readouterr().err


def test_a_bad_line_is_reported_and_no_file_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "good"}\n{"body": "no text"}\n')
    assert main(["--input", str(path), "--output-prefix", str(tmp_path / "out" / "data")]) == 2
    assert "line 2: not a JSON object with the key(s) text" in capsys.readouterr().err
    assert list((tmp_path / "out").iterdir()) == []


def test_an_old_dataset_survives_a_failure(lines: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    main(["--input", str(lines), "--output-prefix", str(prefix)])
    before = documents(prefix)
    lines.write_text('{"text": 1}\nnot json')
    assert main(["--input", str(lines), "--output-prefix", str(prefix)]) == 2
    assert documents(prefix) == before


def test_missing_and_empty_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DataError, match="does not exist"):
        list(json_texts(str(tmp_path / "absent"), ["text"]))
    (tmp_path / "empty").touch()
    assert main(["--input", str(tmp_path / "empty"), "--output-prefix", str(tmp_path / "data")]) == 2
    assert "there is no text" in capsys.readouterr().err


def test_the_standard_library_without_its_tests(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a/test/t.py", "site-packages/x.py", "config-3.11-x/c.py", "a.py", "empty.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("" if name == "empty.py" else name)
    assert [document.text for document in stdlib_texts(tmp_path)] == ["a.py", "a/z.py", "b.py"]
