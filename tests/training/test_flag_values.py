"""Values that nobody means, for every flag: each is taken, or refused in one short line, and never a traceback."""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from megatron.zerobubble.errors import ConfigError, PlanError, UserError
from megatron.zerobubble.messages import MOST_SHOWN
from megatron.zerobubble.training.arguments import build_parser, parse_arguments, settings_from_argv

pytestmark = pytest.mark.claims(
    "Long runs",
    "every flag with `inf`, 5,000 digits, 300-character paths, line breaks, lone surrogates; odd costs, plans and requests",
    "taken, or rejected in one line",
    also=("cli/test_odd_values.py", "playground/test_odd_requests.py"),
)

MODEL = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --micro-batch-size 1 --lr 1e-3 --train-iters 10 "
    "--mock-data "
)
P4 = "--pipeline-model-parallel-size 4 --global-batch-size 8 "
BASES = {
    "plain": MODEL,
    "pipeline": MODEL + P4 + "--enable-zero-bubble ",
    "fp16": MODEL + P4 + "--zero-bubble-v-schedule --fp16 ",
    "rope": MODEL + P4 + "--position-embedding-type rope --group-query-attention --zero-bubble-schedule auto ",
    "experts": MODEL + "--num-experts 4 ",
    "latent": MODEL + "--multi-latent-attention --save none --load none ",
    "trace": MODEL + P4 + "--zero-bubble-schedule zb --zero-bubble-trace . ",
    "files": MODEL.replace("--mock-data ", "") + "--tokenizer-type NullTokenizer --vocab-size 9 --data-path none ",
}
VALUES = [
    *("inf", "-inf", "nan", "1e400", "1e308", "5e-324", "-0.0", "0", "-1", "1", "3", "0.5", "0x10"),
    *(
        "1" + "0" * 17,
        "9" * 19,
        "9" * 400,
        "9" * 5000,
        "-" + "9" * 5000,
        "9" * 400 + "GiB",
        "9" * 5000 + "p",
        "0." + "0" * 400 + "1",
    ),
    *(
        "",
        " ",
        "x" * 300,
        "/x" * 3000,
        "a\nb\r\u2028c\x1b[31m",
        "\udcff" * 90,
        "([t" * 400,
        "[" * 300,
        "1," * 300,
        "\0",
        "٣" * 50,
    ),
]
ACTIONS = {
    action.option_strings[-1]: action for action in build_parser()._actions if not isinstance(action, argparse._HelpAction)
}


@contextmanager
def ends() -> Iterator[None]:
    """Interrupt what does not end."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise AssertionError("it does not end")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(30)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refusal(words: list[str]) -> str | None:
    """The message of the error that `words` of the command line are; None if they are taken."""
    try:
        with ends():
            settings_from_argv(words, world_size=4)
    except UserError as error:
        return str(error)
    return None


@pytest.mark.sampled(0.08)
@pytest.mark.parametrize("flag", sorted(ACTIONS))
def test_any_value_of_any_flag_is_taken_or_refused_in_one_line(flag: str) -> None:
    generator = random.Random(f"{os.environ['ZB_TEST_SEED']} {flag}")
    for value in generator.sample(VALUES, 12):
        base = generator.choice(sorted(BASES))
        message = refusal([*BASES[base].split(), f"{flag}={value}"])
        if message is not None:
            case = f"{base}, {flag}={value[:40]!r}: {message[:600]!r}"
            assert message.isprintable(), case
            assert 0 < len(message) < 700, case
            assert all(len(word) <= MOST_SHOWN + 40 for word in message.split()), case


FLOATS = sorted(
    flag for flag, action in ACTIONS.items() if isinstance(action.metavar, str) and action.metavar == "X" and action.nargs is None
)


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_no_flag_takes_a_number_that_is_not_finite(value: str) -> None:
    assert len(FLOATS) > 10
    for flag in FLOATS:
        message = refusal([*MODEL.split(), f"{flag}={value}"])
        assert message == f"argument {flag}: {value} is not a finite number (--help lists all flags)"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--position-embedding-type rope --hidden-size 60", "--hidden-size 60 / --num-attention-heads 4 = 15 rotated"),
        ("--seed 99999999999", "--seed 99999999999 is too large; give at most 4,000,000,000"),
        ("--num-layers 1000000000000", "--num-layers 1000000000000 is too large; give at most 10,000"),
        ("--rotary-base 9223372036854775807", "--rotary-base 9223372036854775807 is too large"),
        ("--fp16 --loss-scale 1e300", r"--loss-scale 1e\+300 is too large"),
        ("--fp16 --loss-scale 5e-324", "--loss-scale 5e-324 is 0 in fp32"),
        ("--fp16 --initial-loss-scale 0.5", "--initial-loss-scale 0.5 is less than 1"),
        (P4 + "--enable-zero-bubble --global-batch-size 2000000000", "makes 2,000,000,000 microbatches per iteration; plans"),
        ("--distributed-timeout-minutes 99999999999", "--distributed-timeout-minutes 99999999999 is too large"),
        (P4 + "--zero-bubble-schedule zb --zero-bubble-memory-limit " + "9" * 400 + "GiB", "'999.*999GiB' is none of: a number"),
        ("--hidden-size " + "9" * 5000, "argument --hidden-size: invalid int value: '999.*9'"),
        ("--hidden-size " + "9" * 400, "argument --hidden-size: 999.*9 is too large; give at most 9,223,372,036,854,775,807"),
        ("--split " + "9" * 400, "has a number that is too large"),
        ("--save d --load " + "x" * 300, r"xxx\.\.\..*pointed_iteration.txt: File name too long; give another path"),
    ],
)
def test_what_is_refused_at_start(flags: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        settings_from_argv((MODEL + flags).split(), world_size=4)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_plan_error_keeps_its_grid(tmp_path: Path) -> None:
    """The one error of several lines: it draws the plan."""
    file = tmp_path / "plan.json"
    file.write_text(
        '{"format": "zerobubble-plan/1", "schedule": "zb", "num_ranks": 4, "num_microbatches": 1, "stage_to_rank": [0, 1, 2, 3], '
        '"ops": [["0F0", "0F0"], [], [], []]}'
    )
    with pytest.raises(PlanError, match="computed twice") as caught:
        settings_from_argv(f"{MODEL} {P4} --global-batch-size 1 --zero-bubble-load-plan {file}".split(), world_size=4)
    assert str(caught.value).count("\n") > 2


def test_the_line_that_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for value in ("9" * 5000, "a\nb", "\udcff" * 200):
        with pytest.raises(SystemExit):
            parse_arguments([*MODEL.split(), f"--hidden-size={value}"], rank=0, world_size=1)
        printed = capsys.readouterr().err
        assert printed.startswith("pretrain_gpt.py: error: argument --hidden-size: invalid int value: '")
        assert printed.count("\n") == 1
        assert len(printed) < 250
