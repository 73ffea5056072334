"""tools/preprocess_data.py: deterministic and atomic."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import sys
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
    ("unit", "num_units", "expected"),
    [
        (bytes(2**24), 256, r"line 1 is longer than 67,108,864 bytes; split the document"),
        ((b" " * 1023 + b"\n") * 2**14, 256, r"line \d+: the file is decompressed to more than 200 times its size"),
        (b"[" * 2**20, 1, r"line 1: JSON that is nested too deeply"),
    ],
    ids=["one line", "many lines", "deep"],
)
@pytest.mark.sampled(0.34)
def test_a_bomb_is_one_line_soon_and_in_little_memory(unit: bytes, num_units: int, expected: str, tmp_path: Path) -> None:
    """4 GiB of zeros or lines in some MB; the process may allocate 3 GiB."""
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(unit) * num_units)
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_DATA, (3 * 2**30, 3 * 2**30)); "
    code = f"{limit}from tools.preprocess_data import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--input", str(tmp_path / "bomb.gz"), "--output-prefix", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr
    assert re.fullmatch(rf"preprocess_data.py: error: --input .*{expected}.*\n", done.stderr), done.stderr


def test_the_place_in_the_input_is_known(lines: Path) -> None:
    """For the share that is done: a document ends at the last byte that was read for it."""
    ends = [document.end for document in json_texts(str(lines), ["text"])]
    assert ends == sorted(ends)
    assert ends[-1] == lines.stat().st_size


def test_progress_lines_in_a_log(lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--input", str(lines), "--log-interval", "2", "--output-prefix", str(tmp_path / "data")])
    said = capsys.readouterr().err.splitlines()
    assert [re.sub(r"[\d.]+ (docs|%)", r"N \1", line) for line in said] == [
        "Processed 2 documents (N docs/s), N % of the input",
        "Processed 4 documents (N docs/s), N % of the input",
    ]


def test_a_bar_in_a_terminal(
    lines: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["--input", str(lines), "--output-prefix", str(tmp_path / "data")])
    said = capsys.readouterr().err
    assert "docs/s" in said
    assert "100%" in said


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
