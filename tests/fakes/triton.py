"""Triton's interpreter, and stand-ins for the kernels of worker/cuda/kernels."""

import importlib.util
import sys

import pytest

KERNELS = "worker.cuda.kernels"
FILES = ("adapters", "products", "recurrence", "rows", "sampling")
"""The files of worker/cuda/kernels."""


def need_triton() -> None:
    """Skip the test without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")


def interpret_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the kernels in this test; Triton decides it when it reads a file."""
    need_triton()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for file in FILES:
        monkeypatch.setitem(sys.modules, f"{KERNELS}.{file}", None)
        del sys.modules[f"{KERNELS}.{file}"]
