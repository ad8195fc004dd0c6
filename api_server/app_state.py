"""What the routes use: the model's texts, the engine client, metrics and settings."""

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from api_server.engine.engine_client import EngineClient
from api_server.lifecycle.health import DrainState, Health, InFlightCounter
from api_server.live_view.publisher import LiveViewPublisher
from api_server.metrics.collector import Metrics
from api_server.parsers.reasoning import ReasoningStyle, style_of
from api_server.parsers.tool_calling import ToolCaller
from api_server.protocol.responses.stored import StoredResponses
from api_server.sampling import seeds
from api_server.stream import OpenStreams
from api_server.text.chat_template import load_chat_template, read_chat_template
from api_server.text.prompts import PromptReader
from api_server.text.rendering import TemplateRenderer
from api_server.text.tokenizer import ModelTokenizer, special_token_texts
from proto.config import FrontEndConfig, ModelConfig, ServeConfig
from proto.errors import UnknownModelError
from proto.prepared_model import PreparedModel

# What an API server reads from a model's folder: tokenizer and chat template.


@dataclass(frozen=True, slots=True)
class ModelTexts:
    """vocabulary: hex digest of tokenizer.json and the tokens that end an answer."""

    tokenizer: ModelTokenizer
    chat_template: TemplateRenderer
    vocabulary: str

    @classmethod
    def load(cls, config: ModelConfig, model: PreparedModel) -> "ModelTexts":
        """Raises ModelError for what is missing or cannot be used."""
        folder = config.tokenizer or model.folder
        name = config.served_model_name or model.name
        tokenizer = ModelTokenizer.load(folder)
        variables = special_token_texts(folder)
        if config.chat_template is None:
            template = load_chat_template((folder, model.folder), name, variables)
        else:
            template = read_chat_template(Path(config.chat_template), variables)
        digest = hashlib.sha256(repr(model.eos_token_ids).encode())
        digest.update(Path(folder, "tokenizer.json").read_bytes())
        return cls(tokenizer, TemplateRenderer(template), digest.hexdigest())


APP_STATE: Final = "tokend.app_state"
"""Where a request's scope holds what it is answered with."""


@dataclass(frozen=True, slots=True)
class AppState:
    """What the routes use. A reload replaces it as a whole.

    model_name: as clients call it. seeds: for requests without a seed. in_flight: the HTTP requests
    that use this state. epoch: of the engine that they are sent to. vocabulary: a fingerprint that
    differs if token ids have another meaning. open_streams: of all engines. request_abort: abort,
    in all API servers, the requests with these ids, of the key with this name or of any (None).
    responses: of /v1/responses, stored or running. background: tasks of responses whose clients do
    not wait.
    """

    model: PreparedModel
    model_name: str
    config: FrontEndConfig
    client: EngineClient
    metrics: Metrics
    tokenizer: ModelTokenizer
    health: Health
    chat_template: TemplateRenderer
    drain_state: DrainState
    epoch: int
    vocabulary: str
    settings: ServeConfig
    request_abort: Callable[[list[str], str | None], None]
    open_streams: OpenStreams
    responses: StoredResponses
    live_view: LiveViewPublisher
    in_flight: InFlightCounter = field(default_factory=InFlightCounter)
    background: set[asyncio.Task[None]] = field(default_factory=set)
    seeds: Iterator[int] = field(default_factory=lambda: seeds(None, 0))
    created: int = field(default_factory=lambda: int(time.time()))

    def check_model(self, name: str | None) -> None:
        """Raise UnknownModelError unless `name` is served; no name means the one there is."""
        if name is not None and name != self.model_name:
            shown = name.encode("ascii", "backslashreplace").decode()[:100]
            raise UnknownModelError(f"the model {shown} does not exist", "model")

    @property
    def reasoning_style(self) -> ReasoningStyle:
        """Between which markers the model thinks, if it does."""
        return style_of(self.config.reasoning_parser, self.chat_template.source)

    @property
    def tool_caller(self) -> ToolCaller:
        """How the model calls tools."""
        template = self.chat_template
        return ToolCaller(
            self.config.tool_call_parser, template.source, template.facts, self.tokenizer
        )

    def prompt_reader(self, field: str) -> PromptReader:
        """With the limits of the engine; raises NotAvailableError before it is ready.

        field: of the request, for errors.
        """
        engine = self.client.engine
        return PromptReader(self.tokenizer, engine.vocab_size, engine.max_model_len, field)
