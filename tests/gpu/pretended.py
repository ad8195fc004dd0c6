"""Phases that end in every way there is, for the test of what runs them."""

import os
import threading
from typing import Any

from tests.gpu.phases import demand


def fine() -> dict[str, Any]:
    return {"rate": 2.5, "missed": []}


def fails() -> dict[str, Any]:
    demand(False, "2 is not 3")
    return {}


def breaks() -> dict[str, Any]:
    return {"rate": 1 / len([])}


def dies() -> dict[str, Any]:
    os._exit(7)


def hangs() -> dict[str, Any]:
    threading.Event().wait()
    return {}
