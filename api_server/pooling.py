"""A validated pooling request → engine requests → their results, in the order of the texts.

A handler of `routes/pooling.py` creates a `PoolingJob`, reads its texts with `read_texts` or
`read_pairs`, and gets a vector for each from `run`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from starlette.requests import ClientDisconnect, Request

from api_server.app_state import AppState
from api_server.engine_call import EngineCall, check_response_size
from api_server.protocol.pooling import PoolingFields, Vector
from api_server.request_stream import Choice, RequestStream, StreamNotifier, Timeline
from api_server.text.chat_template import PAIR_ROLES, Conversation
from api_server.text.detokenizer import NoText
from api_server.text.prompts import Prompt, PromptReader
from api_server.text.tokenizer import FILL_CONTEXT, truncation
from proto.errors import InvalidRequestError
from proto.pooling import MAX_INPUTS, Pooler, PoolingParams, PoolingTask, check_task
from proto.sampling_params import SamplingParams

_NO_SAMPLING = SamplingParams(max_tokens=1, temperature=0.0)


class PoolingJob(EngineCall[PoolingFields]):
    """The texts of one HTTP request, which are pooled independently.

    num_tokens: of all texts so far.
    """

    _connection: Request
    num_tokens = 0

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

    def check_size(
        self, prompts: Sequence[Prompt], params: PoolingParams, number_bytes: int
    ) -> None:
        """Raise InvalidRequestError for results that could exceed --max-response-bytes.

        number_bytes: of a number in the response.
        """
        app_state = self._app_state
        pooler = pooler_for(app_state, None, "pooling")
        num_numbers = params.dimensions or pooler.size or app_state.model.hidden_size
        num_vectors = len(prompts)
        if params.task == "token_embed":
            num_vectors = sum(len(prompt.token_ids) for prompt in prompts)
        check_response_size(app_state, {"input": num_vectors * num_numbers * number_bytes})

    async def run(
        self, prompts: Sequence[Prompt], params: PoolingParams, field: str
    ) -> list[Vector]:
        """Return the result of each prompt, float32.

        field: of the request, with the texts; named in errors. Raises the RequestError of the
        first prompt that fails, ClientDisconnect if the client is gone.
        """
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if len(prompts) > 1:
            self._check_queue(field, choices=len(prompts), tokens=num_tokens)
        self.num_tokens += num_tokens
        requests = [
            self._engine_request(
                prompt, _NO_SAMPLING, 0, pooling_params=params.of_pair(prompt.second_start)
            )
            for prompt in prompts
        ]
        notifier = StreamNotifier()
        streams = [
            RequestStream(
                request.request_id,
                request.prompt_token_ids,
                [Choice(index=index, detokenizer=NoText())],
                notifier,
                self._app_state.metrics,
                Timeline(self._arrival),
                may_expire_in_queue=request.queue_deadline < math.inf,
                send_buffer=self._send_buffer,
            )
            for index, request in enumerate(requests)
        ]
        stream = self._token_stream(requests, streams, notifier)
        try:
            await stream.submit(self._connection)
            while not stream.finished and stream.error is None and not stream.disconnected:
                await stream.wait()
            if stream.disconnected:
                raise ClientDisconnect
            if stream.error is not None:
                raise stream.error
        finally:
            stream.close()
        return [np.frombuffer(each.pooler_output, dtype="<f4") for each in stream.streams]


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
