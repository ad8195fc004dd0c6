"""Engine switch of a reload in the front end, invisible for clients."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from api_server.generation.images import ImageInput
from api_server.supervisor_commands import EngineSwitch, run_commands
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import (
    ForgetImages,
    NewEngine,
    NextEngine,
    NextReady,
    OldEngineIdle,
    ProtocolViolation,
    Shutdown,
    Switched,
)
from proto.messages.stats import SchedulerStats
from proto.messages.view import Watch
from proto.runtime.sockets import front_end_path
from proto.settings.config import ReliabilityConfig
from tests.api_server.test_live_view import view, watching
from tests.fakes.fake_engine import FakeEngine
from tests.fakes.media_reader import FakeMediaReader

LIMIT_SECONDS = 20


class Case:
    """A front end with an engine of epoch 1, or several; the test acts as its supervisor.

    engines: by epoch.
    """

    def __init__(self, front_end):
        self.front_end = front_end
        self.engines = {each.epoch: each for each in front_end.engines}
        self.sent = front_end.supervisor.sent
        self.engine_switch = EngineSwitch(front_end.boot, front_end.app.state)

    def path(self, epoch):
        return front_end_path(self.front_end.run_dir, epoch, 0)

    def start_engine(self, epoch, **fields):
        """Start another engine, which is not ready yet."""
        vocab_size = self.engines[1].vocab_size + 1  # a larger vocabulary
        engine = FakeEngine(
            self.path(epoch), vocab_size=vocab_size, epoch=epoch, accepts=True, **fields
        )
        self.engines[epoch] = engine
        return engine

    async def next(self):
        async with asyncio.timeout(LIMIT_SECONDS):
            return await self.sent.get()

    async def begin(self, epoch=1, **fields):
        """Start a completion at the engine of this epoch."""
        answer = asyncio.create_task(
            self.front_end.complete(return_token_ids=True, max_tokens=2, **fields)
        )
        async with asyncio.timeout(LIMIT_SECONDS):
            return answer, await self.engines[epoch].requests.get()

    async def tokens(self, answer):
        response = await answer
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]

    async def side_by_side(self, epoch, model, index=0):
        """Prepare the next engine, up to the moment before the switch."""
        engine = self.start_engine(epoch)
        self.engine_switch.prepare(NextEngine(epoch, model, in_place=False, engine=index))
        engine.announce()
        assert await self.next() == NextReady(0, epoch)
        return engine

    async def switch(self, epoch, index=0, epochs=()):
        """Switch from the previous engine to the next one, or all engines to these epochs."""
        self.engine_switch.switch(epoch, index, epochs)
        assert await self.next() == Switched(0, epoch)

    async def close(self):
        for engine in self.engines.values():
            if engine not in self.front_end.engines:
                await engine.close()


@pytest.fixture
async def case(start):
    async with start(accepts=True) as front_end:
        each = Case(front_end)
        yield each
        await each.close()


async def test_open_requests_stay_and_new_ones_go_to_the_next_engine(case, model):
    old, first = await case.begin()
    engine = case.start_engine(2)
    case.engine_switch.prepare(NextEngine(2, model, in_place=False))
    before, second = await case.begin()
    assert case.sent.empty(), "the next engine is not ready yet"
    engine.announce()
    assert await case.next() == NextReady(0, 2)
    await case.switch(2)
    new, third = await case.begin(2)
    assert (first.epoch, second.epoch, third.epoch) == (1, 1, 2)
    engine.emit(third, [42, 43], finish=FinishReason.LENGTH)
    assert await case.tokens(new) == [42, 43]
    for request in (first, second):
        case.engines[1].emit(request, [40, 41], finish=FinishReason.LENGTH)
        assert case.sent.empty()
        assert await case.tokens(old if request is first else before) == [40, 41]
    assert await case.next() == OldEngineIdle(0, 1)
    assert len({first.request_id, second.request_id, third.request_id}) == 3


async def test_a_profile_ends_with_its_engine(case, model):
    """The stacks that a front end has sampled are dropped, so that the next profile can begin."""
    dropped = []

    class Sampler:
        def discard(self):
            dropped.append(case.front_end.app_state.epoch)

    state = case.front_end.app.state
    state.app_state = replace(state.app_state, sampler=Sampler())
    await case.side_by_side(2, model)
    assert not dropped
    await case.switch(2)
    assert len(dropped) == 1
    case.start_engine(3)
    case.engine_switch.replace_engine(NewEngine(3, 3))
    assert len(dropped) == 2


async def test_an_admin_call_during_the_switch_reaches_both_engines(case, model):
    """The daemon is paused, whichever engine answers."""
    await case.side_by_side(2, model)
    call = asyncio.create_task(
        case.front_end.app_state.client.call_admin("pause", pause_mode="finish_running")
    )
    await asyncio.sleep(0)  # sent, but not answered
    assert case.engines[1].calls == []
    await case.switch(2)
    assert (await call).ok
    async with asyncio.timeout(LIMIT_SECONDS):
        while not (case.engines[1].calls and case.engines[2].calls):
            await asyncio.sleep(0)
    for epoch in (1, 2):
        (made,) = case.engines[epoch].calls
        assert (made.epoch, made.name, made.pause_mode) == (epoch, "pause", "finish_running")


async def test_live_view_subscribers_follow_the_switch(case, model):
    """They get views of the old engine, a reload event, then views of the new engine."""
    async with asyncio.timeout(LIMIT_SECONDS), watching(case.front_end) as stream:
        old = case.engines[1]
        assert (await stream.next())[0] == "hello"
        assert await old.watches.get() == Watch(1, True)
        new = await case.side_by_side(2, model)
        new.send_view(view(epoch=2, step=20))
        old.send_view(view(epoch=1, step=10))
        assert (await stream.next())[1]["step"] == 10
        assert new.watches.empty()
        await case.switch(2)
        assert await old.watches.get() == Watch(1, False)
        assert await new.watches.get() == Watch(2, True)
        old.send_view(view(epoch=1, step=11))
        new.send_view(view(epoch=2, step=21))
        kind, notice = await stream.next()
        assert (kind, notice["kind"]) == ("notice", "reload")
        assert (await stream.next())[1]["step"] == 21


async def test_an_abort_goes_to_the_engine_that_has_the_request(case, model):
    answer, request = await case.begin(stream=True)
    await case.side_by_side(2, model)
    await case.switch(2)
    answer.cancel()
    async with asyncio.timeout(LIMIT_SECONDS):
        abort = await case.engines[1].aborts.get()
    assert (abort.epoch, abort.request_id) == (1, request.request_id)
    assert await case.next() == OldEngineIdle(0, 1)
    assert case.engines[2].aborts.empty()


async def test_requests_of_a_dead_old_engine_continue_at_the_next(case, model):
    answer, request = await case.begin()
    case.engines[1].emit(request, [40])
    await case.side_by_side(2, model)
    await case.switch(2)
    case.engine_switch.drop(1)
    async with asyncio.timeout(LIMIT_SECONDS):
        again = await case.engines[2].requests.get()
    assert (again.epoch, again.request_id, again.crash_count) == (2, request.request_id, 1)
    assert again.output_token_ids == ((40,),)
    case.engines[2].emit(again, [41], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [40, 41]
    assert case.sent.empty(), "the old engine is known to be dead"


async def test_images_are_no_longer_read_for_an_engine_that_is_dropped(case, model):
    """The old one, while a request is open at it."""
    state, reader = case.front_end.app.state, FakeMediaReader()
    state.app_state = replace(state.app_state, images=ImageInput(reader, 0, 1))
    answer, _ = await case.begin()
    await case.side_by_side(2, model)
    await case.switch(2)
    assert not reader.is_closed
    case.engine_switch.drop(1)
    await asyncio.sleep(0)
    assert reader.is_closed
    answer.cancel()


async def test_the_supervisor_has_pixels_of_images_forgotten(case, monkeypatch):
    state, reader = case.front_end.app.state, FakeMediaReader()
    for images in (None, ImageInput(reader, 0, 1)):
        state.app_state = replace(state.app_state, images=images)
        receive = AsyncMock(side_effect=[[ForgetImages(), Shutdown()], asyncio.CancelledError])
        monkeypatch.setattr(case.front_end.supervisor, "receive", receive, raising=False)
        stopped = asyncio.Event()
        running = asyncio.create_task(
            run_commands(case.front_end.supervisor, case.engine_switch, stopped)
        )
        await stopped.wait()
        running.cancel()
    assert reader.num_forgotten == 1


async def test_images_are_no_longer_read_for_a_next_engine_that_is_dropped(
    case, model, monkeypatch
):
    reader = FakeMediaReader()
    monkeypatch.setattr(
        "api_server.supervisor_commands.make_image_input",
        lambda *_: ImageInput(reader, 0, 1),
    )
    await case.side_by_side(2, model)
    case.engine_switch.drop(2)
    await asyncio.sleep(0)
    assert reader.is_closed


async def test_garbage_of_the_old_engine_is_reported_to_the_supervisor(case, model):
    """The lost message may be the end of a stream, so its requests wait until it is dropped."""
    answer, request = await case.begin()
    await case.side_by_side(2, model)
    await case.switch(2)
    case.engines[1].link.zmq_socket.send(b"\xc1")
    case.engines[1].emit(request, [99])
    assert (await case.next()).epoch == 1
    assert case.engines[2].requests.empty()
    case.engine_switch.drop(1)
    async with asyncio.timeout(LIMIT_SECONDS):
        again = await case.engines[2].requests.get()
    assert again.output_token_ids == ((),)
    case.engines[2].emit(again, [40, 41], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [40, 41]
    assert case.sent.empty()


async def test_the_next_engine_may_die(case, model):
    """Requests at the old engine are not affected."""
    old, first = await case.begin()
    await case.side_by_side(2, model)
    await case.switch(2)
    new, _ = await case.begin(2)
    await case.engines.pop(2).close()
    case.engine_switch.replace_engine(NewEngine(3, 3))
    engine = case.start_engine(3)
    engine.announce()
    async with asyncio.timeout(LIMIT_SECONDS):
        again = await engine.requests.get()
    assert engine.requests.empty()
    engine.emit(again, [42, 43], finish=FinishReason.LENGTH)
    assert await case.tokens(new) == [42, 43]
    case.engines[1].emit(first, [40, 41], finish=FinishReason.LENGTH)
    assert await case.tokens(old) == [40, 41]
    assert await case.next() == OldEngineIdle(0, 1)


async def test_an_abandoned_next_engine_changes_nothing(case, model):
    case.start_engine(2)
    case.engine_switch.prepare(NextEngine(2, model, in_place=False))
    await asyncio.sleep(0)
    case.engine_switch.drop(2)
    case.engine_switch.switch(2)
    answer, request = await case.begin()
    case.engines[1].emit(request, [40, 41], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [40, 41]
    assert case.sent.empty()


async def test_an_unreadable_model_is_reported(case, model, tmp_path):
    empty = msgspec.structs.replace(model, folder=str(tmp_path))
    case.engine_switch.prepare(NextEngine(2, empty, in_place=True))
    said = await case.next()
    assert (said.index, said.epoch) == (0, 2)
    assert said.error is not None
    assert "tokenizer.json" in said.error.message


async def test_garbage_of_the_next_engine_before_the_switch_is_reported_after_it(case, model):
    client = case.front_end.app_state.client
    engine = await case.side_by_side(2, model)
    engine.link.zmq_socket.send(b"\xc1")
    async with asyncio.timeout(LIMIT_SECONDS):
        while client._connections[2].ready:
            await asyncio.sleep(0.001)
    assert case.sent.empty(), "no request is sent there yet"
    case.engine_switch.switch(2)
    assert isinstance(violation := await case.next(), ProtocolViolation)
    assert violation.epoch == 2
    assert await case.next() == Switched(0, 2)
    assert await case.next() == OldEngineIdle(0, 1)
    late = asyncio.create_task(case.front_end.complete(return_token_ids=True, max_tokens=1))
    while not client.num_open:
        await asyncio.sleep(0.001)
    case.engine_switch.replace_engine(NewEngine(3, 3))
    following = case.start_engine(3)
    following.announce()
    async with asyncio.timeout(LIMIT_SECONDS):
        request = await following.requests.get()
    following.emit(request, [40], finish=FinishReason.LENGTH)
    assert await case.tokens(late) == [40]
    assert engine.requests.empty()


async def test_in_place_accepted_requests_are_marked_for_the_next_engine(case, model):
    """Their HTTP status may have been sent, so queue limits do not apply."""
    answer, request = await case.begin()
    while not case.front_end.app_state.client._open[request.request_id].accepted:
        await asyncio.sleep(0)
    case.engine_switch.replace_engine(NewEngine(2, 2, died=False))
    engine = case.start_engine(2)
    engine.announce()
    async with asyncio.timeout(LIMIT_SECONDS):
        again = await engine.requests.get()
    assert (again.accepted, again.crash_count) == (True, 0)
    engine.emit(again, [40], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [40]


async def test_an_engine_of_another_protocol_version_is_reported(case, model):
    engine = case.start_engine(2)
    case.engine_switch.prepare(NextEngine(2, model, in_place=False))
    engine.announce(protocol_version=99)
    said = await case.next()
    assert said.error is not None
    assert "protocol 99" in said.error.message


def other_version(model, folder: Path):
    """Return the model with another tokenizer and another template."""
    shutil.copytree(model.folder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("hello", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return msgspec.structs.replace(model, folder=str(folder))


async def test_requests_use_the_tokenizer_of_their_engine(case, model, tmp_path):
    """Also requests sent during the switch; open ones keep the old tokenizer."""
    changed = other_version(model, tmp_path / "other")
    old, first = await case.begin()
    await case.side_by_side(2, changed)
    await case.switch(2)
    new, second = await case.begin(2)
    assert len(second.prompt_token_ids) == 1 < len(first.prompt_token_ids)
    chat = asyncio.create_task(case.front_end.chat(max_tokens=1))
    third = await case.engines[2].requests.get()
    assert third.prompt_token_ids == second.prompt_token_ids
    for request in (second, third):
        case.engines[2].emit(request, [40], finish=FinishReason.LENGTH)
    assert (await new).status_code == (await chat).status_code == 200
    case.engine_switch.drop(1)
    assert (await old).status_code == 500, "the next engine has another vocabulary"


async def test_in_place_another_tokenizer_is_refused(case, model, tmp_path):
    changed = other_version(model, tmp_path / "other")
    case.engine_switch.prepare(NextEngine(2, changed, in_place=True))
    said = await case.next()
    assert said.error is not None
    assert "another tokenizer" in said.error.message


async def test_in_place_requests_wait_for_the_next_engine_without_a_crash_count(
    case, model, tmp_path
):
    shutil.copytree(model.folder, tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").write_text("fox")
    changed = msgspec.structs.replace(model, folder=str(tmp_path / "other"))
    answer, request = await case.begin()
    case.engines[1].emit(request, [40])
    case.engine_switch.prepare(NextEngine(2, changed, in_place=True))
    assert await case.next() == NextReady(0, 2)
    case.engine_switch.replace_engine(NewEngine(2, 2, died=False))
    late = asyncio.create_task(case.front_end.complete(max_tokens=1))
    while case.front_end.app_state.client.num_open < 2:
        await asyncio.sleep(0.001)
    engine = case.start_engine(2)
    engine.announce()
    again, other = await engine.requests.get(), await engine.requests.get()
    assert (again.request_id, again.crash_count) == (request.request_id, 0)
    assert again.output_token_ids == ((40,),)
    engine.emit(again, [41], finish=FinishReason.LENGTH)
    engine.emit(other, [42], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [40, 41]
    assert (await late).status_code == 200
    case.engine_switch.switch(2)
    chat = asyncio.create_task(case.front_end.chat(max_tokens=1))
    third = await engine.requests.get()
    fox = case.front_end.app_state.tokenizer._tokenizer.encode("fox", add_special_tokens=False)
    assert third.prompt_token_ids == fox.ids
    engine.emit(third, [40], finish=FinishReason.LENGTH)
    assert (await chat).status_code == 200
    assert case.sent.empty()


async def test_gauges_sum_both_engines(case, model):
    _, request = await case.begin()
    await case.side_by_side(2, model)
    await case.switch(2)
    case.engines[1].send_outputs(stats=SchedulerStats(1, 2, 0.5))
    case.engines[2].send_outputs(stats=SchedulerStats(3, 0, 0.25))

    async def shown(running, waiting, usage):
        text = (await case.front_end.http.get("/metrics")).text
        values = {"num_requests_running": running, "num_requests_waiting": waiting}
        values["kv_cache_usage_perc"] = usage
        return all(
            f'vllm:{name}{{engine="0",model_name="toy"}} {value}\n' in text
            for name, value in values.items()
        )

    async with asyncio.timeout(LIMIT_SECONDS):
        while not await shown(4.0, 2.0, 0.5):
            await asyncio.sleep(0)
        case.engines[1].emit(request, [40, 41], finish=FinishReason.LENGTH)
        while not await shown(3.0, 0.0, 0.25):
            await asyncio.sleep(0)


async def test_a_drain_waits_for_requests_at_both_engines(case, model):
    old, first = await case.begin()
    await case.side_by_side(2, model)
    await case.switch(2)
    new, second = await case.begin(2)
    assert case.engine_switch.num_in_flight == 2
    gone = asyncio.create_task(case.engine_switch.wait_until_idle())
    case.engines[2].emit(second, [40], finish=FinishReason.LENGTH)
    await new
    assert not gone.done()
    case.engines[1].emit(first, [40], finish=FinishReason.LENGTH)
    await old
    await gone


@asynccontextmanager
async def inside(case, model, epochs=()):
    """Start a request before the switch whose body arrives after it. epochs: of all engines."""
    port = case.front_end.http.base_url.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"prompt": "hello", "max_tokens": 1}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
    next_epoch = max(case.engines) + 1
    await case.side_by_side(next_epoch, model)
    while not case.engine_switch.num_in_flight:
        await asyncio.sleep(0)
    await case.switch(next_epoch, 0, epochs)
    assert epochs or case.sent.empty()
    yield reader, lambda: writer.write(body)
    writer.close()


async def test_a_request_accepted_before_the_switch_goes_to_the_old_engine(case, model):
    """It was tokenized with the old tokenizer."""
    async with inside(case, model) as (reader, go_on):
        go_on()
        async with asyncio.timeout(LIMIT_SECONDS):
            request = await case.engines[1].requests.get()
        case.engines[1].emit(request, [40], finish=FinishReason.LENGTH)
        assert b"200 OK" in await reader.readline()
        assert await case.next() == OldEngineIdle(0, 1)


async def test_it_fails_if_the_old_engine_died_and_no_other_has_its_tokenizer(
    case, model, tmp_path
):
    async with inside(case, other_version(model, tmp_path / "other")) as (reader, go_on):
        case.engine_switch.drop(1)
        go_on()
        assert b"500" in await reader.readline()
        assert case.engines[2].requests.empty()


async def test_it_goes_to_the_next_engine_if_the_old_one_died(case, model):
    async with inside(case, model) as (reader, go_on):
        case.engine_switch.drop(1)
        go_on()
        async with asyncio.timeout(LIMIT_SECONDS):
            request = await case.engines[2].requests.get()
        case.engines[2].emit(request, [40], finish=FinishReason.LENGTH)
        assert b"200 OK" in await reader.readline()


async def test_new_requests_have_the_sampling_defaults_of_the_next_model(case, model, caplog):
    _, first = await case.begin()
    settings = (("temperature", 0.5),)
    await case.side_by_side(2, msgspec.structs.replace(model, generation_settings=settings))
    with caplog.at_level("INFO", "tokend.api"):
        await case.switch(2)
    assert "sampling defaults: temperature 0.5 (generation_config.json)" in caplog.text
    _, second = await case.begin(2)
    temperatures = [each.sampling_params.temperature for each in (first, second)]
    assert temperatures == [1.0, 0.5]


async def test_invalid_sampling_defaults_of_the_next_model_keep_the_old_engine(case, model):
    settings = (("top_p", 2.0),)
    broken = msgspec.structs.replace(model, generation_settings=settings)
    case.engine_switch.prepare(NextEngine(2, broken, in_place=True))
    answer = await case.next()
    assert "generation_config.json: top_p must be" in answer.error.message


async def test_another_model_has_its_own_name_and_no_requests_of_the_old_one(case, model):
    """Even with the same tokenizer, an answer of one model is not continued by another."""
    other = msgspec.structs.replace(model, name="other", source="/other")
    first, _ = await case.begin()
    await case.side_by_side(2, other)
    case.engine_switch.switch(2)
    late, request = await case.begin(2, model="other")
    case.engines[2].emit(request, [5, 6], finish=FinishReason.LENGTH)
    body = (await late).json()
    assert body["model"] == "other"
    assert (await case.front_end.complete(model="toy")).status_code == 404
    names = (await case.front_end.http.get("/v1/models")).json()["data"]
    assert [each["id"] for each in names] == ["other"]
    assert 'model_name="other"' in (await case.front_end.http.get("/metrics")).text
    case.engine_switch.drop(1)
    failed = await first
    assert failed.status_code == 500
    assert "the engine of this request died" in failed.json()["error"]["message"]


async def test_in_place_requests_finish_before_another_model_is_loaded(case, model):
    other = msgspec.structs.replace(model, name="other", source="/other")
    answer, request = await case.begin()
    case.engine_switch.prepare(NextEngine(2, other, in_place=True))
    async with asyncio.timeout(LIMIT_SECONDS):
        while not case.engine_switch.app_state.health.is_switching_model:
            await asyncio.sleep(0)
    refused = await case.front_end.complete()
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert "another model is being loaded" in refused.json()["error"]["message"]
    assert (await case.front_end.http.get("/health/ready")).status_code == 503
    assert case.sent.empty()
    case.engines[1].emit(request, [5, 6], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [5, 6]
    assert await case.next() == NextReady(0, 2)
    case.engine_switch.drop(2)  # it cannot be loaded
    answer, request = await case.begin()
    case.engines[1].emit(request, [7, 8], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [7, 8]


async def test_in_place_requests_that_do_not_end_keep_the_model(case, model):
    """The boot's --shutdown-timeout limits the wait."""
    config = msgspec.structs.replace(
        case.front_end.boot.config, reliability=ReliabilityConfig(shutdown_timeout=0.05)
    )
    boot = msgspec.structs.replace(case.front_end.boot, config=config)
    case.engine_switch = EngineSwitch(boot, case.front_end.app.state)
    answer, request = await case.begin()
    other = msgspec.structs.replace(model, name="other", source="/other")
    case.engine_switch.prepare(NextEngine(2, other, in_place=True))
    ready = await case.next()
    assert ready.error is not None
    assert "1 requests still ran after 0.05 s (--shutdown-timeout)" in ready.error.message
    assert not case.engine_switch.app_state.health.is_switching_model
    case.engines[1].emit(request, [5, 6], finish=FinishReason.LENGTH)
    assert await case.tokens(answer) == [5, 6]
