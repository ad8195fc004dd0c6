"""From one HTTP request to the engine: its requests, and the stream of their output."""

import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from api_server.generation.app_state import AppState, RequestContext
from api_server.generation.request_stream import RequestStream, SendBuffer, StreamNotifier
from api_server.generation.stream import TokenStream
from api_server.protocol.common import ComputedRequest
from api_server.text.prompts import Prompt
from proto.errors import InvalidRequestError
from proto.messages.engine_io import EngineCoreRequest
from proto.messages.sampling_params import SamplingParams

Body = TypeVar("Body", bound=ComputedRequest)


class EngineCall(Generic[Body]):
    """The engine requests of one HTTP request and the stream of their output.

    Its creation is the arrival time of the request. id: of the response. model_name: in the
    response, the adapter's if the request names one. Raises UnknownModelError for the name of a
    model that is not served, InvalidRequestError for an invalid tenant header.
    """

    def __init__(self, context: RequestContext, body: Body, id_prefix: str) -> None:
        adapters, chosen = context.app_state.adapters, None
        if adapters is not None:
            chosen = adapters.choose(body.model, getattr(body, "lora", None), context.key_name)
        if chosen is None or not chosen.is_named:
            context.app_state.check_model(body.model, context.key_name)
        self._lora = None if chosen is None else chosen.lora
        self.model_name = context.app_state.model_name
        if chosen is not None and chosen.is_named:
            self.model_name = chosen.lora.lora_name
        self.id = id_prefix + (body.request_id or secrets.token_hex(16))
        self._context = context
        self._app_state = context.app_state
        self._body = body
        self._tenant = context.tenant
        self._arrival = time.monotonic()
        self._send_buffer = SendBuffer()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response."""
        name = self._body.request_id or self.id
        return [(b"x-request-id", name.encode()), *self._context.ignored.headers()]

    def _check_queue(self, field: str, *, choices: int = 0, tokens: int = 0) -> None:
        """Raise InvalidRequestError for prompts that together never fit into the queue.

        A single prompt always fits into an empty queue.
        """
        engine = self._app_state.client.engine
        for count, unit, most in (
            (choices, "choices", engine.max_num_queued_reqs),
            (tokens, "tokens", engine.max_num_queued_tokens),
        ):
            if 0 < most < count:
                flag = "--max-num-queued-" + ("reqs" if unit == "choices" else unit)
                raise InvalidRequestError(
                    f"the prompts have {count} {unit} together, and {flag} lets {most} wait: send "
                    "fewer at a time",
                    field,
                )

    def _engine_request(
        self, prompt: Prompt, params: SamplingParams, seed: int, **fields: Any
    ) -> EngineCoreRequest:
        """Return the request of a prompt. fields: those that only some endpoints have."""
        app_state, body, salt = self._app_state, self._body, self._body.cache_salt
        # a hash has a fixed length, and the engine need not know what the client has sent
        hidden_salt = None if salt is None else hashlib.sha256(salt.encode()).hexdigest()
        return EngineCoreRequest(
            epoch=app_state.epoch,
            request_id=app_state.client.next_request_id(),
            prompt_token_ids=prompt.token_ids,
            prompt_embeds=prompt.embeds,
            mm_features=list(prompt.mm_features),
            sampling_params=params,
            seed=seed,
            arrival_time=self._arrival,
            priority=body.priority,
            cache_salt=hidden_salt,
            tenant=self._tenant,
            queue_deadline=self._deadline(
                body.queue_timeout_ms, app_state.config.queue_timeout * 1000
            ),
            deadline=self._deadline(body.timeout_ms),
            label=self.id,
            reader=self._context.reader,
            trace_headers=self._context.trace_headers,
            skip_reading_prefix_cache=body.skip_reading_prefix_cache,
            lora_request=self._lora,
            **fields,
        )

    def _token_stream(
        self,
        requests: Sequence[EngineCoreRequest],
        streams: Sequence[RequestStream],
        notifier: StreamNotifier,
    ) -> TokenStream:
        app_state = self._app_state
        return TokenStream(
            self.id,
            app_state.client,
            app_state.metrics,
            notifier,
            requests,
            streams,
            origin=app_state.request_log.origin(
                self._context.connection.scope,
                getattr(self._body, "agent_session_id", None),
                None if self._lora is None else self._lora.lora_name,
            ),
            engine=self._body.data_parallel_rank,
            send_buffer=self._send_buffer,
            open_streams=app_state.open_streams,
            ignored=str(self._context.ignored),
            key_name=self._context.key_name,
            tracer=app_state.tracer,
        )

    def _deadline(self, *milliseconds: float | None) -> float:
        """Return the earliest of these deadlines, in monotonic seconds; infinite for none."""
        given = [limit for limit in milliseconds if limit]
        return self._arrival + min(given) / 1000 if given else math.inf


def check_response_size(app_state: AppState, sizes: Mapping[str, int]) -> None:
    """Raise InvalidRequestError for a response that could exceed --max-response-bytes.

    sizes: bytes by the field of the request that asks for them, as estimated.
    """
    total, limit = sum(sizes.values()), app_state.config.max_response_bytes
    if total > limit:
        field = max(sizes, key=sizes.__getitem__)
        raise InvalidRequestError(
            f"{field}: the response could have {total} bytes, more than --max-response-bytes, "
            f"which is {limit}; ask for fewer choices, tokens or texts",
            field,
        )
