"""A reload of several engines in the front end: which engine has which request."""

import asyncio

import msgspec
import pytest

from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import NewEngine, OldEngineIdle
from tests.api_server.test_engine_switch import Case, inside

DIED = "the engine of this request died"


@pytest.fixture
async def case(start):
    """Engines 0 and 1 have the epochs 1 and 2."""
    async with start(accepts=True, num_engines=2) as front_end:
        each = Case(front_end)
        yield each
        await each.close()


@pytest.fixture
def other(model):
    """The model with changed files: the same path, tokenizer and name."""
    return msgspec.structs.replace(model, weights_sample="f" * 64)


async def begin(case, engine, epoch):
    """Start a completion at an engine; return its task and the request at this epoch."""
    return await case.begin(epoch, data_parallel_rank=engine)


async def finish(case, answer, request, token_ids=(40, 41)):
    """Finish a request at the engine that has it."""
    case.engines[request.epoch].emit(request, list(token_ids), finish=FinishReason.LENGTH)
    return await case.tokens(answer)


async def announced(case, engine):
    """Announce an engine, and wait until no engine is missing."""
    engine.announce()
    while case.front_end.app_state.client.missing_engines:
        await asyncio.sleep(0.001)


async def have(case, request, token_ids):
    """Wait until the front end has these tokens of a request."""
    entry = case.front_end.app_state.client._open[request.request_id]
    while entry.stream.output_token_ids != (token_ids,):
        await asyncio.sleep(0)


async def moved_to(case, epoch, request):
    """Return a request when it has come to the engine of an epoch."""
    again = await case.engines[epoch].requests.get()
    assert (again.request_id, again.epoch) == (request.request_id, epoch)
    return again


# ---- Unchanged files ----


async def test_each_engine_is_switched_by_itself(case, model):
    first, second = await begin(case, 0, 1), await begin(case, 1, 2)
    await case.side_by_side(3, model)
    await case.switch(3)
    assert case.front_end.app_state.client.epochs == [3, 2]
    for engine, epoch in ((0, 3), (1, 2)):
        assert await finish(case, *await begin(case, engine, epoch)) == [40, 41]
    await finish(case, *first)
    assert await case.next() == OldEngineIdle(0, 1), "though engine 1 has a request of that time"
    state = case.engine_switch.app_state
    await case.side_by_side(4, None, 1)
    await case.switch(4, 1)
    assert case.engine_switch.app_state is state, "it has the model already"
    assert await finish(case, *await begin(case, 1, 4)) == [40, 41]
    assert case.sent.empty()
    await finish(case, *second)
    assert await case.next() == OldEngineIdle(0, 2)


async def test_requests_of_a_dead_engine_continue_at_old_and_new_ones(case, model):
    answer, request = await begin(case, 0, 1)
    await case.side_by_side(3, model)
    await case.switch(3)
    case.engine_switch.replace_engine(NewEngine(4, 4, engine=1))
    case.engine_switch.drop(1)
    again = await moved_to(case, 3, request)
    assert again.crash_count == 1
    await announced(case, case.start_engine(4))
    case.engine_switch.replace_engine(NewEngine(5, 5, engine=0))
    await finish(case, answer, await moved_to(case, 4, request))


async def test_in_place_requests_move_at_once_and_without_blame(case, model):
    """The old engine of the place is idle, though its requests go on at another one."""
    answer, request = await begin(case, 0, 1)
    case.engines[1].emit(request, [40])
    await have(case, request, (40,))
    case.engine_switch.replace_engine(NewEngine(3, 3, died=False, engine=0))
    again = await moved_to(case, 2, request)
    assert (again.output_token_ids, again.crash_count) == (((40,),), 0)
    assert case.front_end.app_state.client.missing_engines == [0]
    await case.side_by_side(4, model)
    await case.switch(4)
    assert await case.next() == OldEngineIdle(0, 3)
    assert await finish(case, *await begin(case, 0, 4)) == [40, 41]
    assert await finish(case, answer, again, [41]) == [40, 41]


async def test_garbage_of_an_old_engine_is_reported_by_its_own_epoch(case, model):
    """Engine 1 was restarted, so that its epoch is higher than that of the new engine 0."""
    await case.side_by_side(3, model)
    await case.switch(3)
    assert await case.next() == OldEngineIdle(0, 1)
    case.engine_switch.replace_engine(NewEngine(7, 7, engine=1))
    engine = case.start_engine(7)
    await announced(case, engine)
    await begin(case, 1, 7)
    await case.side_by_side(8, None, 1)
    await case.switch(8, 1)
    engine.link.zmq_socket.send(b"\xc1")
    assert (await case.next()).epoch == 7


# ---- Changed files ----


async def test_new_requests_only_reach_engines_of_the_changed_model(case, other):
    first, second = await begin(case, 0, 1), await begin(case, 1, 2)
    await case.side_by_side(3, other)
    await case.switch(3, 0, (3, 4))
    client = case.front_end.app_state.client
    assert client.engine.vocab_size == case.engines[3].vocab_size
    assert client.missing_engines == [1]
    for _ in range(3):
        assert await finish(case, *await case.begin(3)) == [40, 41]
    refused = await case.front_end.complete(data_parallel_rank=1)
    assert refused.status_code == 503
    for answer, request in (first, second):
        await finish(case, answer, request)
    idle = {(await case.next()).epoch for _ in range(2)}
    assert idle == {1, 2}
    await announced(case, case.start_engine(4))
    assert await finish(case, *await begin(case, 1, 4)) == [40, 41]


async def test_requests_of_a_dead_old_engine_continue_at_old_ones_alone(case, other):
    answer, request = await begin(case, 0, 1)
    case.engines[1].emit(request, [40])
    await have(case, request, (40,))
    second, _ = await begin(case, 1, 2)
    await case.side_by_side(3, other)
    await case.switch(3, 0, (3, 4))
    case.engine_switch.drop(1)
    again = await moved_to(case, 2, request)
    assert again.output_token_ids == ((40,),)
    case.engine_switch.drop(2)
    for each in (answer, second):
        response = await each
        assert response.status_code == 500
        assert DIED in response.json()["error"]["message"]
    assert case.engines[3].requests.empty()


async def test_a_new_engine_that_dies_leaves_nothing_to_old_ones(case, other):
    await case.side_by_side(3, other)
    old, first = await begin(case, 1, 2)
    await case.switch(3, 0, (3, 4))
    answer, request = await case.begin(3)
    await case.engines.pop(3).close()
    case.engine_switch.replace_engine(NewEngine(5, 5, engine=0))
    late = asyncio.create_task(case.front_end.complete(return_token_ids=True, max_tokens=2))
    while case.front_end.app_state.client.num_open < 3:
        await asyncio.sleep(0.001)
    assert case.engines[2].requests.empty()
    engine = case.start_engine(4)
    engine.announce()
    for _ in range(2):
        got = await engine.requests.get()
        await finish(case, answer if got.request_id == request.request_id else late, got)
    await finish(case, old, first)


async def test_a_request_for_the_old_model_that_comes_late_gets_it(case, other):
    """The last old engine waits for it, though none has a request."""
    async with late_request(case, other) as (reader, go_on):
        idle = await case.next()
        assert isinstance(idle, OldEngineIdle)
        last = 3 - idle.epoch
        case.engine_switch.drop(idle.epoch)
        go_on()
        request = await case.engines[last].requests.get()
        case.engines[last].emit(request, [40], finish=FinishReason.LENGTH)
        assert b"200 OK" in await reader.readline()
        assert await case.next() == OldEngineIdle(0, last)


async def test_a_late_request_fails_when_no_engine_has_its_model(case, other):
    async with late_request(case, other) as (reader, go_on):
        for epoch in (1, 2):
            case.engine_switch.drop(epoch)
        go_on()
        assert b"500" in await reader.readline()
        assert case.engines[3].requests.empty()


def late_request(case, other):
    return inside(case, other, (3, 4))


async def test_in_place_the_engines_that_are_left_finish_requests_of_the_old_model(case, other):
    """Engine 0 has ended before the first new one starts."""
    answer, request = await begin(case, 0, 1)
    case.engine_switch.replace_engine(NewEngine(5, 5, died=False, engine=0))
    again = await moved_to(case, 2, request)
    await case.side_by_side(6, other)
    await case.switch(6, 0, (6, 7))
    assert await case.next() == OldEngineIdle(0, 5)
    await finish(case, answer, again)
    assert await case.next() == OldEngineIdle(0, 2)
