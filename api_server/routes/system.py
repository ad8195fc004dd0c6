"""Routes for load balancers, monitoring and clients: health, version, load, metrics, models."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from api_server.errors import MODELS_PATH, error_response, expects_anthropic
from api_server.generation.app_state import RequestContext
from api_server.routes.common import app_state_of, has_operators_key, page_limit
from proto.codec import to_compact_json
from proto.errors import UnknownPathError, shown

MAX_PAGE: Final = 1000
"""Largest `limit` of Anthropic's lists."""

router = APIRouter()
no_websocket_router = APIRouter()
"""To be included last: for WebSockets at a path that has none."""


@no_websocket_router.websocket("/{path:path}")
async def refuse_websocket(websocket: WebSocket) -> None:
    """Answer 404 in JSON; by default it would be a 403 without a body."""
    error = UnknownPathError(f"there is no WebSocket at {shown(websocket.url.path)}")
    await websocket.send_denial_response(error_response(error, websocket.scope))


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping")
@router.head("/ping", include_in_schema=False)
@router.post("/ping")
async def health(request: Request) -> Response:
    """Answer 200 if requests are accepted; 503 before the engine is ready and during a drain.

    Also 200 while a process is restarted, because requests wait for it.
    """
    app_state = app_state_of(request)
    app_state.health.check_takes_requests()
    _ = app_state.client.engine
    return Response()


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def live() -> Response:
    """Liveness: the event loop of this process responds."""
    return Response()


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """Readiness: 200 if requests make progress, else 503 with the reasons.

    Of several engines one suffices; `missing_engines` has the others, with the reasons. `standby`
    has the number of standby processes that are ready, where some are wanted.
    """
    app_state = app_state_of(request)
    reasons = app_state.health.not_ready_reasons()
    body: dict[str, Any] = {"ready": not reasons, "reasons": reasons}
    if app_state.client.num_engines > 1:
        missing = app_state.health.missing_engines()
        body["missing_engines"] = {str(engine): lines for engine, lines in missing.items()}
    reliability, status = app_state.settings.reliability, app_state.health.supervisor_status
    if reliability.standby:
        body["standby"] = {"engine": status.standby_engines, "worker": status.standby_workers}
    return JSONResponse(body, 503 if reasons else 200, {"retry-after": "1"} if reasons else {})


@router.get("/version")
async def show_version() -> dict[str, str]:
    return {"version": daemon_version()}


@router.get("/load")
async def load(request: Request) -> dict[str, int]:
    """Return the number of requests in flight, in all front ends."""
    return {"server_load": int(app_state_of(request).metrics.in_flight.value)}


@router.get("/kv_event_sources")
async def kv_event_sources(request: Request) -> Response:
    """Return where each engine publishes KV events, by its rank; {} without --kv-events-config."""
    client = app_state_of(request).client
    configs = [client.properties_of(engine).kv_events for engine in range(client.num_engines)]
    sources = {str(index): each for index, each in enumerate(configs) if each is not None}
    return Response(to_compact_json(sources), media_type="application/json")


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return all metrics in Prometheus' text format."""
    app_state = app_state_of(request)
    return Response(
        app_state.metrics.render(
            ready=not app_state.health.not_ready_reasons(),
            missing_engines=app_state.client.missing_engines,
            status=app_state.health.supervisor_status,
        ),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@cache
def daemon_version() -> str:
    """Return the version of the installed package."""
    try:
        return version("tokend")
    except PackageNotFoundError:
        return "unknown"


@router.get(MODELS_PATH)
async def list_models(request: Request) -> Response:
    """List the names of the model, and the adapters that the client may use.

    In Anthropic's format for clients with `anthropic-version`. There may be thousands.
    """
    app_state = app_state_of(request)
    names = [app_state.model_name, *app_state.aliases]
    if app_state.adapters is not None:
        cards = app_state.adapters.cards(RequestContext(request).key_name)
        names += [card.lora.lora_name for card in cards]
    if not expects_anthropic(request.scope):
        listed: dict[str, Any] = {"object": "list", "data": _model_cards(request, names)}
    else:
        page, has_more = _page(names, request)
        listed = {
            "data": _model_cards(request, page),
            "has_more": has_more,
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }
    return Response(to_compact_json(listed), media_type="application/json")


@router.get(f"{MODELS_PATH}/{{name:path}}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    context = RequestContext(request)
    if context.app_state.adapters is not None:
        await context.app_state.adapters.prepare(name, context.key_name)
    context.check_model(name)
    (card,) = _model_cards(request, [name])
    return card


def _page(names: list[str], request: Request) -> tuple[list[str], bool]:
    """Return the page of Anthropic's list that was requested, and whether more follow.

    No name stands before or after one that is not in the list. Raises InvalidRequestError.
    """
    query = request.query_params
    limit = page_limit(query, MAX_PAGE)
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None:
        names = names[names.index(after) + 1 :] if after in names else []
    if before is not None:
        names = names[: names.index(before)] if before in names else []
        return names[-limit:], len(names) > limit
    return names[:limit], len(names) > limit


def _model_cards(request: Request, names: Sequence[str]) -> list[dict[str, Any]]:
    context = RequestContext(request)
    app_state, adapters = context.app_state, context.app_state.adapters
    max_model_len = app_state.client.engine.max_model_len
    if expects_anthropic(request.scope):
        created = datetime.fromtimestamp(app_state.created, UTC)
        return [
            {
                "type": "model",
                "id": name,
                "display_name": name,
                "created_at": created.isoformat().replace("+00:00", "Z"),
                "lifecycle": "active",
                "max_input_tokens": max_model_len,
                "max_tokens": max_model_len,
            }
            for name in names
        ]
    is_operator, key_name = has_operators_key(request), context.key_name
    tasks, defaults = app_state.supported_tasks, dict(app_state.generation_defaults.values)
    modalities = ["text"] if app_state.images is None else ["text", "image"]
    cards = []
    for name in names:
        root, parent = app_state.model.name, None
        adapter = None if adapters is None else adapters.find(name, key_name)
        if adapter is not None:  # where it lies is the operators' alone
            root = adapter.lora.path if is_operator else adapter.lora.lora_name
            parent = app_state.model_name
        cards.append(
            {
                "id": name,
                "object": "model",
                "created": app_state.created,
                "owned_by": "tokend",
                "root": root,
                "parent": parent,
                "max_model_len": max_model_len,
                "supported_tasks": tasks,
                "input_modalities": modalities,
                "default_sampling_params": defaults,
            }
        )
    return cards
