"""`tokend trace view`: the page as a file; test_browser.py tests its display."""

import base64
import json
import re
import struct
import zlib
from pathlib import Path

import pytest

from deploy import cli
from deploy.trace.command import read_trace
from deploy.trace.page import render
from proto.messages.engine_io import agent_session_name
from tests.fakes.traced_engine import TracedEngine, random_load


@pytest.fixture(scope="module")
def engine() -> TracedEngine:
    engine = TracedEngine()
    random_load(4, engine)
    return engine


def data_of(page: str) -> tuple[dict, dict[str, list]]:
    """Return the data that the page's script reads."""
    (text,) = re.findall(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    data = zlib.decompress(base64.b64decode(text))
    length = int.from_bytes(data[:4], "little")
    about, at, columns = json.loads(data[4 : 4 + length]), 4 + length, {}
    for name, (kind, count) in about["columns"].items():
        columns[name] = list(struct.unpack_from(f"<{count}{kind}", data, at))
        at += (8 if kind == "d" else 4) * count
    assert at == len(data)
    return about, columns


def test_the_page_has_every_request_and_step(engine, tmp_path: Path, capsys) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(engine.content)
    assert cli.main(["trace", "view", str(path)]) == 0
    assert path.with_suffix(".html").stat().st_mode & 0o777 == 0o600
    page = tmp_path / "run.html"
    assert capsys.readouterr().out == f"{page}\n"
    about, columns = data_of(page.read_text())
    recording = engine.recording
    assert columns["seq_id"] == list(recording.sequences)
    assert len(about["requests"]) == len(columns["end"]) == len(recording.sequences)
    assert columns["output"] == [each.num_outputs for each in recording.sequences.values()]
    assert columns["segment_row"] == sorted(columns["segment_row"])
    starts = [
        row for at, row in enumerate(columns["segment_row"]) if columns["segment_state"][at] == 0
    ]
    assert set(starts) <= set(range(len(columns["seq_id"])))
    assert about["blocks"] == 39
    for name in ("step_time", "step_end", "prefill", "decode", "free", "pinned"):
        assert len(columns[name]) == len(columns["step"])


def test_the_page_loads_no_resources_and_runs_only_its_script(engine, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    evil = b'"job":"</script><script>alert(1)</script>",'
    path.write_bytes(
        engine.content.replace(b'"num_prompt_tokens"', evil + b'"num_prompt_tokens"', 1)
    )
    page = render(read_trace(path), path.name)
    assert "alert(1)" not in page
    assert data_of(page)[0]["jobs"][0].startswith("</script>")
    assert not re.search(r"(src|href)=|https?://|url\(|import\(|fetch\(", page)
    assert "default-src 'none'" in page
    assert page.count("<script") == 2


def test_names_are_escaped(engine, tmp_path: Path) -> None:
    path = tmp_path / "<b>&.jsonl"
    path.write_bytes(engine.content)
    assert "<title>&lt;b&gt;&amp;.jsonl - scheduler trace</title>" in render(
        read_trace(path), path.name
    )


def test_agent_sessions_are_shown_by_the_ids_of_their_clients(
    engine, tmp_path: Path, capsys
) -> None:
    lines = [json.loads(line) for line in engine.content.splitlines()]
    arrivals = [line for line in lines if line["kind"] == "arrival"]
    expected = []
    for number, line in enumerate(arrivals):
        tenant = line.get("tenant", 0)
        job_id = ["fix-1", "only tenant 1", "not asked for"][number % 3 if tenant else 0]
        line["job"] = agent_session_name(job_id, tenant)
        label = {"fix-1": f"fix-1 (tenant {tenant})", "not asked for": line["job"]}
        expected.append(label.get(job_id, job_id))
    path, ids = tmp_path / "run.jsonl", tmp_path / "ids"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ids.write_text("only tenant 1\n\nnever sent\n")
    arguments = ["trace", "view", str(path), "--job-id", "fix-1", "--job-ids", str(ids)]
    assert cli.main(arguments) == 0
    assert "no agent session of the trace has the id never sent\n" in capsys.readouterr().err
    assert data_of((tmp_path / "run.html").read_text())[0]["jobs"] == expected
    assert len(set(expected)) > 3
    assert cli.main(["trace", "view", str(path), "--job-ids", str(tmp_path / "none")]) == 2
    assert "--job-ids" in capsys.readouterr().err


def test_a_truncated_line_is_skipped_and_an_invalid_one_reported(
    engine, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(engine.content[:-20])
    assert cli.main(["trace", "view", str(path), "-o", str(tmp_path / "page.html")]) == 0
    path.write_bytes(engine.content.replace(b'"kind":"result"', b'"kind":"?"', 1))
    assert cli.main(["trace", "view", str(path)]) == 2
    assert "line " in capsys.readouterr().err
    path.write_bytes(b"")
    assert cli.main(["trace", "view", str(path)]) == 2
    assert cli.main(["trace", "view", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_invalid_arguments(capsys) -> None:
    for words in (["trace"], ["trace", "look"], ["trace", "view"]):
        assert cli.main(words) == 2
    assert cli.main(["trace", "--help"]) == 0
    assert "view FILE" in capsys.readouterr().out
