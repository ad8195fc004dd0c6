"""Traces of a scheduler under a random load, and the engine's own trace file."""

import random
from typing import Any

import msgspec

from engine_core.request import Request
from engine_core.scheduler.features.speculative_decoding import DraftProvider
from engine_core.trace.recorder import TraceRecorder
from proto.messages.engine_io import AgentHint
from proto.messages.multimodal import EncoderLimits
from proto.messages.sched_trace import Arrival, Finish, TraceHeader, TraceLine, read_line
from proto.settings.config import SchedulerConfig
from tests.benchmarks.simulator.recording import Recording
from tests.fakes.clock import FakeClock
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.images import IMAGE_TOKEN, with_pictures

BLOCK_SIZE = 16
SEATS = 8
BUDGET = 64


class TracedEngine:
    """A harness that records trace lines. Keyword arguments are scheduler settings."""

    def __init__(
        self,
        num_blocks: int = 40,
        drafting: DraftProvider | None = None,
        encoder: EncoderLimits | None = None,
        **settings: Any,
    ) -> None:
        self.lines: list[Any] = []
        self.clock = FakeClock(0.0)
        settings = {"max_num_batched_tokens": BUDGET, "max_num_seqs": SEATS, **settings}
        self.recorder = recorder = TraceRecorder(
            self.lines.append,
            started_at=0.0,
            num_seats=settings["max_num_seqs"],
            clock=self.clock,
            image_token_id=IMAGE_TOKEN,
        )
        self.harness = EngineHarness(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            observer=recorder,
            observers=(recorder.block_counter,),
            clock=self.clock,
            drafting=drafting,
            encoder=encoder,
            **settings,
        )
        self.header = TraceHeader(
            epoch=1,
            started_at=0.0,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=True,
            max_model_len=8192,
            scheduler=SchedulerConfig(**settings),
            encoder=encoder,
        )

    def step(self, seconds: float = 0.003) -> None:
        """Run a step that takes this long."""
        scheduler, harness = self.harness.scheduler, self.harness
        if scheduler.has_work or harness.in_flight:
            output = harness.send()
            self.clock.now += seconds
            harness.receive()
            assert output.step == scheduler.step

    def finish(self) -> None:
        """Step until no request is left."""
        while self.harness.scheduler.num_unfinished or self.harness.in_flight:
            self.step()

    def of(self, kind: type[TraceLine]) -> list[Any]:
        """Return the lines of a kind."""
        return [each for each in self.lines if isinstance(each, kind)]

    @property
    def recording(self) -> Recording:
        """Return the recording that a reader of the file gets, via JSON."""
        return recording_of(self.header, self.lines)

    @property
    def content(self) -> bytes:
        """Return the content of the file."""
        return b"".join(msgspec.json.encode(each) + b"\n" for each in (self.header, *self.lines))


def recording_of(header: TraceHeader, lines: list[Any]) -> Recording:
    """Return what `read` returns for a file with these lines."""
    recording = Recording(header)
    for line in lines:
        recording.take(read_line(msgspec.json.encode(line)))
    return recording


def random_load(seed: int, engine: TracedEngine, num_requests: int = 30) -> None:
    """Run requests with shared prefixes, several choices and tenants, and aborts, to their end."""
    rng = random.Random(seed)
    by_priority = engine.header.scheduler.scheduling_policy == "priority"
    documents = [[rng.randrange(900) for _ in range(100)] for _ in range(3)]
    requests = []
    while len(requests) < num_requests:
        engine.clock.now += 0.01
        if rng.random() < 0.5:
            shared = rng.choice(documents)[: rng.randrange(1, 100)]
            requests += engine.harness.add(
                shared + [rng.randrange(900) for _ in range(rng.randrange(1, 30))],
                rng.randrange(1, 80),
                n=rng.choice([1, 1, 2]),
                tenant=rng.randrange(2),
                priority=rng.randrange(3) if by_priority else 0,
                arrival_time=engine.clock.now,
            )
        if rng.random() < 0.1 and requests:
            engine.harness.scheduler.abort_request(rng.choice(requests).request_id)
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()


def images_load(seed: int, engine: TracedEngine, num_requests: int = 30) -> None:
    """Run requests with images, of which some are equal, to their end."""
    rng = random.Random(seed)
    encoder = engine.harness.runner.encoder
    assert encoder is not None
    encoder.row_seconds = 0.004
    for _ in range(num_requests):
        engine.clock.now += 0.01
        parts: list[Any] = [list(range(rng.choice([0, 5, 20])))]
        for _ in range(rng.randrange(3)):
            parts += [(rng.randrange(5), 12), [rng.randrange(900) for _ in range(4)]]
        prompt, features = with_pictures([*parts, [rng.randrange(900)]])
        engine.harness.add(
            prompt,
            rng.randrange(1, 30),
            mm_features=features,
            n=rng.choice([1, 1, 2]),
            arrival_time=engine.clock.now,
        )
        for _ in range(rng.randrange(6)):
            engine.step()
    engine.finish()


def agents_load(seed: int, engine: TracedEngine, num_sessions: int = 8) -> None:
    """Run agent sessions of a few turns over growing prefixes, with the reports of a front end.

    While they wait for their tools, the engine drops expired pins.
    """
    rng = random.Random(seed)
    harness, clock = engine.harness, engine.clock
    sessions = {
        f"session-{number}": [rng.randrange(900) for _ in range(rng.randrange(40, 120))]
        for number in range(num_sessions)
    }
    num_left = {name: rng.randrange(2, 5) for name in sessions}
    due = {name: rng.random() for name in sessions}
    under_way: dict[str, Request] = {}
    while num_left or under_way:
        clock.now += 0.01
        harness.scheduler.agent_sessions.release_expired()
        for name in [each for each in num_left if each not in under_way and due[each] <= clock.now]:
            num_left[name] -= 1
            is_last = not num_left[name]
            ttl_ms = rng.choice([None, None, None, 300.0])
            (under_way[name],) = harness.add(
                list(sessions[name]),
                rng.randrange(4, 20),
                agent=AgentHint(name, is_last, ttl_ms),
                arrival_time=clock.now,
            )
            if is_last:
                del num_left[name]
        for _ in range(rng.randrange(6)):
            engine.step()
        for name, request in list(under_way.items()):
            if request.status.is_finished:
                del under_way[name]
                sessions[name] = [*request.all_token_ids, *(rng.randrange(900) for _ in range(9))]
                harness.scheduler.report_tool(
                    request.request_id, name, rng.choice(["read", "shell", ""])
                )
                due[name] = clock.now + rng.choice([0.02, 0.1, 2.0])
    engine.finish()


def chat(num_turns: int, gap: float = 1.0, job: str = "agent") -> list[Any]:
    """Return the lines of an agent session's turns of one second each, without steps."""
    lines: list[Any] = []
    for turn in range(num_turns):
        start = round(turn * (1 + gap) * 1e6)
        lines.append(
            Arrival(
                time_us=start,
                arrived_us=start,
                seq_id=turn,
                request_id=turn,
                job=job,
                num_prompt_tokens=20 * (turn + 1),
                max_tokens=10,
            )
        )
        lines.append(
            Finish(time_us=start + 1_000_000, seq_id=turn, reason="length", num_output_tokens=10)
        )
    return lines
