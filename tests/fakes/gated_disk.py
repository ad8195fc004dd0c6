"""A disk medium from outside that stops in the middle of a copy while there is a gate.

The gate of a direction is a FIFO of that name in the folder `gates`: a copy that reaches it creates
a file named after the direction and its process, and waits until the test opens the gate.
`bytes_per_second` in its settings limits its speed; a copy still fails at its time limit. Engine
and workers load this module (spec_module_path), and each imports only its own half.
"""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

LOAD, STORE = "load", "store"


def open_for(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those of the gate."""
    ours = ("gates", "spec_module_path", "bytes_per_second")
    return {key: each for key, each in extra.items() if key not in ours}


def close_gate(gates: Path, direction: str) -> None:
    """Make copies of this direction wait."""
    os.mkfifo(gates / direction)


def waiting(gates: Path, direction: str) -> list[int]:
    """Return the ids of processes with a copy that waits at the gate."""
    return [int(path.name.split(".")[1]) for path in gates.glob(f"{direction}.*")]


def GatedDisk_manager(extra: Mapping[str, Any], context: Any) -> Any:
    """Create the manager of the disk medium, in the engine."""
    from engine_core.kv_connector.offload.disk_manager import make_manager

    return make_manager(open_for(extra), context)


def GatedDisk_handlers(extra: Mapping[str, Any], context: Any) -> Any:
    """Create the handlers of the disk medium behind gates, in a worker."""
    from proto.messages.kv_events import DEVICE_MEDIUM
    from proto.settings.kv_media import DISK
    from proto.settings.kv_transfer_config import disk_settings
    from worker.kv_connector.offload.disk_medium import DiskMedium
    from worker.kv_connector.offload.transfer_queue import MediumError, TransferQueue

    gates = Path(extra["gates"])
    rate = float(extra.get("bytes_per_second", math.inf))

    def take_time(num_bytes: int, seconds_left: Callable[[], float]) -> None:
        seconds, most = num_bytes / rate, seconds_left()
        time.sleep(max(0.0, min(seconds, most)))
        if seconds > most:
            raise MediumError("too slow")

    class GatedDisk(DiskMedium):
        def read_blocks(self, labels: Any, image: memoryview, seconds_left: Any) -> Iterator[bool]:
            _pass(gates, LOAD)
            for complete in super().read_blocks(labels, image, seconds_left):
                take_time(len(image), seconds_left)
                yield complete

        def write_block(self, label: Any, image: memoryview, seconds_left: Any) -> None:
            _pass(gates, STORE)
            take_time(len(image), seconds_left)
            super().write_block(label, image, seconds_left)

    settings = disk_settings(open_for(extra))
    medium, limit = GatedDisk(Path(settings.disk_path) / context.folder), settings.load_timeout
    return {
        (DISK, DEVICE_MEDIUM): TransferQueue(medium, context, limit),
        (DEVICE_MEDIUM, DISK): TransferQueue(medium, context, settings.store_timeout),
    }


def _pass(gates: Path, direction: str) -> None:
    gate = gates / direction
    if gate.exists():
        (gates / f"{direction}.{os.getpid()}").touch()
        with gate.open("rb"):
            pass
