"""Target: HTTP requests to the real application with a scripted engine.

    path, a newline, the body

Every response has a documented status, and is complete or an error of OpenAI's shape that names the
field. Requests that reach the engine pass its own checks, and a control request gets the same
response as at the start.
"""

import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hypothesis import strategies as st

from api_server.app import create_app
from api_server.engine.engine_client import FromEngine
from api_server.protocol.agents import AgentHintFields
from api_server.protocol.chat import ChatCompletionRequest
from api_server.protocol.completions import CompletionRequest
from api_server.protocol.fields import HARMLESS, KNOWN
from api_server.protocol.messages.request import MessagesRequest
from api_server.protocol.responses.request import ResponsesRequest
from api_server.server import make_app_state
from engine_core.validation import RequestLimits, validate_request
from proto.runtime.sockets import Link, front_end_path
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import TEMPLATE, byte_level_tokenizer, make_boot, prepared
from tests.fakes.fake_engine import FakeEngine, FakeSupervisor
from tests.fuzz.mutation import Edit, mutate_bytes, mutate_tree, mutated, mutated_bytes

STATUSES: Final = frozenset({200, 400, 404, 405, 413, 415})
MAX_MODEL_LEN: Final = 1024
_FRONTEND: Final = FrontEndConfig(
    disable_log_requests=True, reasoning_parser="qwen3", tool_call_parser="hermes"
)
CONTROL_EVERY: Final = 50
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = f"{MESSAGES}/count_tokens"
FIELDS: Final = sorted(
    {
        *CompletionRequest.model_fields,
        *ChatCompletionRequest.model_fields,
        *ResponsesRequest.model_fields,
        *MessagesRequest.model_fields,
        *KNOWN,
        *HARMLESS,
        *("role", "content", "name", "type", "text", "tool_calls", "include_usage"),
        *("call_id", "arguments", "output", "summary", "format", "schema", "namespace"),
        *("tool_use_id", "input_schema", "budget_tokens", "is_error", "effort", "cache_control"),
        *("continuous_usage_stats", "max_pattern_size", "min_pattern_size", "min_count"),
        *AgentHintFields.model_fields,
    }
)
CONTROL: Final = (COMPLETIONS, b'{"prompt": "the sea", "seed": 1, "max_tokens": 3, "logprobs": 1}')
CITY: Final = {"type": "object", "properties": {"city": {"type": "string"}}}
TOLD: Final = [
    {"role": "user", "content": "x"},
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "y"},
            {"type": "tool_use", "id": "t", "name": "a", "input": {"city": "P"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "t",
                "content": [{"type": "text", "text": "z"}, {"type": "image"}],
                "is_error": True,
            }
        ],
    },
]
CALLED: Final = {
    "id": "c",
    "type": "function",
    "function": {"name": "a", "arguments": '{"city": "P"}'},
}
VALID: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (COMPLETIONS, {"prompt": "hello", "max_tokens": 4, "temperature": 0}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5}),
    (COMPLETIONS, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 2, "max_tokens": 0}),
    (COMPLETIONS, {"prompt": [5, 6], "stream": True, "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "x", "stop": ["q", "fox"], "stop_token_ids": [7], "min_tokens": 2}),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1, "return_token_ids": True, "seed": -1}),
    (COMPLETIONS, {"prompt": "x", "use_beam_search": True, "n": 2, "length_penalty": 0.5}),
    (COMPLETIONS, {"prompt": "x", "priority": 0, "request_id": "me", "min_p": 0.1, "user": "a"}),
    (
        COMPLETIONS,
        {
            "prompt": "the fox",
            "presence_penalty": 0.5,
            "frequency_penalty": -1,
            "repetition_penalty": 1.2,
            "logit_bias": {"5": -100, "17": 2.5},
            "bad_words": ["fox", "the sea"],
            "allowed_token_ids": [5, 17, 30, 40],
            "repetition_detection": {"max_pattern_size": 4, "min_count": 3},
        },
    ),
    (
        COMPLETIONS,
        {
            "prompt": [1, 2, 3, 4, 5],
            "truncate_prompt_tokens": 3,
            "truncation_side": "right",
            "logprobs": 0,
            "logprob_token_ids": [7, 8],
            "return_tokens_as_token_ids": True,
            "return_prompt_text": True,
            "detokenize": False,
            "cache_salt": "s",
        },
    ),
    (COMPLETIONS, {"prompt": "x", "session_id": "s", "agent_hint": {"is_last_step": True}}),
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": "x"}],
            "agent_hint": {"job_id": "a", "is_last_step": False, "ttl_ms": 2.5, "tool": "ls"},
        },
    ),
    (
        COMPLETIONS,
        {
            "prompt": "x",
            "stream": True,
            "stream_interval": 3,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
            "include_stop_str_in_output": True,
            "stop": "fox",
            "hat": 1,
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "hello"}], "max_completion_tokens": 4}),
    (
        CHAT,
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "be brief"}]},
                {"role": "user", "content": "x", "name": "ann"},
            ],
            "logprobs": True,
            "top_logprobs": 3,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/tokenize", {"prompt": "x y", "add_special_tokens": False, "return_token_strs": True}),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}),
    ("/detokenize", {"tokens": [5, 6, 7], "model": "toy"}),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "n": 3, "seed": 4, "tools": []}),
    (RESPONSES, {"input": "hello", "max_output_tokens": 4, "top_k": 5, "metadata": {"a": "b"}}),
    (
        f"{RESPONSES}/compact",
        {
            "model": "toy",
            "instructions": "y",
            "input": [
                {"role": "user", "content": "x"},
                {"type": "compaction", "encrypted_content": "tokend-summary:z"},
            ],
        },
    ),
    (RESPONSES, {"input": "x", "store": True, "background": True, "truncation": "auto"}),
    (
        RESPONSES,
        {
            "input": [
                {"role": "developer", "content": [{"type": "input_text", "text": "be brief"}]},
                {"type": "message", "role": "user", "content": "x", "id": "msg_1"},
                {"type": "reasoning", "summary": [], "encrypted_content": "x"},
                {"type": "web_search_call", "id": "ws_1", "status": "completed"},
            ],
            "instructions": "help",
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "stream": True,
            "stream_options": {"include_obfuscation": False},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "tools": [{"type": "web_search"}],
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            "prompt_cache_key": "k",
        },
    ),
    (
        RESPONSES,
        {
            "input": [
                {"role": "user", "content": "x"},
                {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{}"},
                {
                    "type": "function_call_output",
                    "call_id": "c",
                    "output": [{"type": "input_text", "text": "y"}, {"type": "input_image"}],
                },
                {"type": "custom_tool_call", "call_id": "d", "name": "b", "input": "z"},
                {"type": "custom_tool_call_output", "call_id": "d", "output": "z"},
            ],
            "tools": [
                {"type": "function", "name": "a", "parameters": CITY, "strict": True},
                {"type": "custom", "name": "b", "format": {"type": "text"}},
                {
                    "type": "namespace",
                    "name": "n",
                    "tools": [{"type": "function", "name": "a", "parameters": CITY}],
                },
            ],
            "tool_choice": {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "function", "name": "a"}],
            },
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "json_schema", "name": "x", "schema": CITY}},
        },
    ),
    (
        MESSAGES,
        {
            "model": "toy",
            "max_tokens": 4,
            "messages": TOLD,
            "tools": [{"name": "a", "input_schema": CITY, "strict": True}],
            "tool_choice": {"type": "tool", "name": "a"},
        },
    ),
    (COUNT, {"model": "toy", "messages": TOLD, "tools": [{"name": "a", "input_schema": CITY}]}),
    *(
        (
            CHAT,
            {
                "messages": [
                    {"role": "user", "content": "x" * length},
                    {"role": "assistant", "content": None, "tool_calls": [CALLED]},
                    {"role": "tool", "tool_call_id": "c", "content": "y"},
                ],
                "tools": [
                    {"type": "function", "function": {"name": name, "parameters": CITY}}
                    for name in ("a", "b")
                ],
                "tool_choice": choice,
                "parallel_tool_calls": length % 2 == 0,
                "stream": length % 2 == 0,
                "n": 1 + length % 3,
                "thinking_token_budget": 5,
                "include_reasoning": length != 2,
            },
        )
        for length, choice in enumerate(
            (
                "auto",
                "required",
                "none",
                "auto",
                {"type": "function", "function": {"name": "a"}},
                "auto",
            )
        )
    ),
    *(
        (
            MESSAGES,
            {
                "model": "toy",
                "max_tokens": 200,
                "messages": [{"role": "user", "content": "x" * length}],
                "tools": [{"name": "a", "input_schema": CITY, "strict": length % 2 == 1}],
                "tool_choice": {"type": "auto" if length % 3 else "any"},
                "thinking": {"type": "adaptive"},
                "stream": length % 2 == 0,
            },
        )
        for length in range(1, 6)
    ),
    *(
        (
            RESPONSES,
            {
                "input": "x" * length,
                "max_output_tokens": 200,
                "tools": [
                    {"type": "function", "name": "a", "parameters": CITY, "strict": length % 2 == 1}
                ],
                "tool_choice": "auto" if length % 3 else "required",
                "reasoning": {"effort": "low", "summary": "auto"},
                "stream": length % 2 == 0,
            },
        )
        for length in range(1, 6)
    ),
    (COUNT, {"model": "toy", "messages": [{"role": "user", "content": "x"}], "system": "y"}),
    (
        MESSAGES,
        {
            "model": "toy",
            "max_tokens": 4,
            "stream": True,
            "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": [{"type": "thinking", "thinking": "y"}]},
                {"role": "user", "content": [{"type": "text", "text": "z"}]},
                {"role": "system", "content": "9 tokens left"},
            ],
            "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "output_config": {"effort": "high", "format": None},
            "stop_sequences": ["q"],
            "metadata": {"user_id": "u"},
        },
    ),
)
_CALL: Final = '<tool_call>\n{"name": "a", "arguments": {"city": "P"}}\n</tool_call>'
OUTPUTS: Final = (
    f"<think>\nwhere?\n</think>\n\nlook: {_CALL}",
    f"{_CALL}\n{_CALL.replace('a', 'b', 1)}",
    f"<think>no end {_CALL}",
    _CALL[:-20],
    '<tool_call>{"name": "none"}</tool_call></think> the sea',
)
"""What the model answers, one of them by the length of the prompt."""


class Bodies:
    name = "bodies"

    def __init__(self) -> None:
        self._place = tempfile.TemporaryDirectory(prefix="td-")
        self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._start())
        self._num = 0
        self._expected = self._control()

    async def _start(self) -> None:
        place = Path(self._place.name)
        tokenizer = byte_level_tokenizer()
        tokenizer.save(str(place / "tokenizer.json"))
        (place / "chat_template.jinja").write_text(TEMPLATE)
        model = prepared(place, tokenizer.get_vocab_size(), has_chat_template=True)
        path = front_end_path(str(place), 1, 0)
        scripts = [[20, 30, 200, 2], *([*tokenizer.encode(each).ids, 2] for each in OUTPUTS)]
        self._engine = FakeEngine(
            path,
            vocab_size=model.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            script=lambda request, choice: scripts[
                (len(request.prompt_token_ids) + choice) % len(scripts)
            ],
        )
        # Only the engine knows whether priorities are enabled, and refuses them itself.
        self._limits = RequestLimits(model.vocab_size, MAX_MODEL_LEN, priorities=True)
        boot = make_boot(str(place), model, _FRONTEND)
        self._app_state = make_app_state(boot, [Link.connect(path, FromEngine)], FakeSupervisor())
        self._engine.announce()
        await self._app_state.client.wait_ready()
        self._app = create_app(self._app_state)

    def seeds(self) -> list[bytes]:
        return [path.encode() + b"\n" + json.dumps(body).encode() for path, body in VALID]

    def inputs(self, known: Sequence[bytes]) -> st.SearchStrategy[bytes]:
        return mutated(known, _mutate_body) | mutated(known, _mutate_body) | mutated_bytes(known)

    def run(self, data: bytes) -> str:
        path, _, body = data.partition(b"\n")
        status, answer = self._post(path.decode("latin-1"), body)
        if status == 307:  # a redirect to the same path with or without a slash at its end
            assert answer == b""
            return "elsewhere"
        assert status in STATUSES, (status, answer[:500])
        outcome = _check(status, answer, body)
        while not self._engine.requests.empty():
            validate_request(self._engine.requests.get_nowait(), self._limits)
        assert self._app_state.client.num_open == 0
        self._num += 1
        if self._num % CONTROL_EVERY == 0:
            assert self._control() == self._expected
        return outcome

    def close(self) -> None:
        self._app_state.client.close()
        self._loop.run_until_complete(self._engine.close())
        self._loop.close()
        self._place.cleanup()

    def _control(self) -> dict[str, Any]:
        status, answer = self._post(*CONTROL)
        assert status == 200, answer
        body: dict[str, Any] = json.loads(answer)
        del body["id"], body["created"]
        return body

    def _post(self, path: str, body: bytes) -> tuple[int, bytes]:
        return self._loop.run_until_complete(self._call(path, body))

    async def _call(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a response of the application."""
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode("latin-1"),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        sent: list[Any] = []
        incoming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if incoming:
                return incoming.pop()
            return await asyncio.get_running_loop().create_future()

        async def send(message: Any) -> None:
            sent.append(message)

        await self._app(scope, receive, send)
        await asyncio.gather(*self._app_state.background)
        assert not sent[-1].get("more_body"), "the response does not end"
        return sent[0]["status"], b"".join(each.get("body", b"") for each in sent[1:])


def _check(status: int, answer: bytes, body: bytes) -> str:
    """The outcome in words; fails for a response of the wrong shape."""
    if status == 200:
        text = answer.decode()
        if text.startswith("data: "):
            assert text.endswith("data: [DONE]\n\n"), text[-200:]
            assert '"error"' not in text, text[-500:]
            return "stream"
        if text.startswith("event: "):
            ends = ("event: response.completed", "response.incomplete", "event: message_stop")
            assert any(end in text for end in ends), text[-500:]
            return "stream"
        if text:
            json.loads(text)
        return "whole"
    response = json.loads(answer)
    error = response["error"]
    if response.get("type") == "error":
        assert set(response) == {"type", "error", "request_id"}
        assert set(error) == {"type", "message"}
        assert len(error["message"]) < 2000
        return str(status)
    assert set(error) == {"message", "type", "param", "code"}
    too_long = "maximum context length" in error["message"]
    assert error["code"] == ("context_length_exceeded" if too_long else status)
    assert len(error["message"]) < 2000
    too_deep = error["message"].startswith("the body is nested")
    if status == 400 and not too_deep and _is_object(body):
        assert isinstance(error["param"], str), error
    return f"{status} {error['param']} {error['message']}"


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(json.loads(body), dict)
    except (ValueError, RecursionError):
        return False


def _mutate_body(data: bytes, edits: Sequence[Edit]) -> bytes:
    path, _, body = data.partition(b"\n")
    try:
        return path + b"\n" + json.dumps(mutate_tree(json.loads(body), edits, FIELDS)).encode()
    except (ValueError, RecursionError):
        return mutate_bytes(data, edits, ())
