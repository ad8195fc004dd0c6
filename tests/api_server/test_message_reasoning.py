"""/v1/messages with reasoning models, and with templates that restrict the order of roles."""

import pytest
from anthropic.types import Message

from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import prepared
from tests.api_server.test_messages import BODY, USER, answer, events, prompt_of

THINKING = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% endif %}"
)
STRICT = (
    "{% for message in messages %}"
    "{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}"
    "{{ message.role }}:{{ message.content }};{% endfor %}"
)
SAID = "<think>\nthe fox 😀\n</think>\n\nover the sea"


@pytest.fixture
def serve(tokenizer, tmp_path):
    """serve(template): a model with that template."""

    def served(template: str):
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "chat_template.jinja").write_text(template)
        return prepared(tmp_path, tokenizer.get_vocab_size(), has_chat_template=True)

    return served


async def test_reasoning_is_a_separate_block(start, scripted, serve):
    async with start(scripted(SAID), served=serve(THINKING)) as front_end:
        found = await answer(front_end)
        thinking, text = found["content"]
        assert thinking["thinking"] == "the fox 😀"
        assert thinking["signature"]
        assert text == {"type": "text", "text": "over the sea"}
        details = found["usage"]["output_tokens_details"]
        assert 0 < details["thinking_tokens"] < found["usage"]["output_tokens"]
        streamed = await events(front_end)
        kinds = [
            each["delta"]["type"] for each in streamed if each["type"] == "content_block_delta"
        ]
        assert kinds.index("signature_delta") == kinds.count("thinking_delta") > 0
        assert kinds[-1] == "text_delta"
        assert streamed[-2]["usage"] == found["usage"]


async def test_reasoning_can_be_omitted(start, scripted, serve):
    async with start(scripted(SAID), served=serve(THINKING)) as front_end:
        thinking, text = (
            await answer(front_end, thinking={"type": "adaptive", "display": "omitted"})
        )["content"]
        assert (thinking["thinking"], text["text"]) == ("", "over the sea")


async def test_thinking_switch_and_budget(start, scripted, serve, tokenizer):
    async with start(scripted(SAID), served=serve(THINKING)) as front_end:
        await answer(front_end, thinking={"type": "enabled", "budget_tokens": 1024})
        request = front_end.engine.requests.get_nowait()
        assert request.thinking.budget == 1024
    async with start(scripted("over"), served=serve(THINKING)) as front_end:
        found = await answer(front_end, thinking={"type": "disabled"})
        assert [block["type"] for block in found["content"]] == ["text"]
        assert prompt_of(front_end, tokenizer).endswith("assistant:<think></think>")


async def test_thinking_blocks_are_sent_back_to_the_template(start, scripted, serve, tokenizer):
    async with start(scripted(SAID), served=serve(THINKING)) as front_end:
        first = Message.model_validate(await answer(front_end)).to_param()
        front_end.engine.requests.get_nowait()
        content = [block.model_dump() for block in first["content"]]
        said = {"role": "assistant", "content": content}
        await answer(front_end, messages=[*USER, said, *USER])
        assert "(the fox 😀)over the sea;" in prompt_of(front_end, tokenizer)


async def test_role_orders_are_adapted_to_the_template(start, scripted, serve, tokenizer):
    messages = [*USER, {"role": "system", "content": "9 tokens left"}]
    async with start(scripted("!"), served=serve(STRICT)) as front_end:
        await answer(front_end, system="be brief", messages=messages)
        assert prompt_of(front_end, tokenizer) == "system:be brief;user:hello\n9 tokens left;"
        response = await front_end.http.post(
            "/v1/messages/count_tokens",
            json={"model": "toy", "system": "be brief", "messages": messages},
        )
        assert response.json()["input_tokens"] > 0


async def test_an_unsupported_message_is_an_error_that_names_it(start, serve):
    refusing = "{{ raise_exception('no') }}"
    async with start(served=serve(refusing), config=FrontEndConfig()) as front_end:
        response = await front_end.http.post("/v1/messages", json=BODY)
        assert response.status_code == 400
        assert response.json()["error"]["message"] == "chat template: no"
