"""The group of recurrent states: which are held, found and given away; allocator invariants.

tokens         |  a b c d  |  e f g h  |  i j
block table    |  0        |  2        |  3         the states after h and after j
"""

import random

import pytest

from engine_core.kv_cache import integrity
from engine_core.kv_cache.coordinator import longest_request
from engine_core.kv_cache.groups import RecurrentStateGroup
from engine_core.kv_cache.manager import NO_PREFIX, KVCacheManager
from engine_core.request import Request
from proto.messages.lifecycle import RECURRENT_STATE, KVGroup
from tests.fakes.beam_reference import beam_search
from tests.fakes.engine_harness import EOS, EngineHarness
from tests.fakes.kv_requests import Requests
from tests.fakes.paged_runner import hashed_logprobs, undisturbed

SIZE = 4
GROUPS = (KVGroup(), KVGroup(kind=RECURRENT_STATE))


def make(num_blocks: int = 41, num_slots: int = 9, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(
        num_blocks, SIZE, caching, bytes(32), groups=GROUPS, num_state_slots=num_slots
    )


def states_of(manager: KVCacheManager, request: Request) -> list[int]:
    return manager.block_ids(request.seq_id)[1]


def run(manager: KVCacheManager, requests: Requests, text: str, *chunks: int) -> Request:
    """Compute a prompt in chunks, one a step."""
    request = requests.make(text)
    for chunk in chunks or (request.num_tokens,):
        manager.begin_step()
        assert requests.schedule_groups(request, chunk) is not None
    return request


def found(manager: KVCacheManager, requests: Requests, text: str) -> int:
    return manager.get_computed_blocks(requests.make(text)).num_tokens


@pytest.fixture
def manager():
    """A manager whose integrity is checked at the end, and again when nothing runs."""
    made = make()
    yield made
    assert integrity.check(made) == []


def test_a_sequence_holds_its_state_and_that_at_the_last_end_of_a_block(manager):
    requests = Requests(manager)
    request = run(manager, requests, "abcd|efgh|ij")
    assert [slot > 0 for slot in states_of(manager, request)] == [False, True, True]
    (_, at_h, _) = states_of(manager, request)
    for token in "kl":  # the second one ends the block
        requests.decode(request, token)
    assert states_of(manager, request)[1] == at_h
    requests.decode(request, "m")
    assert [slot > 0 for slot in states_of(manager, request)] == [False, False, True, True]
    assert manager.num_states == (8, 2)


def test_a_hit_ends_with_a_state_and_earlier_entries_are_null(manager):
    """ST-11, KVC-12: KV of 8 tokens is there, and of 4 tokens the state is not."""
    requests = Requests(manager)
    request = run(manager, requests, "abcd|efgh|ij")
    state = states_of(manager, request)[1]
    manager.begin_step()
    computed = manager.get_computed_blocks(requests.make("abcd|efgh|xyz"))
    assert (computed.num_tokens, computed.block_ids[1]) == (8, [0, state])
    assert found(manager, requests, "abcd|wxyz|a") == 0
    manager.uncache_content(request)
    assert found(manager, requests, "abcd|efgh|xyz") == 0


def test_a_state_is_not_found_in_the_step_that_computes_it(manager):
    requests = Requests(manager)
    manager.begin_step()
    requests.schedule_groups(requests.make("abcd|efgh|ij"))
    assert found(manager, requests, "abcd|efgh|ij") == 0
    manager.begin_step()
    assert found(manager, requests, "abcd|efgh|ij") == 8


def test_a_turn_goes_on_from_the_last_end_of_a_block_of_the_turn_before(manager):
    requests = Requests(manager)
    request = run(manager, requests, "abcd|ef")
    for token in "ghijklmnopq":
        manager.begin_step()
        requests.decode(request, token)
    manager.free(request)
    manager.begin_step()
    assert found(manager, requests, "abcd|efgh|ijkl|mnop|qrst") == 16
    assert found(manager, requests, "abcd|efgh") == 4  # the prompt's own state
    assert found(manager, requests, "abcd|efgh|ijkl|m") == 4  # those in between were not kept


def test_a_prefix_whose_kv_is_shared_gets_a_state_the_second_time(manager):
    requests = Requests(manager)
    run(manager, requests, "sysA|sysB|sysC|user one")
    manager.begin_step()
    second = requests.make("sysA|sysB|sysC|another")
    computed = manager.get_computed_blocks(second)
    assert (computed.num_tokens, computed.num_with_kv) == (0, 12)
    requests.schedule_groups(second)
    manager.begin_step()
    assert found(manager, requests, "sysA|sysB|sysC|third") == 12


def test_without_slots_no_sequence_starts_and_running_ones_go_on():
    manager = make(num_slots=5)
    requests = Requests(manager)
    first, second = (run(manager, requests, text) for text in ("abcd|ef", "uvwx|yz"))
    third = requests.make("0123|45")
    assert requests.schedule_groups(third) is None
    for number in range(40):
        manager.begin_step()
        for request in (first, second):
            assert requests.decode(request, number) is not None
        assert integrity.check(manager) == []
    manager.free(first)
    assert requests.schedule_groups(third) is not None
    for request in (second, third):
        manager.free(request)
    assert integrity.check(manager) == []
    (group,) = (each for each in manager.groups if isinstance(each, RecurrentStateGroup))
    assert (group.num_charged, group.pool.num_free) == (0, 4)


def test_without_prefix_caching_a_sequence_has_one_slot_in_all_entries():
    manager = make(num_slots=3, caching=False)
    requests = Requests(manager)
    first, second = (run(manager, requests, text) for text in ("abcd|ef", "uvwx|yz"))
    (slot,) = {*states_of(manager, first)} - {0}
    for number in range(20):
        assert requests.decode(first, number) is not None
    assert states_of(manager, first) == [slot] * 7
    assert requests.schedule_groups(requests.make("a")) is None
    manager.free(second)
    assert requests.schedule_groups(requests.make("a")) is not None
    assert integrity.check(manager) == []


def test_states_take_no_block_of_the_kv_pool_and_are_forked_after_all_tokens(manager):
    requests = Requests(manager)
    request = run(manager, requests, "abcd|efgh|ij")
    assert manager.num_available_blocks == 40 - 3
    assert manager.find_fork(request, 8) is NO_PREFIX
    assert manager.find_fork(request, 10).tails == (3, states_of(manager, request)[2])
    assert manager.findable_blocks(request) == manager.block_ids(request.seq_id)[0][:2]
    assert longest_request(GROUPS, 10, SIZE, None, 1000) == 40
    heir = requests.make("abcd|efgh|ijkl")
    manager.hand_over_blocks(request, heir, 10)
    assert [slot > 0 for slot in states_of(manager, heir)] == [False, True, True]
    manager.free(heir)
    assert manager.reset_prefix_cache()
    assert found(manager, requests, "abcd|efgh|ij") == 0


def test_slots_are_no_blocks_of_the_pool(manager):
    """The second request has KV in blocks 4 to 6 and states in slots 4 and 3."""
    requests = Requests(manager)
    first, second = (run(manager, requests, text) for text in ("abcd|efgh|ij", "uvwx|yz01|23"))
    assert manager.block_ids(second.seq_id) == [[4, 5, 6], [0, 4, 3]]
    assert [manager.num_valid_tokens(each, {3}) for each in (first, second)] == [0, None]


class Worker:
    """What slots hold, as the tokens whose state it is; checks each step that is computed."""

    def __init__(self) -> None:
        self.content: dict[int, tuple[int, ...]] = {}

    def compute(self, step: list[tuple[list[int], list[int], int, int]]) -> None:
        """step: table, tokens, first position and end of each sequence."""
        written: dict[int, tuple[int, ...]] = {}
        read: set[int] = set()
        for table, tokens, first, end in step:
            source = table[(first - 1) // SIZE] if first else 0
            if first:
                assert self.content[source] == tuple(tokens[:first]), "not the state before"
            own = {}
            for block in range(first // SIZE, (end - 1) // SIZE + 1):
                reached = min(end, (block + 1) * SIZE)
                if table[block] or reached == end:
                    assert table[block], "the last state has no slot"
                    own[table[block]] = tuple(tokens[:reached])
            assert not own.keys() & written.keys(), "two sequences write to a slot"
            assert not (own.keys() - {source}) & read, "a slot is read and written"
            assert source not in written, "a slot is read and written"
            read.add(source)
            written |= own
        self.content |= written


@pytest.mark.parametrize(("num_blocks", "num_slots"), [(61, 9), (25, 17), (200, 6)])
def test_random_operations_keep_the_states_apart(num_blocks, num_slots):
    """Requests in random order, chunks and lengths, against a worker that knows each slot."""
    draw = random.Random(num_slots)
    manager, worker = make(num_blocks, num_slots), Worker()
    requests = Requests(manager)
    waiting: list[Request] = []
    running: list[Request] = []
    num_found = num_wanted = num_late = 0
    for _ in range(900):
        manager.begin_step()
        step = []
        while len(waiting) < 3:
            prompt = [0] * draw.choice([4, 8, 16, 22]) + draw.choices([0, 1], k=draw.randint(1, 9))
            waiting.append(requests.make(prompt))
        for request in list(running):
            action = draw.random()
            if action < 0.08:  # it ends, is aborted or preempted
                manager.free(request)
                running.remove(request)
                request.num_computed_tokens = 0
                if action < 0.03:
                    waiting.append(request)
                continue
            if request.num_computed_tokens == request.num_tokens:
                request.all_token_ids.append(draw.choice([0, 0, 0, 1]))
            num_new = min(request.num_tokens - request.num_computed_tokens, draw.choice([20, 5, 1]))
            if draw.random() < 0.1:
                place = request.num_tokens // SIZE * SIZE
                num_wanted += place > request.num_computed_tokens + num_new
                manager.want_state(request, place)
            if manager.allocate_slots(request, num_new) is not None:
                first = request.num_computed_tokens
                request.num_computed_tokens += num_new
                step.append((request, first))
                if draw.random() < 0.2 and num_new > SIZE:
                    num_late += manager.want_state(request, first // SIZE * SIZE + SIZE)
        for request in draw.sample(waiting, len(waiting)):
            computed = manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - computed.num_tokens, draw.choice([30, 6, 1]))
            if manager.allocate_slots(request, num_new, computed) is not None:
                num_found += computed.num_tokens
                request.num_computed_tokens = computed.num_tokens + num_new
                step.append((request, computed.num_tokens))
                waiting.remove(request)
                running.append(request)
        worker.compute(
            [
                (states_of(manager, each), each.all_token_ids, first, each.num_computed_tokens)
                for each, first in step
            ]
        )
        assert integrity.check(manager) == []
    assert num_found > 500
    assert num_wanted > 10
    assert num_late > 3
    for request in running:
        manager.free(request)
    assert integrity.check(manager) == []


def make_engine(**settings: object) -> EngineHarness:
    return EngineHarness(
        block_size=SIZE,
        groups=GROUPS,
        **{"num_blocks": 200, "num_state_slots": 13, "max_num_batched_tokens": 16, **settings},  # type: ignore[arg-type]
    )


IS_ASYNC = pytest.mark.parametrize("is_async", [False, True])


@IS_ASYNC
def test_requests_that_share_a_prefix_wait_and_find_its_state(is_async):
    engine = make_engine(async_scheduling=is_async)
    shared = list(range(1, 41))
    rows = [engine.add_one([*shared, 50 + number, 60], 3, ignore_eos=True) for number in range(3)]
    engine.run()
    assert [row.num_cached_tokens for row in rows] == [0, 40, 40]
    engine.assert_idle()


@IS_ASYNC
@pytest.mark.parametrize(("num_shared", "num_found"), [(10, 8), (5, 4), (3, 0)])
def test_requests_admitted_with_a_short_leader_wait_for_a_state_of_its_step(
    is_async, num_shared, num_found
):
    """The leader's 10 tokens fit into one step, which holds the states after 8 and 10 of them.

    That after 4 is held for the other request.
    """
    engine = make_engine(async_scheduling=is_async, max_num_batched_tokens=64)
    prompts = [[*range(1, num_shared + 1), *[50 + number] * (10 - num_shared)] for number in (0, 1)]
    rows = [engine.add_one(prompt, 3, ignore_eos=True) for prompt in prompts]
    assert len(engine.step().new_requests) == (1 if num_found else 2)
    engine.run()
    assert [row.num_cached_tokens for row in rows] == [0, num_found]
    engine.assert_idle()


def test_the_step_in_planning_gets_a_slot_for_a_state_that_is_wanted(manager):
    requests = Requests(manager)
    request = requests.make("abcd|efgh|ijkl|mnop")
    manager.begin_step()
    new = requests.schedule_groups(request, 10)
    slots = new[-1]
    assert [slot > 0 for slot in slots] == [False, True, True]
    assert manager.want_state(request, 4)
    assert slots == states_of(manager, request)
    assert all(slots), "the message of the step has the slot, too"
    assert found(manager, requests, "abcd|x") == 0, "it is not computed yet"
    manager.begin_step()
    assert found(manager, requests, "abcd|x") == 4


def test_without_a_slot_a_state_of_the_step_in_planning_is_not_held():
    manager = make(60, 3)
    requests = Requests(manager)
    request = run(manager, requests, "abcd|efgh|ijkl|mnop", 10)
    assert not manager.want_state(request, 4)
    assert states_of(manager, request)[0] == 0
    assert integrity.check(manager) == []


def test_a_state_is_not_wanted_from_an_earlier_step_that_has_passed_it(manager):
    requests = Requests(manager)
    request = run(manager, requests, "abcd|efgh|ijkl|mnop", 10)
    manager.begin_step()
    assert [manager.want_state(request, length) for length in (4, 8, 12, 16)] == [
        False,  # the step passed it
        True,
        True,
        True,
    ]
    manager.begin_step()
    requests.schedule_groups(request, 6)
    manager.begin_step()
    assert found(manager, requests, "abcd|efgh|ijkl|x") == 12


@IS_ASYNC
@pytest.mark.parametrize("caching", [True, False])
def test_a_busy_engine_gives_each_request_its_tokens(is_async, caching):
    """Chunks, preemptions, aborts, choices, equal prefixes, and the death of a worker."""
    draw = random.Random(caching)
    engine = make_engine(
        num_blocks=41, async_scheduling=is_async, enable_prefix_caching=caching, max_num_seqs=8
    )
    prompts: list[list[int]] = []
    rows: list[Request] = []
    for number in range(60):
        history = draw.choice(prompts) if prompts and draw.random() < 0.5 else []
        prompts.append(history[:40] + draw.choices(range(20), k=draw.randint(1, 30)))
        rows += engine.add(prompts[-1], 12, n=draw.choice([1, 1, 3]), ignore_eos=True)
        for _ in range(draw.randint(1, 6)):
            engine.step()
            assert integrity.check(engine.kv_cache) == []
        if number == 30:
            engine.lose_workers()
        if number % 9 == 8:
            engine.scheduler.abort_request(rows.pop().request_id)
            rows = [row for row in rows if not row.is_finished]
    engine.run()
    assert engine.final.keys() >= {(row.request_id, row.choice) for row in rows}
    for row in rows:
        expected = undisturbed(row.prompt_token_ids, 12, row.choice)
        assert engine.tokens_of(row) == expected
    assert sum(row.num_preemptions for row in rows) > 0
    engine.assert_idle()


@IS_ASYNC
@pytest.mark.parametrize("caching", [True, False])
def test_a_session_goes_on_from_its_state(is_async, caching):
    """The runner checks that each step begins with the state of the tokens before it."""
    engine = make_engine(async_scheduling=is_async, enable_prefix_caching=caching)
    row = engine.add_one(list(range(1, 30)), 6, ignore_eos=True, resumable=True)
    for turn in range(4):
        for _ in range(12):
            engine.step()
        engine.add_session_input(row, [100 + turn, 7], 6, last=turn == 3)
    engine.run()
    engine.assert_idle()


@IS_ASYNC
@pytest.mark.parametrize("caching", [True, False])
def test_a_turn_that_ends_with_a_stop_token_goes_on_from_a_state(is_async, caching):
    """With overlapped steps the stop token has been computed, and its state does not go back."""
    engine = make_engine(async_scheduling=is_async, enable_prefix_caching=caching)
    prompt = list(range(1, 30))
    first = undisturbed(prompt, 12)
    stop = first[8]
    row = engine.add_one(prompt, 20, ignore_eos=True, resumable=True, stop_token_ids=(stop,))
    for _ in range(30):
        engine.step()
    turn = first[: first.index(stop) + 1]
    assert engine.tokens_of(row) == turn
    following = [*prompt, *turn[:-1], 100, 7]
    engine.add_session_input(row, [100, 7], 6, last=True)
    engine.run()
    assert engine.tokens_of(row) == turn + undisturbed(following, 6)
    engine.assert_idle()


CACHING = pytest.mark.parametrize("caching", [True, False])


@IS_ASYNC
@CACHING
@pytest.mark.parametrize("width", [1, 2, 5])
def test_the_beams_of_a_search_are_those_of_the_reference(width, caching, is_async):
    """Each row goes on from a copy of its parent's state, so nothing is computed twice."""
    engine = make_engine(
        async_scheduling=is_async, enable_prefix_caching=caching, max_num_batched_tokens=64
    )
    prompt = list(range(19))
    rows = engine.add(prompt, 14, n=width, beam_width=width)
    engine.run()
    assert [engine.tokens_of(row) for row in rows] == beam_search(
        prompt, hashed_logprobs, width=width, max_tokens=14, stop_ids=(EOS,)
    )
    steps = engine.runner.steps
    assert sum(step.total_num_scheduled_tokens for step in steps) == 19 + width * 13
    assert sum(len(step.state_copies) for step in steps) >= 2 * (width - 1)
    engine.assert_idle()


@IS_ASYNC
@CACHING
def test_searches_with_few_slots_and_blocks_give_the_same_beams(caching, is_async):
    """Rows are preempted for slots and for blocks; other requests run beside them."""
    draw = random.Random(caching)
    searches, others = [], []
    engine = make_engine(
        num_blocks=26,
        num_state_slots=6,
        async_scheduling=is_async,
        enable_prefix_caching=caching,
    )
    for number in range(8):
        prompt = draw.choices(range(20), k=draw.randint(1, 30))
        width = draw.choice([2, 3, 4])
        searches.append((prompt, width, engine.add(prompt, 9, n=width, beam_width=width)))
        others.append(engine.add_one([number, *prompt[:9]], 12, ignore_eos=True))
        for _ in range(draw.randint(1, 9)):
            engine.step()
            assert integrity.check(engine.kv_cache) == []
        if number == 4:
            engine.lose_workers()
    engine.run()
    for prompt, width, rows in searches:
        assert [engine.tokens_of(row) for row in rows] == beam_search(
            prompt, hashed_logprobs, width=width, max_tokens=9, stop_ids=(EOS,)
        )
    for row in others:
        assert engine.tokens_of(row) == undisturbed(row.prompt_token_ids, 12)
    assert engine.scheduler.pop_stats().num_preemptions > 0
    engine.assert_idle()
