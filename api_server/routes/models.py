"""GET /v1/models."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from api_server.routes.access import services_of
from api_server.services import Services

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_card(services_of(request))]}


@router.get("/v1/models/{name:path}")
async def show_model(request: Request, name: str) -> dict[str, Any]:
    services = services_of(request)
    services.check_model(name)
    return _card(services)


def _card(services: Services) -> dict[str, Any]:
    return {
        "id": services.model_name,
        "object": "model",
        "created": services.created,
        "owned_by": "tokend",
        "root": services.model.name,
        "parent": None,
        "max_model_len": services.client.engine.max_model_len,
    }
