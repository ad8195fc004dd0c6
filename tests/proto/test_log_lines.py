"""Log lines in JSON and in text."""

import json
import logging
import sys
from datetime import datetime

from proto.log_lines import FIELDS, formatter, notice_line


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
