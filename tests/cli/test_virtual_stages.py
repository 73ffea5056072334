"""Virtual stages on a script's command line follow the schedule."""

from __future__ import annotations

import shlex
import sys
from types import ModuleType

import pytest

from megatron.zerobubble.errors import ConfigError
from megatron.zerobubble.flags.virtual_stages import with_chunks
from megatron.zerobubble.flags.zero_bubble import ZeroBubbleConfig
from megatron.zerobubble.mcore.run_options import RunOptions

MEGATRON = "--pipeline-model-parallel-size 4 --micro-batch-size 1"
TWO = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.claims(
    "Your own script",
    "`zerobubble run`, `bench` and `pretrain_gpt.py` set Megatron-LM's flags for virtual stages, layouts and hybrid patterns as "
    "the schedule takes them",
    "works",
)
@pytest.mark.parametrize(
    ("words", "chunks", "became", "line"),
    [
        (f"{MEGATRON} --lr 1", 2, f"{MEGATRON} --lr 1 {TWO}", f"with {TWO}: s takes 2 model chunks per rank"),
        (f"{MEGATRON} {TWO} --lr 1", 1, f"{MEGATRON} --lr 1", f"without {TWO}: s takes one model chunk per rank"),
        (
            f"{MEGATRON} {TWO[:-2]}=4",
            2,
            f"{MEGATRON} {TWO}",
            f"without {TWO[:-1]}4 and with {TWO}: s takes 2 model chunks per rank",
        ),
        (
            f"{MEGATRON} --num-layers-per-virtual-pipeline-stage 3",
            2,
            f"{MEGATRON} {TWO}",
            f"without --num-layers-per-virtual-pipeline-stage 3 and with {TWO}: s takes 2 model chunks per rank",
        ),
        (f"{MEGATRON} {TWO}", 2, f"{MEGATRON} {TWO}", None),
        (f"{MEGATRON}", 1, f"{MEGATRON}", None),
        (f"{MEGATRON} --pipeline-model-parallel-layout Et|tL", 2, f"{MEGATRON} --pipeline-model-parallel-layout Et|tL", None),
        (f"{MEGATRON} --hybrid-layer-pattern M*M*", 1, f"{MEGATRON} --hybrid-layer-pattern M*M*", None),
        (
            "--pipeline-model-parallel-size 1 --micro-batch-size 1",
            2,
            "--pipeline-model-parallel-size 1 --micro-batch-size 1",
            None,
        ),
        ("--pipeline-model-parallel-size=4 --stages 8", 2, "--pipeline-model-parallel-size=4 --stages 8", None),
    ],
)
def test_a_command_line_becomes(words: str, chunks: int, became: str, line: str | None) -> None:
    assert with_chunks(words.split(), chunks, "s") == (became.split(), line)


LAYOUT, PATTERN = "--pipeline-model-parallel-layout", "--hybrid-layer-pattern"


@pytest.mark.parametrize(
    ("flag", "given", "chunks", "became"),
    [
        (LAYOUT, "Et*3|tt|tt|tt|tt|tt|tt|mL", 1, "Et*5|(tttt|)*2ttmL"),
        (LAYOUT, "Ettt|tttt|tttt|ttL", 2, "Et|(tt|)*6L"),
        (LAYOUT, "Ettt|ttt|ttt|tttL", 2, "Ett|t|tt|t|tt|t|tt|tL"),  # three layers on every rank of a V
        (LAYOUT, "Et|(tt|)*10tL", 2, "Ett|(ttt|)*6ttL"),
        (LAYOUT, "Ettt|tttt|ttttm|L", 2, "Et|tt|tt|tt|tt|ttm||L"),
        (LAYOUT, "Et|t|t|L", 2, "Et|t|t|L"),  # a stage would be empty, which the schedule refuses
        (LAYOUT, "Et|oops|t|L", 1, "Et|oops|t|L"),
        (PATTERN, "M*|M*|M-|M-|M*|M*|M-|M-", 1, "M*M*|M-M-|M*M*|M-M-"),
        (PATTERN, "M*M*|M-M-|M*M*|M-M", 2, "M*|M*|M-|M-|M*|M*|M-|M"),
        (PATTERN, "M*M*M-M-", 2, "M|*|M|*|M|-|M|-"),
        (PATTERN, "M*|M*|M-|M-|M*|M*|M-|M-/MM/MM", 1, "M*M*|M-M-|M*M*|M-M-/MM/MM"),
    ],
)
def test_the_contents_of_stages_become(flag: str, given: str, chunks: int, became: str) -> None:
    words = [*MEGATRON.split(), flag, given, "--overlap-param-gather-with-optimizer-step", "--lr", "1"]
    with_step = words[-3:] if chunks > 1 or became == given else words[-2:]
    found, line = with_chunks(words, chunks, "s")
    if became == given:
        assert (found, line) == (words, None)
        return
    assert found == [*MEGATRON.split(), *with_step, flag, became]
    assert line is not None
    assert line.startswith(f"without {flag} {shlex.quote(given)}")
    assert line.endswith(
        f"{shlex.join((flag, became))}: s takes {'one model chunk' if chunks == 1 else '2 model chunks'} per rank"
    )
    assert ("--overlap-param-gather-with-optimizer-step" in line) == (chunks == 1)


def test_a_script_that_has_the_flags_gets_them_always() -> None:
    assert with_chunks([], 2, "s", always=True)[0] == TWO.split()


@pytest.mark.parametrize(
    ("schedule", "given", "message"),
    [
        ("zbv", None, "size None: add --num-virtual-stages-per-pipeline-rank 2"),
        ("zb-h1", 2, "size 2: leave out --num-virtual-stages-per-pipeline-rank and the other flags of virtual stages"),
    ],
)
def test_where_megatron_lm_parsed_the_flags_the_error_names_its_flag(
    schedule: str, given: int | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(flags=ZeroBubbleConfig(zero_bubble_schedule=schedule))
    monkeypatch.delitem(sys.modules, "megatron.training", raising=False)
    with pytest.raises(ConfigError, match="in initialize_model_parallel"):
        options.spec(num_ranks=2, num_chunks=given)
    monkeypatch.setitem(sys.modules, "megatron.training", ModuleType("megatron.training"))
    with pytest.raises(ConfigError, match=f"{message}$"):
        options.spec(num_ranks=2, num_chunks=given)
