"""Lines of the log: for people, or each a JSON object for programs.

Owns their form. What a line says is whoever's who writes it; a record with `fields` (a dict of
texts and numbers) is about one thing that programs want by name, such as a request.
"""

import logging
from datetime import UTC, datetime
from typing import Final

from proto.codec import to_compact_json
from proto.config import LogFormat

FIELDS: Final = "fields"
"""The name of `extra` under which a record has its fields."""


class JsonLines(logging.Formatter):
    """time (UTC), level, process, logger, message; then the fields, and a traceback, if any."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": at,
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return to_compact_json(line).decode()


def notice_line(message: str, process: str) -> str:
    """A line of one that keeps no log."""
    record = logging.makeLogRecord({"name": "tokend", "levelname": "INFO", "msg": message})
    return JsonLines(process).format(record)


def formatter(form: LogFormat, process: str) -> logging.Formatter:
    """Of the lines of a process."""
    if form == "json":
        return JsonLines(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S")
