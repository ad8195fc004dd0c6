"""POST /tokenize and /detokenize, GET /tokenizer_info: text to tokens and back, without the engine.

The tokenizer's thread does long work, so that it does not block the streams.
"""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from api_server.generation.app_state import RequestContext
from api_server.generation.encoders.base import json_parts
from api_server.generation.engine_call import check_response_size
from api_server.generation.response import JsonResponse
from api_server.protocol.chat import ConversationFields
from api_server.protocol.common import Text
from api_server.protocol.fields import IgnoredFields, Neutral, Strict, parse
from api_server.routes.chat import encode_any_length, render_prompt
from api_server.routes.common import app_state_of, read_json
from proto.codec import to_compact_json
from proto.errors import InvalidRequestError, UnknownPathError, require, shown

MAX_DETOKENIZED: Final = 1 << 17
TOKENIZE_CHAT_NEUTRAL: Final[Neutral] = {
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
}


class TokenizeText(Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    prompt: str
    """The text; it may be empty, and longer than the context."""
    add_special_tokens: bool = True
    """Let the tokenizer add what it adds to every text, such as a first token."""
    return_token_strs: bool = False
    """Name each token as the vocabulary spells it."""


class TokenizeChat(ConversationFields):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    add_special_tokens: bool = False
    """Let the tokenizer add what it adds to every text; most templates have done so already."""
    return_token_strs: bool = False
    """Name each token as the vocabulary spells it."""


class Detokenize(Strict):
    model: Text | None = None
    """Name of a served model; by default the one there is."""
    tokens: Annotated[list[int], Field(fail_fast=True)]
    """Up to 131072 token ids, or as many as the context has if these are more, each below the size
    of the vocabulary."""


router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """Return the token ids of a text, or of a conversation that the chat template renders."""
    context = RequestContext(request)
    app_state = context.app_state
    fields = await read_json(context, _parse)
    context.check_model(fields.model)
    if isinstance(fields, TokenizeChat):
        reader = app_state.prompt_reader("messages")
        rendered = await render_prompt(context, fields, reader)
        ids = await encode_any_length(
            context, rendered, reader, add_special_tokens=fields.add_special_tokens
        )
    else:
        reader = app_state.prompt_reader("prompt")
        ids = await reader.encode_any_length(
            fields.prompt, add_special_tokens=fields.add_special_tokens
        )
    names = None
    if fields.return_token_strs:
        tokenizer = app_state.tokenizer
        names = await tokenizer.run_in_thread_if_large(len(ids), tokenizer.token_names, ids)
    body = {
        "count": len(ids),
        "max_model_len": reader.max_model_len,
        "tokens": ids,
        "token_strs": names,
    }
    response = Response(to_compact_json(body), media_type="application/json")
    response.raw_headers += context.ignored.headers()
    return response


def _parse(fields: Any, ignored: IgnoredFields) -> TokenizeChat | TokenizeText:
    if isinstance(fields, dict) and fields.get("messages") is not None:
        return parse(TokenizeChat, fields, TOKENIZE_CHAT_NEUTRAL, ignored)
    if isinstance(fields, dict) and fields.get("prompt") is None:
        field = "messages" if "messages" in fields else "prompt"
        raise InvalidRequestError("prompt or messages is missing", field)
    return parse(TokenizeText, fields, {}, ignored)


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """Return the text of token ids, special tokens included."""
    context = RequestContext(request)
    app_state, ignored = context.app_state, context.ignored
    fields = await read_json(context, partial(parse, Detokenize, neutral={}))
    context.check_model(fields.model)
    ids, size = fields.tokens, app_state.client.engine.vocab_size
    most = max(MAX_DETOKENIZED, app_state.client.engine.max_model_len)
    require(len(ids) <= most, "tokens", f"must be at most {most}, got {len(ids)}")
    for bound in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= bound < size:
            raise InvalidRequestError(
                f"token id {shown(bound)} is outside the vocabulary [0, {size})", "tokens"
            )
    tokenizer = app_state.tokenizer
    text_size = await tokenizer.run_in_thread_if_large(len(ids), tokenizer.json_size, ids)
    check_response_size(app_state, {"tokens": text_size})
    text = await tokenizer.run_in_thread_if_large(
        len(ids), tokenizer.decode, ids, skip_special_tokens=False
    )
    return JsonResponse(json_parts({"prompt": text}), ignored.headers())


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request) -> Response:
    """Return tokenizer_config.json and the chat template, if a setting enables this route."""
    app_state = app_state_of(request)
    if not app_state.config.enable_tokenizer_info_endpoint:
        raise UnknownPathError("/tokenizer_info needs --enable-tokenizer-info-endpoint")
    folder = app_state.settings.model.tokenizer or app_state.model.folder
    settings = await asyncio.to_thread(_tokenizer_settings, folder)
    template = app_state.chat_template
    source = template.with_tools.source if template.source is None else template.source
    return JSONResponse(settings | {"chat_template": source})


def _tokenizer_settings(folder: str) -> dict[str, Any]:
    """Return the model's tokenizer_config.json, with a default class for clients to load."""
    path = Path(folder, "tokenizer_config.json")
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **found}
