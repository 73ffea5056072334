"""The steps: what each would tell, what is expected, and what a deviation means. docs/benchmarks/gpu.md shows the same table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command and how to read its outcome."""

    name: str
    """Of the step, for people."""
    files: str
    """Name of its files in the report's folder. Jobs whose losses are compared share the part before the last hyphen."""
    command: tuple[str, ...]
    """What runs, from the root of the repository. ``{out}`` is the report's folder."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables set for it; ``{out}`` as in `command`."""
    num_gpus: int = 1
    """GPUs that it needs."""
    program: str | None = None
    """Program that has to be on the PATH."""
    minutes: float
    """After that long it is ended and counts as failed."""
    expected: str
    """The expected outcome."""
    deviation: str
    """What another outcome means."""


_TRAINER = ("-m", "megatron.zerobubble.cli.train")
_SCRIPT = "megatron/zerobubble/cli/train.py"
"""The same, as the script that `zerobubble bench` runs."""
_IN_ENVIRONMENT = 'source examples/gpu_environment.sh && exec "$0" "$@"'


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the steps run on."""

    num_ranks: int
    """GPUs, or ranks of a rehearsal."""
    has_fp8: bool
    shares: bool = False
    """Whether all ranks share one GPU: what is measured against time is left out then."""
    rehearses: bool = False
    """Whether sizes are tiny and everything is on the CPU. Tests that need a GPU are then only collected."""
    variables: tuple[tuple[str, str], ...] = field(init=False)
    """Of every job's environment in a rehearsal; on GPUs `examples/gpu_environment.sh` sets those that the user has not set."""

    def __post_init__(self) -> None:
        on_cpu = (("CUDA_VISIBLE_DEVICES", ""), ("OMP_NUM_THREADS", "1"))
        object.__setattr__(self, "variables", on_cpu if self.rehearses else ())

    def tests(self, marker: str, *words: str) -> tuple[str, ...]:
        """Tests by their marker."""
        return (
            sys.executable,
            "-m",
            "pytest",
            "-m",
            marker,
            *(["-q", "--collect-only"] if self.rehearses else ["-v"]),
            *words,
        )

    def ranks(self, num_ranks: int, *program: str) -> tuple[str, ...]:
        """The command that runs a program on this number of ranks under torchrun."""
        shared = ("-m", "tools.gpu.share") if self.shares else ()
        start = (
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={num_ranks}",
            *shared,
            *program,
        )
        return start if self.rehearses else ("bash", "-c", _IN_ENVIRONMENT, *start)

    def model(self, *, is_large: bool, pipeline: int) -> tuple[str, ...]:
        """Flags of the model and the device."""
        device = ("--distributed-backend", "gloo" if self.rehearses else "nccl")
        hidden, heads, tokens = ("4096", "32", "4096") if is_large else ("2048", "16", "2048")
        if self.rehearses:
            hidden, heads, tokens = "32", "4", "32"
        return (
            *device,
            *("--hidden-size", hidden, "--num-attention-heads", heads, "--seq-length", tokens),
            *("--num-layers", str(4 * pipeline), "--pipeline-model-parallel-size", str(pipeline)),
            *("--swiglu", "--normalization", "RMSNorm", "--disable-bias-linear", "--position-embedding-type", "rope"),
            *("--hidden-dropout", "0", "--attention-dropout", "0", "--untie-embeddings-and-output-weights"),
            *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255" if self.rehearses else "32000"),
            *("--eval-iters", "0", "--micro-batch-size", "1", "--lr", "3e-4", "--log-interval", "5"),
            *(() if self.rehearses else ("--bf16",)),
        )

    def job(self, files: str, ranks: int, *words: str, pipeline: int) -> tuple[str, ...]:
        """A job of the reference trainer, without checkpoints."""
        replicas = ranks // pipeline
        return (
            *self.ranks(ranks, *_TRAINER),
            *self.model(is_large=files.startswith("sweep"), pipeline=pipeline),
            *("--global-batch-size", str(3 * pipeline * replicas), "--metrics-jsonl", f"{{out}}/{files}.jsonl"),
            *("--train-iters", "4" if self.rehearses else "30", "--zero-bubble-weights-seed", "1234", *words),
        )


def hour(machine: Machine) -> list[Step]:
    """All steps, in the order of what would make later ones meaningless."""
    first, checked = [*_kernels(machine)], [*_nccl(machine), *_jobs(machine)]
    if machine.shares:
        return [*first, *checked]
    return [*first, _link(machine), *checked, *_bench(machine), *_sweep(machine), _nsys(machine)]


_TRUST = "no run can be trusted before it is excluded"
_ONE_GPU = ("-m", "tools.benchmarks.one_gpu", "--json", "{out}/one_gpu.json", "--markdown", "{out}/one_gpu.md")


def _kernels(machine: Machine) -> Iterator[Step]:
    yield Step(
        name="kernels of W and the split linear",
        files="kernels",
        command=machine.tests("gpu", "tests/wgrad/test_gemm.py", "tests/wgrad/test_gpu.py"),
        minutes=3,
        expected="passes; the log names the kernel: apex where it is installed, else torch addmm with out_dtype",
        deviation=f"a kernel adds something else than dY^T X, or operands of W change between B and W: {_TRUST}",
    )
    yield Step(
        name="one GPU: every rank's program",
        files="one_gpu",
        command=(sys.executable, *_ONE_GPU, *(("--device", "cpu", "--scale", "0.016") if machine.rehearses else ())),
        environment=machine.variables,
        minutes=10,
        expected="no rank fails; B and W at most 1.02 of the full backward; activations within 5 % of the plan's",
        deviation="a larger ratio is lost in every schedule: see which kernel of W is chosen in the first step's log",
    )


def _link(machine: Machine) -> Step:
    return Step(
        name="a link",
        files="links",
        command=machine.ranks(2, "-m", "tools.gpu.links"),
        environment=(*machine.variables, ("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "{out}/nccl-%p.log")),
        num_gpus=2,
        minutes=2,
        expected="NVLink: over 100 GB/s one way; 16 or more channels",
        deviation="a slow link: see nvidia-smi topo -m in the report, and NCCL's log",
    )


def _nccl(machine: Machine) -> Iterator[Step]:
    for name, files in (("order of transfers", "tests/runtime/test_gpu.py"), ("gradients", "tests/mcore/test_gpu.py")):
        yield Step(
            name=f"NCCL: {name}",
            files=f"nccl-{name.split()[0]}",
            command=machine.tests("gpu", files, *(() if files.startswith("tests/runtime") else ("-k", "not memory"))),
            minutes=6,
            expected="every schedule ends under random delays, with every message where it belongs, and equals one GPU",
            deviation="a hang or another message: the four rules of ADR 3 are wrong about NCCL; send the log first, and try the "
            "jobs with --zero-bubble-batch-p2p-comm",
        )
    yield Step(
        name="memory, recorder and watchdog",
        files="memory",
        command=machine.tests(
            "gpu",
            *("tests/mcore/test_gpu.py", "tests/profiling/test_recorder.py", "tests/job/test_watchdog.py"),
            *("-k", "memory or on_a_gpu", "--maxfail", "3"),
        ),
        minutes=6,
        expected="nothing grows over 200 iterations; the peak is within 5 % of the plan's",
        deviation="growth: a tensor outlives its op",
    )


_V = ("--zero-bubble-v-schedule",)


def _jobs(machine: Machine) -> Iterator[Step]:
    """Jobs with everything on, each under megatron-core's 1F1B and under a schedule of ours. Context parallelism is Transformer
    Engine's, which a rehearsal does not have."""
    num = machine.num_ranks
    shares = num >= 4  # a stage over two ranks
    deep = 4 if num >= 8 else 2
    everything = (
        *("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--clip-grad", "0.5"),
        *("--recompute-granularity", "selective", "--recompute-modules", "core_attn"),
        *(("--tensor-model-parallel-size", "2", "--sequence-parallel") if shares else ()),
        *(("--fp8-format", "hybrid") if machine.has_fp8 else ()),
    )
    experts: tuple[str, ...] = (
        "--num-experts",
        "4",
        "--moe-ffn-hidden-size",
        "64" if machine.rehearses else "1024",
        "--moe-router-topk",
        "2",
    )
    experts += ("--expert-model-parallel-size", "2") if shares else ()
    optimistic = (*_V, "--enable-optimizer-post-validation")
    jobs: tuple[tuple[str, int, int, tuple[str, ...], str, tuple[str, ...]], ...] = (
        ("everything", 2, 4 * (num // 4) if shares else 2, everything, "zbv", optimistic),
        ("experts", deep, 2 * deep if shares else 2, experts, "zb-h1", ("--enable-zero-bubble",)),
        ("context", deep, 2 * deep, ("--context-parallel-size", "2"), "zbv", _V),
    )
    for name, pipeline, ranks, flags, contender, schedule in jobs[:2] if machine.rehearses else jobs:
        is_tensor_parallel = shares and name == "everything"
        for who, own in (("1f1b", ()), (contender, schedule)):
            is_stock = who == "1f1b"
            yield Step(
                name=f"a job with {name}: {who}",
                files=f"job-{name}-{who}",
                command=machine.job(f"job-{name}-{who}", ranks, *flags, *own, pipeline=pipeline),
                environment=(*machine.variables, ("TP_SIZE", "2" if is_tensor_parallel else "1")),
                num_gpus=ranks,
                minutes=3,
                expected="ends: the baseline" if is_stock else "the losses of 1F1B within 1e-2 (bf16), 5e-2 (FP8)",
                deviation="the machine or megatron-core, not this package: fix that before going on"
                if is_stock
                else "another first loss: another model; losses that diverge: gradients; a hang: the last line says who waits; "
                "try --zero-bubble-batch-p2p-comm",
            )


def _bench(machine: Machine) -> Iterator[Step]:
    pipeline = machine.num_ranks
    quick = ("--rounds", "1", "--timed-iters", "1", "--warmup-iters", "6") if machine.rehearses else ("--rounds", "4")
    contenders = "stock-1f1b,stock-1f1b:no-sync,interleaved-1f1b:2,interleaved-1f1b:4,zb-h1,zbv,zbv+pv,auto"
    yield Step(
        name="schedules side by side",
        files="bench",
        command=(
            *machine.ranks(pipeline, "-m", "megatron.zerobubble.cli.bench", "--bench-dir", "{out}/bench"),
            *(("--cpu",) if machine.rehearses else ()),
            *("--contenders", contenders, *quick, "--", _SCRIPT, *machine.model(is_large=True, pipeline=pipeline)),
            *("--global-batch-size", str(3 * pipeline), "--train-iters", "100"),
        ),
        environment=machine.variables,
        num_gpus=2,
        minutes=25,
        expected="ZBV faster than interleaved 1F1B, and that than 1F1B; each within 5 % of what is predicted; the same losses",
        deviation="slower than predicted: see the trace for what ranks wait for (docs/reading-the-trace.md)",
    )


def _sweep(machine: Machine) -> Iterator[Step]:
    """Jobs that differ in one thing; the median of their late iterations is compared with the first one's."""
    no_margins = tuple((f"NVTE_{name}", "0") for name in ("FWD_LAYERNORM_SM_MARGIN", "BWD_LAYERNORM_SM_MARGIN", "EXT_MARGIN_SM"))
    for name, flags, variables in (
        ("1f1b", (), ()),
        ("zbv", _V, ()),
        ("zbv-2-ctas", (*_V, "--zero-bubble-p2p-max-ctas", "2"), ()),
        ("zbv-16-ctas", (*_V, "--zero-bubble-p2p-max-ctas", "16"), ()),
        ("zbv-without-margins", _V, no_margins),
    ):
        files, num = f"sweep-{name}", machine.num_ranks
        yield Step(
            name=f"one thing at a time: {name}",
            files=files,
            command=machine.job(files, num, *flags, pipeline=num),
            environment=(*machine.variables, *variables),
            num_gpus=2,
            minutes=2,
            expected="ends; zbv's 4 CTAs and margins are a few percent faster than the other choices",
            deviation="another choice is faster: the defaults are wrong for this machine",
        )


def _nsys(machine: Machine) -> Step:
    num = machine.num_ranks
    profile = ("nsys", "profile", "--output={out}/nsys", "--trace=cuda,nvtx", "--delay=40", "--duration=10")
    return Step(
        name="kernels of a few iterations",
        files="sweep-nsys",
        command=(*profile, *machine.job("sweep-nsys", num, *_V, pipeline=num)),
        environment=machine.variables,
        num_gpus=2,
        program="nsys",
        minutes=4,
        expected="between passes of a rank only transfers",
        deviation="gaps with an idle host: launches are late; gaps with a busy host: a wait in the passes",
    )


def markdown(steps: Iterable[Step]) -> str:
    """The table of docs/benchmarks/gpu.md."""
    rows = [f"| {step.name} | {step.num_gpus} | {step.expected} | {step.deviation} |" for step in steps]
    return "\n".join(["| step | GPUs | expected | otherwise |", "|---|---|---|---|", *rows])
