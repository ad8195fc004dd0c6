"""/tokenize and /detokenize in vLLM's shapes; long texts do not block the event loop."""

import asyncio
import json
import shutil

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from api_server import turns
from api_server.text import prompts
from api_server.text import tokenizer as tokenizers
from api_server.text.prompts import PromptReader
from api_server.text.tokenizer import ModelTokenizer, Truncation
from api_server.turns import CLIENT, Client
from proto.errors import ContextLengthError, InvalidRequestError
from proto.messages.engine_io import FinishReason
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import CORPUS

MESSAGES = [{"role": "user", "content": "hello"}]


async def test_tokenize_text(start, tokenizer):
    async with start() as front_end:
        response = await front_end.http.post("/tokenize", json={"prompt": "naïve 你好"})
        ids = tokenizer.encode("naïve 你好").ids
        assert response.json() == {
            "count": len(ids),
            "max_model_len": 256,
            "tokens": ids,
            "token_strs": None,
        }
        body = {"prompt": "the fox", "return_token_strs": True, "model": "toy"}
        found = (await front_end.http.post("/tokenize", json=body)).json()
        assert found["token_strs"] == tokenizer.encode("the fox").tokens
        empty = (await front_end.http.post("/tokenize", json={"prompt": ""})).json()
        assert (empty["count"], empty["tokens"]) == (0, [])


async def test_more_tokens_than_the_context_holds_are_counted(start, tokenizer):
    async with start() as front_end:
        text = CORPUS[0] * 20
        found = (await front_end.http.post("/tokenize", json={"prompt": text})).json()
        assert found["count"] == len(tokenizer.encode(text).ids) > 256


@pytest.mark.parametrize("goes_on", [True, False])
async def test_tokenize_conversation(start, tokenizer, goes_on):
    async with start() as front_end:
        body = {"messages": MESSAGES, "add_generation_prompt": goes_on, "return_token_strs": True}
        found = (await front_end.http.post("/tokenize", json=body)).json()
        text = "<|im_start|>user\nhello<|im_end|>\n" + "<|im_start|>assistant\n" * goes_on
        assert found["tokens"] == tokenizer.encode(text).ids
        assert found["token_strs"][0] == "<|im_start|>"


async def test_tokenized_conversations_equal_chat_prompts(start, scripted):
    async with start(scripted("!")) as front_end:
        chat = (await front_end.chat(return_token_ids=True)).json()
        found = (await front_end.http.post("/tokenize", json={"messages": MESSAGES})).json()
        assert found["tokens"] == chat["prompt_token_ids"]


async def test_detokenize(start, tokenizer):
    async with start() as front_end:
        for text in ("naïve 你好 😀", "<|im_start|>user\nhi<|im_end|>", ""):
            body = {"tokens": tokenizer.encode(text).ids}
            answer = await front_end.http.post("/detokenize", json=body)
            assert answer.json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": None}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a\ud800"}, "prompt"),
        ("/tokenize", {"prompt": "x" * 10**6}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 10**6}]}, "messages"),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": MESSAGES, "continue_final_message": 1}, "continue_final"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": [5] * ((1 << 17) + 1)}, "tokens"),
    ],
)
async def test_invalid_requests_are_refused(start, path, body, param):
    async with start() as front_end:
        content = json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        refused = await front_end.http.post(path, content=content, headers=headers)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"].startswith(param)


async def test_what_is_missing_may_be_either_of_two(start):
    async with start() as front_end:
        refused = await front_end.http.post("/tokenize", json={})
        assert refused.json()["error"]["message"] == "prompt or messages is missing"


async def test_another_model_and_another_content_type(start):
    async with start() as front_end:
        for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
            other = await front_end.http.post(path, json={**body, "model": "gpt-9"})
            assert other.status_code == 404
            assert (await front_end.http.post(path, content=b"x")).status_code == 415


async def test_headers_of_other_endpoints_are_ignored(start):
    async with start() as front_end:
        headers = {"x-request-timeout-ms": "1000", "x-vllm-priority": "1"}
        answer = await front_end.http.post("/tokenize", json={"prompt": "x"}, headers=headers)
        assert answer.status_code == 200


async def test_tokenizer_info(start, model, tmp_path):
    async with start() as front_end:
        hidden = await front_end.http.get("/tokenizer_info")
        assert hidden.status_code == 404
        assert "--enable-tokenizer-info-endpoint" in hidden.json()["error"]["message"]
    config = FrontEndConfig(enable_tokenizer_info_endpoint=True)
    async with start(config=config) as front_end:
        info = (await front_end.http.get("/tokenizer_info")).json()
        assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert info["eos_token"] == {"content": "<|im_end|>"}
        assert info["chat_template"].startswith("{% for message in messages %}")


async def test_a_tokenizer_without_settings(start, model, tmp_path):
    shutil.copy(f"{model.folder}/tokenizer.json", tmp_path)
    served = msgspec.structs.replace(model, folder=str(tmp_path))
    config = FrontEndConfig(enable_tokenizer_info_endpoint=True)
    async with start(config=config, served=served) as front_end:
        info = (await front_end.http.get("/tokenizer_info")).json()
        assert info == {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": None}


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions"])
async def test_a_stream_continues_while_a_long_text_is_tokenized(start, path):
    """The engine sends a token when the client has read the last one."""
    text = CORPUS[0] * 4000
    async with start(accepts=True, max_model_len=200_000) as front_end:
        body = {"prompt": "hello", "stream": True, "max_tokens": 100_000}
        async with front_end.http.stream("POST", "/v1/completions", json=body) as response:
            request = await front_end.engine.requests.get()
            lines = response.aiter_lines()
            asked = asyncio.create_task(front_end.http.post(path, json={"prompt": text}))
            others = asyncio.create_task(front_end.engine.requests.get())
            steps = 0
            while not (asked.done() or others.done()):
                front_end.engine.emit(request, [40])
                while not (await anext(lines)).startswith("data: "):
                    pass
                steps += 1
            front_end.engine.emit(request, [40], finish=FinishReason.LENGTH)
            if path != "/tokenize":
                long = others.result()
                assert len(long.prompt_token_ids) > 50_000
                front_end.engine.emit(long, [40], finish=FinishReason.LENGTH)
            assert (await asked).status_code == 200
            others.cancel()
        assert steps > 20


async def test_short_texts_are_tokenized_without_a_thread(start, monkeypatch):
    async with start() as front_end:
        monkeypatch.setattr(front_end.app_state.tokenizer, "_short_texts", None)
        short = "x" * tokenizers.INLINE_SIZE
        assert (await front_end.http.post("/tokenize", json={"prompt": short})).is_success


def reader(tokenizer, max_model_len: int, **fields) -> PromptReader:
    size = tokenizer.get_vocab_size()
    return PromptReader(ModelTokenizer(tokenizer), size, max_model_len, **fields)


async def test_a_long_text_is_cut_to_the_tokens_that_a_truncation_keeps(tokenizer, monkeypatch):
    text = "".join(CORPUS) * 40
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    monkeypatch.setattr(tokenizers, "SLICE_SIZE", 1000)
    monkeypatch.setattr(tokenizers, "MAX_UNCOUNTED_ASCII", 1000)
    seen = []
    count = ModelTokenizer._count_tokens
    monkeypatch.setattr(
        ModelTokenizer, "_count_tokens", lambda self, text: seen.append(text) or count(self, text)
    )
    for number in (1, 700, len(whole) - 1, len(whole) + 1):
        for side, kept in (("left", whole[-number:]), ("right", whole[:number])):
            seen.clear()
            read = reader(tokenizer, len(whole) + 10, truncation=Truncation(number, side))
            (prompt,) = await read.encode_texts([text], add_special_tokens=False)
            assert prompt.token_ids == kept
            assert number > 700 or sum(map(len, seen)) < 6000 < len(text)
    assert await reader(tokenizer, 100).encode_any_length(text, add_special_tokens=False) == whole


async def test_a_text_with_too_many_tokens_is_refused_when_they_are_counted(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "SLICE_SIZE", 1000)
    monkeypatch.setattr(prompts, "MIN_CHARACTERS", 1 << 20)
    monkeypatch.setattr(Truncation, "encode", lambda *_, **__: pytest.fail("it was encoded"))
    with pytest.raises(ContextLengthError, match="more than 3000 tokens"):
        await reader(tokenizer, 3000).encode_texts(["é" * 100_000], add_special_tokens=False)
    monkeypatch.setattr(prompts, "MAX_TEXT_TOKENS", 5000)
    with pytest.raises(InvalidRequestError, match="prompt: has more than 5000 tokens"):
        await reader(tokenizer, 3000).encode_any_length("é" * 100_000, add_special_tokens=False)


async def test_several_prompts_have_a_limit_of_tokens_together(tokenizer, monkeypatch):
    monkeypatch.setattr(prompts, "MAX_TEXT_TOKENS", 5)
    for value in ([[1] * 3] * 2, ["hello hello fox"] * 2):
        with pytest.raises(InvalidRequestError, match="at most 5 tokens together"):
            await reader(tokenizer, 100).read_prompts(value, add_special_tokens=False)


async def test_texts_are_encoded_in_slices_until_their_client_leaves(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "SLICE_SIZE", 100)
    monkeypatch.setattr(tokenizers, "INLINE_SIZE", 0)
    sizes = []
    encode = Truncation.encode

    def encode_and_note(*args, **fields):
        sizes.append(len(args[2]))
        return encode(*args, **fields)

    monkeypatch.setattr(Truncation, "encode", encode_and_note)
    texts = ["the fox"] * 100
    read = reader(tokenizer, 100)
    found = await read.encode_texts(texts, add_special_tokens=False)
    assert [each.token_ids for each in found] == [tokenizer.encode("the fox").ids] * 100
    assert sum(sizes) == 100
    assert max(sizes) == 14
    sizes.clear()
    monkeypatch.setattr(turns, "client_disconnected", lambda scope: len(sizes) > 2)
    CLIENT.set(Client())
    with pytest.raises(ClientDisconnect):
        await read.encode_texts(texts, add_special_tokens=False)
    assert len(sizes) == 3


async def test_the_documented_number_of_ids_is_the_limit(start):
    async with start(max_model_len=200_000) as front_end:
        schemas = (await front_end.http.get("/openapi.json")).json()["components"]["schemas"]
        field = schemas["Detokenize"]["properties"]["tokens"]
        assert "maxItems" not in field
        for number, status in ((200_000, 200), (200_001, 400)):
            answer = await front_end.http.post("/detokenize", json={"tokens": [20] * number})
            assert answer.status_code == status
