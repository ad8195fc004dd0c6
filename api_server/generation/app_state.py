"""What the routes use: the state of the application, and the context of a request."""

import asyncio
import hashlib
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from starlette.requests import HTTPConnection, Request

from api_server.engine.adapters import ServedAdapters
from api_server.engine.async_link import SupervisorLink
from api_server.engine.engine_client import EngineClient
from api_server.engine.health import Health, InFlightCounter
from api_server.generation.encoders.responses.peers import FrontEndPeers
from api_server.generation.encoders.responses.stored import Owner, StoredResponses
from api_server.generation.images import ImageInput
from api_server.generation.sampling import seeds
from api_server.generation.stream import TokenStream
from api_server.generation.tracing import RequestTracer, TraceHeaders, trace_headers_of
from api_server.http.request_log import RequestLog
from api_server.http.tenants import key_name_of, reader_of, tenant_of
from api_server.live_view import LiveViewPublisher
from api_server.metrics.metrics import Metrics
from api_server.parsers.harmony import Harmony
from api_server.parsers.reasoning import HARMONY, ReasoningFormat, reasoning_format
from api_server.parsers.tool_calls import ModelToolCalls
from api_server.parsers.tools.registry import tool_call_format
from api_server.protocol.fields import IgnoredFields
from api_server.text.chat_template import ChatTemplate, find_chat_templates, read_chat_template
from api_server.text.harmony import HarmonyTemplate, load_encoding
from api_server.text.prompts import PromptReader
from api_server.text.rendering import TemplateRenderer
from api_server.text.tokenizer import ModelTokenizer, special_token_texts
from proto.errors import InvalidRequestError, ModelError, UnknownModelError
from proto.messages.pooling import Pooler, offered_tasks
from proto.messages.prepared_model import PreparedModel, read_model_file
from proto.runtime.stack_sampler import StackSampler
from proto.settings.config import FrontEndConfig, ServeConfig
from proto.settings.generation_config import NO_DEFAULTS, GenerationDefaults, generation_defaults
from proto.settings.pooler_config import pooler_of
from proto.settings.turn_ends import with_end_tokens


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """What a front end reads from a model's folder.

    model: the manifest, with the end tokens of the tokenizer and templates in use.
    vocabulary: hash that differs between models whose token ids or end tokens differ.
    harmony: None for a model of another format. generation_defaults: for requests that give no
    values.
    """

    model: PreparedModel
    tokenizer: ModelTokenizer
    chat_template: TemplateRenderer
    vocabulary: str
    harmony: Harmony | None = None
    generation_defaults: GenerationDefaults = NO_DEFAULTS

    @classmethod
    def load(cls, settings: ServeConfig, model: PreparedModel) -> "ModelTexts":
        """Read tokenizer, chat template and defaults of the sampling.

        Raises ModelError or ConfigError if one is missing or invalid.
        """
        config = settings.model
        folder = config.tokenizer or model.folder
        name = config.served_names(model.name)[0]
        tokenizer = ModelTokenizer.load(folder)
        variables = special_token_texts(folder)
        if config.chat_template is None:
            templates = find_chat_templates((folder, model.folder), variables)
        else:
            templates = {"default": read_chat_template(Path(config.chat_template), variables)}
        template: ChatTemplate | HarmonyTemplate | None = templates.get("default")
        tool_template = templates.get("tool_use")
        harmony = None
        source = None if template is None else template.source
        if _is_harmony(settings.frontend, source):
            encoding = load_encoding(Path(folder, "tokenizer.json"))
            harmony = Harmony.for_tokenizer(encoding, tokenizer)
            if config.chat_template is None:
                template, tool_template = HarmonyTemplate(encoding, source), None
        # An unknown format from outside is an error now, not at the first request with tools.
        tool_call_format(settings.frontend.tool_call_parser, source, template_has_tools=False)
        model = with_end_tokens(model, config)
        digest = hashlib.sha256(repr(model.eos_token_ids).encode())
        digest.update(read_model_file(Path(folder, "tokenizer.json")))
        renderer = TemplateRenderer(template, name, tool_template=tool_template)
        defaults = generation_defaults(config, model)
        return cls(model, tokenizer, renderer, digest.hexdigest(), harmony, defaults)


def _is_harmony(config: FrontEndConfig, template: str | None) -> bool:
    """Return whether the model's answers are in the harmony format, by the flags or the template.

    Raises ModelError for a parser of tool calls that is not of this format.
    """
    named = "harmony" in (config.reasoning_parser, config.tool_call_parser)
    if not named and reasoning_format(config.reasoning_parser, template) is not HARMONY:
        return False
    if config.tool_call_parser not in ("auto", "harmony"):
        raise ModelError(
            f"--tool-call-parser {config.tool_call_parser} does not go with the harmony format of "
            "this model; for another format name --reasoning-parser, too"
        )
    return True


APP_STATE: Final = "tokend.app_state"
"""Key of the AppState in the ASGI scope of a request."""
_MAX_LISTED: Final = 20
"""Names of models and adapters in an error."""


@dataclass(frozen=True, slots=True)
class AppState:
    """What the routes use. A reload replaces it as a whole.

    model_name: as clients call it, and in responses. aliases: other names that requests may have.
    in_flight: HTTP requests that use this state.
    epoch: of an engine with the model, the only one of a daemon with one; it tells the model of
    their engine requests. vocabulary: see `ModelTexts`.
    adapters: None without --enable-lora.
    settings: all of the daemon. harmony, generation_defaults: see `ModelTexts`.
    open_streams: token streams of all requests that have not ended.
    responses: stored and running ones of /v1/responses in this process; peers: finds those in other
    front ends, too. background: tasks that complete responses
    whose clients do not wait. tracer: exports spans; None if they are off. sampler: profiles the
    event loop; None if it may not. request_log: writes the lines of requests.
    images: how the model reads images; None for a model that reads text only.
    seeds: for requests without a seed. created: Unix time.
    """

    model: PreparedModel
    model_name: str
    config: FrontEndConfig
    client: EngineClient
    metrics: Metrics
    tokenizer: ModelTokenizer
    health: Health
    chat_template: TemplateRenderer
    epoch: int
    vocabulary: str
    settings: ServeConfig
    supervisor: SupervisorLink
    responses: StoredResponses
    peers: FrontEndPeers
    live_view: LiveViewPublisher
    request_log: RequestLog
    aliases: Sequence[str] = ()
    adapters: ServedAdapters | None = None
    harmony: Harmony | None = None
    generation_defaults: GenerationDefaults = NO_DEFAULTS
    tracer: RequestTracer | None = None
    sampler: StackSampler | None = None
    images: ImageInput | None = None
    open_streams: set[TokenStream] = field(default_factory=set)
    in_flight: InFlightCounter = field(default_factory=InFlightCounter)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    seeds: Iterator[int] = field(default_factory=lambda: seeds(None, 0))
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None, key_name: str) -> None:
        """Raise UnknownModelError unless `name` is served; None means the only model.

        key_name: of the client, whose adapters the error lists, too.
        """
        if name is not None and name != self.model_name and name not in self.aliases:
            shown = name.encode("ascii", "backslashreplace").decode()[:100]
            adapters = [] if self.adapters is None else self.adapters.cards(key_name)
            names = [self.model_name, *self.aliases, *(card.lora.lora_name for card in adapters)]
            more = ", …" if names[_MAX_LISTED:] else ""
            raise UnknownModelError(
                f"the model {shown} does not exist; available: "
                f"{', '.join(names[:_MAX_LISTED])}{more}",
                "model",
            )

    @property
    def pooler(self) -> Pooler | None:
        """How the model pools; None for one that generates."""
        return pooler_of(self.settings.model, self.model)

    @property
    def supported_tasks(self) -> list[str]:
        """What requests may ask of the model, in vLLM's words.

        chat: it has a chat template. score: it ranks texts, by one label or by embeddings.
        """
        pooler = self.pooler
        if pooler is None:
            return ["generate", "chat"] if self.chat_template.source is not None else ["generate"]
        return offered_tasks(pooler)

    def check_generates(self, api: str) -> None:
        """Raise InvalidRequestError if the model pools instead of generating. api: its name."""
        if self.pooler is not None:
            raise InvalidRequestError(
                f"The model does not support {api}: it is served for pooling", "model"
            )

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        own = self.model.eos_token_ids
        return own if self.harmony is None else tuple({*own, *self.harmony.end_token_ids})

    def template_for(self, tools: Sequence[Any], tool_choice: Any) -> TemplateRenderer:
        """Return the chat template of a request by its tools, as the client's API has them."""
        offers_tools = tools and tool_choice not in ("none", {"type": "none"})
        return self.chat_template.with_tools if offers_tools else self.chat_template

    def reasoning_format(self, template: TemplateRenderer) -> ReasoningFormat:
        """Return how the model writes reasoning in answers to prompts of this template."""
        if self.harmony is not None:
            return HARMONY
        return reasoning_format(self.config.reasoning_parser, template.source)

    def tool_calls(self, template: TemplateRenderer) -> ModelToolCalls:
        """Return how the model calls tools in answers to prompts of this template."""
        return ModelToolCalls(
            self.config.tool_call_parser, template.source, template.facts, self.tokenizer
        )

    def prompt_reader(self, field: str) -> PromptReader:
        """Return a reader with the engine's limits. field: of the request, for errors.

        Raises NotAvailableError before the engine is ready.
        """
        engine = self.client.engine
        return PromptReader(self.tokenizer, engine.vocab_size, engine.max_model_len, field)

    def abort_streams(self, request_ids: Collection[str], key_name: str | None) -> None:
        """End the streams with these response ids on behalf of an operator.

        key_name: only streams of clients with the API key of this name; None for all. Clients may
        choose response ids, so two keys may use the same one.
        """
        wanted = set(request_ids)
        for stream in list(self.open_streams):
            if stream.label in wanted and key_name in (None, stream.key_name):
                stream.abort()


class RequestContext:
    """A request, its client and the state that it is served with.

    connection: the HTTP request, or the WebSocket of a message.
    app_state: by default the one that was current when the request arrived; a reload replaces it.
    ignored: unknown fields of the body, which a header of the response names.
    """

    def __init__(self, connection: HTTPConnection, app_state: AppState | None = None) -> None:
        self.connection = connection
        self.app_state: AppState = app_state or connection.scope[APP_STATE]
        self.ignored = IgnoredFields(takes_images=self.app_state.images is not None)

    @property
    def request(self) -> Request:
        """The HTTP request; a message of a WebSocket has none."""
        assert isinstance(self.connection, Request)
        return self.connection

    @cached_property
    def tenant(self) -> int:
        """The client's tenant; raises InvalidRequestError for an invalid header."""
        return tenant_of(self.connection, self.app_state.config.tenant_by)

    @property
    def key_name(self) -> str:
        """Name of the client's API key."""
        return key_name_of(self.connection)

    @property
    def owner(self) -> Owner:
        """The client as the owner of stored responses."""
        return self.tenant, self.key_name

    @property
    def reader(self) -> int:
        """Id of the clients that may see the request in the live view."""
        return reader_of(self.tenant, self.key_name)

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless the client may use a model or an adapter of this name."""
        adapters = self.app_state.adapters
        if adapters is None or adapters.find(name, self.key_name) is None:
            self.app_state.check_model(name, self.key_name)

    @property
    def trace_headers(self) -> TraceHeaders:
        return trace_headers_of(self.connection)
