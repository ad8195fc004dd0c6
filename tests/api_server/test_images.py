"""Images in chats, responses and messages: what they become, and what is refused.

The media reader is a stand-in: it loads an image of three rows for any URL, and of as many as the
last digit of the URL says.
"""

import asyncio
import gc
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import msgspec
import openai
import pytest
from anthropic.types import Message

from api_server.generation.images import ImageInput
from api_server.protocol.chat import ContentPart
from proto.errors import ErrorInfo, InvalidRequestError
from proto.messages.engine_io import EngineCoreRequest, FinishReason
from proto.messages.prepared_model import PreparedModel, VisionFacts
from proto.runtime.log_lines import FIELDS
from tests.api_server.conftest import TEMPLATE, FrontEnd, byte_level_tokenizer, prepared
from tests.fakes.media_reader import FakeMediaReader

PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Takes parts with images."""
STRICT = PARTS.replace(
    "{% for part",
    "{% if message['role'] != 'user' %}{{ raise_exception('no parts for ' + message['role']) }}"
    "{% endif %}{% for part",
)
"""Takes parts in messages of the user only."""
TEXT_PARTS = PARTS.replace("{% if part['type'] == 'image' %}<image>{% else %}", "{% if true %}")
"""Takes parts, and knows texts only."""
ONLY_PARTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
    "{% elif part['type'] == 'image' %}<image>{% endif %}{% endfor %}<|im_end|>\n{% endfor %}"
)
"""Takes parts, and no content that is a text, as SmolVLM's."""
PNG = "data:image/png;base64,eA=="
TWO, FOUR = "data:image/png;base64,eA2", "data:image/png;base64,eA4"
ROWS = "<around>{}<around>"


def rows(number: int) -> str:
    """Return the text of an image with this many rows, as the model reads it."""
    return ROWS.format("<image>" * number)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PreparedModel]:
    """A prepared model that reads images, with a chat template."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<image>", "<around>", "<start_of_image>"])

    def make(template: str) -> PreparedModel:
        folder = tmp_path_factory.mktemp("vision")
        tokenizer.save(str(folder / "tokenizer.json"))
        (folder / "chat_template.jinja").write_text(template)
        model = prepared(Path(folder), tokenizer.get_vocab_size(), has_chat_template=True)
        image_token_id = tokenizer.token_to_id("<image>")
        vision = VisionFacts(
            architecture="LlavaForConditionalGeneration",
            image_token_id=image_token_id,
            max_embeds=16,
        )
        return msgspec.structs.replace(model, vision=vision)

    return make


@pytest.fixture
def reader() -> FakeMediaReader:
    return FakeMediaReader()


@pytest.fixture
def serve(start: Any, folders: Callable[..., PreparedModel], reader: FakeMediaReader) -> Any:
    """serve(script, template=…) runs a front end whose model reads images."""

    def running(script: Any = None, template: str = PARTS, **fields: Any) -> Any:
        fields = {"served": folders(template), "media": reader, **fields}
        return start(script, **fields)

    return running


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def image(url: Any = PNG, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def user(*content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(content)}]


async def ask(front_end: FrontEnd, *content: Any, **fields: Any) -> EngineCoreRequest:
    """Send a chat of one message; return the request that the engine got."""
    response = await front_end.chat(**{"messages": user(*content), **fields})
    assert response.status_code == 200, response.text
    return front_end.engine.requests.get_nowait()


async def refusal(front_end: FrontEnd, *content: Any, **fields: Any) -> dict[str, Any]:
    response = await front_end.chat(**{"messages": user(*content), **fields})
    assert response.status_code == 400, response.text
    assert front_end.engine.requests.empty()
    error: dict[str, Any] = response.json()["error"]
    return error


def prompt_of(front_end: FrontEnd, request: EngineCoreRequest) -> str:
    return front_end.app_state.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)


def images_of(front_end: FrontEnd, request: EngineCoreRequest) -> list[str]:
    """Return the text of each image of a request, by its range."""
    tokenizer = front_end.app_state.tokenizer
    return [
        tokenizer.decode(
            request.prompt_token_ids[each.offset : each.end], skip_special_tokens=False
        )
        for each in request.mm_features
    ]


async def released(reader: FakeMediaReader) -> None:
    """Wait until no lease is held: an answer can arrive before its request has ended."""
    async with asyncio.timeout(10):
        while reader.num_leases:
            await asyncio.sleep(0)


# Chats.


async def test_the_parts_become_features_of_the_prompt(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        response = await front_end.chat(
            messages=user(text("compare "), image(TWO), text(" and "), image(FOUR, detail="high")),
            cache_salt="s",
        )
        assert response.status_code == 200, response.text
        request = front_end.engine.requests.get_nowait()
        assert prompt_of(front_end, request) == (
            f"<|im_start|>user\ncompare {rows(2)} and {rows(4)}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert images_of(front_end, request) == ["<image>" * 2, "<image>" * 4]
        assert [each.num_embeds for each in request.mm_features] == [2, 4]
        assert [each.grid for each in request.mm_features] == [(1, 2), (1, 4)]
        assert response.json()["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
        ((sources, tenant, salt),) = reader.calls
        assert (tenant, salt) == (request.tenant, "s")
        assert [each.url for each in sources] == [TWO, FOUR]
        assert [each.detail for each in sources] == ["auto", "high"]
        assert [each.param for each in sources] == [
            "messages[0].content[1].image_url",
            "messages[0].content[3].image_url",
        ]


async def test_an_image_is_a_string_or_the_uuid_of_an_earlier_one(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        first = await ask(front_end, {"type": "image_url", "image_url": PNG, "uuid": "a"})
        for again in ({"image_url": None, "uuid": "a"}, {"uuid": "a"}):
            request = await ask(front_end, {"type": "image_url", **again})
            assert request.mm_features == first.mm_features
            assert (reader.sources[0].url, reader.sources[0].uuid) == (None, "a")
        error = await refusal(front_end, {"type": "image_url", "uuid": "b"})
        assert error["param"] == "messages[0].content[0].image_url"
        await released(reader)


async def test_text_alone_is_as_before_and_the_reader_is_not_asked(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        request = await ask(front_end, text("say <image>"))
        assert request.mm_features == []
        assert "say <image><|im_end|>" in prompt_of(front_end, request)
        response = await front_end.complete(prompt="<image>")
        assert response.status_code == 200
        assert front_end.engine.requests.get_nowait().mm_features == []
        assert reader.calls == []


@pytest.mark.parametrize("template", [TEMPLATE, TEXT_PARTS])
async def test_a_template_that_takes_no_images_gets_the_placeholder_as_text(
    serve, scripted, template
):
    async with serve(scripted("Hi"), template) as front_end:
        request = await ask(front_end, text("a"), image(TWO), text("b"))
        joint = "\n" if template == TEMPLATE else ""
        assert f"user\na{joint}{rows(2)}{joint}b<|im_end|>" in prompt_of(front_end, request)
        assert images_of(front_end, request) == ["<image>" * 2]


async def test_gemma_writes_another_text_than_its_image_token(serve, scripted):
    template = (Path(__file__).parent / "templates" / "gemma3.jinja").read_text()
    reader = FakeMediaReader("<start_of_image>")
    async with serve(scripted("Hi"), template, media=reader) as front_end:
        request = await ask(front_end, text("a "), image(TWO))
        assert f"user\na{rows(2)}<end_of_turn>" in prompt_of(front_end, request)
        for mark in ("<start_of_image>", "<image>"):
            error = await refusal(front_end, text(mark), image())
            assert f"messages[0]: a text beside images must not contain {mark}" in error["message"]


@pytest.mark.parametrize("template", [PARTS, STRICT, TEMPLATE, ONLY_PARTS])
async def test_the_result_of_a_tool_has_images(serve, scripted, template):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("here:"), image(TWO)]},
        *user(image(FOUR), text("and this?")),
    ]
    async with serve(scripted("Hi"), template) as front_end:
        request = await ask(front_end, messages=messages)
        assert images_of(front_end, request) == ["<image>" * 2, "<image>" * 4]
        found = prompt_of(front_end, request)
        assert f"here:{rows(2)}" in found.replace("\n", "")
        assert found.index(rows(2)) < found.index(rows(4))


async def test_tools_reach_a_template_that_knows_nothing_but_parts(serve, scripted):
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    async with serve(scripted("Hi"), ONLY_PARTS, max_model_len=2048) as front_end:
        request = await ask(front_end, image(TWO), tools=[tool])
        found = prompt_of(front_end, request)
        assert "system\n# Tools" in found
        assert f"user\n{rows(2)}<|im_end|>" in found


async def test_choices_grammars_streams_and_a_continued_answer(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        request = await ask(front_end, image(TWO), n=2)
        assert (request.n, len(request.mm_features)) == (2, 1)
        request = await ask(front_end, image(TWO), structured_outputs={"choice": ["Hi", "no"]})
        assert request.grammar is not None
        assert len(request.mm_features) == 1
        events = await front_end.events(
            "/v1/chat/completions",
            messages=user(image(TWO)),
            stream_options={"include_usage": True},
        )
        request = front_end.engine.requests.get_nowait()
        assert events[-2]["usage"]["prompt_tokens"] == len(request.prompt_token_ids)
        answer = {"role": "assistant", "content": "It is"}
        request = await ask(
            front_end,
            messages=[*user(image(TWO)), answer],
            continue_final_message=True,
            add_generation_prompt=False,
        )
        assert prompt_of(front_end, request).endswith(
            f"{rows(2)}<|im_end|>\n<|im_start|>assistant\nIt is"
        )
        await released(reader)


async def test_the_prompt_text_is_what_the_model_reads(serve, scripted):
    async with serve(scripted("Hi")) as front_end:
        response = await front_end.chat(messages=user(image(TWO)), return_prompt_text=True)
        assert rows(2) in response.json()["prompt_text"]


async def test_tokenize_counts_image_tokens(serve, reader):
    async with serve() as front_end:
        body = {"messages": user(text("a"), image(FOUR)), "return_token_strs": True}
        reply = (await front_end.http.post("/tokenize", json=body)).json()
        assert reply["token_strs"].count("<image>") == 4
        assert reply["count"] == len(reply["tokens"])
        assert reader.num_leases == 0


async def test_a_rendered_prompt_has_places_and_hashes_of_its_images(serve, scripted, reader):
    content = (image(TWO), text("a"), image(FOUR))
    async with serve(scripted("Hi")) as front_end:
        body = {"messages": user(*content)}
        reply = await front_end.http.post("/v1/chat/completions/render", json=body)
        assert reader.num_leases == 0
        computed = await ask(front_end, *content)
        assert reply.json()["token_ids"] == computed.prompt_token_ids
        places, images = reply.json()["features"], computed.mm_features
        assert places["mm_hashes"] == {"image": [each.mm_hash.hex() for each in images]}
        assert places["mm_placeholders"]["image"] == [
            {"offset": each.offset, "length": each.length} for each in images
        ]


async def test_the_models_list_says_what_the_model_reads(serve, start):
    async with serve() as front_end:
        (card,) = (await front_end.http.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text", "image"]
    async with start() as front_end:
        (card,) = (await front_end.http.get("/v1/models")).json()["data"]
        assert card["input_modalities"] == ["text"]


# Refusals.


async def test_a_text_that_stands_for_an_image_is_refused_beside_images(serve, scripted):
    tool = {"type": "function", "function": {"name": "f", "description": "<image>"}}
    first = [{"role": "assistant", "content": "x", "reasoning": "an <image> here"}]
    async with serve(scripted("Hi")) as front_end:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"messages": [*user(text("hi")), *user(text("<image>"), image())]}, "messages[1]"),
            ({"messages": [*first, *user(image())]}, "messages[0]"),
            ({"tools": [tool]}, "tools"),
            ({"chat_template_kwargs": {"name": "<image>"}}, "chat_template_kwargs"),
        ]
        for fields, where in cases:
            error = await refusal(front_end, image(), **fields)
            assert error["message"].startswith(f"{where}: a text beside images"), error
            assert error["param"] == where.partition("[")[0]
            assert "<image>" in error["message"]


async def test_the_number_of_images_is_limited(serve, scripted, reader):
    async with serve(scripted("Hi"), max_model_len=20_000) as front_end:
        await ask(front_end, *[image(TWO)] * 64)
        error = await refusal(front_end, *[image(TWO)] * 65)
        assert "at most 64 images per request, got 65" in error["message"]
        assert len(reader.calls) == 1


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url"}, "messages[0].content[0].image_url must be an object"),
        ({"type": "image_url", "image_url": {}}, "[0].image_url.url is missing"),
        ({"type": "image_url", "image_url": {"url": 5}}, "[0].image_url.url must be a URL"),
        ({"type": "image_url", "image_url": {"url": ""}}, "[0].image_url.url must be a URL"),
        ({"type": "image_url", "image_url": "x", "uuid": 1}, "[0].uuid must be a text"),
        ({"type": "image_url", "image_url": "x", "uuid": "u" * 257}, "[0].uuid must be a text"),
        (image(detail="huge"), "[0].image_url.detail must be one of auto, low, high"),
        ({"type": "image_url", "image_url": "bad"}, "content[0].image_url: no image can be read"),
        ({"type": "input_audio", "input_audio": {}}, "reads no part of the type input_audio"),
        ({"type": "video_url", "video_url": {}}, "reads no part of the type video_url"),
        ({"type": "file", "file": {}}, "messages[0].content[0]: takes text and images only"),
    ],
)
async def test_a_part_that_is_no_image_is_named(serve, scripted, reader, part, words):
    async with serve(scripted("Hi")) as front_end:
        error = await refusal(front_end, part)
        assert words in error["message"]
        assert error["param"].startswith("messages")
        assert reader.num_leases == 0


async def test_a_template_without_images_in_a_role_is_named(serve, scripted):
    system = {"role": "system", "content": [image()]}
    hidden = PARTS.replace("{% for part", "{% if message['role'] == 'user' %}{% for part").replace(
        "{% endfor %}{% endif %}<|im_end|>", "{% endfor %}{% endif %}{% endif %}<|im_end|>"
    )
    for template, words in (
        (STRICT, "no parts for system"),
        (
            hidden,
            "messages[0]: the model's chat template renders no images in messages of the role",
        ),
    ):
        async with serve(scripted("Hi"), template) as front_end:
            error = await refusal(front_end, messages=[system, *user(text("hi"))])
            assert words in error["message"]
            assert error["param"] == "messages"


async def test_a_prompt_with_images_is_not_cut(serve, scripted):
    async with serve(scripted("Hi")) as front_end:
        content = [text("what? "), image(FOUR)]
        request = await ask(front_end, *content, truncate_prompt_tokens=100)
        assert len(request.mm_features) == 1
        error = await refusal(front_end, *content, truncate_prompt_tokens=5)
        assert error["param"] == "truncate_prompt_tokens"
        assert "a prompt with images is not truncated" in error["message"]
        error = await refusal(front_end, *[image("x9")] * 40, truncate_prompt_tokens=-1)
        assert "maximum context length is 256" in error["message"]


async def test_a_context_that_images_fill_is_named(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        error = await refusal(front_end, *[image("x9")] * 40)
        assert "maximum context length is 256 tokens" in error["message"]
        assert reader.num_leases == 0


# Leases.


async def test_the_pixels_are_held_until_the_answer_ends(serve, reader):
    async with serve(accepts=True) as front_end:
        answer = asyncio.create_task(front_end.chat(messages=user(image(), image())))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        assert reader.num_leases == 2
        front_end.engine.emit(request, [41], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        await released(reader)


async def test_the_pixels_are_released_when_the_client_leaves(serve, reader):
    async with serve(accepts=True) as front_end:
        async with httpx.AsyncClient(base_url=front_end.url, timeout=20) as client:
            body = {"messages": user(image()), "stream": True}
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await front_end.engine.requests.get()
            assert reader.num_leases == 1
            answer.cancel()
        await front_end.engine.aborts.get()
        await released(reader)


async def test_the_pixels_are_released_when_the_request_is_refused(serve, reader):
    async with serve() as front_end:
        answer = asyncio.create_task(front_end.chat(messages=user(image())))
        request = await front_end.engine.requests.get()
        assert reader.num_leases == 1
        front_end.engine.refuse(request, ErrorInfo("invalid_request", "no"))
        assert (await answer).status_code >= 400
        await released(reader)
        error = await refusal(front_end, image(), bad_words=["x" * 200] * 100, max_tokens=10_000)
        assert error["param"] != "messages"
        assert len(reader.calls) == 2
        assert reader.num_leases == 0


async def test_a_request_keeps_its_images_when_its_engine_dies(serve, reader):
    async with serve(accepts=True) as front_end:
        answer = asyncio.create_task(front_end.chat(messages=user(image(TWO))))
        request = await front_end.engine.requests.get()
        front_end.engine.emit(request, [40])
        stream = front_end.app_state.client._open[request.request_id].stream
        while not any(stream.output_token_ids):
            await asyncio.sleep(0)
        engine = await front_end.lose_engine()
        engine.announce()
        again = await engine.requests.get()
        assert again.output_token_ids == ((40,),)
        assert again.mm_features == request.mm_features
        assert reader.num_leases == 1
        engine.emit(again, [41], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        await released(reader)


async def test_what_the_client_sent_is_freed_when_the_engine_has_the_request(serve):
    url = f"{PNG}{'A' * 1000}"

    def is_kept() -> bool:
        return any(isinstance(each, ContentPart) and each.url == url for each in gc.get_objects())

    async with serve(accepts=True) as front_end:
        answer = asyncio.create_task(front_end.chat(messages=user(image(url))))
        request = await front_end.engine.requests.get()
        async with asyncio.timeout(10):
            while is_kept():
                await asyncio.sleep(0.01)
        front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200


async def test_the_log_has_the_number_of_images(serve, scripted, caplog):
    caplog.set_level(logging.INFO)
    async with serve(scripted("Hi")) as front_end:
        await ask(front_end, image(TWO), image(FOUR))
        await ask(front_end, text("hi"))
    lines = [getattr(r, FIELDS) for r in caplog.records if r.name == "tokend.requests"]
    assert [line.get("images") for line in lines] == [2, None]


# Messages.


def block(url: str | None = None, data: str = "eA4", **fields: Any) -> dict[str, Any]:
    source = {"type": "base64", "media_type": "image/png", "data": data}
    if url is not None:
        source = {"type": "url", "url": url}
    return {"type": "image", "source": {**source, **fields}}


async def message(front_end: FrontEnd, path: str = "", **fields: Any) -> httpx.Response:
    body = {"model": "toy", "max_tokens": 9, **fields}
    return await front_end.http.post(f"/v1/messages{path}", json=body)


RESULT = [
    {"role": "user", "content": "look"},
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}],
    },
]


async def test_blocks_of_images(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        content = [text("one"), block(), text("two"), block("https://a.example/b2")]
        response = await message(front_end, messages=user(*content))
        assert response.status_code == 200, response.text
        Message.model_validate(response.json())
        request = front_end.engine.requests.get_nowait()
        assert f"user\none{rows(4)}two{rows(2)}<|im_end|>" in prompt_of(front_end, request)
        assert [each.url for each in reader.sources] == [FOUR, "https://a.example/b2"]
        number = response.json()["usage"]["input_tokens"]
        assert number == len(request.prompt_token_ids)
        counted = await message(front_end, "/count_tokens", messages=user(*content))
        assert counted.json() == {"input_tokens": number}


@pytest.mark.parametrize("template", [PARTS, STRICT, TEMPLATE, ONLY_PARTS])
async def test_images_in_the_result_of_a_tool(serve, scripted, template):
    result = {
        "type": "tool_result",
        "tool_use_id": "c",
        "is_error": True,
        "content": [text("seen"), block()],
    }
    async with serve(scripted("Hi"), template) as front_end:
        messages = [*RESULT, *user(result, text("what is it?"), block(data="eA2"))]
        response = await message(front_end, messages=messages)
        assert response.status_code == 200, response.text
        assert "ignored_fields" not in response.json()
        request = front_end.engine.requests.get_nowait()
        found = prompt_of(front_end, request).replace("\n", "")
        assert f"Error: seen{rows(4)}" in found
        assert f"what is it?{rows(2)}" in found


async def test_errors_name_the_block(serve, scripted):
    bad = {"type": "image", "source": {"type": "url", "url": "bad"}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": [text("a"), bad]}
    cases: list[tuple[list[Any], str]] = [
        (user(text("a"), text("b"), bad), "messages[0].content[2].source"),
        ([*RESULT, *user(result)], "messages[2].content[0].content[1].source"),
        ([*user(text("hi")), *user(text("a"), bad)], "messages[1].content[1].source"),
        (user(block(type="file")), "messages[0].content[0].source"),
        (user(block(data="")), "messages[0].content[0].source.data"),
        (user(block(media_type="text/html")), "messages[0].content[0].source.media_type"),
        (user({"type": "image"}), "messages[0].content[0].source"),
        (user(text("<image>"), block()), "messages[0]"),
    ]
    async with serve(scripted("Hi")) as front_end:
        for messages, where in cases:
            response = await message(front_end, messages=messages)
            assert response.status_code == 400, response.text
            assert response.json()["error"]["message"].startswith(f"{where}: "), response.text
        assistant = [*user(text("hi")), {"role": "assistant", "content": [block()]}]
        response = await message(front_end, messages=assistant)
        assert "reads no part of the type image" in response.text
        response = await message(front_end, messages=user(text("hi")), system=[block()])
        assert "system[0]" in response.text


# Responses.


def input_image(url: Any = FOUR, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def input_text(value: str) -> dict[str, Any]:
    return {"type": "input_text", "text": value}


async def respond(front_end: FrontEnd, **fields: Any) -> httpx.Response:
    return await front_end.http.post("/v1/responses", json=fields)


async def test_input_images(serve, scripted, reader):
    async with serve(scripted("Hi")) as front_end:
        items = user(input_text("one"), input_image(detail="low"), input_text("two"))
        response = await respond(front_end, input=items)
        assert response.status_code == 200, response.text
        request = front_end.engine.requests.get_nowait()
        assert f"user\none{rows(4)}two<|im_end|>" in prompt_of(front_end, request)
        assert [each.detail for each in reader.sources] == ["low"]
        number = response.json()["usage"]["input_tokens"]
        assert number == len(request.prompt_token_ids)
        counted = await front_end.http.post("/v1/responses/input_tokens", json={"input": items})
        assert counted.json()["input_tokens"] == number
        follow = await respond(
            front_end, input="and now?", previous_response_id=response.json()["id"]
        )
        assert follow.status_code == 200, follow.text
        again = front_end.engine.requests.get_nowait()
        assert [each.mm_hash for each in again.mm_features] == [
            each.mm_hash for each in request.mm_features
        ]
        await released(reader)


@pytest.mark.parametrize("template", [PARTS, STRICT, TEMPLATE, ONLY_PARTS])
async def test_images_in_the_output_of_a_function(serve, scripted, template):
    items = [
        {"role": "user", "content": "look"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c",
            "output": [input_text("here"), input_image()],
        },
        *user(input_text("and"), input_image(TWO)),
    ]
    async with serve(scripted("Hi"), template) as front_end:
        response = await respond(front_end, input=items)
        assert response.status_code == 200, response.text
        assert "ignored_fields" not in response.json()
        request = front_end.engine.requests.get_nowait()
        assert f"here{rows(4)}" in prompt_of(front_end, request).replace("\n", "")
        assert images_of(front_end, request) == ["<image>" * 4, "<image>" * 2]


async def test_errors_name_the_item(serve, scripted):
    cases: list[tuple[Any, str]] = [
        (input_image("bad"), "input[0].content[1]: no image can be read"),
        (input_image(None, file_id="f"), "input[0].content[1].file_id: this server keeps no files"),
        (input_image(None), "input[0].content[1].image_url must be a URL"),
        (input_image(detail="huge"), "input[0].content[1].detail must be one of"),
        ({"type": "input_file"}, "input[0].content[1]: takes text and images only"),
    ]
    async with serve(scripted("Hi")) as front_end:
        for part, words in cases:
            response = await respond(front_end, input=user(input_text("a"), part))
            assert response.status_code == 400, response.text
            assert words in response.json()["error"]["message"]
        response = await respond(front_end, input=[{"role": "system", "content": [input_image()]}])
        assert "input[0].content[0]: takes text only" in response.json()["error"]["message"]


async def test_roles_are_merged_with_their_images(serve, scripted):
    """For a template in which user and assistant alternate."""
    alternating = (
        "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('take turns') }}{% endif %}{% endfor %}" + PARTS
    )
    async with serve(scripted("Hi"), alternating) as front_end:
        items = [*user(input_text("one"), input_image()), *user(input_image(TWO))]
        response = await respond(front_end, input=items)
        assert response.status_code == 200, response.text
        request = front_end.engine.requests.get_nowait()
        assert f"user\none{rows(4)}{rows(2)}<|im_end|>" in prompt_of(front_end, request)
        items = [*items, *user(input_image("bad"))]
        response = await respond(front_end, input=items)
        assert "input[2].content[0]: no image can be read" in response.json()["error"]["message"]


ODD = (
    None,
    0,
    1.5,
    True,
    "",
    "x",
    "\ud800",
    "🦊" * 300,
    [],
    ["x"],
    {},
    {"url": 1},
    {"type": "text"},
)


def variants(value: Any) -> Iterator[Any]:
    """Yield a JSON value with each of its members replaced by each odd value."""
    if isinstance(value, dict):
        for name, member in value.items():
            yield from ({**value, name: odd} for odd in ODD)
            yield from ({**value, name: other} for other in variants(member))


async def test_odd_parts_are_refused_in_all_apis(serve, scripted, reader):
    chat = {"model": "toy", "messages": [], "max_tokens": 9}
    cases = [
        ("/v1/chat/completions", chat, "messages", {**image(detail="low"), "uuid": "a"}),
        ("/v1/messages", chat, "messages", block()),
        ("/v1/messages", chat, "messages", block("https://a.example/b")),
        ("/v1/responses", {"model": "toy"}, "input", input_image(detail="low")),
    ]
    async with serve(scripted("Hi")) as front_end:
        for path, body, field, part in cases:
            for odd in variants(part):
                content = json.dumps({**body, field: user(odd)})
                response = await front_end.http.post(
                    path, content=content, headers={"content-type": "application/json"}
                )
                assert response.status_code in (200, 400), (path, odd, response.text)
                if response.status_code == 400:
                    assert field in response.text, (path, odd, response.text)
        await released(reader)


# The official clients.


async def test_the_openai_client(serve, scripted):
    async with serve(scripted("Hi")) as front_end:
        client = openai.AsyncOpenAI(
            base_url=f"{front_end.url}/v1", api_key="none", max_retries=0, timeout=20
        )
        async with client:
            chat = await client.chat.completions.create(
                model="toy", messages=user(text("What is this?"), image(detail="low"))
            )
            assert chat.choices[0].message.content == "Hi"
            response = await client.responses.create(
                model="toy", input=user(input_text("What is this?"), input_image(detail="auto"))
            )
            assert response.output_text == "Hi"
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="toy", messages=user(image("bad")))
            assert caught.value.param == "messages[0].content[0].image_url"


async def test_the_anthropic_client(serve, scripted):
    async with serve(scripted("Hi")) as front_end:
        client = anthropic.AsyncAnthropic(base_url=front_end.url, api_key="none", max_retries=0)
        async with client:
            found = await client.messages.create(
                model="toy", max_tokens=9, messages=user(block(), text("What is this?"))
            )
            assert found.content[0].text == "Hi"
            result = {"type": "tool_result", "tool_use_id": "c", "content": [block()]}
            async with client.messages.stream(
                model="toy", max_tokens=9, messages=[*RESULT, *user(result)]
            ) as stream:
                assert await stream.get_final_text() == "Hi"


async def test_the_schema_knows_images(serve):
    async with serve() as front_end:
        document = (await front_end.http.get("/openapi.json")).json()
        assert "image_url" in json.dumps(document["components"]["schemas"]["Message"])


# Features.


def test_the_image_tokens_must_be_those_of_the_images(reader):
    with pytest.raises(InvalidRequestError, match="has 2 image tokens, and its images have 0"):
        ImageInput(reader, 7, 64).features([5, 7, 7], [])
