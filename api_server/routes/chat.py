"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.protocol.answers import ChatAnswer
from api_server.protocol.chat import CHAT_LATER, ChatCompletionRequest
from api_server.protocol.fields import parse
from api_server.routes.access import services_of
from api_server.routes.body import read_fields
from api_server.routes.prepare import Preparation, Wishes
from api_server.routes.respond import GenerationResponse
from api_server.tenants import key_name_of, tenant_of
from proto.errors import InvalidRequestError

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    tenant = tenant_of(request, services.config.tenant_by)
    reader = services.prompt_reader("messages")
    asked = parse(ChatCompletionRequest, await read_fields(request), CHAT_LATER)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", "top_logprobs")
    preparation = Preparation(services, asked, "chatcmpl-", tenant, key_name_of(request))
    reader.check_characters(sum(len(message.content) for message in asked.messages))
    messages = [message.for_template() for message in asked.messages]
    text = await services.chat_template.render(messages)
    prompts = await reader.encode([text], add_special_tokens=False)
    wishes = Wishes(
        max_tokens=asked.wanted_max_tokens,
        default_max_tokens=None,
        logprobs=asked.num_logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        max_tokens_field=asked.max_tokens_field,
    )
    generation = preparation.generation(preparation.requests(prompts, wishes), [0])
    answer = ChatAnswer(preparation.shape(asked.num_logprobs), generation.streams[0])
    keep_alive = services.config.sse_keep_alive
    return GenerationResponse(generation, answer, stream=asked.stream, keep_alive=keep_alive)
