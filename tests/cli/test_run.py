"""`zerobubble run`: flags wherever they stand, a script as `python SCRIPT` runs it, and errors in one line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.zerobubble.cli import run
from megatron.zerobubble.cli.main import main
from megatron.zerobubble.flags.loop_options import MicrobatchLengths, Seeds
from tests.training.launch import ROOT, environment

pytestmark = pytest.mark.claims(
    "Your own script",
    "`zerobubble run`: a script as `python SCRIPT` runs it, flags anywhere, a rank that fails ends with its reason",
    "works",
)

_DEVICE = "megatron.zerobubble.mcore.cpu.scripts.script_device"

SCRIPT = """
import json, os, sys
from beside import HERE
from megatron.core.pipeline_parallel import get_forward_backward_func
print(json.dumps({
    "name": __name__, "argv": sys.argv, "path": sys.path[0], "beside": HERE,
    "schedule": type(get_forward_backward_func(2, None)).__name__,
}))
"""


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`main` sets them for the script."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("HERE = __file__")
    path = tmp_path / "pretrain.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give a training script and its flags (see --help)"),
        ("--enable-zero-bubble", "give a training script and its flags (see --help)"),
        ("--enable-zero-bubble nowhere.py --lr 1", "the script nowhere.py is not a file"),
        ("SCRIPT --lr 1", "no schedule is chosen: give --enable-zero-bubble, --zero-bubble-v-schedule or"),
        ("--zero-bubble-foo SCRIPT", "unrecognized arguments: --zero-bubble-foo (see --help)"),
        ("--enable-zero-buble SCRIPT", "unrecognized arguments: --enable-zero-buble; did you mean --enable-zero-bubble? (see"),
        (
            "--enable-zero-bubble SCRIPT --zero-bubble-slice=4",
            "--zero-bubble-slice is not a zero-bubble flag of zerobubble run; did you mean --zero-bubble-slices? (see --help)",
        ),
        (
            "SCRIPT --zero-bubble-schedule zbpp_light",
            "--zero-bubble-schedule 'zbpp_light' is unknown; choose from stock, auto, 1f1b, interleaved-1f1b, zb-h1, zb-h2, zb, "
            "zbv, v-half, v-min, 1f1b-v, zb-interleaved, zb-w; did you mean zb-h1?",
        ),
        ("--enable-zero-bubble SCRIPT --zero-bubble-foo=1", "--zero-bubble-foo is not a zero-bubble flag of zerobubble run"),
        ("SCRIPT --zero-bubble-schedule nope", "--zero-bubble-schedule 'nope' is unknown; choose from stock, auto"),
        ("--cpu SCRIPT --zero-bubble-schedule auto --zero-bubble-planning-seconds 0", "--zero-bubble-schedule auto needs"),
        ("--microbatch-tokens bshd --enable-zero-bubble SCRIPT", "argument --microbatch-tokens: invalid choice: 'bshd'"),
        ("--nproc-per-node two SCRIPT", "--nproc-per-node is 'two'; give the number of ranks on this machine"),
        ("--nproc-per-node=0 SCRIPT", "--nproc-per-node is '0'; give the number of ranks on this machine"),
        ("--nproc-per-node", "--nproc-per-node is ''; give the number of ranks on this machine"),
        ("--nproc-per-node 2 SCRIPT", "no schedule is chosen"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: str, message: str, script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_DEVICE, lambda launch, on_cpu: contextlib.nullcontext())
    with pytest.raises(SystemExit) as caught:
        main(["run", *(str(script) if word == "SCRIPT" else word for word in words.split())])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"zerobubble run: error: {message}")
    assert printed.err.count("\n") == 1


def test_flags_count_wherever_they_stand_and_the_script_sees_only_its_own(script: Path) -> None:
    own = ["--lr", "-1", "--zero", "x", "--", "--tail", "last one"]
    before = run._parse(["--cpu", "--zero-bubble-max-pending-backward", "2p", str(script), *own])
    among = run._parse(["--cpu", str(script), *own[:4], "--zero-bubble-max-pending-backward=2p", *own[4:]])
    both = run._parse(["--zero-bubble-v-schedule", str(script), "--zero-bubble-v-schedule-mem-setup", "half", *own])
    assert before == among
    assert before.arguments == both.arguments == own
    assert run.schedule_of(before) == "zb-h2"
    assert run.schedule_of(both) == "v-half"


def test_the_name_of_a_ready_function_and_seeds_reach_install(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(_DEVICE, lambda launch, on_cpu: contextlib.nullcontext())
    monkeypatch.setattr("megatron.zerobubble.script.install", lambda args, **options: given.update(options))
    for words, name, seed in (["--microbatch-tokens", "nested"], "nested", None), (["--zero-bubble-weights-seed", "7"], None, 7):
        assert main(["run", *words, "--enable-zero-bubble", str(script)]) == 0
        assert given == {"lengths": name and MicrobatchLengths(name), "seeds": Seeds(weights=seed)}


def test_the_script_runs_as_by_python(script: Path) -> None:
    command = [sys.executable, "-m", "megatron.zerobubble.run", "--cpu", "--enable-zero-bubble", str(script), "--lr", "1"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "name": "__main__",
        "argv": [str(script), "--lr", "1"],
        "path": str(script.parent),
        "beside": str(script.parent / "beside.py"),
        "schedule": "_PatchedSchedule",
    }


@pytest.mark.parametrize(
    ("python", "given"),
    [
        (["-m", "megatron.zerobubble.run"], [str(ROOT)]),
        (["-P", "-m", "megatron.zerobubble.run"], [str(ROOT)]),
        (["-c", "from megatron.zerobubble.cli.run import main; main()"], [str(ROOT)]),
        (["WRAPPER"], ["/of-the-wrapper", "FOLDER", str(ROOT)]),
    ],
)
@pytest.mark.sampled(0.25)
def test_the_scripts_folder_replaces_only_the_one_that_python_put_first(
    script: Path, python: list[str], given: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("wrapper")
    wrapper = folder / "wrapper.py"
    wrapper.write_text("import sys\nsys.path.insert(0, '/of-the-wrapper')\nfrom megatron.zerobubble.cli.run import main\nmain()")
    script.write_text("import sys; print(*sys.path, sep='\\n')")
    words = [str(wrapper) if word == "WRAPPER" else word for word in python]
    command = [sys.executable, *words, "--cpu", "--enable-zero-bubble", str(script)]
    done = subprocess.run(command, env=environment(), cwd=script.parent.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = [str(script.parent), *(str(folder) if entry == "FOLDER" else entry for entry in given)]
    assert done.stdout.splitlines()[: len(expected)] == expected


def test_zero_bubble_0_in_the_environment(
    script: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_DEVICE, lambda launch, on_cpu: contextlib.nullcontext())
    monkeypatch.setenv("ZERO_BUBBLE", "0")
    assert main(["run", "--enable-zero-bubble", str(script)]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "function", "megatron-core's own"


def test_without_a_gpu_the_error_names_the_flag(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        main(["run", "--enable-zero-bubble", str(script)])
    assert "sees no GPU" in (text := capsys.readouterr().err)
    assert "add --cpu before it" in text
