"""tools/preprocess_data.py: deterministic and atomic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zerobubble.errors import DataError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.data.corpus import read_corpus_info
from tools.preprocess_data import json_texts, main, stdlib_texts

with quiet_third_parties():
    from megatron.core.datasets.indexed_dataset import IndexedDataset

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
    info = read_corpus_info(str(prefix))
    assert info is not None
    assert (info.tokenizer_type, info.vocab_size, info.num_documents) == ("ByteLevelTokenizer", 256, 3)
    assert "3 documents" in capsys.readouterr().out
    assert {path.name for path in prefix.parent.iterdir()} == {"data.bin", "data.idx", "data.corpus.json"}


def test_end_of_document(lines: Path, tmp_path: Path) -> None:
    main(["--input", str(lines), "--append-eod", "--output-prefix", str(tmp_path / "data")])
    assert documents(tmp_path / "data") == [text.encode() + b"\0" for text in TEXTS]


def test_several_workers_make_the_same_dataset(lines: Path, tmp_path: Path) -> None:
    main(["--input", str(lines), "--output-prefix", str(tmp_path / "one")])
    main(["--input", str(lines), "--workers", "2", "--output-prefix", str(tmp_path / "two")])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()


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
    assert list(stdlib_texts(tmp_path)) == ["a.py", "a/z.py", "b.py"]


def test_the_standard_library_is_some_megabytes() -> None:
    size = sum(map(len, stdlib_texts()))
    assert 3e6 < size < 3e7
