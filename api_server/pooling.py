"""A validated pooling request → engine requests → their results, in the order of the texts.

A handler of `routes/pooling.py` creates a `PoolingJob`, reads its texts with `read_texts` or
`read_pairs`, and gets a vector for each from `run`.
"""

import math
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import Request

from api_server.app_state import AppState
from api_server.http.tenants import key_name_of, reader_of, tenant_of
from api_server.protocol.fields import IgnoredFields
from api_server.protocol.pooling import PoolingFields, Vector
from api_server.request_builder import hidden_salt
from api_server.request_stream import Choice, RequestStream, SendBuffer, StreamNotifier, Timeline
from api_server.stream import TokenStream
from api_server.text.chat_template import PAIR_ROLES, Conversation
from api_server.text.detokenizer import NoText
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.tokenizer import FILL_CONTEXT, truncation
from api_server.tracing import trace_headers_of
from proto.engine_io import EngineCoreRequest
from proto.errors import InvalidRequestError
from proto.pooling import (
    MAX_INPUTS,
    Pooler,
    PoolingParams,
    PoolingTask,
    check_task,
)
from proto.sampling_params import SamplingParams

_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


class DisconnectedError(Exception):
    """The client has closed the connection, so no response is needed."""


class PoolingJob:
    """The texts of one HTTP request, which are pooled independently.

    api: its name, for errors. Raises InvalidRequestError if the model does not pool.
    """

    def __init__(
        self,
        app_state: AppState,
        connection: Request,
        body: PoolingFields,
        ignored: IgnoredFields,
        id_prefix: str,
    ) -> None:
        app_state.check_model(body.model)
        self._app_state = app_state
        self._connection = connection
        self._body = body
        self._ignored = ignored
        self._arrival = time.monotonic()
        self.id = id_prefix + (body.request_id or secrets.token_hex(16))
        self.num_tokens = 0

    @property
    def model_name(self) -> str:
        return self._app_state.model_name

    def reader(self, field: str) -> PromptReader:
        """Return a reader of texts with the limits of the engine. field: of the request."""
        body = self._body
        reader = self._app_state.prompt_reader(field)
        longest = reader.max_model_len
        wanted = body.truncate_prompt_tokens
        if wanted is not None and wanted != FILL_CONTEXT and wanted > longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens must be at most {longest}, the longest text of the model",
                "truncate_prompt_tokens",
            )
        if body.truncation_side != "right" and wanted is None:
            raise InvalidRequestError(
                "truncation_side needs truncate_prompt_tokens", "truncation_side"
            )
        return replace(
            reader,
            truncation=truncation(wanted, body.truncation_side, longest),
            max_prompts=MAX_INPUTS,
            num_output_tokens=0,
        )

    async def read_texts(self, value: Any, field: str) -> list[Prompt]:
        """Return the prompts of `input`: texts, token ids, or lists of these."""
        return await self.reader(field).read_prompts(
            value, add_special_tokens=self._body.add_special_tokens
        )

    async def read_pairs(self, pairs: Sequence[tuple[str, str]], field: str) -> list[Prompt]:
        """Return a prompt of each query and document, by the template or the tokenizer.

        A chat template is used if it mentions the roles of both.
        """
        template, reader = self._app_state.chat_template, self.reader(field)
        if not template.facts.pairs_texts:
            return await reader.encode_pairs(pairs)
        texts = []
        for pair in pairs:
            messages = [
                {"role": role, "content": text} for role, text in zip(PAIR_ROLES, pair, strict=True)
            ]
            texts.append(await template.render(Conversation(messages)))
        return await reader.encode_texts(texts, add_special_tokens=False)

    async def run(self, prompts: Sequence[Prompt], params: PoolingParams) -> list[Vector]:
        """Return the result of each prompt, float32.

        Raises the RequestError of the first that fails, DisconnectedError if the client is gone.
        """
        self.num_tokens += sum(len(prompt.token_ids) for prompt in prompts)
        stream = self._stream([self._request(prompt, params) for prompt in prompts])
        try:
            await stream.submit(self._connection)
            while not stream.finished and stream.error is None and not stream.disconnected:
                await stream.wait()
            if stream.disconnected:
                raise DisconnectedError
            if stream.error is not None:
                raise stream.error
        finally:
            stream.close()
        return [np.frombuffer(each.pooler_output, dtype="<f4") for each in stream.streams]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Return the headers of the response."""
        name = self._body.request_id or self.id
        return [(b"x-request-id", name.encode()), *self._ignored.headers()]

    def _request(self, prompt: Prompt, params: PoolingParams) -> EngineCoreRequest:
        app_state, body = self._app_state, self._body
        tenant = tenant_of(self._connection, app_state.config.tenant_by)
        return EngineCoreRequest(
            epoch=app_state.epoch,
            request_id=app_state.client.next_request_id(),
            prompt_token_ids=prompt.token_ids,
            sampling_params=_NO_SAMPLING,
            seed=0,
            arrival_time=self._arrival,
            priority=body.priority,
            cache_salt=hidden_salt(body.cache_salt),
            tenant=tenant,
            queue_deadline=self._deadline(
                body.queue_timeout_ms, app_state.config.queue_timeout * 1000
            ),
            deadline=self._deadline(body.timeout_ms),
            label=self.id,
            reader=reader_of(tenant, key_name_of(self._connection)),
            trace_headers=trace_headers_of(self._connection),
            pooling_params=params,
        )

    def _deadline(self, *milliseconds: float | None) -> float:
        given = [limit for limit in milliseconds if limit]
        return self._arrival + min(given) / 1000 if given else math.inf

    def _stream(self, requests: Sequence[EngineCoreRequest]) -> TokenStream:
        app_state, notifier, buffer = self._app_state, StreamNotifier(), SendBuffer()
        streams = [
            RequestStream(
                request.request_id,
                request.prompt_token_ids,
                [Choice(index=index, detokenizer=NoText())],
                notifier,
                app_state.metrics,
                Timeline(self._arrival),
                may_expire_in_queue=request.queue_deadline < math.inf,
                send_buffer=buffer,
            )
            for index, request in enumerate(requests)
        ]
        return TokenStream(
            self.id,
            app_state.client,
            app_state.metrics,
            notifier,
            requests,
            streams,
            log=not app_state.config.disable_log_requests,
            send_buffer=buffer,
            open_streams=app_state.open_streams,
            ignored=str(self._ignored),
            key_name=key_name_of(self._connection),
            tracer=app_state.tracer,
        )


def pooler_for(app_state: AppState, task: PoolingTask | None, api: str) -> Pooler:
    """Return the model's pooler; raise InvalidRequestError if it has no such task.

    task: None for any. api: its name, for the error.
    """
    pooler = app_state.pooler
    if pooler is None:
        raise InvalidRequestError(
            f"The model does not support {api}: it generates text, and pools if it is served with "
            "--runner pooling",
            "model",
        )
    if task is not None:
        check_task(pooler, task, api)
    return pooler
