"""The file of a trace: permissions, size limit, slow disks."""

import os
import stat
from pathlib import Path

import pytest

from engine_core.trace.file import TraceFile, path_of_epoch
from proto.errors import ConfigError
from proto.messages.sched_trace import Dropped, Event, TraceEnd, read_line

MUCH = 1 << 30


def lines_of(path):
    content = path.read_bytes()
    assert content.endswith(b"\n")
    return [read_line(each) for each in content.splitlines()]


def test_the_trace_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("old")
    path.chmod(0o644)
    file = TraceFile(str(path), MUCH)
    file.write_line(Event(what="pause"))
    file.close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert lines_of(path) == [Event(what="pause"), TraceEnd(reason="shutdown")]


def test_a_symlink_is_not_followed_and_a_missing_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "else")
    for name in ("link", "nowhere/trace.jsonl"):
        with pytest.raises(ConfigError, match="--sched-trace"):
            TraceFile(str(tmp_path / name), MUCH)
    assert not (tmp_path / "else").exists()


def test_a_path_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o644)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    modes = [os.stat(path).st_mode for path in (pipe, os.devnull)]
    for path in (pipe, os.devnull):
        with pytest.raises(ConfigError, match=f"--sched-trace {path}: is not a regular file"):
            TraceFile(str(path), MUCH)
    os.close(reader)
    assert [os.stat(path).st_mode for path in (pipe, os.devnull)] == modes


def test_a_pipe_without_a_reader_does_not_block_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="--sched-trace"):
        TraceFile(str(tmp_path / "pipe"), MUCH)


def test_the_trace_stops_at_its_size_limit(tmp_path: Path, caplog) -> None:
    path = tmp_path / "trace.jsonl"
    file = TraceFile(str(path), 200)
    for _ in range(100):
        file.write_line(Event(what="resume"))
    assert file.has_ended
    file.close()
    *lines, last = lines_of(path)
    assert last == TraceEnd(reason="limit")
    assert lines
    assert set(map(repr, lines)) == {repr(Event(what="resume"))}
    assert path.stat().st_size <= 200 + 40
    assert "--sched-trace-max-bytes" in caplog.text


def test_dropped_trace_lines_are_counted(tmp_path: Path) -> None:
    """Nothing is written before `close`, because the thread ends at once."""
    path = tmp_path / "trace.jsonl"
    file = TraceFile(str(path), MUCH, max_unwritten=100)
    file._closing.set()
    file._thread.join()
    for _ in range(50):
        file.write_line(Event(what="resume"))
    file._write()
    file.write_line(Event(what="pause"))
    file._closing.clear()
    file.close()
    lines = lines_of(path)
    (dropped,) = [each.num_lines for each in lines if isinstance(each, Dropped)]
    assert dropped + sum(each == Event(what="resume") for each in lines) == 50
    assert lines[-2:] == [Event(what="pause"), TraceEnd(reason="shutdown")]


def test_a_full_disk_ends_the_trace_and_nothing_else(tmp_path: Path, caplog) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("there is no /dev/full")
    file = TraceFile(str(tmp_path / "trace.jsonl"), MUCH)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._descriptor)
    os.close(full)
    file.write_line(Event(what="pause"))
    file.close()
    assert file.has_ended
    assert "No space left" in caplog.text


def test_later_engines_have_files_of_their_own() -> None:
    assert path_of_epoch("a/trace.jsonl", 1) == "a/trace.jsonl"
    assert path_of_epoch("a/trace.jsonl", 7) == "a/trace.7.jsonl"
    assert path_of_epoch("trace", 2) == "trace.2"
