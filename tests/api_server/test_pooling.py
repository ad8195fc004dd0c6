"""The pooling endpoints over HTTP, with a scripted engine."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from proto.errors import ErrorInfo
from proto.messages.engine_io import EngineCoreRequest, FinishReason
from proto.messages.lora import AdapterCard
from proto.messages.pooling import MAX_INPUTS, Pooler
from proto.messages.prepared_model import PreparedModel
from proto.settings.config import LoRAConfig
from tests.api_server.conftest import FrontEnd, StartFrontEnd, concurrently, serving
from tests.fakes.lifecycle_messages import engine_ready
from tests.fakes.lora import lora_request

SIZE = 4
EMBEDDER = Pooler(size=SIZE)


def vector(request: EngineCoreRequest) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The result that the engine makes up for a prompt."""
    params = request.pooling_params
    assert params is not None
    ids = request.prompt_token_ids
    numbers = np.array([len(ids), *ids[:3], 0, 0, 0][:SIZE], dtype="<f4") / 7
    return numbers[: params.dimensions or SIZE]


answered = vector
"""The function of the answers, which a test may replace."""


@pytest_asyncio.fixture
async def front_end(run_dir: str, model: PreparedModel) -> AsyncIterator[FrontEnd]:
    """A front end of an embedding model, whose engine answers every request."""
    pooling = msgspec.structs.replace(model, pooler=EMBEDDER, hidden_size=SIZE)
    async with serving(run_dir, pooling, accepts=True) as front_end:

        async def answer() -> None:
            while True:
                request = await front_end.engine.requests.get()
                if request.prompt_token_ids[0] == 7:
                    front_end.engine.refuse(request, ErrorInfo("overloaded", "full"))
                    continue
                front_end.engine.emit(
                    request,
                    [],
                    finish=FinishReason.STOP,
                    pooler_output=answered(request).tobytes(),
                )

        task = asyncio.create_task(answer())
        yield front_end
        task.cancel()


async def test_the_openai_client(front_end: FrontEnd) -> None:
    """Both encodings give the same numbers; usage counts the tokens of all texts."""
    client = AsyncOpenAI(base_url=front_end.url + "/v1", api_key="x", max_retries=0)
    texts = ["hello", "the quick brown fox", "hello"]
    as_base64 = await client.embeddings.create(model="toy", input=texts)
    as_float = await client.embeddings.create(model="toy", input=texts, encoding_format="float")
    assert [each.index for each in as_float.data] == [0, 1, 2]
    for ours, other in zip(as_float.data, as_base64.data, strict=True):
        np.testing.assert_array_equal(np.float32(ours.embedding), np.float32(other.embedding))
    assert as_float.data[0].embedding == as_float.data[2].embedding != as_float.data[1].embedding
    num_tokens = round(7 * sum(each.embedding[0] for each in as_float.data))
    assert as_float.usage.prompt_tokens == as_float.usage.total_tokens == num_tokens
    short = await client.embeddings.create(model="toy", input="hello", dimensions=2)
    assert len(short.data[0].embedding) == 2


async def test_inputs_of_all_kinds(front_end: FrontEnd) -> None:
    async def check(case: tuple[Any, list[list[int]]]) -> None:
        given, expected = case
        response = await front_end.http.post("/v1/embeddings", json={"input": given})
        assert response.status_code == 200, response.text
        data = response.json()["data"]
        assert [round(7 * each["embedding"][0]) for each in data] == list(map(len, expected))

    ids = [[5, 6], [8, 9, 10]]
    await concurrently(check, [(ids[0], ids[:1]), (ids, ids), ([[5]] * MAX_INPUTS, [[5]] * 8192)])


@pytest.mark.parametrize("side", ["left", "right"])
async def test_truncation(front_end: FrontEnd, side: str) -> None:
    body = {"input": [list(range(10, 20))], "truncate_prompt_tokens": 2, "truncation_side": side}
    response = await front_end.http.post("/pooling", json=body)
    (entry,) = response.json()["data"]
    first = 18 if side == "left" else 10
    assert np.rint(7 * np.array(entry["data"])).tolist() == [2, first, first + 1, 0]


async def test_the_vectors_of_all_tokens(front_end: FrontEnd) -> None:
    body = {"input": [5, 6], "task": "token_embed", "encoding_format": "float"}
    response = await front_end.http.post("/pooling", json=body)
    assert np.array(response.json()["data"][0]["data"]).shape == (2, SIZE // 2)
    body["encoding_format"] = "base64"
    response = await front_end.http.post("/pooling", json=body)
    assert len(base64.b64decode(response.json()["data"][0]["data"])) == 4 * SIZE


async def test_invalid_requests_are_named(front_end: FrontEnd) -> None:
    """And harm nothing: a valid request follows each of them."""
    long = "word " * 300

    async def check(case: tuple[str, dict[str, Any], str]) -> None:
        path, fields, param = case
        response = await front_end.http.post(path, json=fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), case
        valid = await front_end.http.post("/v1/embeddings", json={"input": "hello"})
        assert valid.status_code == 200

    embeddings = "/v1/embeddings"
    await concurrently(
        check,
        [
            (embeddings, {}, "input"),
            (embeddings, {"input": ""}, "input"),
            (embeddings, {"input": ["hello", ""]}, "input"),
            (embeddings, {"input": []}, "input"),
            (embeddings, {"input": [[]]}, "input"),
            (embeddings, {"input": 5}, "input"),
            (embeddings, {"input": [1 << 40]}, "input"),
            (embeddings, {"input": ["hello"] * (MAX_INPUTS + 1)}, "input"),
            (embeddings, {"input": "hello", "dimensions": 0}, "dimensions"),
            (embeddings, {"input": "hello", "dimensions": SIZE + 1}, "dimensions"),
            (embeddings, {"input": "hello", "encoding_format": "hex"}, "encoding_format"),
            (
                embeddings,
                {"input": "hello", "truncate_prompt_tokens": 257},
                "truncate_prompt_tokens",
            ),
            (embeddings, {"input": "hello", "truncation_side": "left"}, "truncation_side"),
            ("/pooling", {"input": "hello", "task": "classify"}, "model"),
            ("/v1/completions", {"prompt": "hello"}, "model"),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "model"),
            ("/v1/responses", {"input": "hello"}, "model"),
        ],
    )
    response = await front_end.http.post(embeddings, json={"input": long})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    body = {"input": long, "truncate_prompt_tokens": -1}
    truncated = await front_end.http.post(embeddings, json=body)
    assert truncated.json()["usage"]["prompt_tokens"] == 256
    whole = await front_end.http.post(embeddings, json={"input": [9] * 256})
    assert whole.status_code == 200, "a text may be as long as the model"


async def test_a_failure_of_one_text_ends_the_request(front_end: FrontEnd) -> None:
    response = await front_end.http.post("/v1/embeddings", json={"input": [[5], [7], [6]]})
    assert response.status_code == 503
    assert front_end.app_state.client.num_open == 0


async def test_a_client_that_leaves(run_dir: str, model: PreparedModel) -> None:
    """Its texts are aborted."""
    pooling = msgspec.structs.replace(model, pooler=EMBEDDER, hidden_size=SIZE)
    async with serving(run_dir, pooling, accepts=True) as front_end:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(front_end.url[-5:]))
        body = json.dumps({"input": [[5], [6]]}).encode()
        head = (
            "POST /v1/embeddings HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        )
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        requests = [await front_end.engine.requests.get() for _ in range(2)]
        writer.close()
        aborted = {(await front_end.engine.aborts.get()).request_id for _ in range(2)}
        assert aborted == {request.request_id for request in requests}
        assert not await reader.read()


async def test_models_say_what_they_can_do(front_end: FrontEnd) -> None:
    (card,) = (await front_end.http.get("/v1/models")).json()["data"]
    assert card["supported_tasks"] == ["embed", "token_embed", "score"]


async def test_errors_of_a_model_that_pools(front_end: FrontEnd) -> None:
    refused = await front_end.http.post("/classify", json={"input": "hello"})
    assert "its tasks are embed, token_embed, score" in refused.json()["error"]["message"]
    longest = front_end.app_state.client.engine.max_model_len
    refused = await front_end.http.post("/v1/embeddings", json={"input": [5] * (longest + 1)})
    error = refused.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {longest} tokens. The prompt is too long" in error["message"]


async def test_a_generating_model_refuses(start: StartFrontEnd) -> None:
    async with start() as front_end:
        for path in ("/v1/embeddings", "/pooling", "/classify", "/score", "/v2/rerank"):
            response = await front_end.http.post(path, json={"input": "hello"})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "model")
            assert "does not support" in error["message"]


async def test_more_texts_than_the_queue_limit_are_refused_without_retry(
    run_dir: str, model: PreparedModel
) -> None:
    served = msgspec.structs.replace(model, pooler=EMBEDDER, hidden_size=SIZE)
    async with serving(run_dir, served, ready=False) as front_end:
        limits = engine_ready(
            vocab_size=model.vocab_size, max_num_queued_reqs=4, max_num_queued_tokens=30
        )
        front_end.engine._send(limits)
        await front_end.app_state.client.wait_ready()
        for path, fields, word, param in (
            ("/v1/embeddings", {"input": ["one"] * 5}, "reqs lets 4 wait", "input"),
            ("/v1/embeddings", {"input": [[5] * 16] * 2}, "tokens lets 30 wait", "input"),
            ("/rerank", {"query": "a", "documents": ["b"] * 4}, "5 choices", "documents"),
        ):
            response = await front_end.http.post(path, json=fields)
            assert response.status_code == 400
            error = response.json()["error"]
            assert word in error["message"]
            assert error["param"] == param


async def test_scores_of_embeddings_are_their_cosine(
    front_end: FrontEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def normalised(request: EngineCoreRequest) -> np.ndarray[Any, np.dtype[np.float32]]:
        numbers = vector(request)
        return numbers / np.float32(np.linalg.norm(numbers) * 0.999999)

    monkeypatch.setattr("tests.api_server.test_pooling.answered", normalised)
    texts = ["hello", "the sea", "the quick fox", "hello"]
    response = await front_end.http.post("/v1/embeddings", json={"input": texts})
    vectors = np.array([each["embedding"] for each in response.json()["data"]])
    expected = vectors[1:] @ vectors[0]
    body: dict[str, Any] = {"text_1": texts[0], "text_2": texts[1:]}
    for path in ("/score", "/v1/score"):
        data = (await front_end.http.post(path, json=body)).json()["data"]
        np.testing.assert_allclose([each["score"] for each in data], expected, rtol=1e-5)
        assert data[-1]["score"] <= 1.0, "a text is no more like itself than 1"
    body = {"query": texts[0], "documents": [texts[1], {"text": texts[2]}, texts[3]], "top_n": 2}
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        response = await front_end.http.post(path, json=body)
        results = response.json()["results"]
        order = np.argsort(-expected, kind="stable")[:2].tolist()
        assert [each["index"] for each in results] == order
        assert [each["document"]["text"] for each in results] == [texts[1 + i] for i in order]


async def test_classes_and_scores_of_pairs(run_dir: str, model: PreparedModel) -> None:
    """The prompt has both texts; only the document is cut."""
    scorer = Pooler(task="classify", size=1, activation="sigmoid", labels=("yes",))
    served = msgspec.structs.replace(model, pooler=scorer, hidden_size=SIZE)
    async with serving(run_dir, served, accepts=True) as front_end:
        tokenizer = front_end.app_state.tokenizer

        async def post(path: str, number: int, **fields: Any) -> tuple[Any, list[list[int]]]:
            call = asyncio.create_task(front_end.http.post(path, json=fields))
            prompts = []
            for index in range(number):
                request = await front_end.engine.requests.get()
                prompts.append(request.prompt_token_ids)
                data = np.array([index / 4], dtype="<f4").tobytes()
                front_end.engine.emit(request, [], finish=FinishReason.STOP, pooler_output=data)
            return (await call).json(), prompts

        texts = ["the sea", "a fox", "the old man"]
        encoded = tokenizer.encode(texts, add_special_tokens=False)
        query, first, second = [ids async for ids in encoded]
        fields = {"query": "the sea", "documents": ["a fox", "the old man"]}
        body, prompts = await post("/v1/rerank", 2, **fields, return_documents=False)
        assert prompts == [query + first, query + second]
        assert body["results"] == [
            {"index": 1, "relevance_score": 0.25},
            {"index": 0, "relevance_score": 0.0},
        ]
        limit = len(query) + 1
        _, prompts = await post("/rerank", 2, **fields, truncate_prompt_tokens=limit)
        assert prompts == [query + first[:1], query + second[:1]]
        body, _ = await post("/classify", 1, input="a fox")
        assert body["data"] == [{"index": 0, "label": "yes", "probs": [0.0], "num_classes": 1}]
        for path, given, param in (
            ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
            ("/score", {"text_1": "a", "text_2": []}, "text_2"),
            ("/rerank", {"query": "a", "documents": ["b", ""]}, "documents"),
            ("/rerank", {"query": "", "documents": ["b"]}, "query"),
            ("/rerank", {"query": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, "documents"),
            ("/v1/embeddings", {"input": "a"}, "model"),
        ):
            response = await front_end.http.post(path, json=given)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_a_model_names_an_adapter(model: PreparedModel, run_dir: str) -> None:
    """Each text of a request has it."""
    pooling = msgspec.structs.replace(model, pooler=EMBEDDER, hidden_size=SIZE)
    lora = LoRAConfig(enable_lora=True)
    async with serving(run_dir, pooling, accepts=True, lora=lora) as front_end:
        front_end.engine.send_adapters(AdapterCard(lora_request(1), 8, 1000, 1))
        await front_end.app_state.client.call_admin("get_pause")
        for name, wanted in (("adapter-1", lora_request(1)), (None, None)):
            body = {"model": name, "input": [[5, 6], [8, 9, 10]]}
            answer = asyncio.create_task(front_end.http.post("/v1/embeddings", json=body))
            for _ in range(2):
                request = await front_end.engine.requests.get()
                assert request.lora_request == wanted
                front_end.engine.emit(
                    request, [], finish=FinishReason.STOP, pooler_output=vector(request).tobytes()
                )
            assert (await answer).json()["model"] == (name or front_end.app_state.model_name)
        body["model"] = "adapter-2"
        assert (await front_end.http.post("/v1/embeddings", json=body)).status_code == 404
