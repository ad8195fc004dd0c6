"""Routes for operators: drain, pause, prefix cache, profiles, aborts, settings.

`check_operator` guards every route here. Commands to the engine are AdminCalls; commands to all
front ends go through the supervisor.
"""

import json
from functools import partial
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.generation.app_state import RequestContext
from api_server.protocol.fields import Strict, parse
from api_server.routes.common import app_state_of, check_operator, has_operators_key, read_json
from api_server.routes.system import daemon_version
from proto.codec import to_json_line
from proto.errors import ConflictError, InternalRequestError, InvalidRequestError, require, shown
from proto.messages.engine_io import AdminName, AdminReply, PauseMode
from proto.messages.lifecycle import AbortRequests, DrainRequested, ForgetImages, ProfileFrontEnds
from proto.settings.config import SECRET_FIELDS

router = APIRouter(dependencies=[Depends(check_operator)])

MAX_ABORTED_IDS: Final = 1024
MAX_ID_CHARACTERS: Final = 160

PAUSES: Final[dict[str, tuple[PauseMode, bool]]] = {
    "abort": ("finish_running", True),
    "wait": ("finish_running", False),
    "keep": ("freeze", False),
}
"""vLLM's name of a pause mode → the mode, and whether unfinished requests end first."""
_BOOLEANS: Final = {"true": True, "1": True, "false": False, "0": False}


class AbortBody(Strict):
    request_ids: Annotated[
        list[Annotated[str, StringConstraints(max_length=MAX_ID_CHARACTERS)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_ABORTED_IDS),
    ]
    """Full ids of responses, such as cmpl-…"""


@router.post("/admin/drain")
async def drain(request: Request) -> Response:
    """Answer 202; new requests are refused, and the daemon exits after the running ones."""
    app_state = app_state_of(request)
    app_state.health.start_drain()  # here at once; the supervisor notifies the other front ends
    app_state.supervisor.send(DrainRequested(app_state.supervisor.index))
    in_flight = int(app_state.metrics.in_flight.value)  # of all front ends
    return JSONResponse({"status": "draining", "requests_in_flight": in_flight}, status_code=202)


@router.post("/pause")
async def pause(request: Request) -> Response:
    """Pause the engine until /resume, also across restarts and reloads.

    mode=wait: running requests continue, others wait. mode=keep: nothing is computed. mode=abort:
    unfinished requests end with their output so far and finish reason abort; new ones wait.
    """
    mode, ends_unfinished = _query_value(request, "mode", PAUSES, "wait")
    if _query_value(request, "clear_cache", _BOOLEANS, "false"):
        raise InvalidRequestError.fixed("clear_cache: use POST /reset_prefix_cache", "clear_cache")
    await app_state_of(request).client.call_admin(
        "pause", pause_mode=mode, ends_unfinished=ends_unfinished
    )
    return JSONResponse({"status": "paused"})


@router.post("/resume")
async def resume(request: Request) -> Response:
    """End a pause."""
    await app_state_of(request).client.call_admin("resume")
    return JSONResponse({"status": "resumed"})


@router.get("/is_paused")
async def is_paused(request: Request) -> Response:
    """Return whether the engine is paused."""
    reply = await app_state_of(request).client.call_admin("get_pause")
    return JSONResponse({"is_paused": bool(reply.value)})


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Clear the prefix cache; 409 if requests are unfinished.

    reset_running_requests=true: unfinished requests are recomputed instead. reset_external=true:
    the KV connector's cache is cleared as well (409 while it copies).
    """
    running = _query_value(request, "reset_running_requests", _BOOLEANS, "false")
    external = _query_value(request, "reset_external", _BOOLEANS, "false")
    client = app_state_of(request).client
    reply = await client.call_admin(
        "reset_prefix_cache", reset_running_requests=running, reset_external=external
    )
    if not reply.ok:
        raise ConflictError(f"{reply.detail}: wait for them, or set reset_running_requests=true")
    return Response()


@router.post("/reset_encoder_cache")
async def reset_encoder_cache(request: Request) -> Response:
    """Forget encoder outputs and pixels of images; 409 while a request needs an output.

    Front ends keep the pixels of images that open requests use.
    """
    app_state = app_state_of(request)
    reply = await app_state.client.call_admin("reset_encoder_cache")
    if not reply.ok:
        raise ConflictError(f"{reply.detail}: wait for them")
    app_state.supervisor.send(ForgetImages())
    return Response()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin a profile of all processes; 409 if one is running."""
    await _call_profiler(request, "start_profile")
    app_state_of(request).supervisor.send(ProfileFrontEnds(True))
    return JSONResponse({"status": "profiling"})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End a profile and return the paths of the engine's and the workers' files."""
    try:
        reply = await _call_profiler(request, "stop_profile")
    finally:  # also if a worker failed
        app_state_of(request).supervisor.send(ProfileFrontEnds(False))
    return JSONResponse({"status": "stopped", "files": reply.detail.splitlines()})


@router.post("/abort_requests")
async def abort_requests(request: Request) -> Response:
    """Abort requests by response id, in all front ends; their clients get error 410.

    With an operator's key the requests of all clients, else those of the same key.
    """
    context = RequestContext(request)
    fields = await read_json(context, partial(parse, AbortBody, neutral={}))
    key_name = None if has_operators_key(request) else context.key_name
    context.app_state.supervisor.send(AbortRequests(fields.request_ids, key_name))
    response = JSONResponse({"status": "aborting"}, status_code=202)
    response.raw_headers += context.ignored.headers()
    return response


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """Return version, model, engine and all settings except secrets.

    `vllm_config` has what routers read in vLLM's answer.
    """
    app_state = app_state_of(request)
    settings = json.loads(to_json_line(app_state.settings))
    for section in settings.values():
        for field in SECRET_FIELDS & section.keys():
            section[field] = None if section[field] is None else "***"
    engine, num_engines = app_state.client.engine, app_state.client.num_engines
    return JSONResponse(
        {
            "version": daemon_version(),
            "model": json.loads(to_json_line(app_state.model)),
            "engine": {
                "number": num_engines,
                "device": engine.device_name,
                "max_model_len": engine.max_model_len,
                "num_blocks": engine.num_blocks,
                "block_size": engine.block_size,
                "max_num_queued_reqs": engine.max_num_queued_reqs,
                "max_num_queued_tokens": engine.max_num_queued_tokens,
            },
            "config": settings,
            "vllm_config": {
                "model_config": {"model": app_state.model_name},
                "cache_config": {"block_size": engine.block_size},
            },
        }
    )


async def _call_profiler(request: Request, name: AdminName) -> AdminReply:
    app_state = app_state_of(request)
    if app_state.settings.trace.parsed_profiler() is None:
        raise InvalidRequestError.fixed(
            """profiles are off: start with --profiler-config '{"profiler": "torch", """
            """"torch_profiler_dir": "FOLDER"}'"""
        )
    reply = await app_state.client.call_admin(name)
    if not reply.ok:
        raise InternalRequestError(reply.detail) if reply.value else ConflictError(reply.detail)
    return reply


def _query_value(request: Request, name: str, meanings: dict[str, Any], default: str) -> Any:
    """Return the meaning of a query parameter; raises InvalidRequestError for other values."""
    value = request.query_params.get(name, default)
    require(value in meanings, name, f"takes {' or '.join(meanings)}, got {shown(value)}")
    return meanings[value]
