"""Random lives of sessions among other requests, in pools that are too small for all of them.

Every turn gives what a fresh request with the same prompt would, every step progresses
while anything is left to do, and at the end nothing is left.
"""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.kv_cache.integrity import check
from proto.engine_io import FinishReason
from proto.errors import InvalidRequestError
from tests.fakes.engine_harness import EOS, EngineHarness
from tests.fakes.paged_runner import undisturbed

BLOCK_SIZE = 4
MAX_MODEL_LEN = 52
TIMEOUT = 10.0
STOPS = tuple(range(EOS % 6, 1000, 6))
"""The end token among them, so that about every sixth token ends a turn before its limit does."""

lengths, limits = st.integers(1, 20), st.integers(1, 6)
which = st.integers(0, 12)
operations = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 2), lengths, limits, st.integers(-1, 1)),
        st.tuples(st.just("add"), st.integers(0, 2), lengths, limits, st.integers(-1, 1)),
        *[st.tuples(st.just("give"), which, st.integers(1, 9), limits)] * 3,
        *[st.tuples(st.just("step"))] * 4,
        st.tuples(st.just("close"), which),
        st.tuples(st.just("abort"), which),
        st.tuples(st.just("abort_in_flight"), which),
        st.tuples(st.just("reset")),
        st.tuples(st.just("reset_in_flight")),
        st.tuples(st.just("pass_time"), st.sampled_from([1.0, 4.0, TIMEOUT])),
        st.tuples(st.just("pause"), st.sampled_from(["finish_running", "freeze"])),
        st.tuples(st.just("resume")),
    ),
    max_size=70,
)
settings_of_engine = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(15, 30),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(1, 40),
        "enable_prefix_caching": st.booleans(),
        "windows": st.sampled_from([(None,), (None,), (None, 6), (9,), (5, None, 14)]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "scheduler_reserve_full_isl": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.0, 0.3]),
        "stop_admission_above": st.sampled_from([1.0, 1.0, 0.6]),
        "preempt_above": st.sampled_from([1.0, 1.0, 0.7]),
        "async_scheduling": st.booleans(),
        "num_tenants": st.sampled_from([1, 3]),
    }
)


def prompt_of(family: int, length: int) -> list[int]:
    return [(family * 100 + position) % 900 for position in range(length)]


def expected_turn(prompt: list[int], max_tokens: int) -> list[int]:
    tokens = undisturbed(prompt, max_tokens)
    ends = [place for place, token in enumerate(tokens, 1) if token in STOPS]
    return tokens[: ends[0]] if ends else tokens


@dataclass
class Talk:
    """A request or a session, with all its inputs."""

    request: object
    inputs: list[tuple[list[int], int]]
    aborted: bool = False

    def expected(self) -> tuple[list[list[int]], bool]:
        """Its tokens turn by turn, and whether an input does not fit."""
        prompt, found = [], []
        for tokens, max_tokens in self.inputs:
            prompt = prompt + tokens
            if len(prompt) + max_tokens > MAX_MODEL_LEN:
                return found, True
            found.append(expected_turn(prompt, max_tokens))
            prompt = prompt + found[-1][:-1]
        return found, False


class Life:
    """One random run, with what must come out of it."""

    def __init__(self, num_tenants=1, **config) -> None:
        self.num_tenants = num_tenants
        config["num_blocks"] *= len(config["windows"])
        config["preempt_above"] = max(config["preempt_above"], config["stop_admission_above"])
        self.now = 0.0
        self.engine = EngineHarness(
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            session_timeout=TIMEOUT,
            clock=lambda: self.now,
            **config,
        )
        self.sessions = self.engine.scheduler.sessions
        self.talks: list[Talk] = []
        self.overdue: set[int] = set()

    def do(self, operation) -> None:
        kind, *details = operation
        getattr(self, kind)(*details)
        assert check(self.engine.kv_cache) == []
        if not self.engine.scheduler.num_unfinished:
            assert self.engine.kv_cache.usage == 0

    def open(self, family, length, max_tokens, priority) -> None:
        self._add(family, length, max_tokens, priority, resumable=True)

    def add(self, family, length, max_tokens, priority) -> None:
        self._add(family, length, max_tokens, priority, resumable=False)

    def _add(self, family, length, max_tokens, priority, resumable) -> None:
        prompt = prompt_of(family, length)
        request = self.engine.add_one(
            prompt,
            max_tokens,
            priority=priority,
            tenant=family % self.num_tenants,
            arrival_time=self.now,
            resumable=resumable,
            eos_token_ids=(),
            stop_token_ids=STOPS,
        )
        self.talks.append(Talk(request, [(prompt, max_tokens)]))

    def give(self, index, length, max_tokens) -> None:
        talk = self._session(index)
        if talk is None:
            return
        tokens = prompt_of(3 + index, length)
        talk.inputs.append((tokens, max_tokens))
        try:
            self.engine.give(talk.request, tokens, max_tokens, stop_token_ids=STOPS)
        except InvalidRequestError as error:
            assert talk.expected()[1], "it would have fitted"
            talk.aborted = True
            self.sessions.fail(talk.request.request_id, error)

    def close(self, index) -> None:
        talk = self._session(index)
        if talk is not None:
            self.engine.give(talk.request, [], last=True)

    def step(self) -> None:
        waits = bool(self.engine.in_flight)
        output = self.engine.step()
        if output.total_num_scheduled_tokens == 0 and not waits:
            assert not self.engine.scheduler.has_work, "somebody could have progressed"

    def abort(self, index) -> None:
        talks = [talk for talk in self.talks if self.engine.reason_of(talk.request) is None]
        if talks:
            talk = talks[index % len(talks)]
            talk.aborted = True
            self.engine.scheduler.abort(talk.request.request_id)

    def abort_in_flight(self, index) -> None:
        self.engine.send()
        self.abort(index)
        self.engine.receive()

    def reset(self) -> None:
        assert self.engine.scheduler.reset_prefix_cache(preempting=True)
        assert self.engine.kv_cache.usage == 0

    def reset_in_flight(self) -> None:
        self.engine.send()
        self.reset()
        self.engine.receive()

    def pass_time(self, seconds) -> None:
        self.now += seconds
        overdue = self.sessions.end_overdue()
        self.overdue |= {each.request_id for outputs in overdue.values() for each in outputs}
        self.engine.note(overdue)

    def pause(self, mode) -> None:
        self.engine.scheduler.pause(mode)

    def resume(self) -> None:
        self.engine.scheduler.resume()

    def _session(self, index) -> Talk | None:
        """One of those that take input."""
        talks = [t for t in self.talks if self.sessions.takes_input(0, t.request.request_id)]
        return talks[index % len(talks)] if talks else None

    def end(self) -> None:
        self.resume()
        while self._session(0) is not None:
            self.close(0)
        self.engine.run()
        self.engine.assert_at_rest()
        for talk in self.talks:
            self._check(talk)

    def _check(self, talk: Talk) -> None:
        key = (talk.request.request_id, 0)
        turns, too_long = talk.expected()
        tokens = self.engine.tokens_of(talk.request)
        everything = [token for turn in turns for token in turn]
        if talk.aborted:
            assert tokens == everything[: len(tokens)]
            return
        assert tokens == everything
        reason = FinishReason.STOP if turns[-1][-1] in STOPS else FinishReason.LENGTH
        failed = too_long or talk.request.request_id in self.overdue
        assert self.engine.final[key] is (FinishReason.ERROR if failed else reason)
        ends = [each for each in self.engine.outputs[key] if each.finish_reason is not None]
        assert [each.goes_on for each in ends] == [True] * (len(ends) - 1) + [False]
        assert len(turns) <= len(ends) <= len(turns) + 1


@settings(max_examples=300, deadline=None)
@given(config=settings_of_engine, script=operations)
def test_whatever_happens_to_sessions_their_turns_are_right_and_they_end(config, script):
    life = Life(**config)
    for operation in script:
        life.do(operation)
    life.end()


KINDS = {
    "open": 6,
    "add": 6,
    "give": 20,
    "step": 60,
    "close": 4,
    "abort": 1,
    "reset": 1,
    "reset_in_flight": 1,
}


@pytest.mark.parametrize(("overlapped", "num_tenants"), [(True, 1), (False, 1), (True, 2)])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
@pytest.mark.parametrize("caching", [True, False])
def test_a_busy_life(windows, caching, overlapped, num_tenants):
    """A crowd in a pool with room for a few of them; counted, so that it is one."""
    draw = random.Random(len(windows))
    life = Life(
        num_blocks=30,
        windows=windows,
        max_num_seqs=6,
        max_num_batched_tokens=16,
        enable_prefix_caching=caching,
        preempt_above=1.0,
        stop_admission_above=1.0,
        async_scheduling=overlapped,
        num_tenants=num_tenants,
    )
    for _ in range(3000):
        (kind,) = draw.choices(list(KINDS), list(KINDS.values()))
        details = {
            "open": lambda: (draw.randrange(3), draw.randint(1, 20), draw.randint(1, 6), 0),
            "add": lambda: (draw.randrange(3), draw.randint(1, 20), draw.randint(1, 6), 0),
            "give": lambda: (draw.randrange(100), draw.randint(1, 9), draw.randint(1, 6)),
            "close": lambda: (draw.randrange(100),),
            "abort": lambda: (draw.randrange(100),),
        }
        if kind in ("open", "add") and life.engine.scheduler.num_unfinished > 12:
            continue
        life.do((kind, *details.get(kind, tuple)()))
    life.end()
    sent = [new for step in life.engine.runner.steps for new in step.new_requests]
    kept = sum(new.num_computed_tokens > 0 for new in sent)
    turns = sum(output.goes_on for each in life.engine.outputs.values() for output in each)
    print(f"{turns} turns, {kept} of {len(sent)} sequences begun with blocks")
    assert turns > 200
    assert kept > 100
    assert len(sent) - kept > 200
