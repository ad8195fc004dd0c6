"""The preparing process: `python -m deploy.models.prepare NAME SOURCE KIND TARGET FINAL`.

Owns nothing but the order of things: read the source, write the folder, report.
"""

import sys
import time
import warnings

from deploy.models import gguf_file, hf_folder
from deploy.models import prepared_folder as folder
from deploy.models.job import Event, Job, render
from proto.errors import ModelError

_REPORT_EVERY_SECONDS = 0.1


class _LinePrinter:
    """Reports to the parent, not more often than it can matter."""

    def __init__(self) -> None:
        self._last = ("", 0.0)

    def __call__(self, what: str, fraction: float | None) -> None:
        now = time.monotonic()
        text, at = self._last
        if what == text and now - at < _REPORT_EVERY_SECONDS:
            return
        self._last = (what, now)
        print(render(Event("progress", what, fraction)), flush=True)


def prepare(work: Job, report: folder.ProgressCallback) -> None:
    """Fill the target folder of a job; raises ModelError or OSError."""
    read = {"gguf": gguf_file.read, "folder": hf_folder.read}[work.kind]
    contents = read(work.source, report)
    folder.write(
        contents,
        name=work.name,
        source=work.source,
        target=work.target,
        final=work.final,
        report=report,
    )


def main() -> int:
    """Exit status: 0 done, 2 the model cannot be used."""
    warnings.simplefilter("ignore")  # of libraries, about models in general
    try:
        prepare(Job.from_arguments(sys.argv[1:]), _LinePrinter())
    except (ModelError, OSError) as error:
        print(render(Event("error", " ".join(str(error).split()))), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
