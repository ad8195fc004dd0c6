"""POST /v1/embeddings and /pooling, /classify, /score, /rerank with their other paths."""

import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.pooling import DisconnectedError, PoolingJob, pooler_for
from api_server.protocol.fields import IgnoredFields, parse
from api_server.protocol.pooling import (
    EmbeddingRequest,
    PoolingRequest,
    encoded,
    pooling_usage,
)
from api_server.routes.common import app_state_of, read_fields
from proto.codec import to_compact_json
from proto.errors import InvalidRequestError
from proto.pooling import Pooler, PoolingParams, PoolingTask

router = APIRouter()


@router.post("/v1/embeddings")
async def create_embedding(request: Request) -> Response:
    """Return an embedding of each text."""
    pooler = pooler_for(app_state_of(request), "embed", "Embeddings API")
    ignored = IgnoredFields()
    body = parse(EmbeddingRequest, await read_fields(request, ignored), {}, ignored)
    job = PoolingJob(app_state_of(request), request, body, ignored, "embd-")
    params = _params(pooler, body, "embed")
    return await _answer(job, body, params, "embedding", "embedding")


@router.post("/pooling")
async def create_pooling(request: Request) -> Response:
    """Return the pooled result of each text as the model gives it."""
    pooler = pooler_for(app_state_of(request), None, "Pooling API")
    ignored = IgnoredFields()
    body = parse(PoolingRequest, await read_fields(request, ignored), {}, ignored)
    task = body.task or pooler.task
    pooler_for(app_state_of(request), task, f"the task {task}")
    job = PoolingJob(app_state_of(request), request, body, ignored, "pool-")
    return await _answer(job, body, _params(pooler, body, task), "pooling", "data")


def _params(pooler: Pooler, body: EmbeddingRequest, task: PoolingTask) -> PoolingParams:
    """Return the parameters; raises InvalidRequestError for dimensions that the model lacks."""
    if body.dimensions is not None:
        if task == "classify":
            raise InvalidRequestError("dimensions needs an embedding", "dimensions")
        if pooler.size and body.dimensions > pooler.size:
            raise InvalidRequestError(
                f"dimensions must be at most {pooler.size}, got {body.dimensions}", "dimensions"
            )
    return PoolingParams(
        task=task,
        dimensions=body.dimensions or 0,
        activate=body.normalize,
        needs_all_tokens=pooler.needs_all_tokens or task == "token_embed",
    )


async def _answer(
    job: PoolingJob, body: EmbeddingRequest, params: PoolingParams, kind: str, key: str
) -> Response:
    """Pool the texts of `input` and return a list with an object of this kind for each."""
    prompts = await job.read_texts(body.input, "input")
    try:
        vectors = await job.run(prompts, params)
    except DisconnectedError:
        return Response()
    if params.task == "token_embed":
        shaped = [
            vector.reshape(len(prompt.token_ids), -1)
            for vector, prompt in zip(vectors, prompts, strict=True)
        ]
    else:
        shaped = vectors
    data = [
        {"object": kind, "index": index, key: encoded(vector, body.encoding_format)}
        for index, vector in enumerate(shaped)
    ]
    return _json(job, {"object": "list", "data": data, "usage": pooling_usage(job.num_tokens)})


def _json(job: PoolingJob, fields: dict[str, Any]) -> Response:
    body = {"id": job.id, "created": int(time.time()), "model": job.model_name, **fields}
    response = Response(to_compact_json(body), media_type="application/json")
    response.raw_headers += job.headers()
    return response
