"""Responses by their id: looking at one, ending it, forgetting it.

Each client finds only its own. One that is under way can be ended whether or not it is to be
stored; to be looked at it has to be.
"""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from api_server.routes.access import services_of
from api_server.tenants import key_name_of, tenant_of
from proto.errors import InvalidRequestError, UnknownPathError, shown

router = APIRouter()


@router.get("/v1/responses/{response_id}")
async def get_response(request: Request, response_id: str) -> dict[str, Any]:
    if request.query_params.get("stream", "false").lower() != "false":
        raise InvalidRequestError("stream: a response that is kept is told as a whole", "stream")
    responses, owner = services_of(request).responses, _owner(request)
    running = responses.under_way(owner, response_id)
    if running is not None and running.stored:
        return running.so_far()
    stored = responses.find(owner, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored.response


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> dict[str, Any]:
    """Of one that is over nothing changes."""
    responses, owner = services_of(request).responses, _owner(request)
    running = responses.under_way(owner, response_id)
    if running is not None:
        return running.cancel()
    stored = responses.find(owner, response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored.response


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> dict[str, Any]:
    if not services_of(request).responses.drop(_owner(request), response_id):
        raise _unknown(response_id)
    return {"id": response_id, "object": "response.deleted", "deleted": True}


def _owner(request: Request) -> tuple[int, str]:
    tenant_by = services_of(request).config.tenant_by
    return tenant_of(request, tenant_by), key_name_of(request)


def _unknown(response_id: str) -> UnknownPathError:
    return UnknownPathError(f"there is no response {shown(response_id)}", "response_id")
