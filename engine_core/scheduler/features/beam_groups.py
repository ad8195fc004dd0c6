"""The rows of a beam search: one request for each beam, advanced together.

    round      slot 0        slot 1        slot 2
    first      prompt        (held)        (held)
    next       prompt a      prompt b      prompt c       forks of slot 0, queued
    next       prompt b d    prompt b e    prompt c f     slot 0 becomes a fork of slot 1

A row is scheduled like any request. It reports the candidates for its next token, and then has
nothing to compute until every row of its group has reported. A slot whose hypothesis died takes the
tokens and blocks of the one that branched.

Rows need not run in the same step, so they may be preempted one by one. But rows that have reported
must not hold blocks that another row of the group waits for: they are preempted until the group
advances.

The search itself and numpy are imported with the first group: they are a quarter of what an engine
imports, and its start is part of every outage after a crash.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate, SchedulerFeature, Unblock
from engine_core.scheduler.output import ForcedTokens
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.step_plan import StepPlan
from proto.messages.engine_io import LogprobsArrays

if TYPE_CHECKING:
    from engine_core.scheduler.features.beam_search import Branch


class BeamGroup:
    """One beam search. rows: a request for each slot. reported: candidates by slot."""

    def __init__(self, first: Request) -> None:
        from engine_core.scheduler.features.beam_search import BeamSearch

        params = first.sampling_params
        self.rows = [first]
        self.search = BeamSearch(
            params.beam_width,
            params.max_tokens,
            first.stop_ids,
            params.length_penalty,
            params.early_stopping,
        )
        self.reported: dict[int, LogprobsArrays] = {}

    @property
    def has_all(self) -> bool:
        return len(self.reported) == self.search.num_slots

    @property
    def living(self) -> list[Request]:
        """Rows that have a hypothesis."""
        return self.rows[: self.search.num_slots]

    def results(self) -> Iterator[tuple[Request, list[int]]]:
        """Return (row, tokens of a finished hypothesis), best first."""
        return zip(
            self.rows, [hypothesis.token_ids for hypothesis in self.search.finished], strict=True
        )

    def advance(self) -> "list[Branch]":
        """Return the next hypothesis of each slot, from the candidates of all rows."""
        import numpy as np

        arrays = [self.reported[slot] for slot in range(self.search.num_slots)]
        self.reported.clear()
        return self.search.advance(
            np.stack([np.frombuffer(row.token_ids, dtype="<i4") for row in arrays]),
            np.stack([np.frombuffer(row.logprobs, dtype="<f4") for row in arrays]),
        )


class BeamGroups(SchedulerFeature):
    """All beam searches: holds rows back that have nothing to compute, and keeps their reports."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_BEAMS

    def __init__(
        self,
        kv_cache: KVCacheManager,
        preemption: Preemption,
        forced_tokens: ForcedTokens,
        unblock: Unblock,
    ) -> None:
        self._kv_cache = kv_cache
        self._preemption = preemption
        self._forced_tokens = forced_tokens
        self._unblock = unblock
        self._groups: dict[int, BeamGroup] = {}
        self._reporting: dict[int, BeamGroup] = {}  # some rows have reported

    def on_request_added(self, request: Request) -> None:
        """Add a request to its group, if it is a row; rows are added in order.

        Its max_tokens becomes 1, so that no step is scheduled before the group has chosen the next
        token; the search knows how long a hypothesis may be.
        """
        if not request.sampling_params.beam_width:
            return
        request.max_tokens = 1
        if request.choice == 0:
            self._groups[request.request_id] = BeamGroup(request)
        else:
            self._groups[request.request_id].rows.append(request)

    def report_candidates(self, request: Request, candidates: LogprobsArrays | None) -> bool:
        """Keep the candidates of a row; False if it is no row or has no valid candidates."""
        group = self._groups.get(request.request_id)
        if group is None or candidates is None:
            return False
        if candidates.width != request.sampling_params.num_candidates:
            return False
        group.reported[request.choice] = candidates
        self._reporting[request.request_id] = group
        request.num_output_placeholders = 0
        return True

    def advance_groups(self) -> list[BeamGroup]:
        """Advance every group whose rows have all reported; return the finished ones."""
        ready = [group for group in self._reporting.values() if group.has_all]
        for group in ready:
            del self._reporting[group.rows[0].request_id]
        return [group for group in ready if not self._advance_group(group)]

    # Admission

    def begin_admission(self, plan: StepPlan) -> None:
        """Preempt rows that have reported while another row of their group waits for room.

        The waiting row has to get the room in this step, or a search without other requests would
        have a step without tokens. So admission goes on after this preemption.
        """
        for group in self._reporting.values():
            reported = group.reported
            if any(
                row.status is not RequestStatus.RUNNING
                for slot, row in enumerate(group.living)
                if slot not in reported
            ):
                for slot in sorted(reported, reverse=True):
                    if group.rows[slot].status is RequestStatus.RUNNING:
                        self._preemption.preempt(group.rows[slot], plan)

    def is_blocked(self, candidate: Candidate) -> bool:
        request = candidate.request
        group = self._groups.get(request.request_id)
        if group is None:
            return False
        return request.choice >= group.search.num_slots or request.choice in group.reported

    def on_released(self, request: Request) -> None:
        self._groups.pop(request.request_id, None)
        self._reporting.pop(request.request_id, None)
        self._forced_tokens.forget_sequence(request.seq_id)

    # Internals

    def _advance_group(self, group: BeamGroup) -> bool:
        branches = group.advance()
        for slot, branch in enumerate(branches):
            if branch.parent != slot:
                self._replace_row(group.rows[slot], group.rows[branch.parent])
        for row, branch in zip(group.living, branches, strict=bool(branches)):
            row.all_token_ids.append(branch.token_id)
            self._forced_tokens.force_token(row, branch.token_id)
            self._unblock(row)
        return bool(branches)

    def _replace_row(self, row: Request, source: Request) -> None:
        """Give a row the tokens of another one, and its blocks if both run."""
        self._kv_cache.free(row)
        row.num_computed_tokens = 0
        row.copy_tokens(source)
        if row.status is RequestStatus.RUNNING:
            row.num_computed_tokens = self._kv_cache.fork_blocks(row, source, source.num_tokens)
            self._forced_tokens.replace_row(row)
