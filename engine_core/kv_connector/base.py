"""The deciding half of a KV connector, as the scheduler sees it.

A connector knows KV that this engine's pool does not hold: in host memory, on a disk, in another
engine. It decides in the engine, without ever waiting for anything; its other half copies in the
workers. Method names are the field's (vLLM's KVConnectorBase_V1).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from engine_core.kv_cache.block import BlockIds
from engine_core.request import Request
from proto.config import ServeConfig
from proto.kv_connector import KVConnectorOutput, Payload
from proto.kv_events import KVEvent
from proto.lifecycle import KVCacheGeometry
from proto.scheduler_output import SchedulerOutput
from proto.stats import KVMediumStats


class Match(NamedTuple):
    """What a connector has of a request beyond what the device has.

    num_tokens: a number of whole blocks; None: not known yet, ask again after a wake.
    is_async: the request waits in WAITING_FOR_REMOTE_KVS until its load is reported; otherwise the
        worker has it done before the step computes.
    """

    num_tokens: int | None
    is_async: bool


NO_MATCH = Match(0, is_async=False)
ASK_AGAIN = Match(None, is_async=False)


class BlockHolds(Protocol):
    """References of a connector's own on device blocks, beside those of requests and pins."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep the content of blocks that some request holds now, whatever becomes of it."""
        ...

    def release(self, block_ids: Sequence[int]) -> None:
        """Give up references taken by `hold`, last block first; free ones stay findable."""
        ...


DEFAULTS: Final = ServeConfig()


def always_sound(seq_id: int) -> bool:
    """Where nobody loads within a step."""
    return True


@dataclass(frozen=True)
class SchedulerContext:
    """What a deciding half may know of its engine.

    geometry: of one rank. block_size: tokens of a device block. fingerprint: of everything that
    changes KV values, the same on every rank. num_ranks: workers that share the model.
    block_ids: the block tables of a request now, by seq_id, a copy; null blocks for what a
    window has passed.
    wake: puts requests that were told to ask again back into the line; in the engine's thread.
    serve_config: all settings, for those that some media cannot do with.
    is_storable: by seq_id, whether nothing of a request rests on a load that is not known yet to
    have succeeded; only then is what it computes to be stored.
    """

    geometry: KVCacheGeometry
    block_size: int
    num_blocks: int
    fingerprint: bytes
    num_ranks: int
    holds: BlockHolds
    block_ids: Callable[[int], BlockIds]
    wake: Callable[[Request], None]
    serve_config: ServeConfig = DEFAULTS
    is_storable: Callable[[int], bool] = always_sound


class SchedulerConnector(Protocol):
    """Called between the scheduler's own decisions; none of these waits for anything.

    All of it is called in the engine's own thread. Made from (KVTransferConfig, SchedulerContext).
    supports_groups: it copes with several KV cache groups (hybrid models).
    """

    @property
    def supports_groups(self) -> bool: ...

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        """Tokens it has after the first `num_computed_tokens`, which the device has.

        At least one token of the request is left to compute. May be asked often for the same.
        """
        ...

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """The request was given blocks: its whole tables, a list per group.

        num_external_tokens: of what was matched, those that are to be loaded; 0: it starts without.
        """
        ...

    def build_connector_meta(self, output: SchedulerOutput) -> Payload:
        """What the other half is to do with this step. Called once for every step."""
        ...

    def wants_step(self) -> bool:
        """Whether the workers are to have a step, even one that computes nothing.

        Asked before each step; the next build_connector_meta is for it. What a worker puts off
        until the step that follows may need one.
        """
        ...

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """One rank has reported. Called for every report of every rank.

        finished_sending, finished_recving: what all ranks have finished with this report.
        invalid_block_ids, worker_metadata: of this rank; others say so themselves.
        """
        ...

    def request_finished(
        self, request: Request, block_ids: BlockIds
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over, whatever state it was in.

        Returns whether its blocks are to be kept until `finished_sending` names it, and what
        the client is told as `kv_transfer_params`.
        """
        ...

    def withdraw(self, request: Request) -> None:
        """What a request computed cannot be trusted: nobody is to find any of it.

        Whether the request is over or not, and its copies as well.
        """
        ...

    def take_events(self) -> Iterable[KVEvent]:
        """What changed on its media since the last call."""
        ...

    def take_stats(self) -> list[KVMediumStats]:
        """What was copied since the last call, and how full each medium is."""
        ...

    def reset_cache(self) -> bool:
        """Forget all it has; False where something is being copied."""
        ...

    def start_over(self) -> None:
        """Workers of a new epoch: no copy of the old ones is ever reported; nothing is in
        flight."""
        ...

    def fileno(self) -> int:
        """Readable when a thread of its own has found something; -1: it has none."""
        ...

    def attend(self) -> None:
        """That descriptor is readable: take in what was found, and wake who waits for it."""
        ...

    def close(self) -> None:
        """The engine ends."""
        ...
