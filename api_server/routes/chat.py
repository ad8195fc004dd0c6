"""POST /v1/chat/completions."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from api_server.inputs.logit_edits import logit_edits
from api_server.protocol.answers import ChatAnswer
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.fields import parse
from api_server.protocol.ignored import IgnoredFields
from api_server.protocol.known_fields import CHAT_NEUTRAL
from api_server.routes.access import services_of
from api_server.routes.body import read_fields
from api_server.routes.prepare import Preparation, Wishes
from api_server.tenants import key_name_of, tenant_of
from proto.errors import InvalidRequestError

router = APIRouter()


@router.post("/v1/chat/completions")
async def create_chat_completion(request: Request) -> Response:
    services = services_of(request)
    tenant = tenant_of(request, services.config.tenant_by)
    reader = services.prompt_reader("messages")
    ignored = IgnoredFields()
    fields = await read_fields(request, ignored)
    asked = parse(ChatCompletionRequest, fields, CHAT_NEUTRAL, ignored)
    if asked.top_logprobs and not asked.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs", "top_logprobs")
    preparation = Preparation(services, asked, "chatcmpl-", tenant, key_name_of(request), ignored)
    reader = reader.keeping(preparation.truncation(asked.wanted_max_tokens))
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
        edits=await logit_edits(asked, services.tokenizer),
    )
    (prompt_text,) = await preparation.prompt_texts(prompts)
    generation = preparation.generation(preparation.requests(prompts, wishes), [0])
    shape = preparation.shape(asked.num_logprobs)
    answer = ChatAnswer(shape, generation.streams[0], prompt_text)
    return preparation.response(generation, answer)
