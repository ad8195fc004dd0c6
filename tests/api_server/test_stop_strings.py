"""Incremental stop string search, compared with a search in the whole text."""

import random
import tracemalloc
from collections.abc import Callable

import pytest

from api_server.generation.request_stream import Choice
from api_server.parsers.harmony import HarmonyOutput
from api_server.parsers.output import (
    PLAIN_TEXT,
    ChoiceParser,
    ContentStops,
    ContentText,
    OutputParser,
    OutputPart,
    ReasoningText,
    ToolCallArguments,
)
from api_server.parsers.reasoning import OutputStart, reasoning_format
from api_server.parsers.tools.registry import TOOL_CALL_FORMATS
from api_server.text.stop_strings import StopStrings, stop_strings
from proto.messages.engine_io import FinishReason
from tests.api_server.harmony_model import harmony_of, harmony_tokenizer, marked


def run(strings: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    """Return (text, stop string, chunks of text)."""
    matcher = StopStrings(strings)
    shown: list[str] = []
    for piece in pieces:
        text, stop = matcher.filter_text(piece, min_tokens_reached=True)
        shown.append(text)
        if stop is not None:
            return "".join(shown), stop, shown
    shown.append(matcher.pop_buffer())
    return "".join(shown), None, shown


def obvious(strings: list[str], text: str) -> tuple[str, str | None]:
    """Return the stop string that ends first; ties go to the first in the list."""
    for end in range(1, len(text) + 1):
        for string in strings:
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_agrees_with_the_simple_search(seed: int) -> None:
    source = random.Random(seed)
    strings = [
        "".join(source.choices("ab", k=source.randint(1, 5))) for _ in range(source.randint(1, 4))
    ]
    text = "".join(source.choices("abc", weights=(5, 5, 1), k=30))
    pieces, rest = [], text
    while rest:
        size = source.randint(1, 6)
        pieces.append(rest[:size])
        rest = rest[size:]
    found, stop, _ = run(strings, pieces)
    assert (found, stop) == obvious(strings, text)


@pytest.mark.parametrize(
    ("strings", "shown"), [(["END", "THE END"], "it is THE "), (["THE END", "END"], "it is ")]
)
def test_the_first_in_the_list_wins_a_tie(strings: list[str], shown: str) -> None:
    assert run(strings, ["it is T", "HE E", "ND."])[:2] == (shown, strings[0])


def test_only_a_prefix_of_a_stop_string_is_held_back() -> None:
    _, _, shown = run(["stop here"], ["we ", "stop", " now"])
    assert shown == ["we ", "", "stop now", ""]


def test_a_stop_string_across_chunks_is_not_emitted() -> None:
    assert run(["group of peo", "short"], ["a gr", "oup of", " people"]) == (
        "a ",
        "group of peo",
        ["a ", "", ""],
    )


def test_a_stop_string_inside_a_chunk() -> None:
    assert run(["gani"], ["volunteer organization"])[:2] == ("volunteer or", "gani")


def test_matches_before_min_tokens_are_ignored() -> None:
    matcher = StopStrings(["e"])
    assert matcher.filter_text(" is Lee,", min_tokens_reached=False) == (" is Lee,", None)
    assert matcher.filter_text(" a stude", min_tokens_reached=True) == (" a stud", "e")


def test_a_match_that_began_before_min_tokens_counts() -> None:
    matcher = StopStrings(["abcd"])
    assert matcher.filter_text("xab", min_tokens_reached=False) == ("x", None)
    assert matcher.filter_text("cd", min_tokens_reached=True) == ("", "abcd")


def test_many_strings_agree_with_the_simple_search() -> None:
    source = random.Random(1)
    strings = ["".join(source.choices("abcd", k=source.randint(4, 40))) for _ in range(1024)]
    for _ in range(20):
        text = "".join(source.choices("abcd", k=60))
        assert run(strings, [text[:20], text[20:]])[:2] == obvious(strings, text)


def test_the_text_held_back_is_the_longest_beginning_of_a_string() -> None:
    source = random.Random(2)
    for _ in range(300):
        strings = ["".join(source.choices("ab", k=source.randint(2, 6))) for _ in range(3)]
        text = "".join(source.choices("abc", k=12))
        matcher = StopStrings(strings)
        shown, _ = matcher.filter_text(text, min_tokens_reached=False)
        held = text[len(shown) :]
        beginnings = [string[:size] for string in strings for size in range(1, len(string))]
        longest = max((each for each in beginnings if text.endswith(each)), key=len, default="")
        assert held == longest


# Stop strings of an answer with reasoning.


class Pieces:
    """A detokenizer whose tokens are indices of pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def decode_token(self, token_id: int) -> str:
        return self._pieces[token_id]

    def flush_text(self) -> str:
        return ""


CALL = '<tool_call>\n{"name": "find", "arguments": {"text": "ab b"}}\n</tool_call>'


def thinking_parser() -> OutputParser:
    thinking = reasoning_format("qwen3", None)
    return thinking.new_parser(OutputStart.UNKNOWN, PLAIN_TEXT, is_shown=True)


def call_parser() -> OutputParser:
    return TOOL_CALL_FORMATS["hermes"].new_parser({"find": {}})


@pytest.fixture(scope="module")
def harmony_parser() -> Callable[[], OutputParser]:
    harmony = harmony_of(harmony_tokenizer())
    return HarmonyOutput(harmony=harmony, tool_names=["find"]).new_parser


def joined(parts: list[OutputPart]) -> list[tuple[type, str]]:
    """Return the parts, with consecutive ones of a kind as one; a call as its arguments."""
    found: list[tuple[type, str]] = []
    for part in parts:
        if not isinstance(part, ContentText | ReasoningText | ToolCallArguments):
            continue
        if found and found[-1][0] is type(part):
            found[-1] = (type(part), found[-1][1] + part.text)
        else:
            found.append((type(part), part.text))
    return found


def answer(
    parser: Callable[[], OutputParser],
    calls: Callable[[], OutputParser],
    strings: list[str],
    pieces: list[str],
    interval: int,
) -> tuple[list[tuple[type, str]], object]:
    """Return the parts of a streamed answer, and its stop reason."""
    choice = Choice(0, Pieces(pieces), ContentStops(StopStrings(strings), parser()))
    choice.interval = interval
    encoder = ChoiceParser(parser(), None, calls())
    parts: list[OutputPart] = []
    for index in range(len(pieces)):
        last = FinishReason.LENGTH if index == len(pieces) - 1 else None
        choice.extend([index], [], last, None)
        if choice.has_delta:
            delta = choice.pop_delta()
            parts += encoder.parse_delta(delta.text, delta.finish_reason, delta.num_certain)
        if choice.finished:
            break
    assert choice.finished
    return joined(parts), choice.stop_reason


TEXTS = {
    "thinking": f"<think>\nab b\n</think>\n\nba bc ab{CALL}ab bb",
    "no thinking": f"ba ab bc{CALL}",
    "only thinking": "<think>\nab b ba",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("seed", range(40))
def test_only_content_is_searched(name: str, seed: int) -> None:
    check(thinking_parser, call_parser, TEXTS[name], random.Random(seed))


@pytest.mark.parametrize("seed", range(40))
def test_only_content_of_harmony_is_searched(
    harmony_parser: Callable[[], OutputParser], seed: int
) -> None:
    text = marked(
        "<|channel|>analysis<|message|>ab bc<|end|><|start|>assistant<|channel|>commentary"
        "<|message|>ba b<|end|><|start|>assistant<|channel|>final<|message|>bb ab bc ba"
    )
    check(harmony_parser, lambda: PLAIN_TEXT, text, random.Random(seed))


def check(
    parser: Callable[[], OutputParser],
    calls: Callable[[], OutputParser],
    text: str,
    source: random.Random,
) -> None:
    strings = ["".join(source.choices("ab \n", k=source.randint(1, 4))) for _ in range(3)]
    strings += source.choices(["</think>", "tool_call", "analysis", '"find"', "b<"], k=1)
    pieces, rest = [], text
    while rest:
        size = source.randint(1, 7)
        pieces.append(rest[:size])
        rest = rest[size:]
    whole, in_content = parser(), calls()
    expected: list[OutputPart] = []
    stop = None
    for kind, part in joined([*whole.parse_delta(text), *whole.parse_end(is_cut=True)]):
        if kind is ContentText:
            part, stop = obvious(strings, part)
            expected += in_content.parse_delta(part)
        else:
            expected.append(kind(0, part) if kind is ToolCallArguments else kind(part))
        if stop is not None:
            break
    expected += in_content.parse_end(is_cut=stop is None)
    found = answer(parser, calls, strings, pieces, source.randint(1, 4))
    assert found == (joined(expected), stop)


async def test_many_strings_take_16_bytes_per_character_and_are_shared() -> None:
    source = random.Random(5)
    strings = ["".join(source.choices("abcdefgh", k=64)) for _ in range(1024)]
    tracemalloc.start()
    first = await stop_strings(strings, includes_stop=False)
    size = tracemalloc.get_traced_memory()[0]
    second = await stop_strings(list(strings), includes_stop=True)
    assert tracemalloc.get_traced_memory()[0] - size < 100_000
    tracemalloc.stop()
    assert size < 2_000_000
    text = "abc" + strings[700] + "def"
    assert first.filter_text(text, min_tokens_reached=True) == ("abc", strings[700])
    assert second.filter_text(text, min_tokens_reached=True) == ("abc" + strings[700], strings[700])
