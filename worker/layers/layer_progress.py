"""Which layers of a step may be computed, and which are: what KV connectors load and save by.

    loading thread     load layer 0 ─▶ loaded 1 ─▶ load layer 1 ─▶ loaded 2 …
    computing threads            layer 0 ─▶ computed 1        layer 1 ─▶ computed 2 …
    saving thread                             save layer 0              save layer 1 …

All layers of a step are one call of a kernel or one graph, in which no Python runs, so the two
numbers are in memory, or events of a device stand for the second one.
"""

import time
from typing import Final, Protocol

import numpy as np

_LOADED: Final = 0
_COMPUTED: Final = 1
_PAUSE_SECONDS: Final = 1e-4
"""Between two looks at a number that another thread writes."""


class LayerProgress(Protocol):
    """The layers of one step at a time, counted from the first.

    loads_ahead: whether all layers must be loaded before the step is launched.
    """

    loads_ahead: bool

    def begin_step(self, *, has_copies: bool) -> None:
        """Start with a step that is about to be launched; without copies nothing waits."""

    def note_loaded(self, layer: int) -> None:
        """Let a layer be computed: the KV that it reads is there."""

    def begin_layer(self, layer: int) -> None:
        """Wait until a layer may be computed; called where layers are called one by one."""

    def end_layer(self, layer: int) -> None:
        """Note that K and V of a layer are written, or will be by what is queued on a device."""

    def wait_computed(self, layer: int) -> None:
        """Wait until K and V of a layer are written; called by another thread than the step's."""

    def end_step(self) -> None:
        """End the step, which is computed or abandoned: no thread waits any longer."""


class HostProgress:
    """LayerProgress of a device that computes a step in the call that launches it.

    address: of the two numbers, uint32, for kernels; 0 while a step has no copies.
    """

    loads_ahead = False

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._cells = np.full(2, num_layers, dtype=np.uint32)
        self.address = 0

    def begin_step(self, *, has_copies: bool) -> None:
        self._cells[:] = 0 if has_copies else self._num_layers
        self.address = self._cells.ctypes.data if has_copies else 0

    def note_loaded(self, layer: int) -> None:
        self._cells[_LOADED] = layer + 1

    def begin_layer(self, layer: int) -> None:
        self._wait(_LOADED, layer)

    def end_layer(self, layer: int) -> None:
        if self.address:
            self._cells[_COMPUTED] = layer + 1

    def wait_computed(self, layer: int) -> None:
        self._wait(_COMPUTED, layer)

    def end_step(self) -> None:
        self._cells[:] = self._num_layers
        self.address = 0

    def _wait(self, cell: int, layer: int) -> None:
        while self._cells[cell] <= layer:
            time.sleep(_PAUSE_SECONDS)
