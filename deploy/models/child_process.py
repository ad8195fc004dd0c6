"""A program of this package that prepares or downloads a model in a process of its own.

The libraries it imports stay out of the caller, Ctrl-C ends it, and it may end at any point. It
prints lines of JSON, each a list [kind, text, fraction, detail].
"""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from deploy.display import Display
from proto.errors import ModelError

QUIET_LIBRARIES: Final = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that keep libraries from printing, and from reports of their use."""


class ChildMessage(NamedTuple):
    """A line of the process.

    kind: "progress", "notice", "result", "other" for output of a library, or one of ERRORS.
    fraction: of the progress, 0 to 1; None if unknown. detail: such as bytes and rate.
    """

    kind: str
    text: str
    fraction: float | None = None
    detail: str = ""

    def send(self) -> None:
        """Print the message for the parent process, in one write: threads may do so."""
        sys.stdout.write(f"{json.dumps(self)}\n")
        sys.stdout.flush()

    @classmethod
    def from_line(cls, line: str) -> "ChildMessage":
        try:
            return cls(*json.loads(line))
        except (ValueError, TypeError):
            return cls("other", line.rstrip())


class NotOnHubError(ModelError):
    """The hub has no model of this name."""


class UnreachableError(ModelError):
    """The hub of models cannot be reached."""


ERRORS: Final = {"error": ModelError, "unknown": NotOnHubError, "unreachable": UnreachableError}
"""Kind of a message → the error that it is."""


def run_child(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    display: Display,
    what: str,
) -> str:
    """Run a module and return the text of its last result; "" without one.

    what: begin of the progress that is shown, and of the error if the process ends without one.
    Raises ModelError with the process's error.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**variables, **QUIET_LIBRARIES},
        process_group=0,  # Ctrl-C goes to the parent, which ends this process
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    result, failure, step = "", None, ""
    try:
        for line in process.stdout:
            message = ChildMessage.from_line(line)
            if message.kind in ERRORS:
                failure = ERRORS[message.kind](message.text)
            elif message.kind == "result":
                result = message.text
            elif message.kind == "notice":
                display.notice(message.text)
            elif message.kind == "progress":
                step = message.text
                display.progress(f"{what}: {step}", message.fraction, detail=message.detail)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    if failure is not None:
        raise failure
    if status == -signal.SIGPROF:
        raise ModelError(f"{what}: {step} takes too long")
    if status != 0:
        raise ModelError(f"{what} failed with exit status {status}")
    return result
