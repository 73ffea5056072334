"""Which datasets are read and in which proportions, as --data-path and its kin say it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.zerobubble.errors import ConfigError, DataError, UserError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties
from megatron.zerobubble.training.config.data_blend import Blend, parse_blend, read_blend, read_blends_per_split

with quiet_third_parties():
    from megatron.core.datasets.utils import get_blend_from_list


@pytest.mark.parametrize("words", ["a", "a b", "a b c", "1 a", "0.3 a 0.7 b", "3e1 a 70 b", "1 a 2", "3 a 2 b .5 c"])
def test_blends_are_read_as_megatron_lm_reads_them(words: str) -> None:
    theirs = get_blend_from_list(words.split())
    assert theirs is not None
    prefixes, weights = parse_blend(words.split(), "--data-path").for_megatron_core()
    assert (prefixes, weights) == (list(theirs[0]), theirs[1])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "--data-path is empty; give a prefix"),
        ("1 a b c", "--data-path 1 a b c has weights for some datasets only; give one before each prefix, or none"),
        ("0 a 1 b", "weights must be greater than 0; leave out a dataset"),
        ("-1 a 1 b", "weights must be greater than 0"),
        ("nan a 1 b", "weights must be greater than 0"),
    ],
)
def test_a_blend_without_sense_is_an_error(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(words.split(), "--data-path")


def test_blends_in_files(tmp_path: Path) -> None:
    words, lists = tmp_path / "words.txt", tmp_path / "lists.json"
    words.write_text("0.3 a\n0.7 b\n")
    assert read_blend(str(words)) == Blend(("a", "b"), (0.3, 0.7))
    lists.write_text(json.dumps({"train": ["0.3", "a", 0.7, "b"], "test": ["c"]}))
    assert read_blends_per_split(str(lists)) == (Blend(("a", "b"), (0.3, 0.7)), None, Blend(("c",)))


@pytest.mark.parametrize("text", ["[]", '{"train": "a"}', '{"training": ["a"]}', "{", '{"train": [["a"]]}'])
def test_a_file_of_another_form_is_an_error(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lists.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"is not JSON|must be a JSON object such as"):
        read_blends_per_split(str(path))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent cannot be read: No such file"):
        read_blend(str(tmp_path / "absent"))
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UserError, match="binary cannot be read: it is not UTF-8"):
        read_blend(str(tmp_path / "binary"))
