"""A validated body → engine requests, the token stream that receives their output, the response.

A handler calls `RequestBuilder.build_requests`, `build_stream` and, after `TokenStream.submit`,
`response`.
"""

import copy
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

from starlette.requests import HTTPConnection

from api_server.app_state import AppState
from api_server.engine_call import EngineCall, check_response_size
from api_server.parsers.called_tool import AgentTurn
from api_server.parsers.output import PLAIN_TEXT, ContentStops
from api_server.parsers.output_format import OutputFormat
from api_server.parsers.reasoning import TokenCounter
from api_server.protocol.agents import agent_hint
from api_server.protocol.common import (
    MAX_CHOICES_PER_REQUEST,
    REQUEST_NUMBERS,
    GenerationRequest,
)
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.encoder import ResponseEncoder, ResponseOptions
from api_server.protocol.fields import IgnoredFields
from api_server.request_stream import (
    MAX_UNSENT_BYTES,
    Choice,
    RequestStream,
    SendBuffer,
    StreamNotifier,
    Timeline,
)
from api_server.response import GenerationResponse
from api_server.sampling import SEED_MASK, sampling_params
from api_server.stream import TokenStream
from api_server.text.detokenizer import Detokenizer, MarkerDetokenizer, NoText
from api_server.text.logprobs import TokenNames
from api_server.text.prompts import Prompt
from api_server.text.stop_strings import StopStrings, stop_strings
from api_server.text.tokenizer import ModelTokenizer, Truncation, truncation
from proto.engine_io import EngineCoreRequest
from proto.errors import InvalidRequestError, require
from proto.grammar import GrammarSource
from proto.logit_edits import LogitEdits
from proto.sampling_params import ThinkingRule

TOKEN_ID_BYTES: Final = 8
LOGPROB_BYTES: Final = 128
"""Of a token and its log-probability in a response, with what belongs to it; seldom more."""


@dataclass(frozen=True, slots=True)
class EndpointOptions:
    """Options that have different names in the endpoints' bodies.

    max_tokens: None if not given. logprobs: number of alternatives; None for no log-probabilities.
    echoes_logprobs: `logprobs` are also those of the prompt. max_tokens_field: the body's name of
    max_tokens. edits: of the logits. thinking: limits of the reasoning that the engine enforces;
    None for no limits.
    more_end_ids: tokens that end an answer beside those of the model.
    """

    max_tokens: int | None
    default_max_tokens: int | None
    logprobs: int | None
    prompt_logprobs: int | None
    echoes_logprobs: bool = False
    max_tokens_field: str = "max_tokens"
    edits: LogitEdits | None = None
    thinking: ThinkingRule | None = None
    more_end_ids: tuple[int, ...] = ()


class RequestBuilder(EngineCall[GenerationRequest]):
    """Builds the engine requests, the token stream and the response of one HTTP request.

    grammar: of the answer, None for any text. Other arguments as in EngineCall.
    """

    def __init__(
        self,
        app_state: AppState,
        connection: HTTPConnection,
        request: GenerationRequest,
        ignored: IgnoredFields,
        id_prefix: str,
        grammar: GrammarSource | None,
    ) -> None:
        app_state.check_generates("generation of text")
        check_request(request)
        check_beams(request)
        check_grammar(request, grammar)
        super().__init__(app_state, connection, request, ignored, id_prefix)
        self._grammar = grammar
        self._agent = agent_hint(request, self._tenant)
        self._response_sizes: dict[str, int] = {}  # bytes by field, as far as they are known
        self._send_buffer = SendBuffer(
            MAX_UNSENT_BYTES if request.stream else math.inf,
            app_state.config.max_response_bytes,
            self._names_size,
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

    def response_options(self, num_logprobs: int | None) -> ResponseOptions:
        """Return what the response contains.

        num_logprobs: alternatives for each token, None for no log-probabilities.
        """
        request, tokenizer = self._body, self._app_state.tokenizer
        if num_logprobs is not None and request.logprob_token_ids:
            num_logprobs = len(request.logprob_token_ids)
        return ResponseOptions(
            id=self.id,
            created=int(time.time()),
            model=self._app_state.model_name,
            token_names=TokenNames(
                tokenizer, request.return_tokens_as_token_ids, request.detokenize
            ),
            prompt_token_names=TokenNames(tokenizer, has_text=request.detokenize),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=request.prompt_logprobs,
            returns_token_ids=request.return_token_ids,
            returns_experts=request.return_routed_experts,
            returns_accepted_drafts=request.return_accepted_drafts,
            includes_usage=request.includes_usage,
            includes_continuous_usage=request.includes_continuous_usage,
        )

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

    def build_requests(
        self, prompts: Sequence[Prompt], options: EndpointOptions
    ) -> list[EngineCoreRequest]:
        """Return the engine requests, one per prompt."""
        if self._body.use_beam_search and options.logprobs is not None:
            raise InvalidRequestError(
                "logprobs cannot be combined with use_beam_search", "logprobs"
            )
        if len(prompts) > 1:
            self._check_queue("prompt", tokens=sum(len(prompt.token_ids) for prompt in prompts))
        seed = self._seed()
        requests = [self._generation_request(prompt, options, seed) for prompt in prompts]
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

    async def build_stream(
        self,
        requests: Sequence[EngineCoreRequest],
        text_starts: Sequence[int],
        output_format: OutputFormat,
        notifier: StreamNotifier | None = None,
    ) -> TokenStream:
        """Return the stream of these requests, which `TokenStream.submit` sends.

        text_starts: characters before the first output, for each request. notifier: of the session
        that the stream is a turn of; None for a new one.
        """
        notifier, body, stops = notifier or StreamNotifier(), self._body, None
        if body.stop:
            stops = await stop_strings(body.stop, shows_stop=body.include_stop_str_in_output)
        streams = [
            self._stream(request, notifier, index, text_starts[index], output_format, stops)
            for index, request in enumerate(requests)
        ]
        return self._token_stream(requests, streams, notifier)

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

    def truncation(self, max_tokens: int | None) -> Truncation:
        """Return how prompts are truncated. max_tokens: as given, or the default."""
        request = self._body
        max_prompt_tokens = self._app_state.client.engine.max_model_len - max(max_tokens or 1, 1)
        return truncation(
            request.truncate_prompt_tokens, request.truncation_side, max_prompt_tokens
        )

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

    def _seed(self) -> int:
        """Return a 64-bit seed: the client's (a negative one wraps around), or the next one."""
        seed = self._body.seed
        return next(self._app_state.seeds) if seed is None else seed & SEED_MASK

    def _generation_request(
        self, prompt: Prompt, options: EndpointOptions, seed: int
    ) -> EngineCoreRequest:
        app_state = self._app_state
        engine = app_state.client.engine
        params = sampling_params(
            self._body,
            app_state.generation_defaults,
            max_tokens=options.max_tokens,
            default_max_tokens=options.default_max_tokens,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            num_prompt_tokens=len(prompt.token_ids),
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            eos_token_ids=(*app_state.end_token_ids, *options.more_end_ids),
            max_tokens_field=options.max_tokens_field,
            edits=options.edits,
        )
        return self._engine_request(
            prompt,
            params,
            seed,
            n=self._body.n,
            grammar=self._grammar,
            agent=self._agent,
            thinking=options.thinking,
        )

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
        text_start: int,
        output_format: OutputFormat,
        stops: StopStrings | None,
    ) -> RequestStream:
        """stops: an unused instance, which all choices copy."""
        app_state, body = self._app_state, self._body
        ids = request.prompt_token_ids
        turn = self._agent_turn(output_format)
        text_tails = turn.tails if turn is not None else []
        counters: list[TokenCounter] = []
        detokenizers = [self._detokenizer(ids, output_format, counters) for _ in range(request.n)]
        choices = [
            Choice(
                index=index * request.n + number,
                detokenizer=detokenizers[number],
                stop_strings=_stops_of_choice(stops, output_format),
                min_tokens=body.min_tokens,
                text_start=text_start,
                shows_stop=body.include_stop_str_in_output,
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
    if grammar is None:
        return
    for is_set, name in (
        (request.use_beam_search, "use_beam_search"),
        (request.ignore_eos, "ignore_eos"),
        (request.min_tokens > 0, "min_tokens"),
        (bool(request.allowed_token_ids), "allowed_token_ids"),
        (bool(request.bad_words), "bad_words"),
    ):
        if is_set:
            raise InvalidRequestError(f"{name} cannot be combined with {grammar.field}", name)


def check_thoughts(request: GenerationRequest, rule: ThinkingRule | None) -> None:
    """Raise InvalidRequestError for fields that could prevent the end of the reasoning."""
    for is_set, name in (
        (request.use_beam_search, "use_beam_search"),
        (bool(request.allowed_token_ids), "allowed_token_ids"),
        (bool(request.bad_words), "bad_words"),
    ):
        if rule is not None and is_set:
            raise InvalidRequestError(f"{name} cannot be combined with a thinking budget", name)


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
            allowed = number.beam_value
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
