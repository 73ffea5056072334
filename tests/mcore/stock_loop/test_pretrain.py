"""Megatron-LM's own `pretrain()` on gloo ranks: what it prints with a zero-bubble schedule is what it prints without."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from megatron.zerobubble.cli.main import main
from tests.support.megatron_lm import LR, MISSING, NORMS, SMALL, logged, pretrain
from tests.support.ranks import RankPool
from tests.support.tolerances import after_steps

if importlib.util.find_spec("megatron.training") is None:
    pytest.skip(MISSING, allow_module_level=True)

TWO, FOUR = "--pipeline-model-parallel-size 2", "--pipeline-model-parallel-size 4"
CHUNKS, FOUR_CHUNKS = "--num-virtual-stages-per-pipeline-rank 2", "--num-virtual-stages-per-pipeline-rank 4"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
GATHERED = "--overlap-param-gather-with-optimizer-step"
"""Megatron-LM has it for schedules with several chunks per rank only, so 1F1B runs without."""
UNTIED = "--untie-embeddings-and-output-weights"


def _run(ranks: RankPool, flags: str, zero_bubble: str = "") -> dict[str, tuple[str, ...]]:
    """What the last rank logged. The others log nothing: there is one line per iteration."""
    *others, last = (logged(text) for text in ranks.run(pretrain, flags, zero_bubble))
    assert not any(others)
    assert last
    return last


def _agree(actual: dict[str, tuple[str, ...]], expected: dict[str, tuple[str, ...]], *, is_tied: bool = False) -> bool:
    """In every printed digit; but tied, gradients of embedding and output layer are summed in another order, and all of slices.

    Losses have seven digits, and norms three after the point.
    """
    if not is_tied or actual.keys() != expected.keys():
        return actual == expected
    pairs = [(actual[name], expected[name]) for name in expected]
    losses = all(float(one[0]) == pytest.approx(float(other[0]), rel=after_steps(len(pairs), LR)) for one, other in pairs)
    return losses and all(float(one[-1]) == pytest.approx(float(other[-1]), abs=1.1e-3) for one, other in pairs)


@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's own `pretrain()`, by a script that knows nothing of this package: ZB-H1 and ZBV with the distributed "
    "optimizer and overlapped reduction, ZB-H2, ZBV untied with `--rerun-mode validate_results`, ZBV with tensor parallelism "
    "2, ZB-W, V-Half in bf16 with per-token loss: the log of stock 1F1B, evaluation too "
    "(`make test MCORE=0.19.2`)",
    "works, in every printed digit (tied under V: 4e-6, after steps of Adam in proportion to them)",
)
@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's own `pretrain()` with slices of microbatches, also with tensor parallelism 2, whose second rank reads no "
    "batch (`make test MCORE=0.19.2`)",
    "works, losses 4e-6, after steps of Adam in proportion to them",
)
@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's `pretrain()` with `--overlap-param-gather-with-optimizer-step` under ZBV (`make test MCORE=0.19.2`)",
    "works, 2e-6",
)
@pytest.mark.parametrize(
    ("stock", "more", "zero_bubble"),
    [
        (f"{TWO} {SHARDED}", "", "--enable-zero-bubble"),
        (FOUR, "", "--zero-bubble-max-pending-backward 2p"),
        (f"{TWO} {SHARDED}", CHUNKS, "--zero-bubble-v-schedule"),
        (f"{TWO} {UNTIED} --rerun-mode validate_results", CHUNKS, "--zero-bubble-v-schedule"),
        (f"{TWO} --tensor-model-parallel-size 2 --rerun-mode disabled", CHUNKS, "--zero-bubble-v-schedule"),
        (f"{TWO} --num-layers 8", FOUR_CHUNKS, "--zero-bubble-schedule zb-w"),
        (f"{TWO} {UNTIED} --bf16 --calculate-per-token-loss", CHUNKS, "--zero-bubble-schedule v-half"),
        (f"{TWO} {SHARDED} --ckpt-format torch", f"{CHUNKS} {GATHERED}", "--zero-bubble-v-schedule"),
        (f"{TWO} {SHARDED}", "", "--enable-zero-bubble --zero-bubble-slices 2"),
        (f"{TWO} --tensor-model-parallel-size 2", CHUNKS, "--zero-bubble-v-schedule --zero-bubble-slices 4"),
    ],
    ids=[
        *("zb-h1-sharded", "zb-h2", "zbv-tied-sharded", "zbv-untied-validated", "zbv-tied-tp-2", "zb-w-tied", "v-half-bf16"),
        *("zbv-tied-gathered", "slices-zb-h1-sharded", "slices-zbv-tp-2"),
    ],
)
@pytest.mark.sampled(0.4)
def test_the_same_log_as_without(four_ranks: RankPool, stock: str, more: str, zero_bubble: str) -> None:
    """Losses and gradient norms of training, and losses of evaluation on two data sets."""
    flags = f"{stock} --train-iters 3 --eval-interval 2"
    expected = _run(four_ranks, flags)
    assert len(expected) == 3 + 1 + 2
    is_tied = "slices" in zero_bubble or (bool(more) and UNTIED not in stock)
    assert _agree(_run(four_ranks, f"{flags} {more}", zero_bubble), expected, is_tied=is_tied)


@pytest.mark.claims(
    "Your own script",
    "layouts that `zerobubble layout` proposes for the flags of the run: Megatron-LM's own `pretrain()` with stock 1F1B on 2 and "
    "4 ranks, interleaved 1F1B, and the V schedule that it names (`make test MCORE=0.19.2`)",
    "works, in every printed digit",
)
@pytest.mark.parametrize(
    ("parallel", "schedule"),
    [(TWO, ["1f1b"]), (FOUR, ["1f1b"]), (TWO, ["interleaved-1f1b", "--num-chunks", "2"]), (TWO, ["zbv"])],
    ids=["1f1b-2", "1f1b-4", "interleaved-2", "zbv-2"],
)
def test_a_proposed_layout_trains(
    four_ranks: RankPool, parallel: str, schedule: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The head takes as long as several layers, so no proposal is an even split."""
    flags = f"{parallel} {UNTIED} --num-layers 8 --vocab-size 1000 --train-iters 3 --eval-interval 10"
    assert main(["layout", "--schedule", *schedule, "--json", "-", "--", *f"{SMALL} {flags}".split()]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    assert layout["flag"] == "--pipeline-model-parallel-layout"
    assert len(set(layout["per_stage"])) > 1
    zero_bubble = "" if "1f1b" in schedule[0] else f"--zero-bubble-schedule {schedule[0]}"
    assert _run(four_ranks, f"{flags} {layout['flag']} {layout['text']}", zero_bubble) == _run(four_ranks, flags)


@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's `pretrain()` with post-validation and steps that are clipped, ZB-H1 and ZBV: norms, also of the parameters "
    "(`--log-params-norm`, which makes the steps synchronous), and no number of zeros (`make test MCORE=0.19.2`)",
    "works, as logged without, in the digits that are printed",
)
@pytest.mark.parametrize(
    ("chunks", "zero_bubble"), [("", "--enable-zero-bubble"), (CHUNKS, "--zero-bubble-v-schedule")], ids=["zb-h1", "zbv"]
)
@pytest.mark.sampled(0.5)
def test_the_log_of_clipped_steps(two_ranks: RankPool, chunks: str, zero_bubble: str) -> None:
    """What else is logged of a step, too."""
    flags = f"{TWO} {UNTIED} --clip-grad 0.5 --train-iters 4 --eval-interval 2"
    for more in ("", "--log-params-norm"):
        expected, actual = (
            two_ranks.run(pretrain, f"{flags} {more} {chunks if given else ''}", given)[-1]
            for given in ("", f"{zero_bubble} --enable-optimizer-post-validation --post-validation-patience 0")
        )
        norms = [[(float(norm), rest) for norm, rest in NORMS.findall(text)] for text in (expected, actual)]
        assert len(norms[0]) == 4
        assert [rest for _, rest in norms[1]] == [rest for _, rest in norms[0]], more
        assert [norm for norm, _ in norms[1]] == pytest.approx([norm for norm, _ in norms[0]], abs=1.1e-3)
        assert [float(loss) for loss, *_ in logged(actual).values()] == pytest.approx(
            [float(loss) for loss, *_ in logged(expected).values()], rel=2e-6
        )


@pytest.mark.claims(
    "Your own script",
    "checkpoints from stock 1F1B to ZB-H1, ZB-H2, ZBV, V-Half and back in Megatron-LM's `pretrain()` (`make test-slow`)",
    "works, the same",
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "zero_bubble"),
    [
        ("", "--enable-zero-bubble"),
        ("", "--zero-bubble-max-pending-backward 2p"),
        (CHUNKS, "--zero-bubble-v-schedule"),
        (f"{CHUNKS} {UNTIED}", "--zero-bubble-schedule v-half"),
    ],
    ids=["zb-h1", "zb-h2", "zbv-tied", "v-half-untied"],
)
def test_a_checkpoint_goes_both_ways(two_ranks: RankPool, tmp_path: Path, flags: str, zero_bubble: str) -> None:
    """Stock saves and the schedule goes on, then the schedule saves and stock goes on.

    Without the distributed optimizer, whose state Megatron-LM does not load into an optimizer of torch's that has not stepped.
    """
    plain = (f"{TWO} {flags.replace(CHUNKS, '')}", "")
    expected = _chain(two_ranks, tmp_path / "stock", [plain, plain, plain])
    actual = _chain(two_ranks, tmp_path / "both", [plain, (f"{TWO} {flags}", zero_bubble), plain])
    assert len(expected) == 6
    assert _agree(actual, expected, is_tied=CHUNKS in flags and UNTIED not in flags)


def _chain(ranks: RankPool, folder: Path, jobs: list[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """What jobs of two iterations each logged, which go on from each other's checkpoints."""
    logs: dict[str, tuple[str, ...]] = {}
    for number, (flags, zero_bubble) in enumerate(jobs):
        ends = f"--train-iters 6 --exit-interval {2 * number + 2} --eval-interval 10 --save-interval 100 --save {folder}"
        logs |= _run(ranks, f"{flags} {ends} {f'--load {folder}' if number else ''}", zero_bubble)
    return {name: values for name, values in logs.items() if name.isdecimal()}
