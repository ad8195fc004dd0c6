"""The public OpenAI client against /v1/responses of the running daemon."""

import json

import httpx
import openai
import pytest
from openai.types.responses import ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

MODEL = "smollm2-135m-instruct"
EVENT = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
def client(daemon: Daemon) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)


def test_a_streamed_response_equals_the_whole_one(client: openai.OpenAI) -> None:
    ask = {
        "model": MODEL,
        "input": "What is the capital of France? Answer briefly.",
        "max_output_tokens": 40,
        "temperature": 0,
    }
    whole = client.responses.create(**ask)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    events = list(client.responses.create(**ask, stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].response.output_text == whole.output_text
    assert events[-1].response.usage.output_tokens == whole.usage.output_tokens
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": ask["input"]}],
        max_tokens=40,
        temperature=0,
    )
    assert chat.choices[0].message.content == whole.output_text
    assert chat.usage.prompt_tokens == whole.usage.input_tokens


def test_a_conversation_continues_and_hits_the_prefix_cache(client: openai.OpenAI) -> None:
    ask = {"model": MODEL, "temperature": 0, "max_output_tokens": 24, "store": True}
    first = client.responses.create(**ask, input="Name three animals that live in the sea.")
    second = client.responses.create(
        **ask, input="And three that live in trees.", previous_response_id=first.id
    )
    items = [
        {"role": "user", "content": "Name three animals that live in the sea."},
        *(item.model_dump() for item in first.output),
        {"role": "user", "content": "And three that live in trees."},
    ]
    again = client.responses.create(**ask, input=items)
    assert again.output_text == second.output_text
    assert again.usage.input_tokens == second.usage.input_tokens > first.usage.total_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text


class Person(BaseModel):
    """The schema of a structured output."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=120)


def test_outputs_are_parsed_into_a_pydantic_model(client: openai.OpenAI) -> None:
    fields = {
        "model": MODEL,
        "input": "Describe a person as JSON.",
        "text_format": Person,
        "temperature": 0,
        "max_output_tokens": 100,
    }
    whole = client.responses.parse(**fields).output_parsed
    assert isinstance(whole, Person)
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed == whole


def test_cancelling_a_background_response(client: openai.OpenAI, daemon: Daemon) -> None:
    made = client.responses.create(
        model=MODEL,
        input="Tell a long story.",
        background=True,
        store=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    assert made.status == "in_progress"
    eventually(lambda: client.responses.retrieve(made.id).output_text != "")
    assert client.responses.cancel(made.id).status == "cancelled"
    eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)
    found = client.responses.retrieve(made.id)
    assert found.status == "cancelled"
    assert 0 < found.usage.output_tokens < 4000


def test_a_disconnect_ends_the_request(client: openai.OpenAI, daemon: Daemon) -> None:
    stream = client.responses.create(
        model=MODEL,
        input="Tell a long story.",
        stream=True,
        max_output_tokens=4000,
        extra_body={"ignore_eos": True},
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            break
    stream.close()
    eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)


def test_errors_name_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", max_output_tokens=100_000)
    assert caught.value.param == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_none")
    assert caught.value.param == "previous_response_id"
    response = httpx.get(f"{client.base_url}responses/resp_none")
    assert response.status_code == 404


WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Current weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_streamed_conversation_with_a_tool(client: openai.OpenAI) -> None:
    """create, function_call, function_call_output, answer."""
    ask = {
        "model": MODEL,
        "tools": [WEATHER],
        "temperature": 0,
        "max_output_tokens": 60,
        "parallel_tool_calls": False,
    }
    items: list = [{"role": "user", "content": "What is the weather in Paris?"}]
    events = list(client.responses.create(**ask, input=items, tool_choice="required", stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    response = events[-1].response
    assert response.status == "completed"
    (call,) = response.output
    deltas = [
        event.delta
        for event in events
        if event.type == "response.function_call_arguments.delta" and event.item_id == call.id
    ]
    assert "".join(deltas) == call.arguments
    assert set(json.loads(call.arguments)) == {"city"}
    items += [
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, sunny"},
    ]
    events = list(client.responses.create(**ask, input=items, tool_choice="none", stream=True))
    last = events[-1].response
    assert last.output_text
    assert last.usage.input_tokens_details.cached_tokens >= 0
    named = {"type": "function", "name": "get_weather"}
    (call,) = client.responses.create(**ask, input="Hello", tool_choice=named).output
    assert (call.type, call.name) == ("function_call", "get_weather")
