"""One phase in a process of its own: its figures, or what went wrong, go to a file.

python -m tests.gpu.one_phase FUNCTION FILE
"""

import importlib
import json
import sys
import traceback
from pathlib import Path

from tests.gpu.phases import Failed


def main(function: str, file: str) -> None:
    """FUNCTION is "module:function" of tests.gpu."""
    module, name = function.split(":")
    try:
        answer = {"figures": getattr(importlib.import_module(f"tests.gpu.{module}"), name)()}
    except Failed as failure:
        answer = {"error": str(failure)}
    except Exception:
        answer = {"error": traceback.format_exc()}
    Path(file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
