"""Engine deaths: open requests continue with the next engine, invisibly for clients."""

import asyncio

import pytest

from api_server.engine import engine_client
from api_server.errors import NotAvailableError
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from proto.messages.stats import SchedulerStats


async def begin(front_end, **fields):
    """Start a completion; return its task and the engine's request."""
    task = asyncio.create_task(front_end.complete(return_token_ids=True, **fields))
    return task, await front_end.engine.requests.get()


async def have(front_end, request, num_tokens):
    """Wait until the front end has received this many tokens."""
    stream = front_end.app_state.client._open[request.request_id].stream
    while sum(map(len, stream.output_token_ids)) < num_tokens:
        await asyncio.sleep(0)


async def restart(front_end):
    """Start another engine; return it and its first request."""
    engine = await front_end.lose_engine()
    engine.announce()
    return engine, await engine.requests.get()


async def test_a_request_continues_with_its_tokens(start):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, max_tokens=6, seed=5, stop=["zzz"])
        front_end.engine.emit(request, [40])
        front_end.engine.emit(request, [41, 42])
        await have(front_end, request, 3)
        engine, again = await restart(front_end)
        assert (again.epoch, again.request_id) == (2, request.request_id)
        assert (again.output_token_ids, again.finished_choices) == (((40, 41, 42),), ())
        assert again.crash_count == 1
        assert (again.seed, again.arrival_time) == (request.seed, request.arrival_time)
        assert again.sampling_params == request.sampling_params
        engine.emit(again, [43, 44])
        engine.emit(again, [45], finish=FinishReason.LENGTH)
        body = (await answer).json()
        assert body["choices"][0]["token_ids"] == [40, 41, 42, 43, 44, 45]
        assert body["usage"]["completion_tokens"] == 6
        assert front_end.app_state.client.num_open == 0


async def test_a_repeated_token_is_dropped_and_a_missing_one_is_an_error(start):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, max_tokens=6)
        front_end.engine.emit(request, [40, 41])
        await have(front_end, request, 2)
        engine, again = await restart(front_end)
        engine._sent[again.request_id, 0] = 1
        engine.emit(again, [41, 42], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["token_ids"] == [40, 41, 42]
        answer, request = await begin(front_end, max_tokens=6)
        engine, again = await restart(front_end)
        engine._sent[again.request_id, 0] = 1
        engine.emit(again, [41])
        assert (await answer).status_code == 500


async def test_outputs_of_earlier_epochs_are_dropped(start):
    async with start(accepts=True) as front_end:
        answer, _ = await begin(front_end, max_tokens=6)
        engine, again = await restart(front_end)
        engine.epoch = 1
        engine.emit(again, [40, 41])
        engine.epoch = 2
        engine._sent[again.request_id, 0] = 0
        engine.emit(again, [50], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["token_ids"] == [50]


async def test_finished_choices_are_not_computed_again(start, tokenizer):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, n=3, max_tokens=4, stop=["lazy"])
        ids = tokenizer.encode("lazy dog").ids
        front_end.engine.emit(request, [40], choice=0)
        front_end.engine.emit(request, [41, 42], choice=1, finish=FinishReason.LENGTH)
        front_end.engine.emit(request, ids, choice=2)
        await front_end.engine.aborts.get()
        engine, again = await restart(front_end)
        assert again.finished_choices == (1, 2)
        assert again.output_token_ids[:2] == ((40,), (41, 42))
        engine.emit(again, [43], choice=0, finish=FinishReason.LENGTH)
        choices = (await answer).json()["choices"]
        assert [each["finish_reason"] for each in choices] == ["length", "length", "stop"]
        assert choices[0]["token_ids"] == [40, 43]


async def test_requests_between_engines_wait_and_disconnected_ones_are_dropped(start):
    async with start(accepts=True) as front_end:
        leaving, _ = await begin(front_end, prompt="fox")
        staying, request = await begin(front_end, prompt="dog")
        engine = await front_end.lose_engine()
        leaving.cancel()
        late = asyncio.create_task(front_end.complete(prompt="sea"))
        while front_end.app_state.client.num_open != 2 or not leaving.done():
            await asyncio.sleep(0.001)
        assert (await front_end.http.get("/health")).status_code == 200
        assert engine.requests.empty()
        engine.announce()
        first, second = await engine.requests.get(), await engine.requests.get()
        assert first.request_id == request.request_id
        assert (second.epoch, second.crash_count, second.output_token_ids) == (2, 0, ())
        for each in (first, second):
            engine.emit(each, [40], finish=FinishReason.LENGTH)
        assert (await staying).status_code == (await late).status_code == 200
        assert engine.requests.empty()
        assert engine.aborts.empty()


async def test_the_number_of_waiting_requests_is_limited(start, monkeypatch):
    monkeypatch.setattr(engine_client, "MAX_WAITING", 1)
    async with start(accepts=True) as front_end:
        answer, _ = await begin(front_end)
        engine = await front_end.lose_engine()
        refused = await front_end.complete()
        assert refused.status_code == 503
        assert "retry-after" in refused.headers
        engine.announce()
        engine.emit(await engine.requests.get(), [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200


async def test_crashes_count_without_a_token_or_when_running_alone(start):
    async with start(accepts=True) as front_end:
        answer, _ = await begin(front_end)
        counts = []
        for _ in range(5):
            _, request = await restart(front_end)
            counts.append(request.crash_count)
        assert counts == [1, 2, 3, 3, 3], "the engine did not report that it ran alone"
        for count in (4, 5):
            front_end.engine.send_running_alone(request)
            entry = front_end.app_state.client._open[request.request_id]
            while not entry.alone:
                await asyncio.sleep(0)
            engine, request = await restart(front_end)
            assert request.crash_count == count
        engine.emit(request, [40])
        await have(front_end, request, 1)
        engine, request = await restart(front_end)
        assert request.crash_count == 1
        engine.refuse(request, ErrorInfo("internal", "the server crashed 5 times"))
        refused = await answer
        assert refused.status_code == 500
        assert "crashed 5 times" in refused.json()["error"]["message"]


async def test_progress_past_the_last_crash_is_not_counted(start):
    """According to progress reports, which engines send only after a first crash."""
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end)
        entry = front_end.app_state.client._open[request.request_id]
        counts = []
        for computed, under_way in [(0, 0), (0, 16), (15, 31), (30, 40), (40, 50), (49, 60)]:
            if under_way:
                front_end.engine.send_progress(request, computed, under_way)
                while entry._num_tokens_under_way != under_way:
                    await asyncio.sleep(0)
            engine, request = await restart(front_end)
            counts.append(request.crash_count)
        assert counts == [1, 2, 3, 3, 1, 2], (
            "the third crash exceeds the limit of requests that share steps"
        )
        engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200


async def test_waiting_requests_are_not_counted_from_the_second_crash_on(start):
    async with start(accepts=True) as front_end:
        old, guilty = await begin(front_end, prompt="fox")
        young, queued = await begin(front_end, prompt="dog")
        counts = []
        for num_begun in (0, 1, 1, 0):
            if num_begun:
                front_end.engine.send_progress(guilty, 0, 0)
                entry = front_end.app_state.client._open[guilty.request_id]
                while not entry.started:
                    await asyncio.sleep(0)
            engine = await front_end.lose_engine()
            engine.announce()
            asked = [await engine.requests.get() for _ in range(2)]
            count_of = {each.request_id: each.crash_count for each in asked}
            counts.append((count_of[guilty.request_id], count_of[queued.request_id]))
        assert counts == [(1, 1), (2, 1), (3, 1), (3, 2)], (
            "the last engine had not started any request"
        )
        for each in asked:
            engine.emit(each, [41], finish=FinishReason.LENGTH)
        assert (await old).status_code == (await young).status_code == 200


async def test_suspects_are_sent_first(start):
    async with start(accepts=True) as front_end:
        old, fine = await begin(front_end, prompt="fox", max_tokens=50)
        young, suspect = await begin(front_end, prompt="dog")
        for _ in range(3):
            front_end.engine.emit(fine, [40])
            await asyncio.sleep(0.01)
            engine = await front_end.lose_engine()
            engine.announce()
            asked = [await engine.requests.get() for _ in range(2)]
            fine = next(each for each in asked if each.request_id == fine.request_id)
        assert [each.request_id for each in asked] == [suspect.request_id, fine.request_id]
        assert [each.crash_count for each in asked] == [3, 1]
        for each in asked:
            engine.emit(each, [41], finish=FinishReason.LENGTH)
        assert (await old).status_code == (await young).status_code == 200


async def test_times_and_cached_tokens_count_once(start):
    async with start(accepts=True) as front_end:
        front_end.engine.num_cached_tokens = 7
        answer, request = await begin(front_end, max_tokens=2)
        front_end.engine.emit(request, [40])
        await have(front_end, request, 1)
        engine, again = await restart(front_end)
        engine.num_cached_tokens = 9
        engine.emit(again, [41], finish=FinishReason.LENGTH)
        usage = (await answer).json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 7
        text = (await front_end.http.get("/metrics")).text
        assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="toy"} 1.0' in text
        assert 'vllm:request_queue_time_seconds_count{engine="0",model_name="toy"} 1.0' in text
        prompt = usage["prompt_tokens"]
        assert f'vllm:prompt_tokens_total{{engine="0",model_name="toy"}} {prompt}.0' in text
        assert 'vllm:generation_tokens_total{engine="0",model_name="toy"} 2.0' in text


async def test_logprobs_keep_their_positions(start):
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, max_tokens=3, logprobs=1, prompt_logprobs=1)
        front_end.engine.emit(request, [40])
        await have(front_end, request, 1)
        engine, again = await restart(front_end)
        engine.emit(again, [41])
        engine.emit(again, [42], finish=FinishReason.LENGTH)
        choice = (await answer).json()["choices"][0]
        assert len(choice["logprobs"]["token_logprobs"]) == 3
        assert len(choice["prompt_logprobs"]) == len(request.prompt_token_ids)


async def test_an_admin_call_is_repeated(start):
    async with start(accepts=True) as front_end:
        engine = await front_end.lose_engine()
        client = front_end.app_state.client
        call = asyncio.create_task(client.call_admin("pause", pause_mode="freeze"))
        await asyncio.sleep(0)
        engine.announce()
        assert (await call).ok
        (made,) = engine.calls
        assert (made.epoch, made.name, made.pause_mode) == (2, "pause", "freeze")


async def test_gauges_of_the_dead_engine_are_removed(start):
    async with start(accepts=True) as front_end:
        front_end.engine.send_outputs(stats=SchedulerStats(3, 4, 0.5))
        running = 'vllm:num_requests_running{engine="0",model_name="toy"} '
        while running + "3.0" not in (await front_end.http.get("/metrics")).text:
            await asyncio.sleep(0)
        engine = await front_end.lose_engine()
        engine.announce()
        while running + "0.0" not in (await front_end.http.get("/metrics")).text:
            await asyncio.sleep(0)


async def test_shutdown_ends_waiting_requests(start):
    async with start(accepts=True) as front_end:
        answer, _ = await begin(front_end)
        await front_end.lose_engine()
        front_end.app_state.client.close()
        assert (await answer).status_code == 503


async def test_shutdown_fails_admin_calls_without_a_reply(start):
    async with start(accepts=True) as front_end:
        await front_end.lose_engine()
        client = front_end.app_state.client
        call = asyncio.create_task(client.call_admin("pause", pause_mode="freeze"))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(NotAvailableError, match="shutting down"):
            await call


async def test_an_engine_that_sends_garbage_is_dropped_and_requests_wait_for_the_next(start):
    """The lost message may be the end of a stream, so later messages are dropped."""
    async with start(accepts=True) as front_end:
        answer, request = await begin(front_end, max_tokens=3)
        front_end.engine.emit(request, [40])
        await have(front_end, request, 1)
        front_end.engine.link.zmq_socket.send(b"\xc1")
        front_end.engine.emit(request, [99])
        async with asyncio.timeout(20):
            violation = await front_end.supervisor.sent.get()
        assert (violation.role, violation.epoch) == ("engine_core", 1)
        ready_again = asyncio.create_task(front_end.app_state.client.wait_ready())
        await asyncio.sleep(0)
        assert not ready_again.done()
        late = asyncio.create_task(front_end.complete(max_tokens=1))
        engine, again = await restart(front_end)
        await ready_again
        assert again.output_token_ids == ((40,),)
        engine.emit(again, [41, 42], finish=FinishReason.LENGTH)
        other = await engine.requests.get()
        engine.emit(other, [50], finish=FinishReason.LENGTH)
        assert (await answer).json()["choices"][0]["token_ids"] == [40, 41, 42]
        assert (await late).status_code == 200
        assert front_end.supervisor.sent.empty()
