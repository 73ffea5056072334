"""Megatron-LM's own `pretrain()` on gloo ranks: what it prints with a zero-bubble schedule is what it prints without."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.zerobubble.cli.main import main
from megatron.zerobubble.plan.ir import Plan
from tests.support.megatron_lm import LR, MISSING, NORMS, SMALL, STEPS, logged, pretrain
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
    "2, ZB-W, V-Half in bf16 with per-token loss: the log of stock 1F1B, evaluation and TensorBoard too "
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
    "Megatron-LM's own `pretrain()` with `--zero-bubble-schedule auto`, one chunk per rank and two in a V, and what is measured: "
    "trace, report, `layers.json`, saved plan, balanced stages (`make test MCORE=0.19.2`)",
    "works, in every printed digit (in a V but the last one)",
)
@pytest.mark.parametrize(("chunks", "is_v"), [("", ""), (f"{CHUNKS} {UNTIED}", "--zero-bubble-v-schedule")])
def test_auto_and_what_it_measures(four_ranks: RankPool, tmp_path: Path, chunks: str, is_v: str) -> None:
    folder, iterations = tmp_path / "trace", "--train-iters 7 --eval-interval 10"
    plain = f"{TWO} {chunks.replace(CHUNKS, '')} {iterations}"
    auto = f"--zero-bubble-schedule auto {is_v} --zero-bubble-planning-seconds 0.1 --zero-bubble-balance-stages"
    files = f"--zero-bubble-trace {folder} --zero-bubble-trace-iterations 6 --zero-bubble-save-plan {tmp_path}/plan.json"
    actual = _run(four_ranks, f"{TWO} {chunks} {iterations}", f"{auto} {files}")
    # in a V the clipped gradients' norm is a sum over other stages, which may round another way
    assert _agree(actual, _run(four_ranks, plain), is_tied=bool(is_v))
    names = ["layers.json", "plan-6.json", "report.json", "timeline-6.svg", "trace.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    plan = Plan.from_json((tmp_path / "plan.json").read_bytes())
    assert plan.placement.num_chunks == (2 if is_v else 1)


@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's `pretrain()` in fp16 with post-validation, ZB-H1 and ZBV: learning rate, loss scale, skipped iterations, "
    "loss and norm as logged without, with steps that overflow (`make test MCORE=0.19.2`)",
    "works, in every printed digit",
)
@pytest.mark.parametrize(("chunks", "zero_bubble"), [("", "--enable-zero-bubble"), (CHUNKS, "--zero-bubble-v-schedule")])
@pytest.mark.sampled(0.5)
def test_the_log_of_skipped_steps(two_ranks: RankPool, chunks: str, zero_bubble: str) -> None:
    scaled = "--fp16 --initial-loss-scale 1048576 --loss-scale-window 2 --hysteresis 1 --clip-grad 0 --train-iters 8"
    flags = f"{TWO} {UNTIED} {scaled} --eval-interval 5 {chunks}"
    expected, actual = (
        two_ranks.run(pretrain, flags, f"{zero_bubble} {more}")[-1]
        for more in ("", "--enable-optimizer-post-validation --post-validation-patience 0")
    )
    assert STEPS.findall(actual) == STEPS.findall(expected)
    assert {skipped for *_, skipped in STEPS.findall(actual)} == {"0", "1"}
    assert logged(actual) == logged(expected)


@pytest.mark.claims(
    "Your own script",
    "Megatron-LM's `pretrain()` with `--step-batch-size-schedule` (2, 2, 4, 4, 6 microbatches) while it is planned again, with "
    "trace, saved plan and post-validation: ZBV, `auto` (`make test MCORE=0.19.2`)",
    "works, in every printed digit (tied under V: 2e-6)",
)
@pytest.mark.parametrize(
    ("chunks", "zero_bubble"),
    [
        ("", "--zero-bubble-schedule auto --zero-bubble-trace {folder} --zero-bubble-balance-stages"),
        (CHUNKS, "--zero-bubble-schedule auto --zero-bubble-v-schedule --enable-optimizer-post-validation"),
        (
            CHUNKS,
            "--zero-bubble-v-schedule --zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-save-plan {folder}/plan.json",
        ),
    ],
    ids=["auto-trace", "auto-v-post-validation", "zbv-plan"],
)
def test_a_batch_size_that_grows(two_ranks: RankPool, tmp_path: Path, chunks: str, zero_bubble: str) -> None:
    flags = f"{TWO} --step-batch-size-schedule '0:4 256:8 768:12' --dataloader-type cyclic --train-iters 6 --eval-interval 10"
    window = "--zero-bubble-pipeline-timers-start-iter 2 --zero-bubble-pipeline-timers-end-iter 3"
    planned = f"{zero_bubble.format(folder=tmp_path)} {window} --zero-bubble-planning-seconds 0.05"
    texts = [two_ranks.run(pretrain, *job)[-1] for job in ((flags, ""), (f"{flags} {chunks}", planned))]
    assert [re.findall(r"global batch size: +(\d+)", text)[:6] for text in texts] == [["4", "4", "8", "8", "12", "12"]] * 2
    assert _agree(logged(texts[1]), logged(texts[0]), is_tied=bool(chunks))
    if "plan.json" in zero_bubble:
        assert Plan.from_json((tmp_path / "plan.json").read_bytes()).num_microbatches == 6


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


def _scalars(folder: Path) -> dict[str, list[float]]:
    """What a run wrote for TensorBoard."""
    accumulators: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder))
    events.Reload()
    return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _stock_and_v(ranks: RankPool, folder: Path, more: str) -> tuple[list[str], list[dict[str, list[float]]]]:
    """What 1F1B and ZBV print and write for TensorBoard with these flags."""
    texts, written = [], []
    for name, chunks, zero_bubble in (("stock", "", ""), ("zbv", CHUNKS, "--zero-bubble-v-schedule")):
        flags = f"{TWO} {UNTIED} --train-iters 3 --eval-interval 2 {more} {chunks}"
        *_, text = ranks.run(pretrain, f"{flags} --tensorboard-dir {folder / name} --tensorboard-log-interval 1", zero_bubble)
        texts.append(text)
        written.append(_scalars(folder / name))
    return texts, written


def test_the_loss_is_in_tensorboard(four_ranks: RankPool, tmp_path: Path) -> None:
    _, (stock, ours) = _stock_and_v(four_ranks, tmp_path, "")
    for tag in ("lm loss", "lm loss validation"):
        assert stock[tag] == ours[tag]
        assert len(stock[tag]) == 3


_MTP_LOSSES = re.compile(r"iteration +(\d+)/.*?mtp_1 loss: (\S+) .*?mtp_2 loss: (\S+) ")


@pytest.mark.claims(
    "Your own script",
    "MTP losses and acceptance rates of Megatron-LM's `pretrain()` under V, in its log and TensorBoard "
    "(`make test MCORE=0.19.2`)",
    "works, 2e-6",
)
def test_mtp_losses_are_in_the_log_and_in_tensorboard(four_ranks: RankPool, tmp_path: Path) -> None:
    texts, written = _stock_and_v(four_ranks, tmp_path, "--mtp-num-layers 2 --position-embedding-type rope")
    logs = [[float(value) for line in _MTP_LOSSES.findall(text) for value in line] for text in texts]
    assert len(logs[0]) == 3 * 3
    assert logs[1] == pytest.approx(logs[0], rel=2e-6)
    stock, ours = ({tag: values for tag, values in each.items() if tag.startswith("mtp")} for each in written)
    assert {"mtp_1 loss", "mtp_2 loss"} <= stock.keys() == ours.keys()
    for tag, values in stock.items():
        assert len(values) == 3
        assert ours[tag] == pytest.approx(values, rel=2e-6), tag
