"""A table of bad inputs and client faults with their tests; all of these tests exist."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
API = "tests/api_server/"
GRAMMARS = "tests/engine_core/structured_output/"

ROWS = {
    "1 not JSON, an array, empty, another content type": (
        f"{API}test_bad_bodies.py::test_bad_bodies",
        f"{API}test_bad_bodies.py::test_content_types",
        "tests/e2e/test_bad_input.py::test_invalid_completions_are_refused",
    ),
    "2 a body of 1 GB, 100,000 headers, headers and bodies that come slowly": (
        f"{API}test_limits.py::test_a_body_of_a_gigabyte_takes_no_memory",
        f"{API}test_limits.py::test_endless_headers",
        f"{API}test_limits.py::test_header_count_limit",
        f"{API}test_bad_bodies.py::test_large_bodies",
        f"{API}test_bad_bodies.py::test_large_headers",
        f"{API}test_bad_bodies.py::test_a_slow_upload",
        f"{API}test_slow_clients.py::test_missing_headers_time_out",
        f"{API}test_slow_clients.py::test_the_rest_of_a_body_after_the_answer_times_out",
    ),
    "3 an unknown model, none": (f"{API}test_bad_requests.py::test_models",),
    "4 an empty prompt, list, conversation; null content": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_chat.py::test_bad_messages",
        f"{API}test_chat.py::test_null_content_has_its_own_error",
    ),
    "5 longer than the context": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_chat.py::test_length_errors_name_the_clients_field",
        f"{API}test_chat.py::test_an_oversized_conversation_is_not_rendered",
        "tests/e2e/test_bad_input.py::test_a_request_beyond_the_pool_is_refused_with_both_lengths",
    ),
    "6 token ids that are none": (f"{API}test_bad_requests.py::test_bad_fields",),
    "7 sampling parameters out of range": (f"{API}test_bad_requests.py::test_bad_fields",),
    "8 a million choices or prompts": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_limits.py::test_too_many_prompts_are_refused_before_tokenizing",
    ),
    "9 log-probabilities without a bound": (f"{API}test_bad_requests.py::test_bad_fields",),
    "10 min_tokens over max_tokens, also where that is null": (
        f"{API}test_bad_requests.py::test_bad_fields",
    ),
    "11 stop strings: many, empty, long, half a surrogate pair": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_stop_strings.py::test_only_a_prefix_of_a_stop_string_is_held_back",
    ),
    "12 tokens outside the vocabulary": (f"{API}test_bad_requests.py::test_bad_fields",),
    "13 schemas that are none, too deep, recursive without an end": (
        f"{API}test_structured_fields.py::test_invalid_requests_are_refused",
        f"{API}test_structured_fields.py::test_a_schema_a_thousand_levels_deep_is_refused",
        f"{GRAMMARS}test_backend.py::test_what_cannot_be_used_says_why",
        f"{GRAMMARS}test_sandbox.py::test_neither_a_full_stack_nor_an_endless_compilation_harms_the_engine",
        "tests/e2e/test_structured_output.py::test_abuse_is_a_400_within_seconds",
    ),
    "14 regular expressions that explode, grammars without a bound": (
        f"{GRAMMARS}test_backend.py::test_regular_expressions_that_explode_elsewhere_do_not",
        f"{GRAMMARS}test_cache.py::test_ten_thousand_grammars_keep_within_entries_and_bytes",
        "tests/e2e/test_structured_output.py::test_ten_thousand_grammars_take_bounded_memory",
    ),
    "15 a grammar of one kind, then of another": (
        "tests/e2e/test_structured_output.py::test_every_form_of_asking",
        "tests/e2e/test_structured_output.py::test_constrained_and_free_requests_in_one_batch",
    ),
    "16 bad tools, an unknown tool_choice": (
        f"{API}test_limits.py::test_templates_and_tools_of_clients",
        f"{API}test_bad_requests.py::test_neutral_and_ignored_fields",
    ),
    "17 templates of clients, endless templates": (
        f"{API}test_limits.py::test_templates_and_tools_of_clients",
        f"{API}test_rendering.py::test_an_endless_render_is_stopped",
        f"{API}test_rendering.py::test_the_route_answers_400",
    ),
    "18 a salt of 1 MB, with control characters, that is no text": (
        f"{API}test_limits.py::test_invalid_cache_salts",
    ),
    "19 one request_id twice, a prefix of another; aborts of others": (
        f"{API}test_system.py::test_requests_with_the_same_id_are_independent",
        f"{API}test_admin.py::test_a_client_key_aborts_only_its_own_requests",
    ),
    "22 a wrong key or none on every route, paths and hosts in disguise": (
        f"{API}test_api_key.py::test_every_other_route_needs_the_key",
        f"{API}test_api_key.py::test_no_spelling_of_path_or_host_bypasses_the_key",
        f"{API}test_api_key.py::test_browsers_of_other_origins_are_refused",
        f"{API}test_admin.py::test_only_an_admin_key_opens_admin_routes",
    ),
    "25 a client that stops reading": (
        f"{API}test_slow_clients.py::test_an_unread_stream_is_ended_at_its_limit",
        f"{API}test_slow_clients.py::test_a_connection_without_progress_is_closed",
        f"{API}test_slow_clients.py::test_a_slow_reader_with_progress_is_not_disconnected",
    ),
    "44 characters of several tokens, stop strings across pieces": (
        f"{API}test_multi_token_characters.py::test_a_stop_string_between_multi_token_characters",
        f"{API}test_multi_token_characters.py::test_every_chunk_has_whole_characters",
        f"{API}test_stop_strings.py::test_a_stop_string_across_chunks_is_not_emitted",
        f"{API}test_stream_equivalence.py::test_completions",
        f"{API}test_stream_equivalence.py::test_chats",
    ),
    "45 a failure after the first piece": (
        f"{API}test_stream_failures.py::test_a_failure_of_the_engine",
        f"{API}test_stream_failures.py::test_shutdown_during_a_stream",
        f"{API}test_stream_failures.py::test_an_internal_error",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_tests_of_a_row_exist(row: str) -> None:
    for name in ROWS[row]:
        path, _, function = name.partition("::")
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in functions, name


def test_every_row_has_tests() -> None:
    numbers = {int(row.split()[0]) for row in ROWS}
    assert numbers >= {*range(1, 20), 22, 25, 44, 45}
    assert all(ROWS.values())
