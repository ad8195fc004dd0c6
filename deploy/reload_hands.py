"""What a reload needs done, done to the processes of this daemon.

Owns nothing: the supervisor's children, its loop and the memory of the machine are others'.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from deploy.child import Child
from deploy.preparation import Preparation
from proto.codec import Message
from proto.config import ServeConfig
from proto.host_resources import available_memory, resident_memory
from proto.lifecycle import EngineReady, ProcessBoot
from proto.sockets import Poller


class ReloadHands:
    """running: the supervisor's list of children. start: how it starts one.

    command: prints the manifest of the model. variables: its environment.
    engine: what the engine of now told of itself. preparing: gets the ids of processes that
    prepare the model.
    """

    def __init__(
        self,
        running: Sequence[Child],
        start: Callable[[ProcessBoot], None],
        poller: Poller,
        config: ServeConfig,
        command: Sequence[str],
        variables: Mapping[str, str],
        engine: Callable[[], EngineReady],
        preparing: set[int],
        root: Path = Path("/"),
    ) -> None:
        self._running = running
        self.start = start
        self._poller = poller
        self._config = config
        self._command = command
        self._variables = variables
        self._engine = engine
        self._root = root
        self._preparing = preparing

    def prepare(self) -> Preparation:
        preparation = Preparation(self._command, self._variables)
        self._poller.add(preparation.fileno())
        self._preparing.add(preparation.pid)
        return preparation

    def let_go(self, preparation: Preparation) -> None:
        self._poller.remove(preparation.fileno())
        self._preparing.discard(preparation.pid)
        preparation.close()

    def members(self, generation: int) -> list[Child]:
        return [
            child
            for child in self._running
            if child.role != "api_server" and child.generation == generation
        ]

    def tell_front_ends(self, message: Message) -> None:
        for child in self._running:
            if child.role == "api_server":
                child.tell(message)

    def fits(self) -> bool:
        """On a CPU, where there is as much memory free as workers and KV pool take now.

        A pool whose size nobody has set takes half of what is free, and a reload should
        not make it smaller: that takes twice the pool. What a GPU has free nobody here
        knows, and two engines cannot publish at one endpoint.
        """
        cache = self._config.cache
        if self._config.device.device == "cuda" or cache.has_fixed_kv_events_endpoint:
            return False
        is_set = cache.kv_cache_memory is not None or cache.num_gpu_blocks_override is not None
        workers = [child.pid for child in self._running if child.role == "worker"]
        pools = self._engine().kv_cache_bytes * (1 if is_set else 2)
        needed = pools + sum(resident_memory(pid, self._root) for pid in workers)
        return available_memory(self._root) >= needed
