"""Recorded loads: for the same requests, the same bytes go to the workers and to the front ends.

Each load is a random run (`lives.py`). For each, `recorded_loads.json` has a digest of all messages
to the workers, one of all outputs, and one of the trace and the statistics. A change of the
scheduler that is meant to change no decision keeps them. After one that is meant to, write the file
again:

    python -m tests.engine_core.scheduler.test_recorded_loads
"""

import json
import random
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from engine_core.request import Request
from engine_core.scheduler.step_plan import StepPlan, num_sampled_positions
from engine_core.trace.recorder import TraceRecorder
from proto.codec import encode
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from tests.engine_core.scheduler.lives import (
    CALM,
    KINDS,
    STOPS,
    Kind,
    Life,
    Talk,
    with_drafts,
    with_everything,
    with_pressure,
)
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.gates import FakeGate
from tests.fakes.images import IMAGE_TOKEN

FILE = Path(__file__).with_name("recorded_loads.json")
OPERATIONS = 200
SEEDS = 4
STEP_SECONDS = 0.01


def with_states(rng: random.Random) -> dict[str, Any]:
    return {
        "groups": [KVGroup(), KVGroup(kind=RECURRENT_STATE)],
        "num_state_slots": rng.choice([18, 30, 60]),
        "max_num_seqs": rng.choice([4, 8]),
    }


def with_crashes(rng: random.Random) -> dict[str, Any]:
    return {**with_pressure(rng), "crashes_until_isolated": 2}


def with_throttle(rng: random.Random) -> dict[str, Any]:
    """A large pool and bursts of prompts, which are limited beside decoding requests."""
    return {
        "max_num_batched_tokens": 400,
        "max_num_seqs": 32,
        "max_prefill_slowdown": 1.1,
        "num_blocks": 1200,
        "long_prefill_token_threshold": 0,
    }


RECORDED_KINDS = KINDS | {
    "throttled": Kind(with_throttle, (("step", 20), ("add", 80)), num_tenants=2),
    "beams": Kind(
        with_pressure,
        (("step", 60), ("add", 6), ("beam", 9), ("abort", 2), ("pause", 1), ("resume", 3),
         ("lose_workers", 1)),
        num_tenants=2,
    ),
    "grammars": Kind(
        with_everything,
        (("step", 60), ("add", 6), ("constrain", 12), ("compile", 14), ("mask", 30), ("void", 4),
         ("abort", 2), ("lose_workers", 1)),
        num_tenants=2,
    ),
    "grammars and drafts": Kind(
        with_drafts,
        (("step", 60), ("add", 4), ("constrain", 12), ("compile", 14), ("mask", 30), ("void", 4),
         ("abort", 2)),
        has_drafts=True,
    ),
    "deadlines and crashes": Kind(
        with_crashes,
        (("step", 60), ("add_timed", 16), ("beam", 1), ("lose_workers", 4), ("abort_front_end", 1),
         ("pause", 1), ("resume", 3)),
        num_tenants=3,
    ),
    "states": Kind(with_states, (*CALM, ("lose_workers", 1), ("reset", 1)), num_tenants=2),
}  # fmt: skip


class FakeGrammars:
    """Grammars of some requests; some of them have slow masks.

    constrained: by seq_id, whether the masks are slow.
    """

    def __init__(self) -> None:
        self.constrained: dict[int, bool] = {}
        self.blocked: set[Request] = set()
        self.awaiting_mask: set[int] = set()

    def is_blocked(self, request: Request) -> bool:
        return request in self.blocked or request.seq_id in self.awaiting_mask

    def constrained_seq_ids(self, plan: StepPlan) -> list[int]:
        planned = [
            *zip(plan.continued, plan.continued_tokens, strict=True),
            *zip(plan.admitted, plan.admitted_tokens, strict=True),
        ]
        seq_ids = [
            request.seq_id
            for request, number in planned
            if request.seq_id in self.constrained
            and num_sampled_positions(
                len(request.all_token_ids) + request.num_output_placeholders,
                request.num_computed_tokens + number,
            )
        ]
        self.awaiting_mask |= {seq_id for seq_id in seq_ids if self.constrained[seq_id]}
        return seq_ids

    def num_allowed_tokens(self, request: Request, token_ids: list[int]) -> int:
        if request.seq_id not in self.constrained:
            return len(token_ids)
        return next((n for n, token in enumerate(token_ids) if token % 5 == 0), len(token_ids))

    def forget_request(self, request: Request) -> None:
        self.constrained.pop(request.seq_id, None)
        self.awaiting_mask.discard(request.seq_id)
        self.blocked.discard(request)


class RecordedEngine(EngineHarness):
    """An engine that records digests. Each step takes STEP_SECONDS on its clock."""

    def __init__(self, **settings: Any) -> None:
        self.num_of: Counter[str] = Counter()
        self.sessions_opened: set[int] = set()
        self.gate = FakeGate()
        self.grammars = FakeGrammars()
        self.clock = settings["clock"]
        self.digests = {name: sha256() for name in ("steps", "outputs", "trace")}
        recorder = TraceRecorder(
            lambda line: self.digests["trace"].update(encode(line)),
            started_at=self.clock(),
            num_seats=settings["max_num_seqs"],
            clock=self.clock,
            image_token_id=IMAGE_TOKEN,
        )
        super().__init__(
            observer=recorder,
            observers=(recorder.block_counter,),
            gates=[self.gate],
            grammars=self.grammars,
            **settings,
        )

    def send(self) -> Any:
        output = super().send()
        self.clock.now += STEP_SECONDS
        self.num_of["preempted"] += len(output.preempted_seq_ids)
        self.digests["steps"].update(encode(output))
        return output

    def record_outputs(self, by_front_end: Any) -> None:
        for front_end, outputs in by_front_end.items():
            for output in outputs:
                self.num_of["errors"] += output.error is not None
                self.digests["outputs"].update(encode(output) + bytes([front_end]))
        super().record_outputs(by_front_end)


class RecordedLife(Life):
    """A run without checks of single steps, with a few operations more."""

    kinds = RECORDED_KINDS
    engine_class = RecordedEngine

    def run(self, num_operations: int) -> Counter[str]:
        totals = super().run(num_operations)
        stats = encode(self.engine.scheduler.pop_stats())
        self.engine.digests["trace"].update(stats)
        return totals

    def digest(self) -> str:
        return " ".join(each.hexdigest()[:16] for each in self.engine.digests.values())

    def step(self) -> None:
        engine = self.engine
        if self.ends_early:
            self._compile_all()
        for overdue in engine.scheduler.deadlines.pop_overdue():
            self.num_of["overdue"] += 1
            engine.scheduler.abort_request(overdue.request_id)
        if not engine.grammars.awaiting_mask:
            return super().step()
        engine.step()  # may be empty, because all requests wait for masks
        return None

    def release(self) -> None:
        """Unblock in a fixed order; that of a set of requests is another in each process."""
        self.engine.gate.unblock(*_in_order(self.engine.gate.blocked))

    def beam(self, prompt: list[int], max_tokens: int, width: int) -> None:
        self._add(prompt, max_tokens, n=width, beam_width=width, stop_token_ids=STOPS)

    def constrain(self, prompt: list[int], max_tokens: int, n: int, is_slow: bool) -> None:
        for request in self._add(prompt, max_tokens, n=n):
            self.engine.grammars.constrained[request.seq_id] = is_slow
            self.engine.grammars.blocked.add(request)

    def compile(self, index: int) -> None:
        blocked = _in_order(self.engine.grammars.blocked)
        if blocked:
            request = blocked[index % len(blocked)]
            self.engine.grammars.blocked.discard(request)
            self.engine.scheduler.unblock(request)

    def mask(self, index: int) -> None:
        """Compute the mask of a row that no step in flight computes."""
        in_flight = {
            seq_id for output in self.engine.in_flight for seq_id in output.constrained_seq_ids
        }
        held = sorted(self.engine.grammars.awaiting_mask - in_flight)
        if held:
            seq_id = held[index % len(held)]
            self.engine.grammars.awaiting_mask.discard(seq_id)
            request = next(each for each in self.engine.scheduler.requests if each.seq_id == seq_id)
            self.engine.scheduler.unblock(request)

    def void(self, index: int) -> None:
        """Take constrained rows out of the oldest step in flight."""
        self.engine.send()
        output = self.engine.in_flight[0]
        late = output.constrained_seq_ids[index % 2 :: 2]
        self.num_of["voided"] += len(late)
        self.engine.scheduler.rewind_rows(output, late)
        self.engine.receive()

    def add_timed(
        self, prompt: list[int], max_tokens: int, n: int, seconds: list[float], more: Any
    ) -> None:
        """Add a request with deadlines, which counts in the queue."""
        now = self.clock()
        queue_deadline, deadline = (now + each for each in seconds)
        requests = self._add(prompt, max_tokens, n=n, front_end=len(prompt) % 2, **more)
        message = EngineCoreRequest(
            epoch=1,
            request_id=requests[0].request_id,
            prompt_token_ids=prompt,
            sampling_params=requests[0].sampling_params,
            seed=0,
            arrival_time=now,
            queue_deadline=queue_deadline,
            deadline=deadline,
        )
        for request in requests:
            self.engine.scheduler.queue_limits.count_request(request)
            self.engine.scheduler.deadlines.track_request(request, message)

    def abort_front_end(self, index: int) -> None:
        self.engine.scheduler.abort_front_end_requests(index % 2)

    def _add(self, prompt: list[int], max_tokens: int, **params: Any) -> list[Request]:
        requests = self.engine.add(prompt, max_tokens, **{"eos_token_ids": (), **params})
        talk = Talk(requests, [(prompt, max_tokens)], frozenset())
        self.talks.append(talk)
        return requests

    def _compile_all(self) -> None:
        while self.engine.grammars.blocked:
            self.compile(0)
        for _ in range(len(self.engine.grammars.awaiting_mask)):
            self.mask(0)

    def _details(self, name: str) -> tuple[Any, ...]:
        rng = self.rng
        match name:
            case "beam":
                return (*self._draw_prompt(), rng.choice([1, 2, 3, 4]))
            case "constrain":
                return (*self._draw_prompt(), rng.choice([1, 1, 2]), rng.random() < 0.4)
            case "add_timed":
                seconds = [rng.choice([0.02, 0.2, 9e9]), rng.choice([0.1, 0.5, 9e9])]
                more = {"tenant": rng.randrange(3), "priority": rng.randrange(3)}
                return (*self._draw_prompt(), rng.choice([1, 1, 3]), seconds, more)
            case _:
                return super()._details(name)

    def _check_pins(self) -> None:
        """Do nothing: `test_lives.py` checks them."""

    def _compare(self, talk: Talk, choice: int) -> None:
        """Do nothing: `test_lives.py` compares with undisturbed runs, the digests with all."""


def _in_order(requests: Iterable[Request]) -> list[Request]:
    return sorted(requests, key=lambda request: request.seq_id)


def record(kind: str) -> tuple[list[str], Counter[str]]:
    """Return the digests of the loads of a kind, and the counts of events."""
    digests, totals = [], Counter[str]()
    for seed in range(SEEDS):
        life = RecordedLife(kind, seed)
        totals += life.run(OPERATIONS)
        digests.append(life.digest())
    return digests, totals


@pytest.mark.parametrize("kind", RECORDED_KINDS)
def test_a_load_gives_the_recorded_steps_and_outputs(kind):
    digests, _ = record(kind)
    names = "steps, outputs, trace and statistics"
    assert digests == json.loads(FILE.read_text())[kind], f"other {names} than recorded"


if __name__ == "__main__":
    found = {}
    for each in RECORDED_KINDS:
        found[each], events = record(each)
        print(each, dict(events))
    FILE.write_text(json.dumps(found, indent=1) + "\n")
