"""The command line: tools/plan.py."""

import importlib.util
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from megatron.zerobubble.plan.ir import Plan

TOOL = Path(__file__).parents[2] / "tools" / "plan.py"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_tool", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ZBV = ["plan", "--schedule", "zbv", "--num-ranks", "4", "--num-microbatches", "8"]


def test_plan_shows_the_timeline_and_writes_files(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = {name: tmp_path / name for name in ("json", "svg", "trace")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    assert tool.main([*ZBV, *written]) == 0
    out = capsys.readouterr().out
    assert "zbv: 4 ranks, 8 microbatches, 2 stage(s) a rank (V)" in out
    assert "bubble 0.00 %" in out
    assert "\nrank 3 " in out
    assert Plan.from_json(files["json"].read_text()).num_ranks == 4
    ElementTree.parse(files["svg"])
    assert json.loads(files["trace"].read_text())["traceEvents"]

    assert tool.main(["show", str(files["json"])]) == 0
    assert capsys.readouterr().out == out


def test_json_dash_prints_the_plan_and_nothing_else(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([*ZBV, "--forward-ms", "18.5", "--comm-ms", "0.6", "--json", "-"]) == 0
    captured = capsys.readouterr()
    body = json.loads(captured.out)
    assert body["costs"]["forward_ms"] == [9.25] * 8
    assert body["metrics"]["peak_memory"] == [1.0] * 4
    assert captured.err == ""


def test_max_pending_backward(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        tool.main(["plan", "--schedule", "zb", "--num-ranks", "3", "--num-microbatches", "9", "--max-pending-backward", "2p"])
        == 0
    )
    assert "bubble 0.00 %" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--schedule", "zb-v"], "did you mean 'zbv'"),
        (["--num-ranks", "0"], "num_ranks is 0"),
        (["--num-chunks", "3"], "drop num_chunks"),
        (["--forward-ms", "-1"], "forward_ms is -1.0"),
        (["--wgrad-ms", "nan"], "wgrad_ms is nan"),
        (["--max-pending-backward", "2p"], "drop max_pending_backward"),
        (["--max-pending-backward", "some"], "1p or 2p"),
        (["--json", "/no/such/folder/plan.json"], "No such file"),
    ],
)
def test_user_errors_are_one_line_and_exit_code_2(
    tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert tool.main([*ZBV, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize("arguments", [[], ["plan"], [*ZBV, "--num-ranks", "two"], ["draw"]])
def test_usage_errors_are_one_line_too(tool: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main(arguments)
    assert caught.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_show_refuses_broken_files(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    for text in ("", "{}", '{"format": "zerobubble-plan/9"}'):
        path.write_text(text)
        assert tool.main(["show", str(path)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert tool.main([*ZBV, "--json", str(path)]) == 0
    body = json.loads(path.read_text())
    body["ops"][1].reverse()
    path.write_text(json.dumps(body))
    capsys.readouterr()
    assert tool.main(["show", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ">1W6<" in captured.err
    assert tool.main(["show", str(tmp_path / "missing.json")]) == 2


def test_as_a_command_with_a_pipe() -> None:
    command = [sys.executable, str(TOOL)]
    root = TOOL.parents[1]
    made = subprocess.run([*command, *ZBV, "--json", "-"], cwd=root, capture_output=True, text=True, check=True)
    shown = subprocess.run([*command, "show", "-"], cwd=root, input=made.stdout, capture_output=True, text=True, check=True)
    assert "bubble 0.00 %" in shown.stdout
    assert "examples:" in subprocess.run([*command, "--help"], cwd=root, capture_output=True, text=True, check=True).stdout
