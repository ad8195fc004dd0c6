"""Several engines behind one front end: takeover, isolation, calls, metrics, health, live view."""

import asyncio
import logging

import pytest

from api_server.supervisor_commands import EngineSwitch, _run_command
from proto.codec import changed
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import HealthStatus, NotReady, Restarted, WeightFormatMemory
from proto.messages.stats import SchedulerStats
from proto.settings.config import LoRAConfig, ReliabilityConfig
from tests.api_server.conftest import MODEL
from tests.fakes import lifecycle_messages


@pytest.fixture
async def front_end(start):
    async with start(accepts=True, num_engines=2) as running:
        yield running


async def begin(front_end, engine, **fields):
    """Start a completion at an engine; return its task and the engine's request."""
    headers = {"X-data-parallel-rank": str(engine)}
    body = {"prompt": "hello", "return_token_ids": True, "max_tokens": 6, **fields}
    task = asyncio.create_task(front_end.http.post("/v1/completions", json=body, headers=headers))
    return task, await front_end.engines[engine].requests.get()


async def have(front_end, request, num_tokens):
    """Wait until the front end has this many tokens."""
    stream = front_end.app_state.client._open[request.request_id].stream
    while sum(map(len, stream.output_token_ids)) < num_tokens:
        await asyncio.sleep(0)


async def token_ids(task):
    response = await task
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def command(front_end, message):
    """Execute a command of the supervisor."""
    _run_command(message, EngineSwitch(front_end.boot, front_end.app.state))


def missing(*engines):
    return HealthStatus(
        tuple(NotReady("it is restarted", 0.0, engine, is_restarted=True) for engine in engines)
    )


async def test_requests_of_a_dead_engine_continue_at_once_at_another(front_end, caplog):
    caplog.set_level(logging.INFO)
    task, request = await begin(front_end, 0, seed=5, n=1)
    front_end.engines[0].emit(request, [40, 41])
    await have(front_end, request, 2)
    await front_end.lose_engine(0)
    moved = await front_end.engines[1].requests.get()
    assert (moved.request_id, moved.epoch) == (request.request_id, 2)
    assert (moved.output_token_ids, moved.crash_count, moved.accepted) == (((40, 41),), 1, True)
    assert (moved.seed, moved.sampling_params) == (request.seed, request.sampling_params)
    front_end.engines[1].emit(moved, [42], finish=FinishReason.LENGTH)
    assert await token_ids(task) == [40, 41, 42]
    assert " engine=1 " in caplog.text, "its log line names the engine that finished it"


async def test_a_death_of_one_engine_leaves_requests_of_others_alone(front_end):
    task, request = await begin(front_end, 1)
    await front_end.lose_engine(0)
    front_end.engines[1].emit(request, [40], finish=FinishReason.LENGTH)
    assert await token_ids(task) == [40]
    assert front_end.engines[1].requests.empty()


async def test_without_another_engine_requests_wait_and_new_ones_too(front_end):
    first, request = await begin(front_end, 0)
    await front_end.lose_engine(0)
    await front_end.engines[1].requests.get()
    await front_end.lose_engine(1)
    second = asyncio.create_task(front_end.complete(return_token_ids=True))
    while [each.sent_to for each in front_end.app_state.client._open.values()] != [0, 0]:
        await asyncio.sleep(0.001)
    front_end.engines[1].announce()
    got = [await front_end.engines[1].requests.get()]
    assert got[0].request_id != request.request_id, "a suspect waits until it can run alone"
    front_end.engines[0].announce()
    got.append(await front_end.engines[0].requests.get())
    assert got[1].request_id == request.request_id
    assert got[1].crash_count == 3, "the engine isolates it at this number, too"
    for engine, each in ((1, got[0]), (0, got[1])):
        front_end.engines[engine].emit(each, [45], finish=FinishReason.LENGTH)
    assert await token_ids(first) == await token_ids(second) == [45]


async def test_requests_move_when_workers_die_and_stay_away_until_they_are_back(front_end):
    task, request = await begin(front_end, 0)
    front_end.engines[0].emit(request, [40])
    await have(front_end, request, 1)
    command(front_end, Restarted("worker", engine=0))
    command(front_end, missing(0))
    moved = await front_end.engines[1].requests.get()
    assert (moved.request_id, moved.output_token_ids) == (request.request_id, ((40,),))
    aborted = await front_end.engines[0].aborts.get()
    assert aborted.request_id == request.request_id
    front_end.engines[0].emit(request, [99])  # of a step before the death
    front_end.engines[1].emit(moved, [41], finish=FinishReason.LENGTH)
    assert await token_ids(task) == [40, 41]
    for _ in range(4):
        answer = asyncio.create_task(front_end.complete(return_token_ids=True))
        got = await front_end.engines[1].requests.get()
        front_end.engines[1].emit(got, [50], finish=FinishReason.LENGTH)
        assert await token_ids(answer) == [50]
    command(front_end, HealthStatus())
    task, request = await begin(front_end, 0)
    front_end.engines[0].emit(request, [40], finish=FinishReason.LENGTH)
    assert await token_ids(task) == [40]


async def test_with_one_engine_requests_stay_when_its_workers_die(start):
    async with start(accepts=True) as front_end:
        task, request = await begin(front_end, 0)
        command(front_end, Restarted("worker", engine=0))
        command(front_end, missing(0))
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert await token_ids(task) == [40]
        assert front_end.engine.aborts.empty()


async def die(front_end, engine, *others):
    """The workers of an engine die, in the order of a repeated death; others are missing, too."""
    command(front_end, missing(engine, *others))
    command(front_end, Restarted("worker", engine=engine))


async def come_back(front_end, *still_missing):
    """All engines that have died, or whose workers have, are ready again, except some."""
    for index, engine in enumerate(front_end.engines):
        if index not in still_missing:
            engine.announce()
    command(front_end, missing(*still_missing))
    while front_end.app_state.client.missing_engines != list(still_missing):
        await asyncio.sleep(0.001)


async def engine_dies(front_end, engine):
    await front_end.lose_engine(engine)


@pytest.mark.parametrize(
    "deaths",
    [(engine_dies,) * 3, (die,) * 3, (die, engine_dies, die), (engine_dies, die, engine_dies)],
    ids=lambda deaths: ", ".join("workers" if each is die else "engine" for each in deaths),
)
async def test_a_request_that_kills_engines_runs_alone_then_ends(start, deaths):
    async with start(accepts=True, num_engines=3) as front_end:
        poison, request = await begin(front_end, 0, prompt="poison")
        for death in deaths[:2]:
            await death(front_end, await holder(front_end, request))
        alone = await holder(front_end, request)
        await come_back(front_end)
        other = asyncio.create_task(front_end.complete(return_token_ids=True))
        normal = await other_request(front_end, request)
        assert normal[0] != alone
        front_end.engines[alone].send_running_alone(request)
        entry = front_end.app_state.client._open[request.request_id]
        while not entry.alone:
            await asyncio.sleep(0)
        assert entry.crash_count == 2
        await deaths[2](front_end, alone)
        response = await poison
        assert response.status_code == 500
        assert "crashed 3 times" in response.json()["error"]["message"]
        front_end.engines[normal[0]].emit(normal[1], [40], finish=FinishReason.LENGTH)
        assert await token_ids(other) == [40]


async def test_deaths_count_while_no_other_engine_is_there(front_end):
    """The workers of the last engine die: its requests wait, and their deaths are not forgotten."""
    task, request = await begin(front_end, 0, prompt="poison")
    await front_end.lose_engine(0)
    await front_end.engines[1].requests.get()
    await die(front_end, 1, 0)
    other = asyncio.create_task(front_end.complete(return_token_ids=True))
    await asyncio.wait_for(front_end.engines[1].aborts.get(), 5)
    while len(front_end.app_state.client._open) < 2:
        await asyncio.sleep(0.001)
    entry = front_end.app_state.client._open[request.request_id]
    assert (entry.crash_count, entry.sent_to) == (2, 0)
    await come_back(front_end, 0)
    normal = await front_end.engines[1].requests.get()
    assert normal.request_id != request.request_id, "the other request does not wait for a suspect"
    await come_back(front_end)
    alone = await front_end.engines[0].requests.get()
    assert (alone.request_id, alone.crash_count) == (request.request_id, 3)
    for engine, each in ((1, normal), (0, alone)):
        front_end.engines[engine].emit(each, [45], finish=FinishReason.LENGTH)
    assert await token_ids(task) == await token_ids(other) == [45]


async def test_a_request_that_ran_alone_and_went_on_is_not_blamed_for_that(start):
    async with start(accepts=True, num_engines=2) as front_end:
        front_end.app_state.client._crashes_until_isolated = 1
        task, request = await begin(front_end, 0)
        await front_end.lose_engine(0)
        again = await front_end.engines[1].requests.get()
        front_end.engines[1].send_running_alone(again)
        front_end.engines[1].emit(again, [40])
        await have(front_end, request, 1)
        await come_back(front_end)
        await front_end.lose_engine(1)
        moved = await front_end.engines[0].requests.get()
        front_end.engines[0].emit(moved, [41], finish=FinishReason.LENGTH)
        assert await token_ids(task) == [40, 41]


async def holder(front_end, request):
    """Return the engine that has got a request, when one has."""
    client = front_end.app_state.client
    while True:
        sent_to = client._open[request.request_id].sent_to
        for index, engine in enumerate(front_end.engines):
            if engine.epoch == sent_to:
                return index
        await asyncio.sleep(0.001)


async def other_request(front_end, request):
    """Return (engine, request) of the next request beside this one that an engine gets."""
    while True:
        for index, engine in enumerate(front_end.engines):
            while not engine.requests.empty():
                got = await engine.requests.get()
                if got.request_id != request.request_id:
                    return index, got
        await asyncio.sleep(0.001)


async def test_progress_ends_the_isolation(start):
    async with start(accepts=True, num_engines=2) as front_end:
        task, request = await begin(front_end, 0)
        await front_end.lose_engine(0)
        await front_end.engines[1].requests.get()
        front_end.engines[0].announce()
        while front_end.app_state.client.missing_engines:
            await asyncio.sleep(0.001)
        await front_end.lose_engine(1)
        front_end.engines[1].announce()
        again = await front_end.engines[0].requests.get()
        client = front_end.app_state.client
        assert client._isolated_engine() == 0
        front_end.engines[0].emit(again, [40])
        await have(front_end, request, 1)
        assert client._isolated_engine() is None
        front_end.engines[0].emit(again, [41], finish=FinishReason.LENGTH)
        assert await token_ids(task) == [40, 41]


@pytest.mark.parametrize("rank", ["2", "7"])
async def test_a_rank_that_does_not_exist_is_named(front_end, rank):
    body = {"prompt": "hello"}
    headers = {"X-data-parallel-rank": rank}
    refused = await front_end.http.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "data_parallel_rank"
    assert f"{rank} does not exist: there are engines 0 to 1" in error["message"]


async def test_the_rank_of_the_body_and_of_the_header(front_end):
    for number in (1, 0, 1):
        task = asyncio.create_task(
            front_end.complete(return_token_ids=True, data_parallel_rank=number)
        )
        request = await front_end.engines[number].requests.get()
        front_end.engines[number].emit(request, [40], finish=FinishReason.LENGTH)
        assert await token_ids(task) == [40]
    refused = await front_end.complete(data_parallel_rank=-1)
    assert refused.status_code == 400
    headers = {"X-data-parallel-rank": "one"}
    refused = await front_end.http.post("/v1/completions", json={"prompt": "a"}, headers=headers)
    assert refused.status_code == 400


async def test_a_rank_that_is_down_is_named(front_end):
    await front_end.lose_engine(1)
    refused = await front_end.complete(data_parallel_rank=1)
    assert refused.status_code == 503
    assert "engine 1 is being restarted" in refused.json()["error"]["message"]


async def test_requests_with_a_prefix_go_to_the_engine_that_has_it(front_end):
    prompt = [number % 300 + 3 for number in range(100)]
    task, request = await begin(front_end, 1, prompt=prompt)
    front_end.engines[1].emit(request, [40], finish=FinishReason.LENGTH)
    await token_ids(task)
    for _ in range(5):
        task = asyncio.create_task(front_end.complete(prompt=[*prompt, 5], return_token_ids=True))
        request = await front_end.engines[1].requests.get()
        front_end.engines[1].emit(request, [41], finish=FinishReason.LENGTH)
        assert await token_ids(task) == [41]


async def test_admin_calls_reach_all_engines(front_end):
    first, second = front_end.engines
    assert (await front_end.http.post("/pause?mode=keep")).status_code == 200
    assert (first.pause_mode, second.pause_mode) == ("freeze", "freeze")
    assert (await front_end.http.get("/is_paused")).json() == {"is_paused": True}
    await front_end.http.post("/resume")
    assert (first.pause_mode, second.pause_mode) == (None, None)
    second.resets = False
    refused = await front_end.http.post("/reset_prefix_cache")
    assert refused.status_code == 409
    assert "3 requests are unfinished" in refused.text
    second.resets = True
    assert (await front_end.http.post("/reset_prefix_cache")).status_code == 200


async def test_a_call_waits_for_an_engine_that_is_restarted(front_end):
    await front_end.lose_engine(1)
    call = asyncio.create_task(front_end.http.post("/pause"))
    while not front_end.engines[0].calls:
        await asyncio.sleep(0.001)
    assert not call.done()
    front_end.engines[1].announce()
    assert (await call).status_code == 200
    assert front_end.engines[1].pause_mode == "finish_running"


async def test_no_call_waits_for_an_engine_that_rests(front_end):
    """It is started only after minutes, with the pause of the others."""
    await front_end.lose_engine(1)
    begun = asyncio.create_task(front_end.http.post("/pause"))
    while not front_end.engines[0].calls:
        await asyncio.sleep(0.001)
    rests = NotReady("engine 1 rests", 0.0, 1, is_restarted=True, rests=True)
    command(front_end, HealthStatus((rests,)))
    assert (await begun).status_code == 200
    assert (await front_end.http.post("/resume")).status_code == 200
    command(front_end, HealthStatus())
    later = asyncio.create_task(front_end.http.post("/pause"))
    await asyncio.sleep(0.01)
    assert not later.done()
    front_end.engines[1].announce()
    assert (await later).status_code == 200


async def test_standby_processes_are_shown(front_end):
    """In the health check only where some are wanted."""
    app_state = front_end.app_state
    assert "standby" not in (await front_end.http.get("/health/ready")).json()
    reliability = ReliabilityConfig(standby_engines=1, standby_workers=2)
    settings = changed(app_state.settings, reliability=reliability)
    object.__setattr__(app_state, "settings", settings)  # it is frozen
    command(front_end, HealthStatus((), 1, 2))
    ready = await front_end.http.get("/health/ready")
    assert ready.json()["standby"] == {"engine": 1, "worker": 2}
    metrics = (await front_end.http.get("/metrics")).text.splitlines()
    assert 'tokend:standby_processes{role="engine"} 1.0' in metrics
    assert 'tokend:standby_processes{role="worker"} 2.0' in metrics


async def test_health_names_missing_engines_and_stays_ready(front_end):
    ready = await front_end.http.get("/health/ready")
    assert ready.json() == {"ready": True, "reasons": [], "missing_engines": {}}
    await front_end.lose_engine(1)
    command(front_end, missing(1))
    ready = await front_end.http.get("/health/ready")
    assert ready.status_code == 200
    body = ready.json()
    assert body["ready"] is True
    assert list(body["missing_engines"]) == ["1"]
    assert "it is restarted" in body["missing_engines"]["1"][0]
    metrics = (await front_end.http.get("/metrics")).text
    for line in ('tokend:engine_ready{engine="0"} 1.0', 'tokend:engine_ready{engine="1"} 0.0'):
        assert line in metrics.splitlines()
    await front_end.lose_engine(0)
    command(front_end, missing(0, 1))
    not_ready = await front_end.http.get("/health/ready")
    assert not_ready.status_code == 503
    assert len(not_ready.json()["reasons"]) == 3
    for engine in front_end.engines:
        engine.announce()
    command(front_end, HealthStatus())
    while (await front_end.http.get("/health/ready")).json()["missing_engines"]:
        await asyncio.sleep(0.001)


async def test_metrics_have_the_engine_as_a_label(front_end):
    for number, engine in enumerate(front_end.engines):
        engine.send_outputs(stats=SchedulerStats(number + 1, 0, 0.25, num_queued_tokens=5))
    task, request = await begin(front_end, 1)
    front_end.engines[1].emit(request, [40, 41], finish=FinishReason.LENGTH)
    await token_ids(task)
    text = (await front_end.http.get("/metrics")).text

    def value(name, engine):
        start = f'{name}{{engine="{engine}",model_name="{MODEL}"}} '
        (line,) = [line for line in text.splitlines() if line.startswith(start)]
        return float(line.split()[-1])

    assert [value("vllm:num_requests_running", engine) for engine in (0, 1)] == [1, 2]
    assert [value("vllm:generation_tokens_total", engine) for engine in (0, 1)] == [0, 2]
    assert "tokend:queued_tokens 10.0" in text


async def test_weights_that_engines_share_count_once(start):
    async with start(ready=False, num_engines=2) as front_end:
        weights = (WeightFormatMemory("packed", 90, True), WeightFormatMemory("f32", 5))
        for engine in front_end.engines:
            engine._send(lifecycle_messages.engine_ready(epoch=engine.epoch, weights=weights))
        while front_end.app_state.client.missing_engines:
            await asyncio.sleep(0.001)
        text = (await front_end.http.get("/metrics")).text
        assert 'tokend:weights_bytes{form="packed"} 90.0' in text
        assert 'tokend:weights_bytes{form="f32"} 10.0' in text


async def test_the_live_view_shows_the_engine_that_is_chosen(front_end):
    client = front_end.http
    assert (await client.get("/view/events?engine=2")).status_code == 400
    async with client.stream("GET", "/view/events?engine=1") as response:
        lines = response.aiter_lines()
        async for line in lines:
            if line.startswith("data: "):
                assert '"engine":1,"num_engines":2' in line
                break
        assert (await front_end.engines[1].watches.get()).wanted
        assert front_end.engines[0].watches.empty()
    assert not (await front_end.engines[1].watches.get()).wanted


async def test_adapters_are_loaded_in_all_engines(start, tmp_path):
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    config = LoRAConfig(enable_lora=True)
    async with start(accepts=True, num_engines=2, lora=config) as front_end:
        for engine in front_end.engines:
            engine.send_adapters()
        body = {"lora_name": "mine", "lora_path": str(folder)}
        loaded = await front_end.http.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
        assert [list(engine.adapters) for engine in front_end.engines] == [["mine"], ["mine"]]
        gone = await front_end.http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert gone.status_code == 200
        assert [list(engine.adapters) for engine in front_end.engines] == [[], []]
