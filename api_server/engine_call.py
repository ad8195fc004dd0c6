"""From one HTTP request to the engine: its requests, and the stream of their output."""

import hashlib
import math
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from starlette.requests import HTTPConnection

from api_server.app_state import AppState
from api_server.http.tenants import key_name_of, reader_of, tenant_of
from api_server.protocol.common import ComputedRequest
from api_server.protocol.fields import IgnoredFields
from api_server.request_stream import RequestStream, SendBuffer, StreamNotifier
from api_server.stream import TokenStream
from api_server.text.prompts import Prompt
from api_server.tracing import trace_headers_of
from proto.engine_io import EngineCoreRequest
from proto.errors import InvalidRequestError
from proto.sampling_params import SamplingParams

Body = TypeVar("Body", bound=ComputedRequest)


class EngineCall(Generic[Body]):
    """The engine requests of one HTTP request and the stream of their output.

    Its creation is the arrival time of the request. id: of the response. Raises UnknownModelError
    for the name of a model that is not served, InvalidRequestError for an invalid tenant header.

    connection: of the request. ignored: unknown fields.
    """

    def __init__(
        self,
        app_state: AppState,
        connection: HTTPConnection,
        body: Body,
        ignored: IgnoredFields,
        id_prefix: str,
    ) -> None:
        app_state.check_model(body.model)
        self.id = id_prefix + (body.request_id or secrets.token_hex(16))
        self._app_state = app_state
        self._connection = connection
        self._body = body
        self._tenant = tenant_of(connection, app_state.config.tenant_by)
        self._ignored = ignored
        self._arrival = time.monotonic()
        self._send_buffer = SendBuffer()

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response."""
        name = self._body.request_id or self.id
        return [(b"x-request-id", name.encode()), *self._ignored.headers()]

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
        app_state, body = self._app_state, self._body
        return EngineCoreRequest(
            epoch=app_state.epoch,
            request_id=app_state.client.next_request_id(),
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            seed=seed,
            arrival_time=self._arrival,
            priority=body.priority,
            cache_salt=_hidden_salt(body.cache_salt),
            tenant=self._tenant,
            queue_deadline=self._deadline(
                body.queue_timeout_ms, app_state.config.queue_timeout * 1000
            ),
            deadline=self._deadline(body.timeout_ms),
            label=self.id,
            reader=reader_of(self._tenant, key_name_of(self._connection)),
            trace_headers=trace_headers_of(self._connection),
            skip_reading_prefix_cache=body.skip_reading_prefix_cache,
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
                self._connection.scope, getattr(self._body, "agent_session_id", None)
            ),
            send_buffer=self._send_buffer,
            open_streams=app_state.open_streams,
            ignored=str(self._ignored),
            key_name=key_name_of(self._connection),
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


def _hidden_salt(salt: str | None) -> str | None:
    """Return the hash of a client's cache salt, which has a fixed length."""
    return None if salt is None else hashlib.sha256(salt.encode()).hexdigest()
