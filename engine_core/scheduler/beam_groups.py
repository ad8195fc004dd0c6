"""The rows of a beam search: as many requests as it has beams, moved along together.

    round      slot 0        slot 1        slot 2
    first      prompt        (held)        (held)
    next       prompt a      prompt b      prompt c       forks of slot 0, queued
    next       prompt b d    prompt b e    prompt c f     slot 0 becomes a fork of slot 1

A row is scheduled as any request is. It reports the best tokens that may follow, and
then has nothing to compute until every row of its group has reported. A slot whose
hypothesis died takes over tokens and blocks of the one that branched.

Owns the groups. Nothing needs rows to run in the same step, so rows may be preempted
one by one. Only rows that have reported must not sit on blocks that another row of
the group waits for: they give way too, until the group moves on.

The search itself and numpy, which nothing else in the engine needs, are imported by the first
group: they are a quarter of what an engine imports, and its start is part of every gap after
a death.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.hooks import Candidate, Unblock
from engine_core.scheduler.output import ForcedTokens
from engine_core.scheduler.preemption import Preemption
from engine_core.scheduler.step_plan import StepPlan
from proto.engine_io import LogprobsArrays

if TYPE_CHECKING:
    from engine_core.scheduler.beam_search import Branch


class BeamGroup:
    """rows: one request for each slot, in order. reported: best next tokens by slot."""

    def __init__(self, first: Request) -> None:
        from engine_core.scheduler.beam_search import BeamSearch

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
        """A row and the tokens of a finished hypothesis, best first."""
        return zip(self.rows, [each.token_ids for each in self.search.finished], strict=True)

    def advance(self) -> "list[Branch]":
        """The next hypothesis of each slot, from what all rows have reported."""
        import numpy as np

        arrays = [self.reported[slot] for slot in range(self.search.num_slots)]
        self.reported.clear()
        return self.search.advance(
            np.stack([np.frombuffer(each.token_ids, dtype="<i4") for each in arrays]),
            np.stack([np.frombuffer(each.logprobs, dtype="<f4") for each in arrays]),
        )


class BeamGroups:
    """A gate for rows that have nothing to compute, and the place where rows report."""

    status: ClassVar[RequestStatus] = RequestStatus.WAITING_FOR_BEAMS

    def __init__(
        self, kv_cache: KVCacheManager, preemption: Preemption, forced_tokens: ForcedTokens
    ) -> None:
        self._kv_cache = kv_cache
        self._preemption = preemption
        self._forced_tokens = forced_tokens
        self._groups: dict[int, BeamGroup] = {}
        self._reporting: dict[int, BeamGroup] = {}  # those of which some rows have reported

    def add(self, request: Request) -> None:
        """A row, if it is one; those of a group come in order.

        max_tokens keeps steps from running ahead of what the group chooses; the search
        knows how long a hypothesis may be.
        """
        if not request.sampling_params.beam_width:
            return
        request.max_tokens = 1
        if request.choice == 0:
            self._groups[request.request_id] = BeamGroup(request)
        else:
            self._groups[request.request_id].rows.append(request)

    def owns(self, request_id: int) -> bool:
        """The choices of this request are rows, which end together."""
        return request_id in self._groups

    def report(self, request: Request, candidates: LogprobsArrays | None) -> bool:
        """A row was computed to its end; False for what is no row or brings nothing."""
        group = self._groups.get(request.request_id)
        if group is None or candidates is None:
            return False
        if candidates.width != request.sampling_params.num_candidates:
            return False
        group.reported[request.choice] = candidates
        self._reporting[request.request_id] = group
        request.num_output_placeholders = 0
        return True

    def advance(self) -> list[BeamGroup]:
        """Move on every group whose rows have all reported; returns those that are over."""
        ready = [group for group in self._reporting.values() if group.has_all]
        for group in ready:
            del self._reporting[group.rows[0].request_id]
        return [group for group in ready if not self._moves_on(group)]

    # As a gate

    def attach(self, unblock: Unblock) -> None:
        self._unblock = unblock

    def begin_admission(self, plan: StepPlan) -> None:
        """Rows that have reported give way while another row of theirs waits for room.

        It is to have that room in this very pass, or a lone search would have a step without
        tokens; so this preemption, alone of all, does not stop admission.
        """
        for group in self._reporting.values():
            reported = group.reported
            if any(
                each.status is not RequestStatus.RUNNING
                for slot, each in enumerate(group.living)
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

    def on_admitted(self, request: Request, num_new_tokens: int) -> None:
        """Rows are admitted one by one, as there is room."""

    def on_released(self, request: Request) -> None:
        self._groups.pop(request.request_id, None)
        self._reporting.pop(request.request_id, None)
        self._forced_tokens.forget(request.seq_id)

    # Parts of the above

    def _moves_on(self, group: BeamGroup) -> bool:
        branches = group.advance()
        for slot, branch in enumerate(branches):
            if branch.parent != slot:
                self._take_over(group.rows[slot], group.rows[branch.parent])
        for row, branch in zip(group.living, branches, strict=bool(branches)):
            row.all_token_ids.append(branch.token_id)
            self._forced_tokens.append(row, branch.token_id)
            self._unblock(row)
        return bool(branches)

    def _take_over(self, row: Request, source: Request) -> None:
        """The tokens of another row, and its blocks where both run."""
        self._kv_cache.free(row)
        row.num_computed_tokens = 0
        row.take_over(source)
        if row.status is RequestStatus.RUNNING:
            row.num_computed_tokens = self._kv_cache.fork_blocks(row, source, source.num_tokens)
            self._forced_tokens.replace(row)
