"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.chat_answer import ChatAnswer
from api_server.protocol.fields import parse
from api_server.protocol.ignored import IgnoredFields
from api_server.protocol.known_fields import CHAT_NEUTRAL
from api_server.routes.access import services_of
from api_server.routes.body import read_fields
from api_server.routes.chat_turn import prepare_turn
from api_server.tenants import key_name_of, tenant_of
from proto.errors import InvalidRequestError

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    tenant = tenant_of(request, services.config.tenant_by)
    ignored = IgnoredFields()
    fields = await read_fields(request, ignored)
    asked = parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, ignored)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", "top_logprobs")
    turn = await prepare_turn(
        services,
        asked,
        id_prefix="chatcmpl-",
        tenant=tenant,
        key_name=key_name_of(request),
        ignored=ignored,
    )
    answer = ChatAnswer(turn.shape, turn.generation.streams[0], turn.prompt_text, turn.make_parser)
    return turn.response(answer)
