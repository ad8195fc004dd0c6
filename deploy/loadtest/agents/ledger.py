"""Replays that are over, in a file, so that a grid of hours that was cut off goes on.

A line each, an order and its figures, written when the replay ends. The same order has the same
figures as long as scheduler and simulation are the same: a file is of one version of tokend.
"""

import threading

from proto.codec import from_json, to_json_line
from proto.errors import ConfigError, ProtocolError
from proto.replay import ReplayFigures, ReplayOrder, ReplayRecord


class Ledger:
    """path: read at once where it is there, and appended to; "" keeps nothing beyond this run.

    Raises ConfigError where the file cannot be read or written, or is something else.
    """

    def __init__(self, path: str = "") -> None:
        self._path = path
        self._lock = threading.Lock()
        self._known: dict[bytes, ReplayFigures] = {}
        if not path:
            return
        try:
            with open(path, "ab+") as file:
                file.seek(0)
                whole, end, _ = file.read().rpartition(b"\n")
                for text in whole.splitlines():
                    line = from_json(text, ReplayRecord)
                    self._known[to_json_line(line.order)] = line.figures
                file.truncate(len(whole) + len(end))  # what was being written as it was cut off
        except OSError as error:
            raise ConfigError(f"--ledger: {path}: {error.strerror}", "ledger") from None
        except ProtocolError as error:
            raise ConfigError(
                f"--ledger: {path} is no file of replays: {error}", "ledger"
            ) from None

    def figures(self, order: ReplayOrder) -> ReplayFigures | None:
        """Of such a replay, where there was one."""
        return self._known.get(to_json_line(order))

    def keep(self, order: ReplayOrder, figures: ReplayFigures) -> None:
        """A replay is over; from any thread."""
        with self._lock:
            self._known[to_json_line(order)] = figures
            if self._path:
                with open(self._path, "ab") as file:
                    file.write(to_json_line(ReplayRecord(order, figures)))
