"""Names of contenders, and the flags that the user's script has under each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from megatron.zerobubble.bench.bench_options import Options, parse_options
from megatron.zerobubble.bench.contenders import DEFAULT, PROFILED, WARM_UP, parse_contenders
from megatron.zerobubble.bench.jobs import Job
from megatron.zerobubble.errors import ConfigError, UserError
from megatron.zerobubble.mcore.cpu.device import quiet_third_parties

with quiet_third_parties():
    from megatron.zerobubble.bench.block import BlockRequest, _Block


def script(*words: str) -> Options:
    """The options of a comparison on a script."""
    return parse_options(words, world_size=2, prog="bench")


def of(name: str, *flags: str) -> Job:
    """The script under one contender."""
    (program,) = script("--contenders", name, *flags, "--", __file__).programs.values()
    return program


@pytest.mark.parametrize(
    ("name", "schedule", "num_chunks"),
    [
        ("stock-1f1b", "stock", 1),
        ("interleaved-1f1b", "stock", 2),
        ("interleaved-1f1b:4", "stock", 4),
        ("1f1b", "1f1b", 1),
        ("zb-h1", "zb-h1", 1),
        ("zb@1.5", "zb", 1),
        ("zbv", "zbv", 2),
        ("v-half", "v-half", 2),
        ("zb-interleaved:4", "zb-interleaved", 4),
    ],
)
def test_a_contender_is_a_schedule_with_its_flags(name: str, schedule: str, num_chunks: int) -> None:
    own = of(name)
    assert own.zero_bubble.schedule == schedule
    assert own.arguments == (() if num_chunks == 1 else ("--num-virtual-stages-per-pipeline-rank", str(num_chunks)))


def test_a_contender_has_slices_of_its_own() -> None:
    own = of("zbv:slices=4+pv", "--enable-zero-bubble", "--zero-bubble-slices", "2").zero_bubble
    assert (own.num_slices, own.schedule) == (4, "zbv")
    assert of("zbv", "--enable-zero-bubble", "--zero-bubble-slices", "2").zero_bubble.num_slices == 1
    assert of("zb:slices=2@0.5").zero_bubble.zero_bubble_memory_limit == "0.5"


def test_1f1b_runs_without_its_wait() -> None:
    both = parse_contenders("stock-1f1b,stock-1f1b:no-sync")
    assert [(each.schedule, each.no_sync) for each in both] == [("stock", False), ("stock", True)]
    for contender in both:
        config = SimpleNamespace(batch_p2p_sync=True)
        program: Any = SimpleNamespace(zero_bubble=SimpleNamespace(schedule="stock"))
        request = BlockRequest(number=0, program=program, is_first=True, num_warm_up=6, num_timed=1, no_sync=contender.no_sync)
        schedule: Any = SimpleNamespace(spec=SimpleNamespace(is_stock=True), device=torch.device("cpu"), recordings=mock.Mock())
        _Block(request, lambda: None, lambda _: None)._begin(schedule, [SimpleNamespace(config=config)])
        assert config.batch_p2p_sync == (not contender.no_sync)


def test_the_default_contenders_run_a_usual_job() -> None:
    assert list(script("--", __file__).programs) == DEFAULT.split(",")


def test_a_searched_order_is_profiled_in_the_warm_up_and_a_fixed_one_is_not() -> None:
    assert of("zbv").zero_bubble.timed_iterations == PROFILED
    assert of("zb@2").zero_bubble.timed_iterations == PROFILED
    assert of("zb-h2").zero_bubble.timed_iterations is None
    assert of("stock-1f1b").zero_bubble.timed_iterations is None
    assert PROFILED[1] < WARM_UP


def test_the_jobs_own_schedule_is_replaced() -> None:
    assert of("zb-h1", "--zero-bubble-v-schedule", "--zero-bubble-v-schedule-mem-setup", "half").zero_bubble.schedule == "zb-h1"
    assert of("stock-1f1b", "--enable-zero-bubble").zero_bubble.schedule == "stock"


def test_post_validation_is_the_jobs_or_the_contenders_and_never_of_stock_schedules() -> None:
    def is_optimistic(name: str, *flags: str) -> bool:
        return of(name, *flags).zero_bubble.enable_optimizer_post_validation

    on = ("--enable-zero-bubble", "--enable-optimizer-post-validation")
    assert is_optimistic("zbv+pv")
    assert not is_optimistic("zbv")
    assert is_optimistic("zbv", *on)
    assert not is_optimistic("stock-1f1b", *on)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zbx", "'zbx' is unknown; megatron-core's own are stock-1f1b and interleaved-1f1b:CHUNKS, ours are 1f1b, "),
        ("zbv,zb-h1,zbv", "zbv is given 2 times"),
        (" , ", "give names such as stock-1f1b"),
        ("zbv:3", "zbv has a fixed number of chunks per rank; leave out :3"),
        ("stock-1f1b:2", "1F1B has one chunk per rank; interleaved-1f1b:2 has 2"),
        ("interleaved-1f1b:1", "2 or more chunks per rank; 1F1B is stock-1f1b"),
        ("stock-1f1b+pv", "take no slices, memory limit or post-validation"),
        ("stock-1f1b:slices=2", "take no slices, memory limit or post-validation"),
        ("zb-w:slices=2", "zb-w:slices=2: give 2 or more slices, and one of 1f1b, zb-h1, "),
        ("zbv:slices=1", "zbv:slices=1: give 2 or more slices"),
        ("auto:slices=2", "auto:slices=2: give 2 or more slices, and one of"),
        ("zb-h1@2", "zb-h1 has a fixed order and takes no memory limit; zb@2 does"),
        ("interleaved-1f1b:no-sync", "only stock-1f1b waits for the device behind each exchange; leave out :no-sync"),
        ("zbv:no-sync", "only stock-1f1b waits for the device behind each exchange; leave out :no-sync"),
        ("zbv+xx", "has the wrong form"),
        ("zbv:slices=" + "9" * 5000, "has the wrong form"),
    ],
)
def test_wrong_names_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_contenders(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_iterations_are_those_of_all_blocks() -> None:
    options = script("--contenders", "stock-1f1b,zbv", "--quick", "--", __file__)
    assert options.num_iterations == 2 * (WARM_UP + 3 + 2 * (2 + 3))


def test_megatron_cores_own_schedules_run_without_pairs_of_passes() -> None:
    options = script("--enable-zero-bubble", "--zero-bubble-overlap-moe", "--contenders", "stock-1f1b,zbv", "--", __file__)
    assert [(name, each.zero_bubble.zero_bubble_overlap_moe) for name, each in options.programs.items()] == [
        ("stock-1f1b", False),
        ("zbv", True),
    ]
    assert ["--zero-bubble-overlap-moe" in each.use for each in options.outcomes.values()] == [False, True]


def test_a_script_gets_its_flags_and_the_contenders() -> None:
    flags = ["--contender-flags", "zbv=--chunks 2", "--contender-flags", "v-half:slices=2+pv=--v=2"]
    flags += ["--zero-bubble-planning-seconds", "3"]
    own = ["--lr", "-1", "--zero-bubble-v-schedule", "--", "last one"]
    options = script(*flags, "--contenders", "stock-1f1b,interleaved-1f1b:4,zb-h1,zbv,v-half:slices=2+pv", "--", __file__, *own)
    added = {"interleaved-1f1b:4": ("--num-virtual-stages-per-pipeline-rank", "4"), "zbv": ("--chunks", "2")}
    added["v-half:slices=2+pv"] = ("--v=2",)
    assert options.programs.keys() == {"stock-1f1b", "interleaved-1f1b:4", "zb-h1", "zbv", "v-half:slices=2+pv"}
    for name, program in options.programs.items():
        assert program.arguments == ("--lr", "-1", "--", "last one", *added.get(name, ())), name
        assert program.zero_bubble.zero_bubble_planning_seconds == 3
        assert program.zero_bubble.num_slices == (2 if "slices" in name else 1)
        assert program.zero_bubble.schedule == ("stock" if "1f1b" in name else name.removesuffix(":slices=2+pv"))
        assert program.zero_bubble.enable_optimizer_post_validation == (name == "v-half:slices=2+pv")


def test_a_contender_takes_virtual_stages_away_where_it_has_one_chunk() -> None:
    words = [
        "--contenders",
        "stock-1f1b,zb-h1,zbv,auto",
        "--",
        __file__,
        "--num-virtual-stages-per-pipeline-rank",
        "4",
        "--lr",
        "1",
    ]
    ran = {name: program.arguments for name, program in script(*words).programs.items()}
    assert ran["stock-1f1b"] == ran["zb-h1"] == ("--lr", "1")
    assert ran["zbv"] == ("--lr", "1", "--num-virtual-stages-per-pipeline-rank", "2")
    assert ran["auto"] == ("--num-virtual-stages-per-pipeline-rank", "4", "--lr", "1")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "pretrain.py --lr 1",
            "unrecognized arguments before --: pretrain.py --lr 1; the script and its flags follow the --, as in",
        ),
        ("--cpu", "give -- and then a training script and its flags"),
        ("--", "give -- and then a training script and its flags"),
        ("-- nowhere.py --lr 1", "the script nowhere.py is not a file"),
        ("--lr 1 -- SCRIPT", "unrecognized arguments before --: --lr 1; the script and its flags follow the --"),
        ("--contenders zbx -- SCRIPT", "--contenders: 'zbx' is unknown"),
        ("--contenders zbv --contender-flags zbv -- SCRIPT", "--contender-flags 'zbv': give CONTENDER[,CONTENDER...]=FLAGS"),
        ("--contenders zbv --contender-flags v-half=-x -- SCRIPT", "'v-half=-x': v-half is not among the contenders zbv"),
        ("--contenders zbv --contender-flags zbv=' -- SCRIPT", "No closing quotation"),
        ("-- SCRIPT --zero-bubble-planning-seconds -1", "--zero-bubble-planning-seconds"),
        ("--zero-bubble-own-weights -- SCRIPT --zero-bubble-weights-seed 3", "--zero-bubble-weights-seed draws the weights that"),
    ],
)
def test_wrong_words_about_a_script_are_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        script(*(__file__ if word == "SCRIPT" else word for word in words.split()))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "seed"), [("", 1234), ("--zero-bubble-weights-seed 7", 7), ("--zero-bubble-own-weights", None)]
)
def test_weights_of_a_script_are_drawn_by_one_seed_in_the_first_blocks(words: str, seed: int | None) -> None:
    for program in script("--contenders", "stock-1f1b,zbv", "--", __file__, *words.split()).programs.values():
        assert program.seeds.weights == seed
        assert program.later().seeds.weights is None


def test_the_command_to_use_is_whole() -> None:
    words = ["--cpu", "--contenders", "stock-1f1b,zb-h1", "--", "SCRIPT", "--lr", "1"]
    for ranks_on_host, start in ((4, "zerobubble run --nproc-per-node 4"), (2, "torchrun ... -m megatron.zerobubble.run")):
        given = [__file__ if word == "SCRIPT" else word for word in words]
        options = parse_options(given, world_size=4, prog="bench", ranks_on_host=ranks_on_host)
        uses = {name: outcome.use for name, outcome in options.outcomes.items()}
        own = f"{__file__} --lr 1"
        assert uses == {"stock-1f1b": own, "zb-h1": f"{start} --cpu --zero-bubble-schedule zb-h1 {own}"}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--contenders zbv --baseline zb-h1", "--baseline zb-h1 is not among the contenders zbv"),
        ("--rounds 0", "--rounds 0 must be 1 or more"),
        ("--timed-iters -1", "--timed-iters -1 must be 1 or more"),
        ("--warmup-iters 2", "--warmup-iters 2 must be 6 or more"),
        ("--contender zbv", "unrecognized arguments before --: --contender zbv"),
    ],
)
def test_wrong_options_are_refused_in_one_line(flags: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        script(*flags.split(), "--", __file__)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
