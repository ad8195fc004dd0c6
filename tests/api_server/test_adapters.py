"""Adapters at a front end: names of requests, who may use them, operators' routes, folders."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from api_server.live_view import EncodedView, SubscriberScope
from proto.errors import ErrorInfo
from proto.messages.engine_io import FinishReason
from proto.messages.lora import AdapterCard, AdapterUsage
from proto.messages.stats import LoRAStats, SchedulerStats
from proto.messages.view import AdapterView, BlockMap, EngineView
from proto.settings.config import FrontEndConfig, LoRAConfig
from proto.settings.lora_modules import LoRAAccess
from tests.api_server.conftest import MODEL, FrontEnd, StartFrontEnd, message, samples, websocket
from tests.fakes.lora import lora_request

ON = LoRAConfig(enable_lora=True)
NOT_SERVED = "does not exist"


def card(number: int, **fields: Any) -> AdapterCard:
    """An adapter named adapter-NUMBER."""
    return AdapterCard(lora_request(number), 8, 1000, number, **fields)


def all_resident(*numbers: int) -> EngineView:
    none = BlockMap(b"", b"", b"")
    adapters = [AdapterView(f"adapter-{each}", 0, 0, 0, 1) for each in numbers]
    return EngineView(1, 1.0, 1.0, *(0,) * 8, [], 0, none, adapters=adapters)


async def serve(front_end: FrontEnd, *cards: AdapterCard) -> None:
    """Have the engine serve these adapters; return when the front end knows."""
    front_end.engine.send_adapters(*cards)
    await front_end.app_state.client.call_admin("get_pause")


async def asked(front_end: FrontEnd, **fields: object) -> tuple[Any, Any]:
    """Return the engine's request of a completion, and the response."""
    answer = asyncio.create_task(front_end.complete(max_tokens=1, **fields))
    waiting = asyncio.create_task(front_end.engine.requests.get())
    await asyncio.wait({answer, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if answer.done():
        waiting.cancel()
        return None, answer.result()
    request = waiting.result()
    front_end.engine.accept(request)
    front_end.engine.emit(request, [5], finish=FinishReason.LENGTH)
    return request, await answer


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(b"")
    return path


async def test_a_model_names_an_adapter(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1), card(2))
        for name in ("adapter-2", f"{MODEL}:adapter-2"):
            request, response = await asked(front_end, model=name)
            assert request.lora_request == lora_request(2)
            assert response.json()["model"] == "adapter-2"
        for name in (MODEL, None):
            request, response = await asked(front_end, model=name)
            assert request.lora_request is None
            assert response.json()["model"] == MODEL
        for name in ("adapter-3", f"{MODEL}:adapter-3", "other:adapter-1"):
            request, response = await asked(front_end, model=name)
            assert response.status_code == 404
            assert NOT_SERVED in response.json()["error"]["message"]


async def test_without_the_setting_there_are_no_adapters(start: StartFrontEnd) -> None:
    async with start() as front_end:
        _, response = await asked(front_end, model="adapter-1")
        assert response.status_code == 404
        _, response = await asked(front_end, lora=[{"id": 0}])
        assert "--enable-lora" in response.json()["error"]["message"]
        request, _ = await asked(front_end, lora=[{"id": 0, "scale": 0}])
        assert request.lora_request is None
        response = await front_end.http.post("/v1/unload_lora_adapter", json={"lora_name": "a"})
        assert response.status_code == 400
        assert "--enable-lora" in response.json()["error"]["message"]
        assert "vllm:lora_requests_info" not in (await front_end.http.get("/metrics")).text


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_other_apis_take_adapters_and_answer_under_their_names(
    start: StartFrontEnd, path: str
) -> None:
    async with start(lambda request, choice: [5, 2], lora=ON) as front_end:
        await serve(front_end, card(1))
        body = {"model": "adapter-1", "max_tokens": 4, "input": "hi"}
        if path != "/v1/responses":
            body["messages"] = [{"role": "user", "content": "hi"}]  # type: ignore[assignment]
            del body["input"]
        else:
            body["max_output_tokens"] = body.pop("max_tokens")
        response = await front_end.http.post(path, json=body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "adapter-1"
        assert (await front_end.engine.requests.get()).lora_request == lora_request(1)
        response = await front_end.http.post(path, json={**body, "model": "adapter-7"})
        assert response.status_code == 404


async def test_a_session_and_a_websocket_take_adapters(start: StartFrontEnd) -> None:
    async with start(lambda request, choice: [5, 2], lora=ON) as front_end:
        await serve(front_end, card(1))
        async with websocket(front_end, "/v1/sessions") as client:
            await client.send(
                json.dumps({"type": "input", "model": "adapter-1", "prompt": "a", "max_tokens": 2})
            )
            assert (await message(client))["model"] == "adapter-1"
        async with websocket(front_end, "/v1/responses") as client:
            await client.send(
                json.dumps({"type": "response.create", "model": "adapter-1", "input": "a"})
            )
            assert (await message(client))["response"]["model"] == "adapter-1"
        for _ in range(2):
            assert (await front_end.engine.requests.get()).lora_request == lora_request(1)


async def test_tokens_are_counted_for_adapters(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1))
        for name, status in (("adapter-1", 200), ("adapter-2", 404)):
            response = await front_end.http.post("/tokenize", json={"model": name, "prompt": "a"})
            assert response.status_code == status


async def test_models_are_listed_with_their_adapters(start: StartFrontEnd) -> None:
    config = FrontEndConfig(api_key="client", admin_api_key="admin")
    async with start(lora=ON, config=config) as front_end:
        await serve(front_end, card(1))
        for key, root in (("client", "adapter-1"), ("admin", "/adapters/1")):
            headers = {"authorization": f"Bearer {key}"}
            listed = (await front_end.http.get("/v1/models", headers=headers)).json()["data"]
            assert [(each["id"], each["parent"]) for each in listed] == [
                (MODEL, None),
                ("adapter-1", MODEL),
            ]
            assert listed[1]["root"] == root
            shown = await front_end.http.get("/v1/models/adapter-1", headers=headers)
            assert shown.json() == listed[1]
            missing = await front_end.http.get("/v1/models/adapter-9", headers=headers)
            assert missing.status_code == 404


async def test_only_some_keys_see_and_use_an_adapter(start: StartFrontEnd, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alice a1\nbob b1\n")
    keys.chmod(0o600)
    config = FrontEndConfig(api_key_file=str(keys))
    lora = LoRAConfig(enable_lora=True, lora_access=("adapter-1=alice", "adapter-[2-3]=alice+bob"))
    async with start(lora=lora, config=config) as front_end:
        await serve(front_end, *map(card, (1, 2, 4)))
        for key, seen in (("a1", {1, 2, 4}), ("b1", {2, 4})):
            front_end.http.headers["authorization"] = f"Bearer {key}"
            listed = (await front_end.http.get("/v1/models")).json()["data"]
            assert {each["id"] for each in listed[1:]} == {f"adapter-{each}" for each in seen}
            for number in (1, 2, 4):
                _, response = await asked(front_end, model=f"adapter-{number}")
                assert response.status_code == (200 if number in seen else 404)
                _, response = await asked(front_end, lora=[{"id": number}])
                assert response.status_code == (200 if number in seen else 400)
            for response in (
                await front_end.complete(model="other"),
                await front_end.http.get("/v1/models/other"),
            ):
                names = ", ".join([MODEL, *(f"adapter-{each}" for each in sorted(seen))])
                message = response.json()["error"]["message"]
                assert message == f"the model other does not exist; available: {names}"
            shown = EncodedView(all_resident(1, 2, 4), 0.0, LoRAAccess(lora.lora_access))
            name = "alice" if key == "a1" else "bob"
            event = shown.event_for(SubscriberScope(1, key_name=name)).decode()
            fields = json.loads(event.split("data: ")[1])
            assert {each["name"] for each in fields["adapters"]} == {
                f"adapter-{each}" for each in seen
            }


# llama.cpp


async def test_llama_cpps_field_chooses_an_adapter_and_its_scale(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1), card(2))
        scales = [{"id": 2, "scale": 0.5}, {"id": 1, "scale": 0}]
        request, response = await asked(front_end, lora=scales)
        assert request.lora_request == lora_request(2, scale=0.5)
        assert response.json()["model"] == MODEL
        for given, text in (
            ([{"id": 1}, {"id": 2}], "one adapter"),
            ([{"id": 7}], "no adapter with the id 7"),
            ([{"id": "x"}], "lora"),
        ):
            _, response = await asked(front_end, lora=given)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["param"], text in error["message"]) == ("lora", True)
        _, response = await asked(front_end, model="adapter-1", lora=[{"id": 2}])
        assert "cannot be combined" in response.json()["error"]["message"]


async def test_llama_cpps_route_sets_the_adapter_of_requests_that_name_none(
    start: StartFrontEnd,
) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1), card(2))
        listed = (await front_end.http.get("/lora-adapters")).json()
        assert [(each["id"], each["path"], each["scale"]) for each in listed] == [
            (1, "/adapters/1", 0.0),
            (2, "/adapters/2", 0.0),
        ]
        response = await front_end.http.post("/lora-adapters", json=[{"id": 2, "scale": 0.5}])
        assert response.json() == {"success": True}
        request, response = await asked(front_end)
        assert request.lora_request == lora_request(2, scale=0.5)
        assert response.json()["model"] == MODEL
        request, _ = await asked(front_end, lora=[])
        assert request.lora_request is None
        request, _ = await asked(front_end, model="adapter-1")
        assert request.lora_request == lora_request(1)
        for body in ([{"id": 1}, {"id": 2}], [{"id": 9}], {}, [{"scale": 1}]):
            response = await front_end.http.post("/lora-adapters", json=body)
            assert response.status_code == 400
        await front_end.http.post("/lora-adapters", json=[])
        request, _ = await asked(front_end)
        assert request.lora_request is None


# vLLM's routes


async def load(front_end: FrontEnd, **body: object) -> Any:
    return await front_end.http.post("/v1/load_lora_adapter", json=body)


async def unload(front_end: FrontEnd, **body: object) -> Any:
    return await front_end.http.post("/v1/unload_lora_adapter", json=body)


async def test_adapters_are_loaded_and_unloaded_with_vllms_texts(
    start: StartFrontEnd, tmp_path: Path
) -> None:
    path = str(make_folder(tmp_path / "a"))
    async with start(lora=ON) as front_end:
        await serve(front_end)
        response = await load(front_end, lora_name="a", lora_path=path)
        assert (response.status_code, response.text) == (
            200,
            "Success: LoRA adapter 'a' added successfully.",
        )
        request, _ = await asked(front_end, model="a")
        assert request.lora_request.path == path
        again = await load(front_end, lora_name="a", lora_path=path)
        assert again.status_code == 400
        error = again.json()["error"]
        assert (error["type"], error["param"]) == ("InvalidUserInput", "lora_name")
        assert "has already been loaded" in error["message"]
        in_place = await load(front_end, lora_name="a", lora_path=path, load_inplace=True)
        assert in_place.status_code == 200
        response = await unload(front_end, lora_name="a")
        assert (response.status_code, response.text) == (
            200,
            "Success: LoRA adapter 'a' removed successfully.",
        )
        _, response = await asked(front_end, model="a")
        assert response.status_code == 404
        response = await unload(front_end, lora_name="a")
        assert (response.status_code, response.json()["error"]["type"]) == (404, "NotFoundError")


async def test_bad_calls_are_refused_by_field(start: StartFrontEnd, tmp_path: Path) -> None:
    folder, allowed = make_folder(tmp_path / "a"), tmp_path / "allowed"
    make_folder(allowed / "inside")
    (allowed / "link").symlink_to(folder)
    linked = make_folder(allowed / "linked") / "adapter_model.safetensors"
    linked.unlink()
    linked.symlink_to(folder / "adapter_model.safetensors")
    (tmp_path / "empty").mkdir()
    lora = LoRAConfig(enable_lora=True, lora_allowed_dirs=(str(allowed),))
    cases: list[tuple[dict[str, object], int, str | None]] = [
        ({"lora_path": str(folder)}, 400, "lora_name"),
        ({"lora_name": "a"}, 400, "lora_path"),
        ({"lora_name": MODEL, "lora_path": str(folder)}, 400, "lora_name"),
        ({"lora_name": "a\n", "lora_path": str(folder)}, 400, "lora_name"),
        ({"lora_name": "a" * 300, "lora_path": str(folder)}, 400, "lora_name"),
        ({"lora_name": 3, "lora_path": str(folder)}, 400, "lora_name"),
        ({"lora_name": "a", "lora_path": str(tmp_path / "nothing")}, 404, "lora_path"),
        ({"lora_name": "a", "lora_path": str(tmp_path / "empty")}, 404, "lora_path"),
    ]
    async with start(lora=ON) as front_end:
        for body, status, field in cases:
            response = await load(front_end, **body)
            assert (response.status_code, response.json()["error"]["param"]) == (status, field), (
                body
            )
        assert (await load(front_end, lora_name="a", lora_path="")).json()["error"]["message"] == (
            "Both 'lora_name' and 'lora_path' must be provided."
        )
        assert (await unload(front_end)).json()["error"]["message"] == (
            "'lora_name' needs to be provided to unload a LoRA adapter."
        )
        missing = await load(front_end, lora_name="a", lora_path="/no/such/folder")
        assert missing.json()["error"]["message"] == "No adapter found for /no/such/folder"
        assert front_end.engine.adapter_calls == []
    async with start(lora=lora) as front_end:
        for path in (folder, allowed / "link", allowed / "linked", allowed / ".." / "a"):
            response = await load(front_end, lora_name="a", lora_path=str(path))
            assert response.status_code == 400
            assert "--lora-allowed-dirs" in response.json()["error"]["message"]
        response = await load(front_end, lora_name="a", lora_path=str(allowed / "inside"))
        assert response.status_code == 200


async def test_the_engines_refusal_is_the_answer(start: StartFrontEnd, tmp_path: Path) -> None:
    path = str(make_folder(tmp_path / "a"))
    async with start(lora=ON) as front_end:
        front_end.engine.answers_adapter_calls = False
        answer = asyncio.create_task(load(front_end, lora_name="a", lora_path=path))
        while not front_end.engine.adapter_calls:
            await asyncio.sleep(0.001)
        engine = await front_end.lose_engine()  # the next one gets the call, too
        engine.announce()
        response = await answer
        assert response.status_code == 200
        assert engine.adapter_calls[0].resent


async def test_routes_of_adapters_are_the_operators(start: StartFrontEnd) -> None:
    config = FrontEndConfig(api_key="client", admin_api_key="admin")
    async with start(lora=ON, config=config) as front_end:
        front_end.http.headers["authorization"] = "Bearer client"
        assert (await load(front_end, lora_name="a", lora_path="/a")).status_code == 403
        assert (await unload(front_end, lora_name="a")).status_code == 403
        assert (await front_end.http.get("/lora-adapters")).status_code == 403
        assert (await front_end.http.post("/lora-adapters", json=[])).status_code == 403


async def test_a_name_loaded_through_another_front_end_is_known_at_once(
    start: StartFrontEnd,
) -> None:
    """The list may still be under way when the client comes here."""
    async with start(lora=ON) as front_end:
        front_end.engine.send_adapters(card(1))
        request, response = await asked(front_end, model="adapter-1")
        assert response.status_code == 200
        assert request.lora_request == lora_request(1)


async def test_the_engine_refuses_a_name_that_was_just_unloaded(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1))
        answer = asyncio.create_task(front_end.complete(model="adapter-1"))
        request = await front_end.engine.requests.get()
        front_end.engine.refuse(request, ErrorInfo("unknown_model", "it was unloaded", "model"))
        response = await answer
        assert (response.status_code, response.json()["error"]["param"]) == (404, "model")


async def test_names_survive_the_engine(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1))
        engine = await front_end.lose_engine()
        listed = (await front_end.http.get("/v1/models")).json()["data"]
        assert [each["id"] for each in listed] == [MODEL, "adapter-1"]
        answer = asyncio.create_task(front_end.complete(model="adapter-1", max_tokens=1))
        engine.send_adapters(card(1))
        engine.announce()
        request = await engine.requests.get()
        assert request.lora_request == lora_request(1)
        engine.accept(request)
        engine.emit(request, [5], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200


# --lora-dir


async def test_an_adapter_is_found_by_its_name(start: StartFrontEnd, tmp_path: Path) -> None:
    make_folder(tmp_path / "a")
    (tmp_path / "b.gguf").write_bytes(b"GGUF")
    lora = LoRAConfig(enable_lora=True, lora_dir=str(tmp_path))
    async with start(lora=lora) as front_end:
        await serve(front_end)
        request, response = await asked(front_end, model="a")
        assert response.status_code == 200
        assert request.lora_request.path == str(tmp_path / "a")
        request, _ = await asked(front_end, model=f"{MODEL}:b")
        assert request.lora_request.path == str(tmp_path / "b.gguf")
        await asked(front_end, model="a")
        assert [call.lora_name for call in front_end.engine.adapter_calls] == ["a", "b"]
        shown = await front_end.http.get("/v1/models/a")
        assert shown.json()["parent"] == MODEL


async def test_names_cannot_leave_the_folder(start: StartFrontEnd, tmp_path: Path) -> None:
    folder, outside = tmp_path / "adapters", make_folder(tmp_path / "outside")
    make_folder(folder / "inner" / "deep")
    make_folder(folder / ".hidden")
    (folder / "link").symlink_to(outside)
    make_folder(folder / "linked")
    (folder / "linked" / "adapter_model.safetensors").unlink()
    (folder / "linked" / "adapter_model.safetensors").symlink_to("/etc/passwd")
    (folder / "link.gguf").symlink_to(outside / "adapter_config.json")
    (folder / "pipe").mkdir()
    os.mkfifo(folder / "pipe" / "x")
    lora = LoRAConfig(enable_lora=True, lora_dir=str(folder))
    names = ["../outside", "inner/deep", "inner\\deep", ".hidden", "..", ".", "link", "linked"]
    names += ["pipe", "nothing", "a\0b", str(outside), "x" * 300, "", " "]
    async with start(lora=lora) as front_end:
        await serve(front_end)
        for name in names:
            _, response = await asked(front_end, model=name)
            assert response.status_code in (400, 404), name
        assert front_end.engine.adapter_calls == []


async def test_many_folders_are_never_listed(
    start: StartFrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path / "a")
    listed = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: listed.append(path) or scandir(path))
    monkeypatch.setattr(os, "listdir", lambda path: pytest.fail("the folder is listed"))
    lora = LoRAConfig(enable_lora=True, lora_dir=str(tmp_path))
    async with start(lora=lora) as front_end:
        await serve(front_end)
        request, _ = await asked(front_end, model="a")
        assert request is not None
    assert str(tmp_path) not in map(str, listed)


async def test_a_disk_that_does_not_answer_stalls_no_other_request(
    start: StartFrontEnd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters: Any = __import__("api_server.engine.adapters", fromlist=["_"])
    reached, release = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def hang(folder: str, name: str) -> None:
        loop.call_soon_threadsafe(reached.set)
        asyncio.run_coroutine_threadsafe(release.wait(), loop).result()

    monkeypatch.setattr(adapters, "_find_in", hang)
    monkeypatch.setattr(adapters, "LOOKUP_SECONDS", 0.2)
    lora = LoRAConfig(enable_lora=True, lora_dir=str(tmp_path))
    async with start(lora=lora) as front_end:
        await serve(front_end)
        stuck = asyncio.create_task(front_end.complete(model="a"))
        await reached.wait()
        _, response = await asked(front_end)
        assert response.status_code == 200
        assert (await stuck).status_code == 503
        release.set()


# Metrics


async def test_metrics_name_the_adapters_of_requests(start: StartFrontEnd) -> None:
    async with start(lora=LoRAConfig(enable_lora=True, max_loras=3)) as front_end:
        front_end.engine.send_adapter_usage(AdapterUsage(1, ["a", "b"], ["c"], 5, {"d": 2}))
        await front_end.app_state.client.call_admin("get_pause")
        found = await samples(front_end)
        assert found["vllm:lora_requests_info,3,a,b,c"] > 1e9
        assert found["tokend:lora_resident"] == 5
        assert found["tokend:lora_corrupted_requests,d"] == 2
        assert found["tokend:lora_evictions_total"] == 0


async def test_loads_and_evictions_are_counted(start: StartFrontEnd) -> None:
    async with start(lora=ON) as front_end:
        for lora in (LoRAStats(2, [0.05, 2.0]), LoRAStats(1, [])):
            front_end.engine.send_outputs(stats=SchedulerStats(0, 0, 0.0, lora=lora))
        await front_end.app_state.client.call_admin("get_pause")
        found = await samples(front_end)
        assert found["tokend:lora_evictions_total"] == 3
        assert found["tokend:lora_load_seconds_count"] == 2
        assert found["tokend:lora_load_seconds_sum"] == 2.05
        assert found["tokend:lora_load_seconds_bucket,0.1"] == 1


async def test_a_request_looks_at_no_more_adapters_than_it_names(
    start: StartFrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000, which a default and llama.cpp's numbers find at once, too."""
    looked: list[str] = []
    allows = LoRAAccess.allows

    def counted(self: LoRAAccess, name: str, key_name: str) -> bool:
        looked.append(name)
        return allows(self, name, key_name)

    monkeypatch.setattr(LoRAAccess, "allows", counted)
    async with start(lora=ON) as front_end:
        await serve(front_end, *map(card, range(1, 10_001)))
        request, _ = await asked(front_end)
        assert request.lora_request is None
        request, _ = await asked(front_end, lora=[{"id": 9000, "scale": 1.0}])
        assert request.lora_request == lora_request(9000)
        front_end.engine.answers_adapter_calls = False
        front_end.engine.change_adapters(card(5000, default_scale=1.0))
        front_end.engine.change_adapters(removed=["adapter-1"])
        await front_end.app_state.client.call_admin("get_pause")
        request, _ = await asked(front_end)
        assert request.lora_request == lora_request(5000)
        front_end.engine.change_adapters(card(5000))
        await front_end.app_state.client.call_admin("get_pause")
        request, _ = await asked(front_end)
        assert request.lora_request is None
        assert len(looked) < 10
        _, response = await asked(front_end, model="adapter-1")
        assert response.status_code == 404


async def test_ten_thousand_adapters_are_listed(start: StartFrontEnd, tmp_path: Path) -> None:
    """And one more is found in a folder of many."""
    for number in range(1_000):
        (tmp_path / f"other-{number}").mkdir()
    make_folder(tmp_path / "a")
    async with start(lora=LoRAConfig(enable_lora=True, lora_dir=str(tmp_path))) as front_end:
        await serve(front_end, *map(card, range(1, 10_001)))
        listed = (await front_end.http.get("/v1/models")).json()["data"]
        operators = (await front_end.http.get("/lora-adapters")).json()
        request, _ = await asked(front_end, model="a")
    assert [each["id"] for each in listed] == [MODEL, *(f"adapter-{n}" for n in range(1, 10_001))]
    assert [each["id"] for each in operators] == list(range(1, 10_001))
    assert request.lora_request.path == str(tmp_path / "a")


async def test_the_line_of_a_request_names_its_adapter(
    start: StartFrontEnd, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tokend.requests")
    async with start(lora=ON) as front_end:
        await serve(front_end, card(1))
        await asked(front_end, model="adapter-1")
        await asked(front_end, lora=[{"id": 1, "scale": 0.5}])
        await asked(front_end)
    lines = [each.getMessage() for each in caplog.records if each.name == "tokend.requests"]
    named = [" adapter=adapter-1 " in line for line in lines]
    assert (named, "adapter=" in lines[2]) == ([True, True, False], False)
