"""Format of log lines: text, or one JSON object per line.

A record with the attribute `fields` (a dict of strings and numbers) adds these to its JSON object,
for example the figures of a request.
"""

import logging
from datetime import UTC, datetime
from typing import Final

from proto.codec import to_compact_json
from proto.config import LogFormat

FIELDS: Final = "fields"
"""Key of `extra` for the fields of a record."""


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


def notice_line(message: str, process: str, level: str = "INFO", **fields: str | float) -> str:
    """Return a JSON line for a message of a process that uses no logger."""
    content = {"name": "tokend", "levelname": level, "msg": message, FIELDS: fields}
    return JsonLines(process).format(logging.makeLogRecord(content))


def formatter(form: LogFormat, process: str) -> logging.Formatter:
    """Return the formatter for the log lines of a process."""
    if form == "json":
        return JsonLines(process)
    return logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s", "%H:%M:%S")
