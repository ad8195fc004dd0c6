"""Two front ends of one daemon: a stored response is reachable through both of them."""

import asyncio
import contextlib
import json
import threading

import pytest

from api_server.generation.encoders.responses import peers
from api_server.generation.encoders.responses.stored import History, json_size
from api_server.turns import INLINE_BYTES
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import counted_turns, message, websocket
from tests.api_server.responses_client import PATH, answer, ask, error, prompt_of

TEXT = "Hi 😀 there"


@pytest.fixture
def two(start):
    """two(script): start both front ends."""

    @contextlib.asynccontextmanager
    async def running(script=None, **fields):
        config = FrontEndConfig(api_server_count=2, **fields.pop("config", {}))
        async with (
            start(script, config=config, **fields) as first,
            start(script, config=config, index=1, **fields) as second,
        ):
            yield first, second

    return running


async def test_a_response_is_found_through_the_other_front_end(two, scripted, tokenizer):
    async with two(scripted(TEXT)) as front_ends:
        for index, (here, there) in enumerate((front_ends, front_ends[::-1])):
            made = await answer(here, input="one", store=True)
            assert made["id"].startswith(f"resp_{index}_")
            url = f"{PATH}/{made['id']}"
            assert (await there.http.get(url)).json() == made
            listed = (await there.http.get(f"{url}/input_items")).json()
            assert listed == (await here.http.get(f"{url}/input_items")).json()
            assert listed["data"][0]["content"][0]["text"] == "one"
            prompt_of(here, tokenizer)
            following = await answer(there, input="two", previous_response_id=made["id"])
            assert following["id"].startswith(f"resp_{1 - index}_"), (
                "the response stays in the front end that created it"
            )
            prompt = prompt_of(there, tokenizer)
            assert [part in prompt for part in ("one", TEXT, "two")] == [True] * 3
            assert (await there.http.delete(url)).json()["deleted"]
            assert (await here.http.get(url)).status_code == 404
            assert (await there.http.delete(url)).status_code == 404
            found = await error(there, previous_response_id=made["id"])
            assert found["code"] == "previous_response_not_found"


async def test_a_large_response_is_passed_on_between_other_work(two, scripted, monkeypatch):
    def loads(text, load=json.loads):
        on_loop = threading.current_thread() is threading.main_thread()
        assert len(text) <= INLINE_BYTES or not on_loop
        return load(text)

    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "store": True}
    items = [{"type": "message", "role": "user", "id": f"m{n}"} for n in range(50)]
    items = [item | {"content": "x" * 70_000} for item in items]
    async with two(scripted(TEXT)) as (here, there):
        made = await answer(here, **asked)
        assert made["output"][0]["content"][0]["logprobs"]
        stored = here.app_state.responses
        ((owner, response_id),) = stored._stored
        response = stored.find_stored(owner, response_id).response
        stored.store_response(owner, response, History(items, json_size(items)))
        with monkeypatch.context() as patch, counted_turns() as turns:
            patch.setattr(peers.json, "loads", loads)
            read = [
                await front_end.app_state.peers.read_items("conversation", owner, response_id)
                for front_end in (here, there)
            ]
        assert len(turns) > 50
        assert read[0] == read[1]
        url = f"{PATH}/{response_id}"
        assert [(await each.http.get(url)).json() for each in (here, there)] == [made, made]
        listed = [(await each.http.get(f"{url}/input_items")).json() for each in (here, there)]
        assert listed[0] == listed[1]
        assert len(listed[0]["data"]) == 20


async def test_a_reference_to_an_item_is_found_in_the_other_front_end(two, scripted, tokenizer):
    async with two(scripted(TEXT), max_model_len=2000) as (here, there):
        made = await answer(here, input="one")
        said = {"type": "item_reference", "id": made["output"][0]["id"]}
        user = {"role": "user", "content": "two"}
        found = await answer(there, input=[said, user])
        assert "ignored_fields" not in found
        assert TEXT in prompt_of(there, tokenizer)
        assert (await here.http.delete(f"{PATH}/{made['id']}")).json()["deleted"]
        kept = await answer(here, input=[said, user])
        assert "ignored_fields" not in kept, "the other response holds the item, too"
        for response in (found, kept):
            await here.http.delete(f"{PATH}/{response['id']}")
        gone = await answer(here, input=[said, user])
        assert gone["ignored_fields"] == ["input.item_reference"]


async def test_every_way_to_continue_reaches_the_other_front_end(two, scripted):
    async with two(scripted(TEXT), max_model_len=2000) as (here, there):
        made = await answer(here, input="one")
        fields = {"previous_response_id": made["id"], "input": "two"}
        counts = [
            (await front_end.http.post(f"{PATH}/input_tokens", json=fields)).json()
            for front_end in (here, there)
        ]
        assert counts[0] == counts[1]
        compacted = await there.http.post(f"{PATH}/compact", json={"model": "toy", **fields})
        assert [item["type"] for item in compacted.json()["output"]][-1] == "compaction"
        async with websocket(there, PATH) as client:
            await client.send(
                '{"type": "response.create", "input": "two", "previous_response_id": "'
                + made["id"]
                + '"}'
            )
            assert (await message(client))["type"] == "response.created"


async def test_a_running_response_is_seen_and_cancelled_from_the_other_front_end(two):
    async with two(accepts=True) as (here, there):
        made = (await ask(here, background=True, request_id="mine")).json()
        assert made["id"] == "resp_0_mine"
        request = await here.engine.requests.get()
        here.engine.emit(request, [20])
        url = f"{PATH}/{made['id']}"
        async with asyncio.timeout(10):
            while not (seen := (await there.http.get(url)).json())["output"]:
                await asyncio.sleep(0.001)
        assert seen["status"] == "in_progress"
        assert (await there.http.post(f"{url}/cancel")).json()["status"] == "cancelled"
        assert (await here.engine.aborts.get()).request_id == request.request_id


async def test_responses_of_other_clients_are_hidden_in_both_front_ends(two, scripted):
    async with two(scripted(TEXT), config={"tenant_by": "header"}) as (here, there):
        body = {"input": "one"}
        made = await here.http.post(PATH, json=body, headers={"X-Tenant-ID": "ann"})
        url = f"{PATH}/{made.json()['id']}"
        for name, status in (("ben", 404), ("ann", 200)):
            assert (await there.http.get(url, headers={"X-Tenant-ID": name})).status_code == status


async def test_an_unresponsive_front_end_is_a_503(start, scripted, monkeypatch):
    monkeypatch.setattr(peers, "PEER_SECONDS", 0.1)
    async with start(scripted(TEXT), config=FrontEndConfig(api_server_count=2)) as front_end:
        response = await front_end.http.get(f"{PATH}/resp_1_x")
        assert response.status_code == 503
        assert response.headers["retry-after"]


@pytest.mark.parametrize("index", [0, 1])
async def test_a_restarted_front_end_is_reachable_without_its_responses(start, scripted, index):
    """index: of the restarted front end, which binds the path or connects to it."""
    config = FrontEndConfig(api_server_count=2)
    async with start(scripted(TEXT), config=config, index=1 - index) as there:
        found = []
        for _ in range(2):
            async with start(scripted(TEXT), config=config, index=index) as here:
                found.append(await answer(here))
                seen = [await there.http.get(f"{PATH}/{made['id']}") for made in found]
                statuses = [response.status_code for response in seen]
                assert statuses == [404] * (len(found) - 1) + [200]


@pytest.mark.parametrize("name", ["resp_7_x", "resp_1_", "resp_001", "resp_1_%C3%A9", "resp_999_a"])
async def test_an_id_that_names_no_front_end_is_a_404(start, name):
    async with start(config=FrontEndConfig(api_server_count=2)) as front_end:
        assert (await front_end.http.get(f"{PATH}/{name}")).status_code == 404
