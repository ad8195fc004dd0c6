"""Log lines in JSON and in text."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from proto.runtime.log_lines import FIELDS, LogStream, formatter, notice_line
from proto.settings.config import LogFormat


def record(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "x", "levelname": "ERROR", "msg": message, **more})


def test_a_message_with_newlines_and_quotes_is_one_json_object() -> None:
    text = 'two\nlines, a "quote" and an é \x07'
    line = formatter("json", "engine 0").format(record(text))
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == text
    assert (found["level"], found["logger"], found["process"]) == ("ERROR", "x", "engine 0")
    assert datetime.fromisoformat(found["time"]).utcoffset() is not None


def test_extra_fields_are_top_level_keys() -> None:
    line = formatter("json", "api 0").format(record("m", **{FIELDS: {"id": "r", "ttft": None}}))
    assert json.loads(line)["id"] == "r"
    assert json.loads(line)["ttft"] is None


def test_exceptions_are_logged_with_a_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = formatter("json", "api 0").format(record("m", exc_info=sys.exc_info()))
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_text_format() -> None:
    assert formatter("text", "api 0").format(record("m")).endswith(" ERROR api 0: m")


def test_percent_signs_in_a_notice_are_not_formatted() -> None:
    assert json.loads(notice_line("100 %s", "worker 0"))["message"] == "100 %s"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe whose writing end does not block: (reading end, writing end)."""
    ends = os.pipe()
    os.set_blocking(ends[1], False)
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def read_all(descriptor: int) -> str:
    """What a pipe holds now."""
    os.set_blocking(descriptor, False)
    pieces = []
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(descriptor, 1 << 16):
            pieces.append(piece)
    return b"".join(pieces).decode()


def test_lines_reach_the_reader_whole(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1], "engine 0")
    print("one", "é", file=stream)
    stream.write("two\nthr")
    assert read_all(pipe[0]) == "one é\ntwo\n"
    stream.write("ee")
    assert read_all(pipe[0]) == ""
    stream.flush()
    assert read_all(pipe[0]) == "three"
    long = "x" * 100_000
    writer = threading.Thread(target=lambda: print(long, file=stream))
    writer.start()
    found = ""
    while not found.endswith("\n"):
        found += read_all(pipe[0])
    writer.join()
    assert found == long + "\n"


def test_a_reader_that_has_gone_is_no_error(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1], "engine 0")
    os.close(pipe[0])
    print("lost", file=stream)
    print("lost", file=stream, flush=True)
    stream.flush()
    logger = logging.Logger("x")
    logger.addHandler(logging.StreamHandler(stream))
    logger.error("lost, and no traceback")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_reader_that_does_not_read_costs_lines_that_are_counted(
    pipe: tuple[int, int], log_format: LogFormat
) -> None:
    stream = LogStream(pipe[1], "engine 0", log_format)
    began = time.monotonic()
    for number in range(1_000):
        print(f"{number:0>200}", file=stream)
    assert time.monotonic() - began < 1.0
    kept = read_all(pipe[0]).splitlines()
    assert all(len(line) == 200 for line in kept[:-1])
    whole = [line for line in kept if len(line) == 200]
    print("again", file=stream)
    *cut, said, again = read_all(pipe[0]).splitlines()
    assert not any(cut)
    assert again == "again"
    lost = 1_000 - len(whole)
    assert f"{lost} lines of the log could not be written" in said
    if log_format == "json":
        assert json.loads(said)["dropped_lines"] == lost
    print("and again", file=stream)
    assert read_all(pipe[0]) == "and again\n"


def test_a_reader_that_reads_slowly_costs_a_share_of_the_time(pipe: tuple[int, int]) -> None:
    stream = LogStream(pipe[1], "engine 0")
    print("x" * 60_000, file=stream)
    reading = threading.Event()

    def read_slowly() -> None:
        while not reading.wait(0.03):
            os.read(pipe[0], 4096)

    reader = threading.Thread(target=read_slowly)
    reader.start()
    waited = 0.0
    began = time.monotonic()
    while time.monotonic() - began < 1.5:
        asked = time.monotonic()
        print("y" * 1500, file=stream)
        waited += time.monotonic() - asked
        time.sleep(0.005)
    reading.set()
    reader.join()
    assert waited < 0.6
    text = ""
    while not text.endswith("the end\n"):
        text += read_all(pipe[0])
        print("the end", file=stream)
    assert "of the log could not be written" in text


def test_a_reader_that_comes_back_is_told(tmp_path: Path) -> None:
    fifo = tmp_path / "log"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
    stream = LogStream(writer, "engine 0")
    os.close(reader)
    print("lost", file=stream)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    stream.flush()
    assert "1 line of the log could not be written" in read_all(reader)
    os.close(reader)
    os.close(writer)


PROGRAM = """
import os, sys, threading, warnings
from proto.runtime.log_lines import guard_output
guard_output("tokend")
guard_output("tokend", "json")
sys.stdin.read()
for _ in range(3000):
    warnings.warn_explicit("w" * 100, UserWarning, "file", _)
    print("line" * 20)
threading.Thread(target=lambda: 1 / 0).start()
os.write(2, b"x" * 4096) if sys.argv[1] == "full" else None
raise SystemExit(7)
"""


@pytest.mark.parametrize("reader", ["gone", "full", "none"])
def test_a_process_ends_with_its_own_status(reader: str) -> None:
    """The reader has gone, or does not read, or there is no output at all."""
    close = {"preexec_fn": lambda: (os.close(1), os.close(2))} if reader == "none" else {}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, reader],
        **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE},
        **close,  # type: ignore[call-overload]
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    if reader == "gone":
        process.stdout.close()
        process.stderr.close()
    process.stdin.close()
    assert process.wait(20) == (1 if reader == "full" else 7)


def test_other_programs_that_share_the_pipe_may_still_block() -> None:
    ours, theirs = os.pipe()
    program = "from proto.runtime.log_lines import guard_output; guard_output('tokend'); print('x')"
    subprocess.run([sys.executable, "-c", program], stdout=theirs, check=True)
    assert os.get_blocking(theirs)
    assert os.read(ours, 100) == b"x\n"
    os.close(ours)
    os.close(theirs)
