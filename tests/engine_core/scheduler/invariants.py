"""Invariants of the scheduler and the KV cache, checked after every step.

No check repeats a decision of the scheduler. Each one examines a decision, or the state after it:

    plan      budgets, max_num_seqs, chunks, order of admission and preemption, reserved blocks
    blocks    one table per sequence, append-only, as long as its tokens; references recounted
    content   each findable block holds the KV of the prefix that its hash names; a suffix is
              evicted before its prefix; the longest cached prefix is found
"""

import struct
from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b, sha256
from typing import Any

from engine_core.block_hashing import ROOT
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.features.base import Candidate
from engine_core.scheduler.step_plan import StepPlan
from tests.fakes.drafts import MOST_DRAFTED
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.gates import FakeGate
from tests.fakes.images import image_at
from tests.fakes.pool_model import max_blocks

FINGERPRINT = b"f" * 32
"""Of `EngineHarness`."""


class Contents:
    """The tokens of each block hash, computed from the tokens of all requests."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.digests: dict[bytes, list[bytes]] = {}  # by hash: the runner's content per position
        self.parents: dict[bytes, bytes | None] = {}
        self._chains: dict[int, tuple[list[bytes], bytes]] = {}

    def chain(self, request: Request) -> list[bytes]:
        """Hashes of the full blocks of a request, without the code under test."""
        hashes, digest = self._chains.get(request.seq_id, ([], b""))
        size, tokens = self.block_size, request.all_token_ids
        while (len(hashes) + 1) * size <= len(tokens):
            block = tokens[len(hashes) * size : (len(hashes) + 1) * size]
            content = struct.pack(f"<{size}I", *block)
            parent = hashes[-1] if hashes else None
            if parent is None:
                content = ROOT + FINGERPRINT + content
                if (lora := request.lora_request) is not None:
                    adapter = b"lora:" + lora.digest
                    content += struct.pack("<I", len(adapter)) + adapter
                if (cache_salt := request.extra_keys.cache_salt) is not None:
                    salt = b"cache_salt:" + cache_salt.encode()
                    content += struct.pack("<I", len(salt)) + salt
            else:
                content = parent + content
            start = len(hashes) * size
            for feature in request.mm_features:
                if feature.offset < start + size and start < feature.end:
                    key = b"image:" + feature.mm_hash + struct.pack("<i", feature.offset - start)
                    content += struct.pack("<I", len(key)) + key
            positions = []
            for position, token in enumerate(block, start):
                token_bytes = struct.pack("<I", token) + image_at(request.mm_features, position)
                digest = blake2b(digest + token_bytes, digest_size=8).digest()
                positions.append(digest)
            hashes.append(sha256(content).digest())
            self.digests[hashes[-1]] = positions
            self.parents[hashes[-1]] = parent
        self._chains[request.seq_id] = (hashes, digest)
        return hashes


class CheckedEngine(EngineHarness):
    """An engine that is checked after every step. Its worker reads back the KV of every token.

    has_connector: blocks may be loaded or lost, so fewer checks apply to them.
    num_drafted: most tokens of a draft and of the lookahead behind it, for which a request may have
    room beyond its tokens.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.watch = Watch(self)
        self.gate = ProbingGate(self)
        self.num_of: Counter[str] = Counter()
        self.has_connector = settings.get("connector") is not None
        self.num_drafted = 0 if settings.get("drafting") is None else 2 * MOST_DRAFTED + 1
        self.windows: Sequence[int | None] = settings["windows"]
        self.block_size: int = settings["block_size"]
        self.policy = settings.get("scheduling_policy", "fcfs")
        self.contents = Contents(self.block_size)
        self.known: dict[int, Request] = {}  # every request that ever was, by seq_id
        self.sessions_opened: set[int] = set()  # a turn may begin with more blocks than it needs
        self._findable: dict[int, list[tuple[bytes, int]]] = {}  # by step
        self._tables: dict[tuple[int, int], list[list[int]]] = {}
        super().__init__(observer=self.watch, gates=[self.gate], **settings)
        self.encoder_inputs = self.scheduler._encoder_inputs
        budget = settings["max_num_batched_tokens"]
        self.longest_chunk = min(settings.get("long_prefill_token_threshold") or budget, budget)

    def send(self) -> Any:
        output = super().send()
        assert output.total_num_scheduled_tokens <= self.settings["max_num_batched_tokens"]
        self._findable[output.step] = list(self.kv_cache.pool.index.items())
        self.check_blocks()
        if self.encoder_inputs is not None:
            assert self.encoder_inputs.cache.check() == []
            slices = output.scheduled_encoder_inputs
            self.num_of["slices"] += len(slices)
            self.num_of["adapted slices"] += sum(part.lora_int_id > 0 for part in slices)
            self.num_of["encoder evictions"] += len(output.free_encoder_mm_hashes)
        return output

    def collect(self, output: Any) -> Any:
        by_front_end = super().collect(output)
        self._check_content(self._findable.pop(output.step))
        self._findable = {step: each for step, each in self._findable.items() if step > output.step}
        self.check_references()
        return by_front_end

    def lose_workers(self, epoch: int = 2) -> Any:
        self._findable.clear()
        return super().lose_workers(epoch)

    # Images

    @property
    def is_bidirectional(self) -> bool:
        limits = self.settings.get("encoder")
        return limits is not None and limits.vision.is_bidirectional

    def may_be_cut_at_images(self, request: Request) -> bool:
        """Return whether a prompt may be computed in chunks because of its images."""
        if self.encoder_inputs is None or not request.mm_features:
            return False
        rows = {each.mm_hash: each.num_embeds for each in request.mm_features}
        return self.is_bidirectional or sum(rows.values()) > self.settings["encoder"].cache_size

    # Blocks

    def kv_tables(self, seq_id: int) -> list[list[int]]:
        """Return the block tables of a sequence, without that of recurrent states."""
        return self.kv_cache.block_ids(seq_id)[: len(self.windows)]

    def check_blocks(self) -> None:
        """Check the block tables of a step that was just scheduled."""
        before, self._tables = self._tables, {}
        for request in self.scheduler.running:
            name = (request.seq_id, request.num_preemptions)
            tables = self._tables[name] = self.kv_tables(request.seq_id)
            self._check_length(request, tables)
            if (
                self.has_connector
                or request.seq_id in self.scheduler.kv_transfer.rewound_until_step
            ):
                continue  # a failed load or image frees blocks
            for old, new in zip(before.get(name, tables), tables, strict=True):
                assert len(old) <= len(new), "a block table became shorter"
                assert all(each in (0, then) for then, each in zip(old, new, strict=False)), (
                    f"{request!r} had {old} and has {new}"
                )
        self.check_references()

    def _check_length(self, request: Request, tables: list[list[int]]) -> None:
        needed = -(-request.num_computed_tokens // self.block_size)
        for table, window in zip(tables, self.windows, strict=True):
            assert len(table) >= needed, f"{request!r} has no room: {table}"
            if request.request_id not in self.sessions_opened and not self.has_connector:
                most = -(-(request.num_computed_tokens + self.num_drafted) // self.block_size)
                assert needed <= len(table) <= most, f"{request!r} has {table}"
            if window is None:
                assert 0 not in table, f"the null block is in the table of {request!r}"
            else:
                num_held = sum(1 for block in table if block)
                num_tokens = len(table) * self.block_size
                seen = max(window, 2)  # a hit ends at a block boundary, even outside the window
                most = max_blocks([seen], self.block_size, num_tokens, self.longest_chunk)
                assert num_held <= most, f"{request!r} keeps what its window has passed: {table}"

    def check_references(self) -> None:
        """Recount references and free blocks over all holders of blocks."""
        kv_cache, pool = self.kv_cache, self.kv_cache.pool
        tables = [
            table for each in self.scheduler.requests for table in self.kv_tables(each.seq_id)
        ]
        tables += [
            *kv_cache.transfer_refs.reference_tables(),
            *(pin.blocks for pin in self.scheduler._retained_prefixes),
        ]
        counts = Counter(block for table in tables for block in table if block)
        free = list(pool.free_queue)
        assert 0 not in free
        assert len(set(free)) == len(free) == pool.free_queue.num_free
        for block in range(1, pool.num_blocks):
            assert pool.ref_counts[block] == counts[block], (
                f"block {block} counts {pool.ref_counts[block]}, {counts[block]} hold it"
            )
        assert set(free) == {each for each in range(1, pool.num_blocks) if not counts[each]}
        if self.windows == (None,) and not self.has_connector and self.policy != "continuum":
            self._check_eviction_order(free)

    def _check_eviction_order(self, free: list[int]) -> None:
        """Check that a suffix is evicted before its prefix; otherwise it would be unreachable."""
        index = self.kv_cache.pool.index
        places = {block: place for place, block in enumerate(free)}
        last: dict[bytes, float] = {}
        for key, block in index.items():
            last[key] = max(last.get(key, -1.0), places.get(block, float("inf")))
        for request in self.known.values():
            self.contents.chain(request)
        for key, block in index.items():
            parent = self.contents.parents.get(key)
            if parent is not None and block in places:
                assert last.get(parent, -1.0) > places[block], (
                    f"block {block} is found through a prefix that is evicted before it"
                )

    # Content

    def _check_content(self, findable: list[tuple[bytes, int]]) -> None:
        """Check blocks that were findable when a step was scheduled, now that it is computed."""
        for request in self.known.values():
            self.contents.chain(request)
        slots = self.runner.slots
        for key, block in findable:
            number = key[32] if len(key) > 32 else 0
            digests = self.contents.digests.get(key[:32])
            assert digests is not None, f"block {block} is found under a hash of no known tokens"
            for offset, digest in enumerate(digests):
                assert slots.get((block, offset)) == digest + bytes([number]), (
                    f"slot {offset} of block {block} does not hold what its hash names"
                )

    def _held_states(self) -> set[bytes]:
        """Return the hashes of blocks with a state at their end, without those of this step.

        The worker fails if a step reads a state that the same step computes.
        """
        return {
            key[:32]
            for group in self.kv_cache.state_groups
            for key, slot in group.pool.index.items()
            if slot not in group._fresh
        }

    def longest_cached(self, request: Request) -> int:
        """Return the tokens of the longest prefix that all groups have for the next token."""
        index, size = self.kv_cache.pool.index, self.block_size
        hashes = self.contents.chain(request)
        num_more = self.settings.get("num_dropped_blocks", 0)
        states = self._held_states()
        for count in range((request.num_tokens - 1) // size, 0, -1):
            if self.kv_cache.has_states and hashes[count - 1] not in states:
                continue
            for number, window in enumerate(self.windows):
                suffix = bytes([number]) if number else b""
                first = 0 if window is None else count * size - max(1, window - 1)
                needed = [each for each in range(count) if (each + 1) * size > first]
                needed += range(count, count + num_more)
                if any(
                    each >= len(hashes) or index.get(hashes[each] + suffix) is None
                    for each in needed
                ):
                    break
            else:
                return count * size
        return 0


class ProbingGate(FakeGate):
    """A gate that records candidates for admission and blocks those that a test names."""

    def __init__(self, engine: CheckedEngine) -> None:
        super().__init__()
        self._engine = engine

    def is_blocked(self, candidate: Candidate) -> bool:
        request, engine = candidate.request, self._engine
        if not request.num_computed_tokens:
            wanted = 0
            if engine.kv_cache.enable_caching and not request.skip_reading_prefix_cache:
                wanted = engine.longest_cached(request)
            assert candidate.computed.num_tokens == wanted, f"{wanted} of {request!r} are cached"
        return super().is_blocked(candidate)


class Watch:
    """An observer that checks each plan; the order of tenants follows their usage counters.

    It cannot inherit from the null observer, which may be compiled.
    """

    def __init__(self, engine: CheckedEngine) -> None:
        self._engine = engine
        self._rank: dict[int, int] = {}  # first come, first served: the lower is admitted first
        self._place: dict[int, int] = {}  # admission number of running requests
        self._num_ranks = 0
        self._num_restored = 0
        self._num_admitted = 0
        self._tenants: set[int] = set()
        self._running: list[Request] = []
        self._is_closed = False

    def on_request_added(self, request: Request) -> None:
        self._num_ranks += 1
        self._rank[request.seq_id] = self._num_ranks
        self._tenants.add(request.tenant)
        self._engine.known[request.seq_id] = request

    def on_step_begin(self, plan, waiting, running, kv_cache, connector) -> None:  # type: ignore[no-untyped-def]
        self._waiting, self._now_running, self._kv_cache = waiting, running, kv_cache
        for request in reversed(self._running):
            if request.status is not RequestStatus.RUNNING and not request.is_finished:
                self._restore(request)
        self._running = list(self._now_running)
        self._queued = {each: each.num_computed_tokens for each in self._waiting}
        self._loading = self._loads()
        self._free = self._kv_cache.num_available_blocks
        self._follow_pressure()

    def _loads(self) -> set[Request]:
        loading = RequestStatus.WAITING_FOR_REMOTE_KVS
        return {each for each in self._waiting if each.status is loading}

    def on_step_scheduled(self, step: int, plan: StepPlan) -> None:
        engine = self._engine
        described = list(zip(plan.admitted, plan.admitted_tokens, strict=True))
        continued = list(zip(plan.continued, plan.continued_tokens, strict=True))
        # A running request is sent in full after a load that failed.
        admitted = [each for each in described if each[0] not in self._running]
        self._admitted = [request for request, _ in admitted]
        planned = continued + described
        self._check_amounts(planned, admitted, plan)
        self._check_victims(plan)
        ready = [
            each
            for each in self._waiting
            if not each.status.is_blocked and each not in plan.preempted
        ]
        self._check_order(ready)
        for request in plan.preempted:
            self._restore(request)
        for request in self._admitted:
            self._num_admitted += 1
            self._place[request.seq_id] = self._num_admitted
        if self._queue_lost_blocks():
            self._is_closed = False  # usage may have fallen far in this step
        if len(self._tenants) == 1 and not engine.has_connector:
            self._check_everyone_goes_on(plan, continued)
            self._check_room(plan)
        if plan.preempted:
            self._is_closed = False  # usage may have fallen for a moment
        self._running = list(self._now_running)
        engine.num_of["steps"] += bool(planned)
        engine.num_of["preempted"] += len(plan.preempted)
        engine.num_of["admitted"] += len(admitted)
        engine.num_of["chunks"] += sum(n > 1 for _, n in continued)
        engine.num_of["found"] += sum(each.num_computed_tokens > 0 for each in self._admitted)
        held = [each.status for each in self._waiting]
        engine.num_of["waits for a prefix"] += held.count(RequestStatus.WAITING_FOR_PREFIX)
        engine.num_of["waits for a fork"] += held.count(RequestStatus.WAITING_FOR_FORK)

    def _restore(self, request: Request) -> None:
        """Check that a preempted request is ahead of all waiting ones."""
        self._num_restored += 1
        self._rank[request.seq_id] = -self._num_restored
        self._place.pop(request.seq_id, None)

    def _check_amounts(
        self,
        planned: list[tuple[Request, int]],
        admitted: list[tuple[Request, int]],
        plan: StepPlan,
    ) -> None:
        engine, running = self._engine, list(self._now_running)
        budget, seats = (
            engine.settings[name] for name in ("max_num_batched_tokens", "max_num_seqs")
        )
        assert len(running) <= seats
        assert sum(number for _, number in planned) == budget - plan.budget <= budget
        seq_ids = [each.seq_id for each, _ in planned]
        assert len(set(seq_ids)) == len(seq_ids), "a request is planned twice"
        assert not set(seq_ids) & {each.seq_id for each in plan.preempted}
        for request, number in planned:
            assert request.status is RequestStatus.RUNNING
            assert request in running
            assert 1 <= number <= engine.longest_chunk
            most = request.num_tokens + request.num_output_placeholders
            most += len(plan.drafts.get(request.seq_id, ()))
            assert request.num_computed_tokens + number <= most, "a token that does not exist"
            last = request.num_prompt_tokens + request.max_tokens - 1
            assert request.num_computed_tokens + number <= last, "a token after the last one"
        for request, number in admitted:
            missing = request.num_tokens - request.num_computed_tokens
            assert missing >= 1, "a step without tokens to compute"
            if engine.may_be_cut_at_images(request):
                continue
            if not engine.settings.get("enable_chunked_prefill", True) and missing <= budget:
                assert number == min(missing, engine.longest_chunk), "a prompt was chunked"

    def _check_victims(self, plan: StepPlan) -> None:
        """Check that preempted requests are the last ones admitted, and such a step admits none."""
        if not plan.preempted:
            return
        if len(self._tenants) > 1:  # preemption for a tenant that was served less
            # The request that the victim gave way to was admitted first, or began to load.
            heirs = [*self._admitted[:1], *(self._loads() - self._loading)]
            for victim in plan.preempted if self._admitted else ():
                assert any(each.tenant != victim.tenant for each in heirs)
            return
        assert not self._admitted, "admitted into blocks of preempted requests"
        for victim in plan.preempted:
            for other in self._now_running:
                if self._engine.policy == "priority":
                    assert other.order < victim.order, f"{victim!r} gave way to {other!r}"
                elif self._engine.policy == "fcfs":
                    assert self._place[other.seq_id] < self._place[victim.seq_id]

    def _check_order(self, ready: list[Request]) -> None:
        """No request overtakes one of its tenant; among tenants, the one served least goes first.

        ready: waiting, and not blocked by a gate.
        """
        ledger = self._engine.scheduler._usage
        by_priority = self._engine.policy == "priority"
        last = {request.tenant: request for request in self._admitted}
        for request in self._admitted:
            for other in ready:
                if other.num_output_placeholders:
                    continue  # preempted while its last token is in flight
                urgent = by_priority and other.priority < request.priority
                assert not urgent, f"{request!r} was admitted before {other!r}"
                if other.tenant == request.tenant:
                    assert self._is_before(request, other), (
                        f"{request!r} was admitted before {other!r}"
                    )
                elif last[request.tenant] is request and (
                    not by_priority or other.priority == request.priority
                ):
                    charge = 0 if request.num_preemptions else request.num_tokens
                    charge -= request.num_computed_tokens if charge else 0
                    served = ledger.served(request.tenant) - charge
                    assert served <= ledger.served(other.tenant), (
                        f"tenant {request.tenant} went before {other.tenant}"
                    )

    def _is_before(self, one: Request, other: Request) -> bool:
        if self._engine.policy == "priority":
            return one.order < other.order
        if self._engine.policy == "fcfs":
            return self._rank[one.seq_id] < self._rank[other.seq_id]
        return True

    def _check_everyone_goes_on(self, plan: StepPlan, continued: list[tuple[Request, int]]) -> None:
        """Check that running requests get tokens in every step, in order of admission.

        Except with throttled prefill, or while a token is in flight.
        """
        numbers = {request.seq_id: number for request, number in continued}
        places = [self._place[each.seq_id] for each, _ in continued]
        assert places == sorted(places), "not in the order of admission"
        if self._engine.scheduler.pause_mode == "freeze":
            assert not numbers
            return
        left = plan.budget
        for request in self._now_running:
            if request in self._admitted:
                continue
            ahead = request.num_tokens + request.num_output_placeholders
            ahead = min(ahead, request.num_prompt_tokens + request.max_tokens - 1)
            missing = ahead - request.num_computed_tokens
            if request.num_output_placeholders > 1:
                missing = 0  # a draft is being verified
            missing += len(plan.drafts.get(request.seq_id, ()))
            number = numbers.get(request.seq_id, 0)
            if self._engine.encoder_inputs is not None and missing > 1:
                continue  # it may wait for the encoder, or leaves tokens for those after it
            if missing == 1 or not self._engine.settings.get("max_prefill_slowdown"):
                assert number or missing <= 0, f"{request!r} got nothing"
                wanted = min(missing, self._engine.longest_chunk)
                if missing > 0 and not plan.preempted:
                    assert number == wanted or not left, f"{request!r} got {number} of {wanted}"

    # Capacity

    def _queue_lost_blocks(self) -> bool:
        """Return whether a request that did not run lost its KV in this step."""
        queued = self._queued.items()
        return any(each.num_computed_tokens < computed for each, computed in queued)

    def _follow_pressure(self) -> None:
        """Check that admission stops above a threshold and resumes below another one."""
        settings = self._engine.settings
        usable = self._kv_cache.num_usable_blocks
        self._used = usable - self._free
        stop = settings.get("stop_admission_above", 1.0)
        resume = settings.get("resume_admission_below") or 0.9 * stop
        if self._used > stop * usable:
            self._is_closed = True
        elif self._used < resume * usable:
            self._is_closed = False

    def _check_room(self, plan: StepPlan) -> None:
        settings, kv_cache = self._engine.settings, self._kv_cache
        usable, free = kv_cache.num_usable_blocks, kv_cache.num_available_blocks
        preempt_above = settings.get("preempt_above", 1.0) * usable
        if self._used > preempt_above and len(self._running) > 1:
            assert plan.preempted or self._engine.sessions_opened, (
                "usage is too high, but no request was preempted"
            )
        beside = [each for each in self._now_running if each not in self._admitted]
        if not self._admitted or len(self._now_running) == 1:
            return
        # The last one was admitted while another one ran.
        assert usable - free <= preempt_above, "admitted above the threshold"
        assert free >= int(settings.get("watermark", 0.0) * usable), "the watermark is ignored"
        if self._is_closed and self._engine.windows == (None,):
            assert not beside, "admitted before usage had fallen far enough"
            assert len(self._admitted) == 1
        if settings.get("scheduler_reserve_full_isl") and self._engine.windows == (None,):
            to_come = sum(
                -(-each.num_tokens // self._engine.block_size)
                - len(kv_cache.block_ids(each.seq_id)[0])
                for each in self._now_running
                if each.num_tokens - each.num_computed_tokens > 1
            )
            assert to_come <= free, "the whole prompt does not fit"

    # Unused events

    def on_external_hit(
        self, request: Request, num_tokens: int, connector: str, *, is_async: bool
    ) -> None: ...

    def on_step_result(self, result: Any) -> None: ...

    def on_request_finished(self, request: Request) -> None: ...

    def on_turn_ended(self, request_id: int, agent_session: str, tool: str) -> None: ...

    def on_prefix_retained(self, pin: Any, ttl: float) -> None: ...

    def on_prefix_released(self, pin: Any, reason: str) -> None: ...

    def on_event(self, what: str, detail: str) -> None: ...
