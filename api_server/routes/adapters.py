"""Routes of operators for adapters (LoRA): vLLM's, and llama.cpp's.

    POST /v1/load_lora_adapter, /v1/unload_lora_adapter    vLLM's bodies, texts and statuses
    GET, POST /lora-adapters                               llama.cpp's

Errors name paths in full, which those of clients do not.
"""

from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from api_server.engine.adapters import InvalidAdapterError, ServedAdapters
from api_server.errors import error_body
from api_server.generation.app_state import RequestContext
from api_server.protocol.common import MAX_LORA_SCALES, LoRAScale, Text
from api_server.protocol.fields import IgnoredFields, Strict, parse
from api_server.routes.common import check_operator, read_json
from proto.errors import InvalidRequestError, RequestError

router = APIRouter(dependencies=[Depends(check_operator)])

MAX_PATH_CHARACTERS: Final = 4096


class LoadBody(Strict):
    lora_name: Text = ""
    """Under which requests find the adapter."""
    lora_path: Text = Field(default="", max_length=MAX_PATH_CHARACTERS)
    """Folder of PEFT, or GGUF file."""
    load_inplace: bool = False
    """The name may be taken; its requests that run go on as they are."""


class UnloadBody(Strict):
    lora_name: Text = ""


class ScalesBody(Strict):
    """llama.cpp's list, wrapped for the parser."""

    scales: Annotated[list[LoRAScale], Field(fail_fast=True, max_length=MAX_LORA_SCALES)]


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(request: Request) -> Response:
    """Load an adapter under a name, for all front ends."""
    context = RequestContext(request)
    body = await read_json(context, partial(parse, LoadBody, neutral={"lora_int_id": ()}))
    try:
        if not body.lora_name or not body.lora_path:
            message = "Both 'lora_name' and 'lora_path' must be provided."
            raise InvalidAdapterError(message, "lora_path" if body.lora_name else "lora_name")
        adapters = _adapters_of(context)
        text = await adapters.load(body.lora_name, body.lora_path, in_place=body.load_inplace)
    except RequestError as error:
        return _refusal(context, error)
    return PlainTextResponse(text)


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(request: Request) -> Response:
    """Forget the name of an adapter: requests that run finish, new ones get 404."""
    context = RequestContext(request)
    body = await read_json(context, partial(parse, UnloadBody, neutral={"lora_int_id": ()}))
    try:
        if not body.lora_name:
            message = "'lora_name' needs to be provided to unload a LoRA adapter."
            raise InvalidAdapterError(message, "lora_name")
        text = await _adapters_of(context).unload(body.lora_name)
    except RequestError as error:
        return _refusal(context, error)
    return PlainTextResponse(text)


@router.get("/lora-adapters")
async def list_lora_adapters(request: Request) -> list[dict[str, Any]]:
    """List the adapters; `scale` is that with which one applies to requests that name none."""
    adapters = _adapters_of(RequestContext(request))
    return [
        {
            "id": card.number,
            "name": card.lora.lora_name,
            "path": card.lora.path,
            "scale": card.default_scale,
            "rank": card.rank,
            "bytes": card.num_bytes,
        }
        for card in adapters.all_cards()
    ]


@router.post("/lora-adapters")
async def scale_lora_adapters(request: Request) -> dict[str, bool]:
    """Set the adapter of requests that name none: [{id, scale}], others have the scale 0."""
    context = RequestContext(request)
    body = await read_json(context, _parse_scales)
    await _adapters_of(context).set_default(body.scales)
    return {"success": True}


def _parse_scales(fields: Any, ignored: IgnoredFields) -> ScalesBody:
    if not isinstance(fields, list):
        raise InvalidRequestError.fixed("the body must be a list of {id, scale}")
    return parse(ScalesBody, {"scales": fields}, {}, ignored)


def _adapters_of(context: RequestContext) -> ServedAdapters:
    adapters = context.app_state.adapters
    if adapters is None:
        raise InvalidAdapterError("adapters need a server that was started with --enable-lora")
    return adapters


def _refusal(context: RequestContext, error: RequestError) -> Response:
    context.app_state.request_log.log_refusal(error, context.request.scope)
    body = error_body(error)
    body["error"]["message"] = error.message
    return JSONResponse(body, error.status)
