"""What a command writes: files whole or not at all, and progress on a terminal, which is a pair of pseudo-terminals here."""

from __future__ import annotations

import contextlib
import os
import pty
import resource
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from megatron.zerobubble.cli import progress_bar as progress
from megatron.zerobubble.cli.main import main
from megatron.zerobubble.cli.output_files import columns, has_colors, write_whole
from tests.training.launch import ROOT

PLAN = [sys.executable, "-m", "megatron.zerobubble.cli.main", "plan", "--schedule", "zbv", "--num-ranks", "4"]


def _planned(
    num_microbatches: int, *words: str, preexec_fn: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    arguments = [*PLAN, "--num-microbatches", str(num_microbatches), *words]
    return subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, preexec_fn=preexec_fn, check=False)


def _with_1_kib_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))


@pytest.mark.parametrize("option", ["--json", "--svg"])
@pytest.mark.sampled(0.25)
def test_a_file_that_does_not_fit_leaves_the_old_one(option: str, tmp_path: Path) -> None:
    file = tmp_path / "plan"
    assert _planned(8, option, str(file)).returncode == 0
    old = file.read_bytes()
    assert len(old) > 1024
    failed = _planned(9, option, str(file), preexec_fn=_with_1_kib_files)
    assert failed.returncode == 2
    assert failed.stderr == f"zerobubble: error: {file}: File too large\n"
    assert file.read_bytes() == old
    assert os.listdir(tmp_path) == ["plan"]


def test_a_kill_while_it_is_written_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "plan"
    file.write_text("old")

    def killed(descriptor: int) -> None:
        assert next(tmp_path.glob(".zerobubble-*.new")).read_text() == "new"
        assert file.read_text() == "old"
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(str(file), "new")
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["plan"]


def test_links_stay_links_and_pipes_stay_pipes(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "plan")
    write_whole(str(link), "text")
    assert link.is_symlink()
    assert (tmp_path / "plan").read_text() == "text"
    source, target = os.pipe()
    write_whole(f"/dev/fd/{target}", "text")
    os.close(target)
    with os.fdopen(source) as stream:
        assert stream.read() == "text"
    output = tmp_path / "output"
    with output.open("w") as stream:
        subprocess.run([*PLAN, "--num-microbatches", "4", "--json", "/dev/stdout"], cwd=ROOT, stdout=stream, check=True)
    assert "post-validation" in output.read_text(), "what is printed later goes to the same file"


def test_permissions_and_hard_links_stay(tmp_path: Path) -> None:
    file = tmp_path / "plan"
    file.write_text("old")
    file.chmod(0o600)
    write_whole(str(file), "text")
    assert (file.read_text(), file.stat().st_mode & 0o777) == ("text", 0o600)
    (tmp_path / "link").hardlink_to(file)
    write_whole(str(file), "new")
    assert (tmp_path / "link").read_text() == "new"


def test_a_file_in_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files there can be written, but not replaced; the superuser, who may everything, has to be told so."""
    file, access = tmp_path / "plan", os.access
    file.write_text("old")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    monkeypatch.setattr(Path, "replace", lambda *names: pytest.fail("the file was replaced"))
    write_whole(str(file), "text")
    assert file.read_text() == "text"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "--svg", "none/plan.svg"], "--svg none/plan.svg: none is not a writable directory: it does not exist"),
        (["plan", "--json", "."], "--json . is a directory; give the file to write in it, such as "),
        (["compare", "--json", "/dev/full/x"], "--json /dev/full/x: /dev/full is not a writable directory: it "),
    ],
)
def test_what_cannot_be_written_is_refused_before_a_search(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("megatron.zerobubble.cli.plan.best", lambda *given, **more: pytest.fail("it searched"))
    assert main([*words, "--num-ranks", "2", "--num-microbatches", "4"]) == 2
    assert message.replace("none is", f"{tmp_path / 'none'} is") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "none/plan", "x" * 300, "loop"])
def test_an_error_names_the_target(name: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    target = str(tmp_path / name)
    with pytest.raises(OSError, match="Errno") as raised:
        write_whole(target, "text")
    assert raised.value.filename == target


SCRIPT = """
import sys, time, tqdm
from concurrent.futures import ThreadPoolExecutor
from megatron.zerobubble.cli import progress_bar as progress
progress.PATIENCE_S = float(sys.argv[1])
progress._REFRESH_S = 0.02
with ThreadPoolExecutor(1) as pool:
    progress.waited(pool.submit(time.sleep, 0.2), lambda: "searching")
for _ in progress.track(range(3), "limits"):
    time.sleep(0.05)
print("done")
"""


def on_a_terminal(patience_s: float) -> tuple[str, str]:
    """Standard output, and what the terminal shows of standard error."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(patience_s)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        check=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    shown = b""
    os.set_blocking(ours, False)
    with contextlib.suppress(BlockingIOError):  # all is read; while `theirs` is open, which would discard the rest
        while part := os.read(ours, 65536):
            shown += part
    os.close(theirs)
    os.close(ours)
    return done.stdout, shown.decode()


def test_on_a_terminal_it_is_shown_and_taken_away() -> None:
    printed, shown = on_a_terminal(0.0)
    assert printed == "done\n"
    assert "searching: 00:00" in shown
    assert "limits: " in shown
    assert "3/3" in shown or "2/3" in shown
    assert shown.rstrip("\r").endswith(" "), "the last bar is overwritten with spaces"


def test_a_quick_search_shows_no_bar() -> None:
    assert on_a_terminal(30.0) == ("done\n", "")


def test_elsewhere_there_is_none(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with ThreadPoolExecutor(1) as pool:
        assert progress.waited(pool.submit(abs, -1), lambda: "searching") == 1
    assert list(progress.track([1, 2], "limits")) == [1, 2]
    assert main(["compare", "--num-ranks", "2", "--num-microbatches", "2", "--schedules", "1f1b,zb-h1", "--json", "-"]) == 0
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner needs the standard library only."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with ThreadPoolExecutor(1) as pool:
        assert progress.waited(pool.submit(abs, -1), lambda: "searching") == 1
    assert list(progress.track([1, 2], "limits")) == [1, 2]


def test_the_width_and_the_colors_are_the_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a terminal a text has the same form everywhere."""
    monkeypatch.setenv("COLUMNS", "97")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert (columns(None), columns(70), has_colors()) == (160, 70, False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert (columns(None), columns(70), has_colors()) == (97, 70, True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors()
    monkeypatch.setenv("NO_COLOR", "")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colors()
