"""Events of media while no front end is connected."""

from typing import Any, cast

from engine_core.frontend_io import OutputDispatcher
from engine_core.kv_connector.offload.cpu_manager import CPUOffloadingManager
from engine_core.transport import FrontEndLinks
from tests.fakes.offload_rig import OffloadRig


class NobodyThere:
    """Front-end links of which none is connected."""

    alive: tuple[int, ...] = ()

    def send(self, front_end: int, message: Any) -> None:
        raise AssertionError("there is nobody to send to")


def test_without_a_subscriber_no_events_pile_up() -> None:
    rig = OffloadRig(num_slots=6)
    outputs = OutputDispatcher(
        cast(FrontEndLinks, NobodyThere()), rig.scheduler, rig.kv_cache, epoch=1
    )
    manager = cast(CPUOffloadingManager, rig.offloading._manager)
    num_seen = 0
    for number in range(30):
        rig.generate([number + 31 * each for each in range(25)])
        num_seen += len(manager.events)
        outputs.flush()
        assert not manager.events
    assert num_seen > 30
