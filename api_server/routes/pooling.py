"""POST /v1/embeddings and /pooling, /classify, /score, /rerank with their other paths."""

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.pooling import PoolingJob, pooler_for
from api_server.protocol.encoder import json_parts
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.pooling import (
    NUMBER_BYTES,
    ClassificationRequest,
    EmbeddingRequest,
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
from api_server.response import JsonResponse
from api_server.routes.common import app_state_of, read_request
from proto.codec import to_compact_json
from proto.errors import InvalidRequestError
from proto.pooling import Pooler, PoolingParams, PoolingTask, check_task

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """Return an embedding of each text."""
    pooler = pooler_for(app_state_of(request), "embed", "Embeddings API")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, EmbeddingRequest, {})
    job = PoolingJob(app_state_of(request), request, body, ignored, "embd-")
    params = _params(pooler, body, "embed")
    return await _answer(job, body, params, "embedding", "embedding")


@router.post("/pooling")
async def create_pooling(request: Request) -> Response:
    """Return the pooled result of each text as the model gives it."""
    pooler = pooler_for(app_state_of(request), None, "Pooling API")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, PoolingRequest, {})
    task = body.task or pooler.task
    check_task(pooler, task, f"the task {task}")
    job = PoolingJob(app_state_of(request), request, body, ignored, "pool-")
    return await _answer(job, body, _params(pooler, body, task), "pooling", "data")


@router.post("/classify")
async def classify(request: Request) -> Response:
    """Return the probabilities of the model's labels for each text."""
    pooler = pooler_for(app_state_of(request), "classify", "Classification API")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, ClassificationRequest, {})
    job = PoolingJob(app_state_of(request), request, body, ignored, "classify-")
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
    pooler = pooler_for(app_state_of(request), None, "Score API")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, ScoreRequest, {})
    queries, documents = texts_of(body.text_1, "text_1"), texts_of(body.text_2, "text_2")
    if len(queries) not in (1, len(documents)):
        raise InvalidRequestError(
            f"text_1 must be one text or {len(documents)}, as text_2, got {len(queries)}",
            "text_1",
        )
    job = PoolingJob(app_state_of(request), request, body, ignored, "score-")
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
    pooler = pooler_for(app_state_of(request), None, "Rerank API")
    ignored = IgnoredFields()
    body = await read_request(request, ignored, RerankRequest, {"documents": ()})
    documents = texts_of(body.documents, "documents")
    (query,) = texts_of(body.query, "query")
    job = PoolingJob(app_state_of(request), request, body, ignored, "rerank-")
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
        if task == "classify":
            raise InvalidRequestError("dimensions needs an embedding", "dimensions")
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
