"""Sampling defaults of the model, in every API: they hold unless a request gives its own values."""

import json

import msgspec
import pytest

from tests.api_server.conftest import message, websocket

SETTINGS = (
    ("temperature", 0.6),
    ("top_k", 20),
    ("top_p", 0.9),
    ("min_p", 0.05),
    ("repetition_penalty", 1.1),
    ("max_new_tokens", 77),
)
BODIES = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {
        "model": "toy",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hello"}],
    },
}


@pytest.fixture
def served(model):
    return msgspec.structs.replace(model, generation_settings=SETTINGS)


def drawn(front_end):
    params = front_end.engine.requests.get_nowait().sampling_params
    penalty = 1.0 if params.edits is None else params.edits.repetition_penalty
    return (
        params.temperature,
        params.top_k,
        params.top_p,
        params.min_p,
        penalty,
        params.max_tokens,
    )


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_has_the_models_defaults_unless_it_gives_its_own(
    start, scripted, served, path
):
    own_limit = {"/v1/completions": 16, "/v1/messages": 9}.get(path, 77)
    async with start(scripted("!"), served=served) as front_end:
        for fields in ({}, {"temperature": None, "top_k": None, "repetition_penalty": None}):
            answer = await front_end.http.post(path, json={**BODIES[path], **fields})
            assert answer.status_code == 200, answer.text
            assert drawn(front_end) == (0.6, 20, 0.9, 0.05, 1.1, own_limit)
        if path == "/v1/responses":
            assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.6, 0.9)
        own = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
        limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
        body = {**BODIES[path], **own, limit: 5}
        answer = await front_end.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        assert drawn(front_end) == (1.0, 0, 1.0, 0.0, 1.0, 5)


async def test_the_models_defaults_give_way_to_what_a_request_asks_for(start, scripted, served):
    body = BODIES["/v1/chat/completions"]
    async with start(scripted("!"), served=served, max_model_len=500) as front_end:
        answer = await front_end.http.post("/v1/chat/completions", json={**body, "min_tokens": 90})
        assert answer.status_code == 200, answer.text
        assert drawn(front_end)[-1] == 90
    greedy = msgspec.structs.replace(served, generation_settings=(("temperature", 0),))
    async with start(served=greedy) as front_end:
        answer = await front_end.http.post("/v1/chat/completions", json={**body, "n": 2})
        message = answer.json()["error"]["message"]
        assert message.startswith("n must be 1 when temperature is 0 by the model's defaults")


async def test_a_session_has_the_models_defaults(start, scripted, served):
    async with (
        start(scripted("!"), served=served) as front_end,
        websocket(front_end, "/v1/sessions") as client,
    ):
        await client.send(json.dumps({"type": "input", "prompt": "hello", "top_k": 3}))
        await message(client)
        assert drawn(front_end)[:3] == (0.6, 3, 0.9)


async def test_a_beam_search_has_no_defaults_of_the_model(start, scripted, served):
    async with start(scripted("!"), served=served) as front_end:
        answer = await front_end.complete(use_beam_search=True, n=2)
        assert answer.status_code == 200, answer.text
        assert drawn(front_end)[:5] == (0.0, 0, 1.0, 0.0, 1.0)


async def test_models_and_the_openapi_document_show_the_defaults(start, served):
    async with start(served=served) as front_end:
        (card,) = (await front_end.http.get("/v1/models")).json()["data"]
        expected = dict(SETTINGS)
        expected["max_tokens"] = expected.pop("max_new_tokens")
        assert card["default_sampling_params"] == expected
        schemas = (await front_end.http.get("/openapi.json")).json()["components"]["schemas"]

    def shown(model, field):
        return schemas[model]["properties"][field]["anyOf"][0].get("default")

    for model in ("CompletionRequest", "ChatCompletionRequest", "ResponsesRequest"):
        assert shown(model, "temperature") == 0.6
    assert shown("MessagesRequest", "top_k") == 20
    assert shown("ChatCompletionRequest", "max_tokens") == 77
    assert shown("ResponsesRequest", "max_output_tokens") == 77
    assert shown("CompletionRequest", "max_tokens") == 16


async def test_a_model_without_settings_has_no_defaults(start, scripted):
    async with start(scripted("!")) as front_end:
        (card,) = (await front_end.http.get("/v1/models")).json()["data"]
        assert card["default_sampling_params"] == {}
        assert card["supported_tasks"] == ["generate", "chat"]
        await front_end.complete()
        assert drawn(front_end) == (1.0, 0, 1.0, 0.0, 1.0, 16)
