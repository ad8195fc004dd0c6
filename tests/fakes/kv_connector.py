"""A fake connector with both halves: the test decides what it matches, loads, loses and delays.

Its workers' half writes into the slots of a PagedRunner what the runner would have computed, or
junk, so the runner itself detects reads of blocks that were not loaded, or not yet.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine_core.kv_connector.base import NO_MATCH, Match, SchedulerConnector
from engine_core.request import Request
from proto.messages.kv_connector import NO_PAYLOAD, KVConnectorOutput
from proto.messages.multimodal import MultiModalFeature
from tests.fakes.paged_runner import PagedRunner, Row

JUNK = b"not loaded"


@dataclass
class FakeLoad:
    """A load of KV of the tokens [first, end) of a request into these block tables.

    bad: blocks that the load leaves invalid.
    """

    seq_id: int
    token_ids: list[int]
    tables: list[list[int]]
    first: int
    end: int
    is_async: bool
    bad: set[int] = field(default_factory=set)
    mm_features: list[MultiModalFeature] = field(default_factory=list)

    def blocks(self, block_size: int, windows: Sequence[int | None]) -> list[tuple[int, int, int]]:
        """Return (group, index in the table, block id) of blocks to load; only the window's."""
        found = []
        for group, (table, window) in enumerate(zip(self.tables, windows, strict=True)):
            begin = self.first // block_size
            if window is not None:
                begin = max(begin, (self.end - window + 1) // block_size)
            found += [
                (group, index, table[index]) for index in range(begin, -(-self.end // block_size))
            ]
        return found


class FakeConnector(SchedulerConnector):
    """SchedulerConnector that is also its workers' half (`execute`, `finish`).

    answer: returns the match for (request, tokens on the device). fails: returns the blocks that a
    load leaves invalid. delays: whether a finished request's blocks stay until they are sent.
    """

    def __init__(
        self,
        answer: Callable[[Request, int], Match] = lambda request, num_local: NO_MATCH,
        *,
        fails: Callable[[FakeLoad, list[int]], set[int]] = lambda load, blocks: set(),
        delays: Callable[[Request], bool] = lambda request: False,
    ) -> None:
        self.answer = answer
        self.fails = fails
        self.delays = delays
        self.asked: list[tuple[int, int]] = []
        self.allocated: list[tuple[int, int]] = []
        self.metas: list[int] = []
        self.finished: list[int] = []
        self.sending: list[int] = []
        self.under_way: dict[int, FakeLoad] = {}
        self.reports: list[KVConnectorOutput] = []
        self.num_epochs = 1
        self.resets = 0
        self.busy = False
        self._matched: dict[int, tuple[int, bool]] = {}
        self._planned: list[FakeLoad] = []
        self._by_step: dict[int, list[FakeLoad]] = {}

    # The scheduler's half

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> Match:
        self.asked.append((request.seq_id, num_computed_tokens))
        match = self.answer(request, num_computed_tokens)
        self._matched[request.seq_id] = (num_computed_tokens, match.is_async)
        return match

    def update_state_after_alloc(self, request, block_ids, num_external_tokens) -> None:
        self.allocated.append((request.seq_id, num_external_tokens))
        if num_external_tokens:
            first, is_async = self._matched[request.seq_id]
            end = first + num_external_tokens
            load = FakeLoad(
                *(request.seq_id, list(request.all_token_ids), block_ids, first, end, is_async),
                mm_features=list(request.mm_features),
            )
            self._planned.append(load)

    def build_connector_meta(self, output):
        self.metas.append(len(self._planned))
        planned, self._planned = self._planned, []
        if not planned:
            return NO_PAYLOAD
        self._by_step[output.step] = planned
        return b"loads"

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.reports.append(output)

    def request_finished(self, request, block_ids):
        self.finished.append(request.seq_id)
        if self.delays(request) and any(map(any, block_ids)):
            self.sending.append(request.seq_id)
            return True, {"remote_block_ids": block_ids}
        return False, None

    def reset_cache(self) -> bool:
        self.resets += 1
        return not self.busy

    def on_worker_restart(self) -> None:
        self.num_epochs += 1
        self.under_way.clear()
        self.sending.clear()
        self._planned.clear()
        self._by_step.clear()

    # The workers' half

    def execute(self, step: int, runner: PagedRunner) -> KVConnectorOutput:
        """Do the synchronous loads of a step before it is computed, start asynchronous ones."""
        invalid: list[int] = []
        for load in self._by_step.pop(step, []):
            if load.is_async:
                self.under_way[load.seq_id] = load
            else:
                bad = self._fill(load, runner)
                invalid += bad
                if bad:
                    runner.invalid_rows[load.seq_id] = step
        return KVConnectorOutput(invalid_block_ids=invalid)

    def finish(self, seq_id: int, runner: PagedRunner) -> KVConnectorOutput:
        """Finish an asynchronous load."""
        load = self.under_way.pop(seq_id)
        return KVConnectorOutput(
            finished_recving=[seq_id], invalid_block_ids=self._fill(load, runner)
        )

    def sent(self, seq_id: int) -> KVConnectorOutput:
        """Report that a finished request's blocks have been sent."""
        self.sending.remove(seq_id)
        return KVConnectorOutput(finished_sending=[seq_id])

    def _fill(self, load: FakeLoad, runner: PagedRunner) -> list[int]:
        filled = load.blocks(runner.block_size, runner.windows)
        bad = load.bad | self.fails(load, [block for _, _, block in filled])
        row = Row(
            *(load.token_ids, len(load.token_ids), 0, False, 0, load.tables),
            mm_features=load.mm_features,
        )
        for group, index, block in filled:
            first = index * runner.block_size
            for position in range(first, min(first + runner.block_size, load.end)):
                good = row.digest(position) + bytes([group])
                runner.slots[block, position - first] = JUNK if block in bad else good
        return sorted(bad)


def always(num_tokens: int, *, is_async: bool) -> Callable[[Request, int], Match]:
    """Return an `answer` that matches this many of a request's first tokens."""
    return lambda request, num_local: Match(max(0, num_tokens - num_local), is_async)
