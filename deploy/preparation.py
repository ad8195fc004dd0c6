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
    """One run of `command`; `fileno()` turns readable when it is over.

    What it prints goes into memory: a pipe would fill up, or be held open by whoever it
    has started itself.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._output = os.memfd_create("tokend-manifest")
        self._errors = os.memfd_create("tokend-errors")
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._errors,
                env=env,
                process_group=0,
            )
        except OSError:
            self._forget()
            raise
        self.pid = self._process.pid
        self._pidfd = os.pidfd_open(self.pid)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def result(self) -> PreparedModel:
        """Of one that has ended; raises ModelError with its last line."""
        if self._process.returncode != 0:
            lines = _content(self._errors).decode(errors="replace").strip().splitlines()
            raise ModelError(lines[-1].removeprefix("tokend: ") if lines else self._manner())
        try:
            return from_json(_content(self._output), PreparedModel)
        except ProtocolError as error:
            raise ModelError(f"preparing the model printed no manifest: {error}") from None

    def close(self) -> None:
        """End it if it still runs, and let go of it."""
        if not self.has_ended():
            self._process.kill()
            self._process.wait()
        os.close(self._pidfd)
        self._forget()

    def _manner(self) -> str:
        return f"preparing the model ended with exit status {self._process.returncode}"

    def _forget(self) -> None:
        for descriptor in (self._output, self._errors):
            os.close(descriptor)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0)
