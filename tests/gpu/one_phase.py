"""Run one phase in a process of its own; figures are written to a file at once.

python -m tests.gpu.one_phase FUNCTION FILE
"""

import importlib
import sys
from pathlib import Path

from tests.gpu.hardware import rehearsing
from tests.gpu.report import Report


def main(function: str, file: str) -> None:
    """FUNCTION is "module:function" of tests.gpu and takes a Report."""
    module, name = function.split(":")
    report = Report(Path(file))
    with report.part(name):
        if rehearsing():
            from tests.gpu.rehearsal import rehearsed

            with rehearsed():
                getattr(importlib.import_module(f"tests.gpu.{module}"), name)(report)
        else:
            getattr(importlib.import_module(f"tests.gpu.{module}"), name)(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
