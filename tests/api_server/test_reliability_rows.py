"""Which test tries which bad input or fault of a client, row by row; each of them is there."""

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
        f"{API}test_limits.py::test_headers_without_an_end",
        f"{API}test_limits.py::test_how_many_headers_there_may_be",
        f"{API}test_bad_bodies.py::test_large_bodies",
        f"{API}test_bad_bodies.py::test_large_headers",
        f"{API}test_bad_bodies.py::test_a_slow_upload",
        f"{API}test_slow_clients.py::test_headers_that_do_not_come",
        f"{API}test_slow_clients.py::test_the_rest_of_a_body_that_was_answered_already",
    ),
    "3 an unknown model, none": (f"{API}test_bad_requests.py::test_models",),
    "4 an empty prompt, list, conversation; null content": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_chat.py::test_bad_messages",
        f"{API}test_chat.py::test_null_content_is_told_apart",
    ),
    "5 longer than the context": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_chat.py::test_errors_name_the_length_as_the_client_did",
        f"{API}test_chat.py::test_what_cannot_fit_is_never_rendered",
        "tests/e2e/test_bad_input.py::test_a_request_beyond_the_pool_is_refused_with_both_lengths",
    ),
    "6 token ids that are none": (f"{API}test_bad_requests.py::test_bad_fields",),
    "7 sampling parameters out of range": (f"{API}test_bad_requests.py::test_bad_fields",),
    "8 a million choices or prompts": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_limits.py::test_too_many_prompts_are_refused_before_any_is_read",
    ),
    "9 log-probabilities without a bound": (f"{API}test_bad_requests.py::test_bad_fields",),
    "10 min_tokens over max_tokens, also where that is null": (
        f"{API}test_bad_requests.py::test_bad_fields",
    ),
    "11 stop strings: many, empty, long, half a surrogate pair": (
        f"{API}test_bad_requests.py::test_bad_fields",
        f"{API}test_stop_strings.py::test_holds_back_no_more_than_a_beginning",
    ),
    "12 tokens outside the vocabulary": (f"{API}test_bad_requests.py::test_bad_fields",),
    "13 schemas that are none, too deep, recursive without an end": (
        f"{API}test_structured_fields.py::test_what_is_refused",
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
        f"{API}test_rendering.py::test_what_does_not_end_is_stopped",
        f"{API}test_rendering.py::test_the_route_answers_400",
    ),
    "18 a salt of 1 MB, with control characters, that is no text": (
        f"{API}test_limits.py::test_a_salt_that_is_none",
    ),
    "19 one request_id twice, a prefix of another; aborts of others": (
        f"{API}test_system.py::test_requests_of_one_name_have_nothing_to_do_with_each_other",
        f"{API}test_admin.py::test_aborts_do_not_cross_keys",
    ),
    "22 a wrong key or none on every route, paths and hosts in disguise": (
        f"{API}test_api_key.py::test_the_key_guards_every_other_route",
        f"{API}test_api_key.py::test_no_way_of_writing_a_path_or_a_host_gets_past_the_key",
        f"{API}test_api_key.py::test_browsers_of_other_origins_are_not_let_in",
        f"{API}test_admin.py::test_an_operators_key_and_nothing_else",
    ),
    "25 a client that stops reading": (
        f"{API}test_slow_clients.py::test_a_stream_that_nobody_reads_is_ended_at_its_bound",
        f"{API}test_slow_clients.py::test_a_connection_that_takes_nothing_is_cut_off",
        f"{API}test_slow_clients.py::test_a_slow_reader_that_reads_is_not_cut_off",
    ),
    "44 characters of several tokens, stop strings across pieces": (
        f"{API}test_characters.py::test_a_stop_string_in_the_middle_of_such_characters",
        f"{API}test_characters.py::test_every_piece_is_whole",
        f"{API}test_stop_strings.py::test_across_pieces_nothing_leaks",
        f"{API}test_streams_and_wholes.py::test_completions",
        f"{API}test_streams_and_wholes.py::test_chats",
    ),
    "45 a failure after the first piece": (
        f"{API}test_stream_failures.py::test_an_engines_failure",
        f"{API}test_stream_failures.py::test_the_end_of_the_daemon",
        f"{API}test_stream_failures.py::test_a_mistake_of_ours",
    ),
}


@pytest.mark.parametrize("row", ROWS)
def test_what_a_row_names_is_there(row: str) -> None:
    for name in ROWS[row]:
        path, _, function = name.partition("::")
        functions = {
            node.name
            for node in ast.parse((ROOT / path).read_text()).body
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in functions, name


def test_every_row_of_inputs_and_streams_has_tests() -> None:
    numbers = {int(row.split()[0]) for row in ROWS}
    assert numbers >= {*range(1, 20), 22, 25, 44, 45}
    assert all(ROWS.values())
