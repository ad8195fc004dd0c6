"""Which layers of a step a GPU has computed: an event after each, also within graphs."""

from worker.cuda.accelerator import Accelerator


class EventProgress:
    """LayerProgress by an event for each layer, which a graph records again at each replay.

    A step's layers are loaded before it is queued: a graph cannot wait for the host.
    """

    loads_ahead = True

    def __init__(self, accelerator: Accelerator, num_layers: int) -> None:
        self._events = [accelerator.external_event() for _ in range(num_layers)]

    def begin_step(self, *, has_copies: bool) -> None:
        """Do nothing: the events are recorded in any case, because graphs contain them."""

    def note_loaded(self, layer: int) -> None:
        """Do nothing: the step is not queued yet."""

    def begin_layer(self, layer: int) -> None:
        """Do nothing: all layers are loaded."""

    def end_layer(self, layer: int) -> None:
        self._events[layer].record()

    def wait_computed(self, layer: int) -> None:
        """Wait for the last queued step in which the layer's event is recorded."""
        self._events[layer].synchronize()

    def end_step(self) -> None:
        """Do nothing: events of a queued step are reached."""
