"""The process that prepares a model, and its messages to its parent process.

Command line: `python -m deploy.models.prepare NAME SOURCE KIND TARGET FINAL`. It prints lines of
JSON, each a list [kind, text, fraction].
"""

import json
import sys
import time
import warnings
from typing import Final, NamedTuple

from deploy.models import gguf_file, hf_folder, prepared_folder
from proto.errors import ModelError

QUIET_LIBRARIES: Final = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that keep libraries from printing, and from requests to a model hub."""
_PROGRESS_SECONDS: Final = 0.1
"""Minimum time between two lines about the same operation."""


class PrepareMessage(NamedTuple):
    """A line of the process. kind: "progress", "error", or "other" for output of a library."""

    kind: str
    text: str
    fraction: float | None = None

    def to_line(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_line(cls, line: str) -> "PrepareMessage":
        try:
            kind, text, fraction = json.loads(line)
        except (ValueError, TypeError):
            return cls("other", line.rstrip())
        return cls(kind, text, fraction)


class _ProgressPrinter:
    """Prints progress at most every 0.1 s per operation."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def __call__(self, what: str, fraction: float | None) -> None:
        now = time.monotonic()
        text, printed_at = self._last
        if what == text and now - printed_at < _PROGRESS_SECONDS:
            return
        self._last = (what, now)
        print(PrepareMessage("progress", what, fraction).to_line(), flush=True)


def prepare(
    name: str,
    source: str,
    kind: str,
    target: str,
    final: str,
    report: prepared_folder.ProgressCallback,
) -> None:
    """Fill the folder `target`, which will be moved to `final`; raises ModelError or OSError.

    name, source, kind: as in `store.ModelSource`.
    """
    read = {"gguf": gguf_file.read, "folder": hf_folder.read}[kind]
    contents = read(source, report)
    prepared_folder.write(
        contents, name=name, source=source, target=target, final=final, report=report
    )


def main() -> int:
    """Prepare a model; return the exit status: 0 done, 2 the model cannot be used."""
    warnings.simplefilter("ignore")  # libraries warn about models in general
    try:
        name, source, kind, target, final = sys.argv[1:]
        prepare(name, source, kind, target, final, _ProgressPrinter())
    except (ModelError, OSError) as error:
        message = PrepareMessage("error", " ".join(str(error).split()))
        print(message.to_line(), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
