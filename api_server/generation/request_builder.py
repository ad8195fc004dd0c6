"""A validated body → engine requests, the token stream that receives their output, the response.

A handler reads its prompts with `RequestBuilder.prompt_reader`, and calls `build_stream` and, after
`TokenStream.submit`, `response`.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Final

from api_server.generation.app_state import RequestContext
from api_server.generation.encoders.base import ResponseEncoder, ResponseOptions, json_parts
from api_server.generation.engine_call import EngineCall, check_response_size
from api_server.generation.request_stream import (
    MAX_UNSENT_BYTES,
    Choice,
    RequestStream,
    SendBuffer,
    StreamNotifier,
    Timeline,
)
from api_server.generation.response import GenerationResponse, JsonResponse
from api_server.generation.sampling import (
    NO_EDITS,
    SEED_MASK,
    EndpointOptions,
    logit_edits,
    sampling_params,
)
from api_server.generation.stream import TokenStream
from api_server.parsers.called_tool import AgentTurn
from api_server.parsers.output import PLAIN_TEXT, ContentStops
from api_server.parsers.output_format import OutputFormat
from api_server.parsers.reasoning import TokenCounter
from api_server.protocol.agents import agent_hint
from api_server.protocol.common import MAX_CHOICES_PER_REQUEST, REQUEST_NUMBERS, GenerationRequest
from api_server.protocol.completions import CompletionRequest
from api_server.text.detokenizer import Detokenizer, MarkerDetokenizer, NoText
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.stop_strings import StopStrings, stop_strings
from api_server.text.tokenizer import ModelTokenizer, truncation
from proto.codec import to_compact_json
from proto.errors import InvalidRequestError, require
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.grammar import GrammarSource
from proto.messages.logit_edits import LOGIT_EDIT_NUMBERS
from proto.messages.sampling_params import SAMPLING_NUMBERS, ThinkingRule
from proto.settings.kv_peer import PARAMS, transfer_request
from proto.settings.kv_transfer_config import kv_transfer_config

TOKEN_ID_BYTES: Final = 8
LOGPROB_BYTES: Final = 128
"""Of a token and its log-probability in a response, with what belongs to it; seldom more."""


class RequestBuilder(EngineCall[GenerationRequest]):
    """Builds the engine requests, the token stream and the response of one HTTP request.

    grammar: of the answer, None for any text. Other arguments as in EngineCall.
    """

    def __init__(
        self,
        context: RequestContext,
        request: GenerationRequest,
        id_prefix: str,
        grammar: GrammarSource | None,
    ) -> None:
        app_state = context.app_state
        app_state.check_generates("generation of text")
        check_request(request)
        check_beams(request)
        check_grammar(request, grammar)
        super().__init__(context, request, id_prefix)
        self._grammar = grammar
        self._agent = agent_hint(request, self._tenant)
        self._response_sizes: dict[str, int] = {}  # bytes by field, as far as they are known
        self._send_buffer = SendBuffer(
            MAX_UNSENT_BYTES if request.stream else math.inf,
            app_state.config.max_response_bytes,
            self._names_size,
        )
        if request.lora and app_state.adapters is None:
            require(
                not any(entry.scale for entry in request.lora),
                "lora",
                "needs a server with --enable-lora",
            )
        self._kv_transfer_request = b""
        if request.kv_transfer_params:
            self._kv_transfer_request = transfer_request(
                kv_transfer_config(app_state.settings.cache.kv_transfer_config),
                request.kv_transfer_params,
            )
        if request.return_routed_experts:
            require(
                app_state.settings.model.enable_return_routed_experts,
                "return_routed_experts",
                "needs a server with --enable-return-routed-experts",
            )

    @property
    def has_grammar(self) -> bool:
        return self._grammar is not None

    def drop_messages(self) -> None:
        """Free the messages of a chat: images in them are large, and no answer needs them."""
        self._body = self._body.model_copy(update={"messages": []})

    def response_options(self, num_logprobs: int | None) -> ResponseOptions:
        """Return what the response contains.

        num_logprobs: alternatives for each token, None for no log-probabilities.
        """
        request, tokenizer = self._body, self._app_state.tokenizer
        if num_logprobs is not None and request.logprob_token_ids:
            num_logprobs = len(request.logprob_token_ids)
        now = int(time.time())
        return ResponseOptions(self.id, now, self.model_name, request, tokenizer, num_logprobs)

    def check_choices(self, num_prompts: int) -> None:
        """Raise InvalidRequestError for too many choices; call it before tokenising the prompts."""
        n = self._body.n
        if num_prompts > 1 and self._agent is not None:
            field = self._body.agent_session_field
            raise InvalidRequestError(f"{field} takes one prompt, got {num_prompts}", field)
        if num_prompts * n > MAX_CHOICES_PER_REQUEST:
            raise InvalidRequestError(
                f"n times the number of prompts is at most {MAX_CHOICES_PER_REQUEST}, "
                f"got {num_prompts * n}",
                "n" if n > 1 else "prompt",
            )
        if num_prompts > 1:
            self._check_queue("prompt", choices=num_prompts * n)

    def prompt_reader(self, field: str, max_tokens: int | None) -> PromptReader:
        """Return what reads prompts, and truncates them as the request asks.

        field: of the request, for errors. max_tokens: as given, or the default.
        """
        body, reader = self._body, self._app_state.prompt_reader(field)
        max_prompt_tokens = reader.max_model_len - max(max_tokens or 1, 1)
        return reader.with_truncation(
            truncation(body.truncate_prompt_tokens, body.truncation_side, max_prompt_tokens)
        )

    async def build_stream(
        self,
        prompts: Sequence[Prompt],
        options: EndpointOptions,
        output_format: OutputFormat,
        notifier: StreamNotifier | None = None,
    ) -> TokenStream:
        """Return the stream of a request for each prompt, which `TokenStream.submit` sends.

        notifier: of the session that the stream is a turn of; None for a new one.
        """
        notifier, body, stops = notifier or StreamNotifier(), self._body, None
        requests = await self._build_requests(prompts, options)
        if body.stop:
            stops = await stop_strings(body.stop, includes_stop=body.include_stop_str_in_output)
        streams = [
            self._stream(request, notifier, index, output_format, stops)
            for index, request in enumerate(requests)
        ]
        return self._token_stream(requests, streams, notifier)

    async def _build_requests(
        self, prompts: Sequence[Prompt], options: EndpointOptions
    ) -> list[EngineCoreRequest]:
        body, app_state = self._body, self._app_state
        edits = await logit_edits(body, app_state.tokenizer, app_state.generation_defaults)
        if body.use_beam_search and options.logprobs is not None:
            raise InvalidRequestError(
                "logprobs cannot be combined with use_beam_search", "logprobs"
            )
        if len(prompts) > 1:
            require(
                not self._kv_transfer_request, PARAMS, "is for one prompt, and there are several"
            )
            self._check_queue("prompt", tokens=sum(len(prompt.token_ids) for prompt in prompts))
        # a client's negative seed wraps around
        seed = next(app_state.seeds) if body.seed is None else body.seed & SEED_MASK
        requests = [
            self._engine_request(
                prompt,
                sampling_params(
                    body,
                    options,
                    app_state.generation_defaults,
                    edits,
                    num_prompt_tokens=len(prompt.token_ids),
                    max_model_len=app_state.client.engine.max_model_len,
                    vocab_size=app_state.client.engine.vocab_size,
                    end_token_ids=app_state.end_token_ids,
                ),
                seed,
                n=body.n,
                grammar=self._grammar,
                agent=self._agent,
                thinking=options.thinking,
                kv_transfer_request=self._kv_transfer_request,
            )
            for prompt in prompts
        ]
        self._check_response_size(requests, options)
        return requests

    def _check_response_size(
        self, requests: Sequence[EngineCoreRequest], options: EndpointOptions
    ) -> None:
        """Raise InvalidRequestError for a response that could exceed --max-response-bytes."""
        body = self._body
        num_prompt = body.n * sum(len(request.prompt_token_ids) for request in requests)
        num_output = body.n * sum(request.sampling_params.max_tokens for request in requests)
        sizes: dict[str, int] = {}
        if body.return_token_ids:
            sizes["return_token_ids"] = (num_prompt + num_output) * TOKEN_ID_BYTES
        if options.logprobs is not None:
            named = body.logprob_token_ids or ()
            row = (len(named) or options.logprobs) * LOGPROB_BYTES + LOGPROB_BYTES
            row += self._names_size(named)
            num_rows = num_output + (num_prompt if options.echoes_logprobs else 0)
            sizes["logprobs"] = num_rows * row
        if body.prompt_logprobs is not None:
            entries = num_prompt * (body.prompt_logprobs + 1)
            sizes["prompt_logprobs"] = entries * LOGPROB_BYTES
        if body.return_routed_experts:
            num_tokens = num_prompt + num_output
            routing_bytes = self._app_state.client.engine.routing_bytes
            sizes["return_routed_experts"] = num_tokens * routing_bytes * 4 // 3  # in base64
        self._add_response_sizes(sizes)

    def _names_size(self, token_ids: Sequence[int]) -> int:
        """Return the bytes of tokens' texts in log-probabilities, and in chats of their bytes."""
        with_bytes = not isinstance(self._body, CompletionRequest)
        return self._app_state.tokenizer.names_size(token_ids, with_bytes=with_bytes)

    def _add_response_sizes(self, sizes: Mapping[str, int]) -> None:
        """Add to what the response could have; raise InvalidRequestError if that is too much."""
        self._response_sizes |= sizes
        check_response_size(self._app_state, self._response_sizes)

    def response(
        self,
        stream: TokenStream,
        encoder: ResponseEncoder,
        extra_headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> GenerationResponse:
        """Return the response to a submitted stream, encoded by `encoder`."""
        return GenerationResponse(
            stream,
            encoder,
            as_events=self._body.stream,
            keep_alive_seconds=self._app_state.config.sse_keep_alive,
            extra_headers=[*self.headers(), *extra_headers],
        )

    def render_response(self, stream: TokenStream, *, several: bool = False) -> JsonResponse:
        """Return the response of a /render route: what would be computed, in vLLM's form.

        stream: not submitted; it ends here. several: a list with an entry for each prompt. Raises
        InvalidRequestError for a response that is too long.
        """
        stream.cleanup.close()
        rendered = [self._rendered(request) for request in stream.requests]
        if several:
            entry = len(to_compact_json({**rendered[0], "token_ids": []}))
            num_tokens = sum(len(request.prompt_token_ids) for request in stream.requests)
            size = entry * len(rendered) + num_tokens * TOKEN_ID_BYTES
            check_response_size(self._app_state, {"prompt": size})
            for index, each in enumerate(rendered):
                each["request_id"] += f"-{index}"
        return JsonResponse(json_parts(rendered if several else rendered[0]), self.headers())

    def _rendered(self, request: EngineCoreRequest) -> dict[str, Any]:
        body, params, images = self._body, request.sampling_params, request.mm_features
        edits = params.edits or NO_EDITS
        numbers = {name: getattr(params, name) for name in ("top_k", *SAMPLING_NUMBERS)}
        numbers |= {name: getattr(edits, name) for name in LOGIT_EDIT_NUMBERS}
        places = [{"offset": image.offset, "length": image.length} for image in images]
        hashes = [image.mm_hash.hex() for image in images]
        features = {"mm_hashes": {"image": hashes}, "mm_placeholders": {"image": places}}
        options = body.stream_options
        return {
            "request_id": self.id,
            "model": self.model_name,
            "token_ids": request.prompt_token_ids,
            "features": features if images else None,
            "sampling_params": {
                **numbers,
                "n": body.n,
                "seed": body.seed,
                "max_tokens": params.max_tokens,
                "min_tokens": params.min_tokens,
                "ignore_eos": params.ignore_eos,
                "stop": body.stop,
                "stop_token_ids": params.stop_token_ids,
                "include_stop_str_in_output": body.include_stop_str_in_output,
                "skip_special_tokens": body.skip_special_tokens,
                "logprobs": params.logprobs,
                "prompt_logprobs": params.prompt_logprobs,
                "logit_bias": body.logit_bias or None,
                "bad_words": body.bad_words,
                "allowed_token_ids": body.allowed_token_ids or None,
            },
            "stream": body.stream,
            "stream_options": None if options is None else options.model_dump(exclude_none=True),
            "cache_salt": body.cache_salt,
            "priority": body.priority,
        }

    async def check_prompt_texts(self, prompts: Sequence[Prompt], field: str) -> None:
        """Raise InvalidRequestError for prompts whose texts are too long for all choices.

        field: of the request that asks for them. Call it before the texts are made.
        """
        tokenizer, ids = self._app_state.tokenizer, [prompt.token_ids for prompt in prompts]
        size = await tokenizer.run_in_thread_if_large(
            sum(map(len, ids)), tokenizer.json_size, chain.from_iterable(ids)
        )
        self._add_response_sizes({field: self._body.n * size})

    async def prompt_texts(self, prompts: Sequence[Prompt]) -> Sequence[str | None]:
        """Return the text of each prompt if the client requested it, else None for each."""
        if not self._body.return_prompt_text:
            return [None] * len(prompts)
        await self.check_prompt_texts(prompts, "return_prompt_text")
        tokenizer = self._app_state.tokenizer
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        return await tokenizer.run_in_thread_if_large(num_tokens, _prompt_texts, prompts, tokenizer)

    def _agent_turn(self, output_format: OutputFormat) -> AgentTurn | None:
        """Return what finds the tool that an agent calls; None for other requests."""
        if self._agent is None:
            return None
        hint = self._body.agent_hint
        declared_tool = None if hint is None else hint.tool
        parsers = [output_format.new_parser() for _ in range(self._body.n)]
        return AgentTurn(parsers, self._tenant, declared_tool)

    def _stream(
        self,
        request: EngineCoreRequest,
        notifier: StreamNotifier,
        index: int,
        output_format: OutputFormat,
        stops: StopStrings | None,
    ) -> RequestStream:
        """stops: an unused instance, which all choices copy."""
        app_state, body = self._app_state, self._body
        ids = request.prompt_token_ids
        turn = self._agent_turn(output_format)
        text_tails = turn.tails if turn is not None else []
        counters: list[TokenCounter] = []
        context = [] if request.prompt_embeds else ids
        detokenizers = [
            self._detokenizer(context, output_format, counters) for _ in range(request.n)
        ]
        choices = [
            Choice(
                index=index * request.n + number,
                detokenizer=detokenizers[number],
                stop_strings=_stops_of_choice(stops, output_format),
                min_tokens=body.min_tokens,
                includes_stop=body.include_stop_str_in_output,
                interval=body.stream_interval or app_state.config.stream_interval,
                counts_tokens=not body.detokenize,
                send_buffer=self._send_buffer,
                text_tail=text_tails[number] if text_tails else None,
            )
            for number in range(request.n)
        ]
        has_rows = request.sampling_params.prompt_logprobs is not None
        return RequestStream(
            request.request_id,
            ids,
            choices,
            notifier,
            app_state.metrics,
            Timeline(self._arrival),
            prompt_rows=[None] * len(ids) if has_rows else [],
            may_expire_in_queue=request.queue_deadline < math.inf,
            send_buffer=self._send_buffer,
            turn=turn,
            reasoning_counters=counters,
            max_tokens=request.sampling_params.max_tokens,
        )

    def _detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        output_format: OutputFormat,
        counters: list[TokenCounter],
    ) -> Detokenizer:
        """Return the detokenizer of a choice; add its part that counts reasoning to `counters`."""
        body, markers = self._body, output_format.markers
        detokenizer = self._app_state.tokenizer.detokenizer(
            prompt_token_ids,
            skip_special_tokens=body.skip_special_tokens,
            spaces_between_special_tokens=body.spaces_between_special_tokens,
        )
        if markers and body.skip_special_tokens:
            detokenizer = MarkerDetokenizer(detokenizer, markers)
        counter = output_format.new_counter(detokenizer)
        if counter is not None:
            counters.append(counter)
            detokenizer = counter
        return detokenizer if body.detokenize else NoText(counter)


def _stops_of_choice(
    stops: StopStrings | None, output_format: OutputFormat
) -> StopStrings | ContentStops | None:
    if stops is None:
        return None
    parser = output_format.new_reasoning_parser()
    return copy.copy(stops) if parser is PLAIN_TEXT else ContentStops(copy.copy(stops), parser)


def prompt_text(prompt: Prompt, tokenizer: ModelTokenizer) -> str:
    """Return the prompt as the client sent it, or decoded from its token ids."""
    if prompt.text is None:
        return tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return prompt.text


def _prompt_texts(prompts: Sequence[Prompt], tokenizer: ModelTokenizer) -> list[str]:
    return [prompt_text(prompt, tokenizer) for prompt in prompts]


def check_request(request: GenerationRequest) -> None:
    """Raise InvalidRequestError for fields that cannot be combined."""
    if request.stream_options is not None and not request.stream:
        raise InvalidRequestError("stream_options needs stream", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise InvalidRequestError("prompt_logprobs cannot be streamed", "prompt_logprobs")
    if request.stream_interval not in (None, 1) and not request.stream:
        raise InvalidRequestError("stream_interval needs stream", "stream_interval")
    if request.stop and not request.detokenize:
        raise InvalidRequestError("stop needs text, which detokenize leaves out", "stop")
    if "truncation_side" in request.model_fields_set and request.truncate_prompt_tokens is None:
        raise InvalidRequestError("truncation_side needs truncate_prompt_tokens", "truncation_side")


def check_grammar(request: GenerationRequest, grammar: GrammarSource | None) -> None:
    """Raise InvalidRequestError for fields that conflict with the grammar of the answer.

    A grammar decides where the text ends, so no field may prevent an end; and which tokens are
    allowed, so no field may forbid those.
    """
    if grammar is not None:
        names = ("use_beam_search", "ignore_eos", "min_tokens", "allowed_token_ids", "bad_words")
        _check_unset(request, names, grammar.field)


def check_thoughts(request: GenerationRequest, rule: ThinkingRule | None) -> None:
    """Raise InvalidRequestError for fields that could prevent the end of the reasoning."""
    if rule is not None:
        names = ("use_beam_search", "allowed_token_ids", "bad_words")
        _check_unset(request, names, "a thinking budget")


def _check_unset(request: GenerationRequest, names: Sequence[str], other: str) -> None:
    for name in names:
        if getattr(request, name):
            raise InvalidRequestError(f"{name} cannot be combined with {other}", name)


_NEUTRAL_TO_BEAMS: Final[dict[str, tuple[Any, ...]]] = {
    "stream": (False,),
    "top_k": (0, -1),
    "stop": ([],),
    "prompt_logprobs": (),
    "return_routed_experts": (False,),
    "logprob_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "repetition_detection": (),
}
"""Further fields that a beam search does not support, with the values that it accepts."""


def check_beams(request: GenerationRequest) -> None:
    """Raise InvalidRequestError for fields that need a beam search, or that it does not support."""
    given = request.model_fields_set
    if request.use_beam_search:
        for name, number in REQUEST_NUMBERS.items():
            allowed = number.value_for_beams
            if allowed is None:
                allowed = type(request).model_fields[name].default
            if name in given and getattr(request, name) != allowed:
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search", name)
        for name, neutral in _NEUTRAL_TO_BEAMS.items():
            if name in given and getattr(request, name) not in neutral:
                raise InvalidRequestError(f"{name} cannot be combined with use_beam_search", name)
        return
    if request.length_penalty != 1.0:
        raise InvalidRequestError("length_penalty needs use_beam_search", "length_penalty")
    if request.early_stopping is not False:
        raise InvalidRequestError("early_stopping needs use_beam_search", "early_stopping")
