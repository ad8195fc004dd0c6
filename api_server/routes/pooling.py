"""POST /v1/embeddings and /pooling, /classify, /score, /rerank with their other paths.

A handler creates a `PoolingJob`, reads its texts with `read_texts` or `read_pairs`, and gets a
vector for each from `run`, in the order of the texts.
"""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.encoders.base import json_parts
from api_server.generation.engine_call import EngineCall, check_response_size
from api_server.generation.request_stream import Choice, RequestStream, StreamNotifier, Timeline
from api_server.generation.response import JsonResponse
from api_server.protocol.pooling import (
    NUMBER_BYTES,
    ClassificationRequest,
    EmbeddingRequest,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    Vector,
    encoded,
    label_entry,
    pooling_usage,
    rerank_results,
    texts_of,
)
from api_server.routes.common import read_request
from api_server.text.chat_template import PAIR_ROLES, Conversation
from api_server.text.detokenizer import NoText
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.tokenizer import FILL_CONTEXT, truncation
from proto.codec import to_compact_json
from proto.errors import InvalidRequestError, require
from proto.messages.pooling import MAX_INPUTS, Pooler, PoolingParams, PoolingTask, check_task
from proto.messages.sampling_params import SamplingParams

_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


class PoolingJob(EngineCall[PoolingFields]):
    """The texts of one HTTP request, which are pooled independently.

    num_tokens: of all texts so far.
    """

    num_tokens = 0

    def reader(self, field: str) -> PromptReader:
        """Return a reader of texts with the limits of the engine. field: of the request."""
        body = self._body
        reader = self._app_state.prompt_reader(field)
        longest = reader.max_model_len
        wanted = body.truncate_prompt_tokens
        if wanted is not None and wanted != FILL_CONTEXT and wanted > longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {longest}, the longest text of the model",
                "truncate_prompt_tokens",
            )
        if body.truncation_side != "right" and wanted is None:
            raise InvalidRequestError(
                "truncation_side needs truncate_prompt_tokens", "truncation_side"
            )
        return replace(
            reader,
            truncation=truncation(wanted, body.truncation_side, longest),
            max_prompts=MAX_INPUTS,
            num_output_tokens=0,
        )

    async def read_texts(self, value: Any, field: str) -> list[Prompt]:
        """Return the prompts of `input`: texts, token ids, or lists of these."""
        return await self.reader(field).read_prompts(
            value, add_special_tokens=self._body.add_special_tokens
        )

    async def read_pairs(self, pairs: Sequence[tuple[str, str]], field: str) -> list[Prompt]:
        """Return a prompt of each query and document, by the template or the tokenizer.

        A chat template is used if it mentions the roles of both.
        """
        template, reader = self._app_state.chat_template, self.reader(field)
        if not template.facts.pairs_texts:
            return await reader.encode_pairs(pairs)
        texts = []
        for pair in pairs:
            messages = [
                {"role": role, "content": text} for role, text in zip(PAIR_ROLES, pair, strict=True)
            ]
            texts.append(await template.render(Conversation(messages)))
        return await reader.encode_texts(texts, add_special_tokens=False)

    def check_size(
        self, prompts: Sequence[Prompt], params: PoolingParams, number_bytes: int
    ) -> None:
        """Raise InvalidRequestError for results that could exceed --max-response-bytes.

        number_bytes: of a number in the response.
        """
        app_state = self._app_state
        pooler = pooler_for(app_state, None, "pooling")
        num_numbers = params.dimensions or pooler.size or app_state.model.hidden_size
        num_vectors = len(prompts)
        if params.task == "token_embed":
            num_vectors = sum(len(prompt.token_ids) for prompt in prompts)
        check_response_size(app_state, {"input": num_vectors * num_numbers * number_bytes})

    async def run(
        self, prompts: Sequence[Prompt], params: PoolingParams, field: str
    ) -> list[Vector]:
        """Return the result of each prompt, float32.

        field: of the request, with the texts; named in errors. Raises the RequestError of the
        first prompt that fails, ClientDisconnect if the client is gone.
        """
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if len(prompts) > 1:
            self._check_queue(field, choices=len(prompts), tokens=num_tokens)
        self.num_tokens += num_tokens
        requests = [
            self._engine_request(
                prompt, _NO_SAMPLING, 0, pooling_params=params.of_pair(prompt.second_start)
            )
            for prompt in prompts
        ]
        notifier = StreamNotifier()
        streams = [
            RequestStream(
                request.request_id,
                request.prompt_token_ids,
                [Choice(index=index, detokenizer=NoText())],
                notifier,
                self._app_state.metrics,
                Timeline(self._arrival),
                may_expire_in_queue=request.queue_deadline < math.inf,
                send_buffer=self._send_buffer,
            )
            for index, request in enumerate(requests)
        ]
        stream = self._token_stream(requests, streams, notifier)
        try:
            await stream.submit(self._context.request)
            while not stream.finished and stream.error is None and not stream.disconnected:
                await stream.wait()
            if stream.disconnected:
                raise ClientDisconnect
            if stream.error is not None:
                raise stream.error
        finally:
            stream.close()
        return [np.frombuffer(each.pooler_output, dtype="<f4") for each in stream.streams]


def pooler_for(app_state: AppState, task: PoolingTask | None, api: str) -> Pooler:
    """Return the model's pooler; raise InvalidRequestError if it has no such task.

    task: None for any. api: its name, for the error.
    """
    pooler = app_state.pooler
    if pooler is None:
        raise InvalidRequestError(
            f"The model does not support {api}: it generates text, and pools if it is served with "
            "--runner pooling",
            "model",
        )
    if task is not None:
        check_task(pooler, task, api)
    return pooler


router = APIRouter()


@router.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """Return an embedding of each text."""
    context = RequestContext(request)
    pooler = pooler_for(context.app_state, "embed", "Embeddings API")
    body = await read_request(context, EmbeddingRequest, {})
    job = PoolingJob(context, body, "embd-")
    params = _params(pooler, body, "embed")
    return await _answer(job, body, params, "embedding", "embedding")


@router.post("/pooling")
async def create_pooling(request: Request) -> Response:
    """Return the pooled result of each text as the model gives it."""
    context = RequestContext(request)
    pooler = pooler_for(context.app_state, None, "Pooling API")
    body = await read_request(context, PoolingRequest, {})
    task = body.task or pooler.task
    check_task(pooler, task, f"the task {task}")
    job = PoolingJob(context, body, "pool-")
    return await _answer(job, body, _params(pooler, body, task), "pooling", "data")


@router.post("/classify")
async def classify(request: Request) -> Response:
    """Return the probabilities of the model's labels for each text."""
    context = RequestContext(request)
    pooler = pooler_for(context.app_state, "classify", "Classification API")
    body = await read_request(context, ClassificationRequest, {})
    job = PoolingJob(context, body, "classify-")
    prompts = await job.read_texts(body.input, "input")
    params = pooler.params("classify", activate=body.use_activation)
    job.check_size(prompts, params, NUMBER_BYTES["float"])
    scores = await job.run(prompts, params, "input")
    data = (label_entry(index, each, pooler.labels) for index, each in enumerate(scores))
    return _json(job, {"object": "list", "data": data, "usage": pooling_usage(job.num_tokens)})


@router.post("/v1/score")
@router.post("/score")
async def create_scores(request: Request) -> Response:
    """Return how well each document of text_2 fits its query of text_1."""
    context = RequestContext(request)
    pooler = pooler_for(context.app_state, None, "Score API")
    body = await read_request(context, ScoreRequest, {})
    queries, documents = texts_of(body.text_1, "text_1"), texts_of(body.text_2, "text_2")
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"text_1 must be one text or {len(documents)}, as text_2, got {len(queries)}",
            "text_1",
        )
    job = PoolingJob(context, body, "score-")
    scores = await _scores(job, pooler, queries, documents, body.use_activation, "text_2")
    data = [
        {"index": index, "object": "score", "score": score} for index, score in enumerate(scores)
    ]
    return _json(job, {"object": "list", "data": data, "usage": pooling_usage(job.num_tokens)})


@router.post("/v2/rerank")
@router.post("/v1/rerank")
@router.post("/rerank")
async def rerank(request: Request) -> Response:
    """Return documents in the order in which they fit a query, as Jina and Cohere do."""
    context = RequestContext(request)
    pooler = pooler_for(context.app_state, None, "Rerank API")
    body = await read_request(context, RerankRequest, {"documents": ()})
    documents = texts_of(body.documents, "documents")
    (query,) = texts_of(body.query, "query")
    job = PoolingJob(context, body, "rerank-")
    scores = await _scores(job, pooler, [query], documents, body.use_activation, "documents")
    return _json(
        job,
        {
            "results": rerank_results(scores, documents, body),
            "usage": pooling_usage(job.num_tokens),
            "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
        },
    )


async def _scores(
    job: PoolingJob,
    pooler: Pooler,
    queries: list[str],
    documents: list[str],
    activate: bool,
    field: str,
) -> list[float]:
    """Return the score of each document for its query; one query is for all documents.

    A model of embeddings gives their cosine, without what rounding adds beyond 1. field: of the
    request, with the documents; named in errors.
    """
    if pooler.task == "embed":
        params = pooler.params("embed", activate=True)
        prompts = await job.read_texts(queries, field)
        prompts += await job.read_texts(documents, field)
        vectors = np.stack(await job.run(prompts, params, field))
        products = vectors[: len(queries)] * vectors[len(queries) :]
        return [float(score) for score in products.sum(1).clip(-1, 1)]
    if len(pooler.labels) != 1:
        raise InvalidRequestError(
            f"The model does not support scores: it has {len(pooler.labels)} labels", "model"
        )
    pairs = [
        (queries[index if len(queries) > 1 else 0], text) for index, text in enumerate(documents)
    ]
    params = pooler.params("classify", activate=activate)
    scores = await job.run(await job.read_pairs(pairs, field), params, field)
    return [float(score[0]) for score in scores]


def _params(pooler: Pooler, body: EmbeddingRequest, task: PoolingTask) -> PoolingParams:
    """Return the parameters; raises InvalidRequestError for dimensions that the model lacks."""
    if body.dimensions is not None:
        require(task != "classify", "dimensions", "needs an embedding")
        if pooler.size and body.dimensions > pooler.size:
            raise InvalidRequestError(
                f"dimensions must be at most {pooler.size}, got {body.dimensions}", "dimensions"
            )
    return pooler.params(task, dimensions=body.dimensions or 0, activate=body.normalize)


async def _answer(
    job: PoolingJob, body: EmbeddingRequest, params: PoolingParams, kind: str, key: str
) -> Response:
    """Pool the texts of `input` and return a list with an object of this kind for each."""
    prompts = await job.read_texts(body.input, "input")
    job.check_size(prompts, params, NUMBER_BYTES[body.encoding_format])
    vectors = await job.run(prompts, params, "input")
    if params.task == "token_embed":
        shaped: Iterable[Vector] = (
            vector.reshape(len(prompt.token_ids), -1)
            for vector, prompt in zip(vectors, prompts, strict=True)
        )
    else:
        shaped = vectors
    data = (
        {"object": kind, "index": index, key: encoded(vector, body.encoding_format)}
        for index, vector in enumerate(shaped)
    )
    return _json(job, {"object": "list", "data": data, "usage": pooling_usage(job.num_tokens)})


def _json(job: PoolingJob, fields: dict[str, Any]) -> Response:
    body = {"id": job.id, "created": int(time.time()), "model": job.model_name, **fields}
    parts = json_parts(body, lambda value: to_compact_json(value).decode())
    return JsonResponse(parts, job.headers())
