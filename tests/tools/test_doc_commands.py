"""Every command in README and the guides: what a `console` block shows is what its commands print, others are there to be run.

A block runs in an empty folder with the repository's own files linked into it; `...` in its output stands for any text. Commands
that take GPUs, minutes or the reader's own files are checked up to there: commands, flags, targets, files and extras exist.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.zerobubble.bench.bench_options import build_parser as bench_parser
from megatron.zerobubble.cli.main import build_parser
from megatron.zerobubble.cli.run import build_parser as run_parser
from megatron.zerobubble.overlay import add_flags
from megatron.zerobubble.training.arguments import build_parser as train_parser

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = ("docs", "examples", "pretrain_gpt.py", "README.md", "tools")
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROGRAMS = ("zerobubble", "torchrun", "make", "python", "bash", "pip")
ENVIRONMENT = os.environ | {
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "OMP_NUM_THREADS": "1",
    "DATA": "data/python-stdlib",
}


class Block(NamedTuple):
    """A fenced block and the first words of it, for the name of a test."""

    page: str
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}: {' '.join(self.text.split()[:4])}"


def blocks() -> list[Block]:
    return [Block(page.name, *found) for page in PAGES for found in BLOCK.findall(page.read_text(encoding="utf-8"))]


def commands(block: Block) -> list[tuple[str, str]]:
    """The commands of a `console` block, each with the output below it."""
    parts = re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]
    return [(match[0], part[match.end() :]) for part in parts if (match := re.match(r"(?:.*\\\n)*.*\n", part))]


CONSOLE = [block for block in blocks() if block.language == "console"]
MARK = "------ the next command"
MEASURED = "zerobubble bench"
"""Begins commands whose output is a measurement: they run in tests/bench."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in LINKED:
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "layers.json").symlink_to(ROOT / "docs" / "benchmarks" / "data" / "layers" / "llama-3-8b.json")
    return tmp_path


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("block", CONSOLE, ids=[block.name for block in CONSOLE])
def test_a_console_block_shows_what_its_commands_print(block: Block, folder: Path) -> None:
    found = [each for each in commands(block) if " ..." not in each[0] and not each[0].startswith(MEASURED)]
    script = "".join(f"{command}echo {MARK}\n" for command, _ in found)
    run = ["bash", "-ec", script]
    done = subprocess.run(run, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for (command, output), printed in zip(found, done.stdout.split(f"{MARK}\n"), strict=False):
        expected = ".*".join(map(re.escape, output.strip().split("...")))
        assert not output.strip() or re.fullmatch(expected, printed.strip(), re.DOTALL), command + printed


def lines() -> Iterator[tuple[str, str]]:
    """(page, command) of all blocks, without their comments."""
    for block in blocks():
        text = block.text.replace("\\\n", " ")
        text = re.sub(r'^\w+="([^"]*)"$', lambda assigned: assigned[1].replace("\n", " "), text, flags=re.MULTILINE)
        for line in text.splitlines():
            for part in line.removeprefix("$ ").split("&&"):
                command = re.sub(r"\s+#.*", "", part.strip())
                if command.partition(" ")[0] in PROGRAMS and block.language in ("", "bash", "console"):
                    yield block.page, command


LINES = sorted(set(lines()))


@pytest.mark.parametrize(("page", "command"), LINES, ids=[f"{page}: {command[:60]}" for page, command in LINES])
def test_what_a_command_names_exists(page: str, command: str) -> None:
    words = [word for word in shlex.split(command) if word not in ("...", "|")]
    program, rest = words[0], words[1:]
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in rest if "=" not in word} <= targets
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert set(re.findall(r"\.\[([\w,]+)\]", command)) <= extras.keys()
    elif program in ("python", "bash"):
        found = importlib.util.find_spec(rest[1]) is not None if rest[0] == "-m" else (ROOT / rest[0]).is_file()
        assert found, rest
    elif program == "torchrun" and "-m" not in rest:
        assert not unknown(train_parser(), rest[rest.index("pretrain_gpt.py") + 1 :])
    elif program == "torchrun":
        module = rest[rest.index("-m") + 1]
        check_zerobubble(module.rpartition(".")[2], rest[rest.index("-m") + 2 :])
    else:
        check_zerobubble(rest[0], rest[1:])


def check_zerobubble(name: str, words: list[str]) -> None:
    """The command has the flags that stand before the script and its own."""
    if words[:1] == ["--nproc-per-node"]:
        words = words[2:]
    if name == "bench":
        parser = bench_parser()
        add_flags(parser)
        assert not unknown(parser, words[: words.index("--")] if "--" in words else [])
    elif name == "run":
        assert run_parser().parse_args(words).script.endswith(".py")
    elif name == "train":
        assert not unknown(train_parser(), words)
    elif name in ("playground", "env", "checkpoint"):
        build_parser().parse_known_args([name])
    else:
        build_parser().parse_args([name, *("-p=8" if word == "$row" else word for word in words)])


TRAINING = [
    pytest.param(ROOT / "docs" / "tutorial.md", "zerobubble show runs/plan.json", id="tutorial", marks=pytest.mark.slow),
    pytest.param(ROOT / "docs" / "reading-the-trace.md", "ls runs/trace/report.json", id="reading-the-trace"),
    pytest.param(ROOT / "docs" / "flags-examples.md", "true", id="flags-examples"),
]
SMALL = "--hidden-size 32 --num-attention-heads 4 --seq-length 32 --train-iters 16 --distributed-backend gloo"


@pytest.mark.sampled(0.07, group="whole jobs")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("page", "last"), TRAINING)
def test_the_jobs_of_a_page_train(page: Path, last: str, folder: Path) -> None:
    """In its order and in one shell, with a smaller model, fewer iterations and less text than those of `make data`."""
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{number} squared " * 60}) + "\n" for number in range(200)))
    data = "python tools/preprocess_data.py --input text.jsonl --tokenizer-type ByteLevelTokenizer --output-prefix $DATA"
    found = [block.text for block in blocks() if block.page == page.name and block.language == ""]
    jobs = "\n".join(text for text in found if re.search("torchrun|zerobubble run|train ", text) and " ..." not in text)
    assert jobs
    script = f'torchrun() {{ command torchrun "$@" {SMALL}; }}\nmkdir data\n{data}\n{jobs}\n{last}'
    done = subprocess.run(["bash", "-ec", script], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


STAND_IN = """
import runpy
import sys

ours, theirs = "--num-virtual-stages-per-pipeline-rank", "--virtual-pipeline-model-parallel-size"
sys.argv[1:] = [theirs if word == ours else word for word in sys.argv[1:]]
runpy.run_path({example!r}, run_name="__main__")
"""
"""A loop for megatron-core that takes Megatron-LM's flag for virtual stages, in place of Megatron-LM's own script."""
README_COMMANDS = [command for page, command in LINES if page == "README.md" and command.startswith("zerobubble ")]


@pytest.mark.sampled(0.07, group="whole jobs")
@pytest.mark.parametrize("command", README_COMMANDS, ids=[" ".join(each.split()[:5]) for each in README_COMMANDS])
def test_the_commands_of_the_readme_run_as_printed(command: str, folder: Path) -> None:
    """On two CPU ranks, with a small loop in place of Megatron-LM's script and of ITS FLAGS."""
    script = folder / "pretrain_gpt_of_megatron_lm.py"
    script.write_text(STAND_IN.format(example=str(ROOT / "examples" / "stock_megatron_core.py")))
    sizes = "--pipeline-model-parallel-size 2 --micro-batch-size 2 --train-iters 100"
    given = {
        "--nproc-per-node 4": "--nproc-per-node 2 --cpu",
        "/path/to/Megatron-LM/pretrain_gpt.py": str(script),
        "ITS FLAGS": sizes,
    }
    if "bench" in command:
        given["--contenders"] = "--rounds 1 --timed-iters 1 --contenders"
    else:
        given["ITS FLAGS"] = sizes.replace("100", "4")
    for printed, here in given.items():
        assert printed in command
        command = command.replace(printed, here)
    done = subprocess.run(command, shell=True, cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if "bench" in command:
        table = re.findall(r"^(stock-1f1b|zb-h1|zbv) .* (yes|-)$", done.stdout, re.MULTILINE)
        assert table == [("stock-1f1b", "-"), ("zb-h1", "yes"), ("zbv", "yes")]
    else:
        assert ("with --num-virtual-stages-per-pipeline-rank 2: zbv takes 2" in done.stderr) == (
            "--zero-bubble-v-schedule" in command
        )


def unknown(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Flags that the parser does not have."""
    known = {flag for action in parser._actions for flag in action.option_strings}
    return [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
