"""Graphs of a FakeDevice: tensor operations are recorded and replayed on the same memory.

As on a real device no Python runs in a replay: decisions made on the host during the capture are
fixed, and a tensor that replaces another one afterwards is not seen.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.nested import nested_tensors


class CaptureError(Exception):
    """An operation that cannot be captured."""


class Recorder(TorchDispatchMode):
    """Records and executes the operations while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []
        self._hidden = False

    @contextmanager
    def as_one(self, run: Callable[[], None]) -> Iterator[None]:
        """Record all operations inside as one call of `run`."""
        self.calls.append(run)
        self._hidden = True
        try:
            yield
        finally:
            self._hidden = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._hidden:
            return result
        if func is torch.ops.aten._local_scalar_dense.default:
            raise CaptureError("a number is read on the host inside a capture")
        given = {_place(each) for each in nested_tensors((args, kwargs))}
        outputs = [each for each in nested_tensors(result) if _place(each) not in given]

        def again() -> None:
            found = [
                each for each in nested_tensors(func(*args, **kwargs)) if _place(each) not in given
            ]
            for output, each in zip(outputs, found, strict=True):
                output.copy_(each)

        self.calls.append(again)
        return result


class FakeGraph:
    """A captured graph. replayed: called after every replay."""

    def __init__(self, calls: list[Callable[[], None]], replayed: Callable[[], None]) -> None:
        self._calls = calls
        self._replayed = replayed

    def replay(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for call in self._calls:
                call()
        self._replayed()


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
