"""The public Anthropic client against /v1/messages of the running daemon."""

import anthropic
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from tests.e2e.daemon import Daemon, eventually

pytestmark = pytest.mark.suite("daemons")

MODEL = "smollm2-135m-instruct"
EVENT = TypeAdapter(RawMessageStreamEvent)
GREEDY = {"temperature": 0}
"""The client's own models have no temperature any more."""
WEATHER = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(daemon: Daemon) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=daemon.url, api_key="none", max_retries=0)


def test_a_streamed_message_equals_the_whole_one_and_counts_tokens(
    client: anthropic.Anthropic,
) -> None:
    messages = [{"role": "user", "content": "What is the capital of France? Answer briefly."}]
    ask = {"model": MODEL, "max_tokens": 40, "extra_body": GREEDY, "messages": messages}
    whole = client.messages.create(**ask)
    assert "Paris" in whole.content[0].text
    assert whole.stop_reason == "end_turn"
    events = list(client.messages.create(**ask, stream=True))
    for event in events:
        EVENT.validate_python(event.model_dump(by_alias=True, exclude_unset=True))
    with client.messages.stream(**ask) as stream:
        again = stream.get_final_message()
    assert again.content[0].text == whole.content[0].text
    assert again.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=messages)
    usage = whole.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_conversation_with_a_tool_hits_the_prefix_cache(client: anthropic.Anthropic) -> None:
    ask = {"model": MODEL, "max_tokens": 100, "extra_body": GREEDY, "tools": [WEATHER]}
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(**ask, messages=messages, tool_choice=choice) as stream:
        asked = stream.get_final_message()
    (call,) = asked.content
    assert asked.stop_reason == "tool_use"
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert set(call.input) == {"city"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees, sunny"}
    messages += [asked.to_param(), {"role": "user", "content": [result]}]
    with client.messages.stream(**ask, messages=messages) as stream:
        message = stream.get_final_message()
    assert message.content[0].type == "text"
    assert message.stop_reason in ("end_turn", "max_tokens")
    assert message.usage.cache_read_input_tokens > 0


def test_a_disconnect_ends_the_request(client: anthropic.Anthropic, daemon: Daemon) -> None:
    stream = client.messages.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell a long story."}],
        stream=True,
        max_tokens=32_000,
        extra_body={"ignore_eos": True},
    )
    for event in stream:
        if event.type == "content_block_delta":
            break
    stream.close()
    eventually(lambda: daemon.metric("vllm:num_requests_running") == 0)


def test_errors_have_anthropics_shape(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(
            model="gpt", max_tokens=5, messages=[{"role": "user", "content": "x"}]
        )
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(
            model=MODEL, max_tokens=5, messages=[{"role": "user", "content": "one " * 9000}]
        )
    assert caught.value.body["error"]["message"].startswith("prompt is too long: ")
