"""Requests to /v1/responses, and their answers."""

import json

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

PATH = "/v1/responses"

EVENT = TypeAdapter(ResponseStreamEvent)


async def ask(front_end, **fields):
    body = json.dumps({"input": "hello", **fields})
    headers = {"content-type": "application/json"}
    return await front_end.http.post(PATH, content=body, headers=headers)


async def answer(front_end, **fields) -> dict:
    """Return the response after validation by OpenAI's types."""
    response = await ask(front_end, **fields)
    assert response.status_code == 200, response.text
    Response.model_validate(response.json())
    return response.json()


def decoded(text: str) -> list[dict]:
    """Return the events of a stream, validated by OpenAI's types and numbered consecutively."""
    found = []
    for number, event in enumerate(text.removesuffix("\n\n").split("\n\n")):
        name, _, data = event.partition("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert name == f"event: {fields['type']}"
        assert fields["sequence_number"] == number
        EVENT.validate_python(fields)
        found.append(fields)
    return found


async def events(front_end, **fields) -> list[dict]:
    body = {"input": "hello", **fields, "stream": True}
    async with front_end.http.stream("POST", PATH, json=body) as response:
        assert response.status_code == 200, await response.aread()
        return decoded((await response.aread()).decode())


async def error(front_end, **fields) -> dict:
    response = await ask(front_end, **fields)
    assert response.status_code == 400, response.text
    return response.json()["error"]


def client(front_end, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{front_end.url}/v1", api_key=key, max_retries=0, timeout=20
    )


def prompt_of(front_end, tokenizer) -> str:
    """Return the last request that the engine got."""
    request = front_end.engine.requests.get_nowait()
    return tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
