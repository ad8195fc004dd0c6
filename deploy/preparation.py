"""The model is looked at once more while it is served: `tokend prepare` in a process of its own.

Owns that process. It may take minutes, and the supervisor's loop must go on turning.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

from proto.codec import from_json
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import PreparedModel


class Preparation:
    """One run of `command`; `fileno()` turns readable when it is over."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            process_group=0,
        )
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> PreparedModel:
        """Of one that has ended; raises ModelError with its last line."""
        output, errors = self._process.communicate()
        if self._process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or ["no reason was given"]
            raise ModelError(lines[-1].removeprefix("tokend: "))
        try:
            return from_json(output, PreparedModel)
        except ProtocolError as error:
            raise ModelError(f"preparing the model printed no manifest: {error}") from None

    def close(self) -> None:
        """End it if it still runs, and let go of it."""
        if not self.has_ended():
            self._process.kill()
        self._process.communicate()
        os.close(self._pidfd)
