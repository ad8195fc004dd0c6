"""A session through the engine client: input when it comes, output turn by turn."""

import asyncio

import pytest

from api_server.engine.session import TurnInput, generate
from api_server.errors import NotAvailableError
from proto.engine_io import EngineCoreOutput, FinishReason
from proto.errors import ErrorInfo, InternalRequestError, InvalidRequestError
from proto.sampling_params import SamplingParams

PARAMS = SamplingParams(max_tokens=4)
OTHERS = SamplingParams(max_tokens=7)


async def inputs_of(*inputs, before_each=None, end=None):
    """Gives its inputs, each when `before_each` has been set anew, and raises `end`."""
    for each in inputs:
        if before_each is not None:
            await before_each.wait()
            before_each.clear()
        yield each
    if end is not None:
        raise end


async def read(session, outputs):
    async for each in session:
        outputs.append(each)


async def test_two_inputs_give_three_outputs_the_last_of_which_is_final(start):
    """STR-12."""
    async with start() as front_end:
        engine, client = front_end.engine, front_end.app_state.client
        inputs = inputs_of(TurnInput([1, 2, 3], PARAMS), TurnInput([4, 5], OTHERS))
        session = generate(client, inputs, seed=9)
        outputs = []
        reading = asyncio.create_task(read(session, outputs))
        request = await engine.requests.get()
        assert (request.prompt_token_ids, request.sampling_params) == ([1, 2, 3], PARAMS)
        assert request.resumable
        assert request.seed == 9
        second, close = await engine.inputs.get(), await engine.inputs.get()
        assert (second.prompt_token_ids, second.sampling_params) == ([4, 5], OTHERS)
        assert (close.prompt_token_ids, close.last) == ([], True)
        assert not second.last
        engine.emit(request, [10], finish=FinishReason.STOP, goes_on=True)
        engine.emit(request, [20])
        engine.emit(request, [21, 22], finish=FinishReason.LENGTH)
        await reading
        assert [each.token_ids for each in outputs] == [[10], [20], [21, 22]]
        assert [each.finished for each in outputs] == [False, False, True]
        reasons = [each.finish_reason for each in outputs]
        assert reasons == [FinishReason.STOP, None, FinishReason.LENGTH]
        assert client.num_open == 0
        assert engine.aborts.empty(), "there is nothing left to abort"


async def test_an_input_is_sent_when_it_comes(start):
    async with start() as front_end:
        engine, client = front_end.engine, front_end.app_state.client
        come = asyncio.Event()
        come.set()
        inputs = inputs_of(TurnInput([1], PARAMS), TurnInput([2], PARAMS), before_each=come)
        session = generate(client, inputs)
        reading = asyncio.ensure_future(anext(session))
        request = await engine.requests.get()
        engine.emit(request, [10], finish=FinishReason.STOP, goes_on=True)
        assert (await reading).finish_reason is FinishReason.STOP
        assert engine.inputs.empty()
        come.set()
        assert (await engine.inputs.get()).prompt_token_ids == [2]
        assert (await engine.inputs.get()).last
        engine.emit(request, [], finish=FinishReason.STOP)
        final = await anext(session)
        assert (final.token_ids, final.finished) == ([], True)
        await session.aclose()


async def test_who_leaves_early_aborts_the_session(start):
    async with start() as front_end:
        engine, client = front_end.engine, front_end.app_state.client
        session = generate(client, inputs_of(TurnInput([1], PARAMS)))
        reading = asyncio.ensure_future(anext(session))
        request = await engine.requests.get()
        engine.emit(request, [10])
        await reading
        await session.aclose()
        assert (await engine.aborts.get()).request_id == request.request_id
        assert client.num_open == 0


async def test_an_exception_of_the_inputs_is_raised_and_aborts_the_session(start):
    async with start() as front_end:
        engine = front_end.engine
        inputs = inputs_of(TurnInput([1], PARAMS), end=KeyError("microphone"))
        session = generate(front_end.app_state.client, inputs)
        with pytest.raises(KeyError, match="microphone"):
            await anext(session)
        request = await engine.requests.get()
        assert (await engine.aborts.get()).request_id == request.request_id


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"error": ErrorInfo("invalid_request", "too long", "max_tokens")}, InvalidRequestError),
        ({"finish_reason": FinishReason.ABORT}, InternalRequestError),
        ({"token_index": 5, "new_token_ids": [1]}, InternalRequestError),
    ],
)
async def test_what_the_engine_refuses_or_loses_is_raised(start, fields, error):
    async with start() as front_end:
        engine = front_end.engine
        session = generate(front_end.app_state.client, inputs_of(TurnInput([1], PARAMS)))
        reading = asyncio.ensure_future(anext(session))
        request = await engine.requests.get()
        defaults = {"choice": 0, "token_index": 0, "new_token_ids": []}
        engine.send_outputs(EngineCoreOutput(request.request_id, **(defaults | fields)))
        with pytest.raises(error):
            await reading


async def test_the_end_of_the_server_ends_a_session(start):
    async with start() as front_end:
        client = front_end.app_state.client
        session = generate(client, inputs_of(TurnInput([1], PARAMS)))
        reading = asyncio.ensure_future(anext(session))
        await front_end.engine.requests.get()
        client.close()
        with pytest.raises(NotAvailableError):
            await reading


async def test_a_reset_at_the_cost_of_running_requests_reaches_the_engine(start):
    async with start() as front_end:
        reply = await front_end.app_state.client.call_admin(
            "reset_prefix_cache", reset_running_requests=True
        )
        assert reply.ok
        assert front_end.engine.calls[-1].reset_running_requests
