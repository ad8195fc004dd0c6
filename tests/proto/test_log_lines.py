"""Lines of the log as programs read them."""

import json
import logging
import sys
from datetime import datetime

from proto.log_lines import FIELDS, formatter, notice_line


def record(message: str, **more: object) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "x", "levelname": "ERROR", "msg": message, **more})


def test_a_line_is_one_object_whatever_it_says() -> None:
    text = 'two\nlines, a "quote" and an é \x07'
    line = formatter("json", "engine 0").format(record(text))
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == text
    assert (found["level"], found["logger"], found["process"]) == ("ERROR", "x", "engine 0")
    assert datetime.fromisoformat(found["time"]).utcoffset() is not None


def test_fields_have_names_of_their_own() -> None:
    line = formatter("json", "api 0").format(record("m", **{FIELDS: {"id": "r", "ttft": None}}))
    assert json.loads(line)["id"] == "r"
    assert json.loads(line)["ttft"] is None


def test_an_error_has_its_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        line = formatter("json", "api 0").format(record("m", exc_info=sys.exc_info()))
    assert "ValueError: broken" in json.loads(line)["traceback"]


def test_lines_for_people() -> None:
    assert formatter("text", "api 0").format(record("m")).endswith(" ERROR api 0: m")


def test_a_notice_with_a_percent_sign_is_as_it_is() -> None:
    assert json.loads(notice_line("100 %s", "worker 0"))["message"] == "100 %s"
