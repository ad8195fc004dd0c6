"""Masks that are late cost their own rows only: other rows go on, and no text changes."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine_core.structured_output import manager as manager_module
from engine_core.structured_output.mask_threads import MaskTask, MaskThreads
from engine_core.structured_output.matchers import FREE, GrammarCost
from proto.messages.engine_io import FinishReason
from proto.messages.grammar import GrammarSource
from proto.runtime.sockets import EventFd
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.grammar_engine import LIMIT_SECONDS, GrammarEngine
from tests.fakes.toy_vocabulary import SIZE

QUICK = GrammarSource("regex", "([a-c]{3} ){4}[0-9]{1,4}")
SLOW = GrammarSource("regex", "([d-f]{2} ){5}[0-9]{1,4}")

Before = Callable[[MaskTask], None]


@pytest.fixture
def before_masks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Before], None]:
    """Set a function that is called before the masks of each task, in their thread."""
    hook: list[Before] = []
    compute = MaskTask.compute

    def wait(task: MaskTask, backend: Any) -> None:
        for before in hook:
            before(task)
        compute(task, backend)

    monkeypatch.setattr(MaskTask, "compute", wait)
    monkeypatch.setattr(manager_module, "MAX_WAIT_SECONDS", 0.01)
    return lambda before: hook.__setitem__(slice(None), [before])


MODES = {"synchronous": {}, "overlapped": {"async_scheduling": True}}


@pytest.fixture(params=MODES)
def engine(request: Any, tokenizer_folder: Any) -> Iterator[GrammarEngine]:
    made = GrammarEngine(tokenizer_folder, **MODES[request.param])
    yield made
    made.close()


class Gate:
    """Holds back the masks of a grammar from the third token on."""

    def __init__(self, engine: GrammarEngine, request_id: int) -> None:
        self._engine, self._request_id = engine, request_id
        self.opened = threading.Event()
        self.num_waiting = 0

    def __call__(self, task: MaskTask) -> None:
        rows = self._engine.manager._rows
        row = rows.get(task.seq_id)
        if row is None or row.request.request_id != self._request_id or row.num_consumed < 3:
            return
        self.num_waiting += 1
        assert self.opened.wait(LIMIT_SECONDS)


def serve(engine: GrammarEngine, first_id: int, before_run: Callable[[], None] = lambda: None):
    """Serve a slow request with three choices, a quick one and a free one; return the tokens."""
    prompt = [5, 6, 7]
    engine.send_request(first_id, SLOW, prompt, n=3)
    engine.send_request(first_id + 1, QUICK, prompt, n=2)
    engine.send_request(first_id + 2, None, prompt, max_tokens=30)
    before_run()
    engine.run()
    return {
        (request_id - first_id, choice): tokens
        for (request_id, choice), tokens in engine.harness.tokens.items()
        if request_id >= first_id
    }


def assert_nothing_is_left(engine: GrammarEngine) -> None:
    engine.harness.assert_idle()
    assert engine.num_constrained == 0
    assert not engine.manager.awaiting_mask
    assert not engine.manager._late
    assert engine.harness.scheduler.kv_transfer.rewound_until_step == {}


def test_rows_whose_masks_are_late_sit_out_and_say_the_same(engine, before_masks):
    expected = serve(engine, 1)
    gate = Gate(engine, 11)
    before_masks(gate)

    def run_others() -> None:
        for _ in range(500):
            if {(12, 0), (12, 1), (13, 0)} <= engine.harness.final.keys():
                break
            engine.step()
        assert all(2 <= len(engine.tokens(11, each)) <= 3 for each in range(3))
        assert (11, 0) not in engine.harness.final
        assert gate.num_waiting >= 1
        gate.opened.set()

    assert serve(engine, 11, run_others) == expected
    assert_nothing_is_left(engine)


def test_a_request_whose_masks_take_too_long_ends_with_an_error(engine, before_masks, monkeypatch):
    monkeypatch.setattr(manager_module, "MAX_LATE_SECONDS", 0.05)
    gate = Gate(engine, 1)
    before_masks(gate)
    engine.send_request(1, SLOW, n=2)
    engine.send_request(2, QUICK)
    engine.run()
    for choice in range(2):
        (*_, last) = engine.harness.outputs[1, choice]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error.param == SLOW.field
        assert "masks of the grammar take too long" in last.error.message
    assert engine.reason(2) is FinishReason.STOP
    gate.opened.set()
    assert_nothing_is_left(engine)


def test_the_workers_may_die_while_masks_are_late(engine, before_masks):
    expected = serve(engine, 1)
    gate = Gate(engine, 11)
    before_masks(gate)

    def lose_workers() -> None:
        while not gate.num_waiting:
            engine.step()
        engine.lose_workers()
        for _ in range(3):
            engine.step()
        gate.opened.set()

    assert serve(engine, 11, lose_workers) == expected
    assert_nothing_is_left(engine)


def test_a_request_may_be_aborted_while_its_masks_are_late(engine, before_masks):
    gate = Gate(engine, 1)
    before_masks(gate)
    engine.send_request(1, SLOW, n=4)
    engine.send_request(2, QUICK)
    while not gate.num_waiting:
        engine.step()
    engine.step()
    engine.harness.scheduler.abort_request(1)
    engine.run()
    assert engine.reason(2) is FinishReason.STOP
    gate.opened.set()
    assert_nothing_is_left(engine)


def test_no_step_waits_for_a_grammar_that_was_slow(engine, before_masks, monkeypatch):
    expected = serve(engine, 1)
    monkeypatch.setattr(manager_module, "MAX_WAIT_SECONDS", LIMIT_SECONDS)
    slow = engine.manager._compiler.request_grammar(SLOW, 0).cost
    before_masks(lambda task: time.sleep(0.02 if task.cost is slow else 0.0))
    monkeypatch.setattr(GrammarCost, "is_slow", property(lambda cost: cost is slow))
    assert serve(engine, 11) == expected
    assert not engine.voided, "its rows are planned when their masks are there"
    assert_nothing_is_left(engine)


def drafts_of(answers: dict[tuple[int, int], list[int]]) -> SyntheticDrafts:
    def answer(request: Any, num_tokens: int) -> list[int]:
        recorded = answers[request.request_id % 10 - 1, request.choice]
        first = request.num_output_tokens
        return recorded[first : first + num_tokens] or [5]

    return SyntheticDrafts(0.6, answer, vocab_size=SIZE)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts", [False, True], ids=["", "drafts"])
@pytest.mark.parametrize(
    "seed",
    [0, 1, *(pytest.param(each, marks=pytest.mark.suite("lives")) for each in (2, 3))],
)
def test_delays_change_no_text(tokenizer_folder, before_masks, mode, drafts, seed):
    """Masks are late at random, blocks are few, workers die, and grammars turn slow and quick."""
    plain = GrammarEngine(tokenizer_folder)
    expected = serve(plain, 1)
    plain.close()
    settings: dict[str, Any] = {"num_blocks": 12, "block_size": 4, **MODES[mode]}
    if drafts:
        settings["drafting"] = drafts_of(expected)
    engine = GrammarEngine(tokenizer_folder, **settings)
    rng = random.Random(seed)
    before_masks(lambda task: time.sleep(rng.choice([0, 0, 0, 0.005, 0.02, 0.05])))

    def disturb() -> None:
        costs = {row.cost for row in engine.manager._rows.values()}
        for step in range(40):
            for cost in costs:
                cost.add(rng.choice([-1.0, 0.0, 1.0]))
            engine.step()
            if step in (9, 23):
                engine.lose_workers()

    assert serve(engine, 11, disturb) == expected
    assert_nothing_is_left(engine)
    engine.close()


class Backend:
    def empty_masks(self, rows: int) -> Any:
        return [None] * rows

    def fill_masks(self, matchers: Any, masks: Any) -> None: ...


def test_slow_masks_do_not_keep_the_threads_from_quick_ones(before_masks):
    """Nor do masks that take for ever: threads that are late are replaced."""
    opened = threading.Event()
    entered = threading.Semaphore(0)
    slow = [GrammarCost(), GrammarCost()]
    before_masks(lambda task: task.cost in slow and (entered.release(), opened.wait(LIMIT_SECONDS)))

    event_fd = EventFd()
    threads = MaskThreads(Backend, event_fd, 1)  # type: ignore[arg-type]
    of_slow = [MaskTask(number, 0, FREE, slow[number % 2], [], []) for number in range(200)]
    first = MaskTask(900, 0, FREE, GrammarCost(), [], [])
    threads.submit([*of_slow, first], [])
    assert entered.acquire(timeout=LIMIT_SECONDS)
    assert entered.acquire(timeout=LIMIT_SECONDS)
    assert threads.pop_done() == []
    assert not threads.is_quick_done
    threads.stop_waiting()
    assert threads.is_quick_done
    threads.submit([second := MaskTask(901, 0, FREE, GrammarCost(), [], [])], [])
    done: list[MaskTask] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while second not in done and time.monotonic() < deadline:
        done += threads.pop_done()
    assert second in done
    opened.set()
    while len(done) < 202 and time.monotonic() < deadline:
        done += threads.pop_done()
    threads.close()
    event_fd.close()
    assert {task.seq_id for task in done} == {*range(200), 900, 901}


def test_many_slow_grammars_of_a_tenant_take_one_turn(before_masks):
    opened = threading.Event()
    order: list[int] = []
    before_masks(lambda task: (opened.wait(LIMIT_SECONDS), order.append(task.seq_id)))
    event_fd = EventFd()
    threads = MaskThreads(Backend, event_fd, 1)  # type: ignore[arg-type]
    shared = GrammarCost()
    costs = [GrammarCost() for _ in range(20)] + [shared]
    of_one = [MaskTask(number, 1, FREE, cost, [], []) for number, cost in enumerate(costs)]
    of_two = [MaskTask(100 + number, 2, FREE, shared, [], []) for number in range(3)]
    threads.submit([], [*of_one, *of_two])
    threads.discard(of_two[1])
    opened.set()
    done: list[MaskTask] = []
    deadline = time.monotonic() + LIMIT_SECONDS
    while len(done) < 23 and time.monotonic() < deadline:
        done += threads.pop_done()
    threads.close()
    event_fd.close()
    assert order == [0, 100, 1, 102, *range(2, 21)]
