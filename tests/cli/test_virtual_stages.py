"""Virtual stages on a script's command line follow the schedule."""

from __future__ import annotations

import pytest

from megatron.zerobubble.flags.virtual_stages import with_chunks

MEGATRON = "--pipeline-model-parallel-size 4 --micro-batch-size 1"
TWO = "--num-virtual-stages-per-pipeline-rank 2"


@pytest.mark.claims(
    "Your own script",
    "`zerobubble run`, `bench` and `pretrain_gpt.py` set Megatron-LM's flags for virtual stages as the schedule takes them; "
    "layouts and patterns stay as they are",
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
        (f"{MEGATRON} --hybrid-layer-pattern M*|M*", 2, f"{MEGATRON} --hybrid-layer-pattern M*|M*", None),
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


def test_a_script_that_has_the_flags_gets_them_always() -> None:
    assert with_chunks([], 2, "s", always=True)[0] == TWO.split()
