"""Admin routes: authorisation of operators, and the effect of every route."""

import asyncio
import json

import pytest

from api_server.routes import admin
from proto.messages.engine_io import AdminReply, EngineCoreOutput, FinishReason
from proto.messages.lifecycle import AbortRequests, ForgetImages, FrontEndReady, ProfileFrontEnds
from proto.settings.config import FrontEndConfig, TraceConfig
from tests.api_server.conftest import samples
from tests.api_server.test_process import running

OPERATOR = {"x-api-key": "op"}
KEYS = {"authorization": "Bearer op"}
ROUTES = {
    (method, route.path): {"request_ids": ["cmpl-x"]} if "abort" in route.path else None
    for route in admin.router.routes
    for method in route.methods
}
JSON_ERROR = {"message", "type", "param", "code"}


async def ask(front_end, method, path, headers=None, **fields):
    return await front_end.http.request(
        method, path, json=ROUTES[method, path], headers=headers, **fields
    )


def config(tmp_path, **fields) -> FrontEndConfig:
    (tmp_path / "clients").write_text("alice a-key\nbob b-key\n")
    (tmp_path / "operators").write_text("ops op2\n")
    return FrontEndConfig(api_key_file=str(tmp_path / "clients"), **fields)


def test_every_admin_route_is_listed():
    assert {path for _, path in ROUTES} == {
        *("/admin/drain", "/pause", "/resume", "/is_paused", "/reset_prefix_cache"),
        *("/abort_requests", "/server_info", "/start_profile", "/stop_profile"),
        "/reset_encoder_cache",
    }


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_only_an_admin_key_opens_admin_routes(start, tmp_path, method, path):
    """With admin keys configured, local clients need one, too."""
    fields = {"admin_api_key": "op", "admin_api_key_file": str(tmp_path / "operators")}
    async with start(config=config(tmp_path, **fields)) as front_end:
        for headers, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"x-api-key": "a-key"}, 403),
            ({"authorization": "Bearer b-key"}, 403),
        ):
            refused = await ask(front_end, method, path, headers)
            assert refused.status_code == status, headers
            assert set(refused.json()["error"]) == JSON_ERROR
        assert front_end.engine.calls == []
        assert not front_end.app_state.health.draining
        afar = {"x-forwarded-for": "192.0.2.1", "origin": "https://example.org"}
        for key in ("op", "op2"):
            response = await ask(front_end, method, path, {"x-api-key": key, **afar})
            assert response.is_success, response.text


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_admin_keys_without_client_keys(start, method, path):
    async with start(config=FrontEndConfig(admin_api_key="op")) as front_end:
        assert (await front_end.http.get("/v1/models")).status_code == 200
        for headers in ({}, {"x-api-key": "wrong"}):
            refused = await ask(front_end, method, path, headers)
            assert refused.status_code == 401
            assert "www-authenticate" in refused.headers
        assert (await ask(front_end, method, path, OPERATOR)).is_success


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_without_admin_keys_only_local_clients(start, tmp_path, method, path):
    async with start(config=config(tmp_path)) as front_end:
        key = {"x-api-key": "a-key"}
        assert (await ask(front_end, method, path)).status_code == 401
        for sign in ({"origin": "https://example.org"}, {"via": "1.1 proxy"}):
            assert (await ask(front_end, method, path, {**key, **sign})).status_code == 403
        assert front_end.engine.calls == []
        assert (await ask(front_end, method, path, key)).is_success


async def test_an_admin_key_opens_all_routes(start, tmp_path):
    async with start(config=config(tmp_path, admin_api_key="op"), accepts=True) as front_end:
        assert (await front_end.http.get("/metrics", headers=OPERATOR)).status_code == 200
        answer = asyncio.create_task(
            front_end.http.post("/v1/completions", json={"prompt": "x"}, headers=OPERATOR)
        )
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        assert request.tenant == 0


async def test_pause_and_resume(start):
    async with start() as front_end:
        http = front_end.http

        async def paused() -> bool:
            return (await http.get("/is_paused")).json()["is_paused"]

        assert not await paused()
        assert (await http.post("/pause")).json() == {"status": "paused"}
        assert front_end.engine.pause_mode == "finish_running"
        assert await paused()
        assert (await http.post("/pause?mode=keep&clear_cache=false")).status_code == 200
        assert front_end.engine.pause_mode == "freeze"
        assert (await http.post("/resume")).json() == {"status": "resumed"}
        assert not await paused()
        for query, param in (("mode=end", "mode"), ("mode=", "mode"), ("clear_cache=true",) * 2):
            refused = await http.post(f"/pause?{query}")
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param.partition("=")[0]
        assert not await paused()


async def test_a_pause_that_aborts_running_requests(start):
    """The engine ends them; clients keep their partial output, with finish reason abort."""
    async with start(accepts=True) as front_end:
        engine = front_end.engine
        begun = asyncio.create_task(front_end.complete(max_tokens=9))
        begun_request = await engine.requests.get()
        waiting = asyncio.create_task(front_end.chat(max_tokens=9))
        waiting_request = await engine.requests.get()
        streamed = asyncio.create_task(front_end.events("/v1/completions", prompt="a", n=2))
        streamed_request = await engine.requests.get()
        engine.emit(begun_request, [40])
        engine.emit(streamed_request, [40], choice=1)
        assert (await front_end.http.post("/pause?mode=abort")).json() == {"status": "paused"}
        assert [each.ends_unfinished for each in engine.calls] == [True]
        assert engine.pause_mode == "finish_running"
        for request, choice in (
            *((begun_request, 0), (waiting_request, 0)),
            *((streamed_request, 0), (streamed_request, 1)),
        ):
            engine.send_outputs(
                EngineCoreOutput(request.request_id, choice, 0, [], FinishReason.ABORT)
            )
        answer = await begun
        assert answer.status_code == 200
        assert answer.json()["choices"][0]["finish_reason"] == "abort"
        assert answer.json()["choices"][0]["text"]
        assert answer.json()["usage"]["completion_tokens"] == 1
        answer = (await waiting).json()
        assert answer["choices"][0]["finish_reason"] == "abort"
        assert answer["choices"][0]["message"]["content"] == ""
        ends = [each["choices"][0] for each in (await streamed)[:-1]]
        reasons = {(each["index"], each["finish_reason"]) for each in ends}
        assert reasons >= {(0, "abort"), (1, "abort")}
        assert front_end.app_state.client.num_open == 0
        engine.calls.clear()
        await front_end.http.post("/pause?mode=wait")
        assert [each.ends_unfinished for each in engine.calls] == [False]


async def test_the_prefix_cache_is_reset_if_no_request_uses_it(start):
    async with start() as front_end:
        assert (await front_end.http.post("/reset_prefix_cache")).status_code == 200
        front_end.engine.resets = False
        refused = await front_end.http.post("/reset_prefix_cache")
        assert refused.status_code == 409
        assert "3 requests are unfinished" in refused.json()["error"]["message"]
        query = "reset_running_requests=true"
        assert (await front_end.http.post(f"/reset_prefix_cache?{query}")).status_code == 200
        assert [each.reset_running_requests for each in front_end.engine.calls] == [0, 0, 1]
        both = f"{query}&reset_external=true"
        assert (await front_end.http.post(f"/reset_prefix_cache?{both}")).status_code == 200
        assert [each.reset_external for each in front_end.engine.calls] == [0, 0, 0, 1]
        refused = await front_end.http.post("/reset_prefix_cache?reset_running_requests=perhaps")
        assert refused.status_code == 400


async def test_the_encoder_cache_is_reset_with_the_pixels_of_all_front_ends(start, monkeypatch):
    async with start() as front_end:
        assert (await front_end.http.post("/reset_encoder_cache")).status_code == 200
        assert [each.name for each in front_end.engine.calls] == ["reset_encoder_cache"]
        assert front_end.supervisor.sent.get_nowait() == ForgetImages()
        monkeypatch.setattr(
            front_end.engine,
            "_reply",
            lambda call: AdminReply(1, call.call_id, False, "requests need outputs"),
        )
        refused = await front_end.http.post("/reset_encoder_cache")
        assert refused.status_code == 409
        assert refused.json()["error"]["message"] == "requests need outputs: wait for them"
        assert front_end.supervisor.sent.empty()


async def test_settings_are_returned_without_secrets(start, tmp_path):
    fields = {"api_key": "hush-1", "admin_api_key": "hush-2"}
    async with start(config=config(tmp_path, **fields)) as front_end:
        answer = await front_end.http.get("/server_info", headers={"x-api-key": "hush-2"})
        assert "hush" not in answer.text
        assert "a-key" not in answer.text
        info = answer.json()
        assert info["config"]["frontend"]["api_key"] == "***"
        assert info["config"]["scheduler"]["max_num_seqs"] == 256
        assert info["engine"]["max_model_len"] == 256
        assert info["model"]["name"] == "toy"
        assert info["vllm_config"] == {
            "model_config": {"model": "toy"},
            "cache_config": {"block_size": info["engine"]["block_size"]},
        }
        assert info["version"]


async def test_a_profile_begins_and_ends_at_the_engine_and_at_all_front_ends(start, monkeypatch):
    async with start() as front_end:
        http, sent = front_end.http, front_end.supervisor.sent
        assert (await http.post("/start_profile")).json() == {"status": "profiling"}
        monkeypatch.setattr(
            front_end.engine, "_reply", lambda call: AdminReply(1, call.call_id, True, "/a\n/b")
        )
        stopped = await http.post("/stop_profile")
        assert stopped.json() == {"status": "stopped", "files": ["/a", "/b"]}
        assert [sent.get_nowait() for _ in range(2)] == [
            *(ProfileFrontEnds(True), ProfileFrontEnds(False))
        ]
        for value, status in ((0, 409), (1, 500)):
            monkeypatch.setattr(
                front_end.engine,
                "_reply",
                lambda call, value=value: AdminReply(1, call.call_id, False, "it lasts", value),
            )
            for path in ("/start_profile", "/stop_profile"):
                refused = await http.post(path)
                assert (refused.status_code, refused.json()["error"]["message"]) == (
                    *(status, "it lasts"),
                )
        assert [each.wanted for each in (sent.get_nowait(), sent.get_nowait())] == [False, False]
        assert sent.empty()
        calls = len(front_end.engine.calls)
        monkeypatch.setattr(TraceConfig, "parsed_profiler", lambda self: None)
        for path in ("/start_profile", "/stop_profile"):
            refused = await http.post(path)
            assert refused.status_code == 400
            assert "--profiler-config" in refused.json()["error"]["message"]
        assert len(front_end.engine.calls) == calls


def wired(front_end) -> list[AbortRequests]:
    """Collect the abort requests sent to the supervisor, and forward them at once."""
    aborts: list[AbortRequests] = []

    def pass_on(message: AbortRequests) -> None:
        aborts.append(message)
        front_end.app_state.abort_streams(message.request_ids, message.owner)

    front_end.supervisor.send = pass_on
    return aborts


def begin(front_end, key: str, **fields) -> asyncio.Task:
    body = {"prompt": "hello", "max_tokens": 4, **fields}
    headers = {"x-api-key": key}
    return asyncio.create_task(front_end.http.post("/v1/completions", json=body, headers=headers))


async def abort(front_end, key: str, *ids: str) -> int:
    response = await front_end.http.post(
        "/abort_requests", json={"request_ids": ids}, headers={"x-api-key": key}
    )
    return response.status_code


async def test_an_operator_can_abort_any_request(start, tmp_path):
    """The aborted answer is marked as incomplete."""
    async with start(config=config(tmp_path, admin_api_key="op"), accepts=True) as front_end:
        wired(front_end)
        whole = begin(front_end, "a-key", request_id="one")
        streamed = begin(front_end, "b-key", request_id="two", stream=True)
        other = begin(front_end, "b-key", request_id="one-and-more")
        requests = [await front_end.engine.requests.get() for _ in range(3)]
        for request in requests:
            front_end.engine.emit(request, [40])
        assert await abort(front_end, "op", "cmpl-one", "cmpl-two", "cmpl-unknown") == 202
        gone = {(await front_end.engine.aborts.get()).request_id for _ in range(2)}
        assert (await whole).status_code == 410
        assert (await whole).json()["error"]["type"] == "RequestAbortedError"
        events = (await streamed).text.removesuffix("\n\n").split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == 410
        assert events[-1] == "data: [DONE]"
        (left,) = (each for each in requests if each.request_id not in gone)
        front_end.engine.emit(left, [41], finish=FinishReason.LENGTH)
        assert (await other).status_code == 200
        assert front_end.app_state.client.num_open == 0
        counts = (await front_end.http.get("/metrics", headers=OPERATOR)).text
        assert 'tokend:requests_cut_short_total{cause="operator"} 2.0' in counts


async def test_a_client_key_aborts_only_its_own_requests(start, tmp_path):
    """Of two requests with the same id, a client aborts only its own."""
    async with start(config=config(tmp_path), accepts=True) as front_end:
        aborts = wired(front_end)
        mine, yours = (begin(front_end, key, request_id="same") for key in ("a-key", "b-key"))
        requests = [await front_end.engine.requests.get() for _ in range(2)]
        assert await abort(front_end, "a-key", "cmpl-same", "cmpl-sam", "same") == 202
        assert aborts[0].owner == "alice"
        gone = (await front_end.engine.aborts.get()).request_id
        assert (await mine).status_code == 410
        (left,) = (each for each in requests if each.request_id != gone)
        front_end.engine.emit(left, [41], finish=FinishReason.LENGTH)
        assert (await yours).status_code == 200
        assert front_end.engine.aborts.empty()


@pytest.mark.parametrize(
    "body",
    [
        *({}, [1], {"request_ids": []}, {"request_ids": "x"}, {"request_ids": [1]}),
        *({"request_ids": ["x" * 161]}, {"request_ids": ["x"] * 1025}),
    ],
)
async def test_invalid_lists_of_ids_are_refused(start, body):
    async with start() as front_end:
        refused = await front_end.http.post("/abort_requests", json=body)
        assert refused.status_code == 400


async def test_aborts_go_through_the_supervisor_to_all_front_ends(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        body = {"prompt": "hello", "request_id": "mine"}
        answer = asyncio.create_task(process.http.post("/v1/completions", json=body))
        await process.engine.requests.get()
        asked = await process.http.post("/abort_requests", json={"request_ids": ["cmpl-mine"]})
        assert asked.status_code == 202
        aborts = await process.next_message(AbortRequests)
        assert aborts == AbortRequests(["cmpl-mine"], "")
        assert not answer.done(), "another front end may have the request"
        process.supervisor.send(aborts)
        assert (await answer).status_code == 410


async def test_finished_requests_are_no_longer_listed(start, scripted):
    async with start(scripted("!")) as front_end:
        await front_end.complete(request_id="x")
        await front_end.events("/v1/completions", prompt="hello", request_id="x")
        assert front_end.app_state.open_streams == set()


async def test_load_counts_open_requests(start):
    async with start(accepts=True) as front_end:

        async def load() -> int:
            return (await front_end.http.get("/load")).json()["server_load"]

        assert await load() == 0
        asking = [asyncio.create_task(front_end.complete(max_tokens=1)) for _ in range(3)]
        requests = [await front_end.engine.requests.get() for _ in asking]
        assert await load() == 3
        for request in requests:
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        await asyncio.gather(*asking)
        assert await load() == 0
        assert (await samples(front_end))["tokend:requests_cut_short_total,operator"] == 0
