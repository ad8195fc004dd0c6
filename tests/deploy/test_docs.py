"""Tables and figures of the documentation match the code."""

import re
from pathlib import Path

import pytest

from api_server.generation.encoders.responses.stored import MAX_STORED, MAX_STORED_PER_OWNER
from api_server.generation.request_stream import MAX_UNSENT_BYTES
from api_server.http.connection import (
    MAX_BODY_BYTES,
    MAX_CLIENT_UPLOAD_BYTES,
    MAX_UPLOAD_BYTES,
    READ_AHEAD_BYTES,
    STALL_SECONDS,
    UPLOAD_BYTES,
    UPLOAD_SECONDS,
)
from api_server.http.http_protocol import (
    HEADER_SECONDS,
    LEFTOVER_SECONDS,
    MAX_HEADER_BYTES,
    MAX_HEADERS,
)
from api_server.http.websocket_protocol import SMALL_FRAMES, SMALL_FRAMES_PER_SECOND
from api_server.protocol.chat import (
    MAX_ARGUMENT_VALUES,
    MAX_CALLS,
    MAX_DOCUMENTS,
    MAX_MESSAGES,
    MAX_PARTS,
    MAX_VARIABLES,
)
from api_server.protocol.common import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_CHOICES_PER_REQUEST,
    MAX_PROMPTS,
    MAX_SALT_CHARACTERS,
    MAX_STOP_BYTES,
    MAX_STOP_STRINGS,
)
from api_server.protocol.decoding import MAX_CONTAINERS, MAX_KEYS, MAX_STRINGS, MAX_VALUES
from api_server.protocol.fields import MAX_DEPTH
from api_server.protocol.responses.input import MAX_ITEMS
from api_server.protocol.structured import MAX_CHOICE_STRINGS
from api_server.protocol.tools import MAX_LISTED_TOOLS, MAX_TOOLS
from api_server.routes.admin import MAX_ABORTED_IDS, MAX_ID_CHARACTERS
from api_server.text.prompts import MAX_TOKEN_CHARACTERS, MAX_TRUNCATED_CHARACTERS, MIN_CHARACTERS
from api_server.text.rendering import RENDER_SECONDS
from api_server.text.tokenizer import MAX_TEXT_TOKENS
from api_server.turns import HELD_BYTES, UNHELD_BYTES
from deploy.flags import _default_value, _usage, all_flags, field_helps
from engine_core.scheduler.limits import (
    DEFAULT_QUEUED_PER_RUNNING,
    MAX_RETRY_SECONDS,
    MIN_DEFAULT_REQUESTS,
    MIN_DEFAULT_TOKENS,
)
from proto.messages.engine_io import MAX_CHOICES
from proto.messages.logit_edits import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, MAX_BIASED_TOKENS
from proto.messages.sampling_params import (
    MAX_LOGPROB_TOKEN_IDS,
    MAX_PATTERN_SIZE,
    MAX_REPEATED_TOKENS,
    MAX_STOP_TOKEN_IDS,
)
from tests.deploy.api_reference import markdown
from tests.deploy.models_table import with_current_tables
from worker.models.families import supported_models

ROOT = Path(__file__).parents[2]


def test_the_table_of_settings_is_current() -> None:
    """To update it: `print(markdown_table())` of this file."""
    assert markdown_table() in (ROOT / "docs" / "configuration.md").read_text()


def markdown_table() -> str:
    """Return all flags as a table for docs/configuration.md."""
    helps = field_helps()
    rows = [
        f"| `{_usage(flag).replace('|', ' ')}` | {_default_value(flag)} | {helps[flag.field]} |"
        for flag in all_flags()
    ]
    return "\n".join(["| flag | default | meaning |", "|---|---|---|", *rows])


def test_the_tables_of_request_fields_are_current() -> None:
    """To update them: `print(markdown())` of tests.deploy.api_reference, at the end of the page."""
    assert markdown() in (ROOT / "docs" / "api.md").read_text()


def test_the_tables_of_models_are_those_of_the_registry() -> None:
    """To update it: python -m tests.deploy.models_table."""
    text = (ROOT / "docs" / "models.md").read_text()
    assert with_current_tables(text) == text
    table = "\n".join(supported_models())
    assert f"\n\n{table}\n\n" in text


def test_flags_in_the_readme_exist_and_have_the_same_help() -> None:
    helps = {flag.name: field_helps()[flag.field] for flag in all_flags()}
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.+?) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 10
    for name, meaning in rows:
        assert meaning == helps[name]


@pytest.mark.parametrize(
    ("what", "limit"),
    [
        ("URL and headers together", f"{MAX_HEADER_BYTES >> 10} KiB"),
        ("time for the headers to arrive", f"{HEADER_SECONDS:g} s"),
        (
            "time for the rest of a body after an early answer",
            f"{LEFTOVER_SECONDS:g} s",
        ),
        (
            "text and log-probabilities of a stream that wait to be read",
            f"{MAX_UNSENT_BYTES >> 20} MiB",
        ),
        ("time in which the client reads nothing while data waits", f"{STALL_SECONDS:g} s"),
        ("headers", f"{MAX_HEADERS}"),
        ("objects and lists around a value of a body", f"{MAX_DEPTH}"),
        ("body", f"{MAX_BODY_BYTES >> 20} MiB"),
        (
            "time for the body to arrive",
            f"{UPLOAD_SECONDS:g} s for each {UPLOAD_BYTES >> 10} KiB and for the rest",
        ),
        (
            "bodies and messages that arrive or wait, together; of one address or tenant",
            f"{MAX_UPLOAD_BYTES >> 20} MiB; {MAX_CLIENT_UPLOAD_BYTES >> 20} MiB",
        ),
        (
            "WebSocket frames below 16 bytes, pings and pongs: at once; a second",
            f"{SMALL_FRAMES}; {SMALL_FRAMES_PER_SECOND}",
        ),
        ("requests received before a response is complete", f"{READ_AHEAD_BYTES >> 10} KiB"),
        (
            "values of a body; strings; names of members; objects and lists",
            f"{MAX_VALUES:,}; {MAX_STRINGS:,}; {MAX_KEYS:,}; {MAX_CONTAINERS:,}",
        ),
        (
            f"bodies over {UNHELD_BYTES >> 20} MiB that are decoded at once, until their requests "
            "are in the engine or their answer begins",
            f"{HELD_BYTES >> 20} MiB",
        ),
        ("prompts of a completion request", f"{MAX_PROMPTS:,}"),
        (
            "tokens of several prompts of a request together; of a text that is only counted",
            f"{MAX_TEXT_TOKENS:,}",
        ),
        (
            "characters of a prompt, of which a truncated prompt keeps one end",
            f"{MAX_TOKEN_CHARACTERS} per token of the context, at least {MIN_CHARACTERS:,}",
        ),
        (
            "characters of a conversation whose prompt is truncated",
            f"as many, at least {MAX_TRUNCATED_CHARACTERS:,}",
        ),
        ("parts of a message; calls of a message", f"{MAX_PARTS:,}; {MAX_CALLS:,}"),
        (
            "values in the arguments of all calls, which are JSON in strings",
            f"{MAX_ARGUMENT_VALUES:,}",
        ),
        ("documents; variables of the template", f"{MAX_DOCUMENTS:,}; {MAX_VARIABLES}"),
        (
            "tools in a list of Responses and Messages, with those that are left out",
            f"{MAX_LISTED_TOOLS:,}",
        ),
        ("strings of a choice in structured outputs", f"{MAX_CHOICE_STRINGS:,}"),
        (
            "choices of a prompt; of all prompts of a request",
            f"{MAX_CHOICES}; {MAX_CHOICES_PER_REQUEST:,}",
        ),
        ("messages of a chat", f"{MAX_MESSAGES:,}"),
        ("items of a response, including previous responses", f"{MAX_ITEMS:,}"),
        ("tools of a response", f"{MAX_TOOLS:,}"),
        ("stored responses; of one client", f"{MAX_STORED:,}; {MAX_STORED_PER_OWNER:,}"),
        ("time for the chat template", f"{RENDER_SECONDS:g} s"),
        ("ids of one `/abort_requests`", f"{MAX_ABORTED_IDS:,} of {MAX_ID_CHARACTERS} characters"),
        (
            "stop strings; bytes of all; stop token ids",
            f"{MAX_STOP_STRINGS:,}; {MAX_STOP_BYTES:,}; {MAX_STOP_TOKEN_IDS}",
        ),
        (
            "bad words; characters of one; tokens of all",
            f"{MAX_BAD_WORDS}; {MAX_BAD_WORD_CHARACTERS}; {MAX_BAD_WORD_TOKENS:,}",
        ),
        (
            "tokens of logit_bias; of logprob_token_ids",
            f"{MAX_BIASED_TOKENS:,}; {MAX_LOGPROB_TOKEN_IDS}",
        ),
        ("characters of cache_salt", f"{MAX_SALT_CHARACTERS:,}"),
        (
            "repetition_detection: max_pattern_size; times min_count",
            f"{MAX_PATTERN_SIZE}; {MAX_REPEATED_TOKENS:,}",
        ),
    ],
)
def test_documented_limits_equal_the_code(what: str, limit: str) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert f"| {what} | {limit} | " in text


def test_documented_queue_defaults_equal_the_code() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    times = DEFAULT_QUEUED_PER_RUNNING
    for flag, fewest in (("reqs", MIN_DEFAULT_REQUESTS), ("tokens", MIN_DEFAULT_TOKENS)):
        row = rf"\| `--max-num-queued-{flag}` \| {times} × .*, at least {fewest:,} \|"
        assert re.search(row, text)
    assert f"(1 to {MAX_RETRY_SECONDS:g})" in text
