"""Reasoning is separated from content in texts split at any position."""

import random

import pytest

from api_server.parsers.output import (
    PLAIN_TEXT,
    ContentText,
    OutputParser,
    OutputPart,
    ReasoningText,
)
from api_server.parsers.reasoning import (
    NO_REASONING,
    REASONING_FORMATS,
    OutputStart,
    ReasoningParser,
    ReasoningTokenCounter,
    reasoning_format,
)
from api_server.text.detokenizer import Detokenizer, MarkerDetokenizer
from proto.messages.sampling_params import BLANKS, MAX_BLANKS
from proto.settings.config import FrontEndConfig, ReasoningParserName

THINK = REASONING_FORMATS["qwen3"]
INSIDE, UNKNOWN = OutputStart.REASONING, OutputStart.UNKNOWN

OUTPUTS = [
    # start of the output, text, reasoning, content
    (UNKNOWN, "<think>\nTwo and two.\n</think>\n\n4", "Two and two.", "4"),
    (UNKNOWN, "<think>Two</think>4", "Two", "4"),
    (UNKNOWN, " \n <think>Two</think>4", "Two", "4"),
    (UNKNOWN, "<think>\n\n</think>\n\n4", "", "4"),
    (UNKNOWN, "<think></think>", "", ""),
    (UNKNOWN, "4", "", "4"),
    (UNKNOWN, "  4 <think>no</think>", "", "  4 <think>no</think>"),
    (UNKNOWN, "<thin", "", "<thin"),
    (UNKNOWN, "<thinking>4", "", "<thinking>4"),
    (UNKNOWN, " ", "", " "),
    (UNKNOWN, "", "", ""),
    (UNKNOWN, BLANKS + "<think>a</think>4", "a", "4"),
    (UNKNOWN, " " * MAX_BLANKS + "<think>a</think>4", "a", "4"),
    (UNKNOWN, " " * MAX_BLANKS + " <think>a", "", " " * MAX_BLANKS + " <think>a"),
    (UNKNOWN, "\x1c<think>a", "", "\x1c<think>a"),
    (UNKNOWN, "\u3000<think>a", "", "\u3000<think>a"),
    (UNKNOWN, "<think>never ends", "never ends", ""),
    (UNKNOWN, "<think>never ends </thin", "never ends </thin", ""),
    (UNKNOWN, "<think> a </think >b</think> c ", "a </think >b", " c "),
    (UNKNOWN, "<think>a\n\n  b \n</think>c\n\nd\n", "a\n\n  b", "c\n\nd\n"),
    (UNKNOWN, "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
    (UNKNOWN, "<think>a<</<</t</think>4", "a<</<</t", "4"),
    (UNKNOWN, "<think>思考 😀</think>答え", "思考 😀", "答え"),
    (INSIDE, "Two and two.\n</think>\n\n4", "Two and two.", "4"),
    (INSIDE, "\n<think>\nTwo</think>4", "Two", "4"),
    (INSIDE, "</think>4", "", "4"),
    (INSIDE, "<b>x</b></think>4", "<b>x</b>", "4"),
    (INSIDE, "never ends\n", "never ends", ""),
    (INSIDE, "<thin", "<thin", ""),
    (INSIDE, "a</think>" + "\n" * 200 + "b", "a", "b"),
    (INSIDE, "", "", ""),
    (INSIDE, "a </think>\n </think>", "a", " </think>"),
]


def read(parser: OutputParser, pieces: list[str]) -> tuple[str, str]:
    """Return (reasoning, content); reasoning comes first."""
    parts: list[OutputPart] = [part for piece in pieces for part in parser.parse_delta(piece)]
    parts += parser.parse_end()
    kinds = [type(part) for part in parts]
    assert kinds == sorted(kinds, key=lambda kind: kind is ContentText), kinds
    assert all(part.text for part in parts)  # type: ignore[union-attr]
    thoughts = "".join(part.text for part in parts if isinstance(part, ReasoningText))
    return thoughts, "".join(part.text for part in parts if isinstance(part, ContentText))


@pytest.mark.parametrize(("opening", "text", "thoughts", "answer"), OUTPUTS)
def test_texts_split_at_any_position(
    opening: OutputStart, text: str, thoughts: str, answer: str
) -> None:
    def parser(*, is_shown: bool = True) -> ReasoningParser:
        return ReasoningParser(THINK, opening, PLAIN_TEXT, is_shown=is_shown)

    assert read(parser(), [text]) == (thoughts, answer)
    assert read(parser(), list(text)) == (thoughts, answer)
    for place in range(len(text) + 1):
        assert read(parser(), [text[:place], text[place:]]) == (thoughts, answer), place
    assert read(parser(is_shown=False), list(text)) == ("", answer)


ANSWERS = [
    # text, reasoning, content
    ("<think>\nTwo\n</think>\n<answer>\n4\n</answer>", "Two", "4"),
    ("<think>\n\n</think>\n\n<answer>\n4\n\n</answer>\n", "", "4"),
    ("<answer>4</answer>", "", "4"),
    (" \n<answer>\n\n 4 <a> </answe </answer>", "", " 4 <a> </answe "),
    ("<think>a</think><answer>4", "a", "4"),
    ("<think>a</think>4</answer>", "a", "4</answer>"),
    ("<think>a</think>It is <answer>4</answer>", "a", "It is <answer>4</answer>"),
    ("<answer>4</answer>\n\nand</answer> \n", "", "4and</answer> \n"),
    ("<answer>4" + "\n" * 70 + "</answer>", "", "4" + "\n" * 6),
    ("<answer></answer>", "", ""),
    ("<answer", "", "<answer"),
    ("\n", "", "\n"),
    ("", "", ""),
]


@pytest.mark.parametrize("name", ["hunyuan_a13b", "granite33"])
@pytest.mark.parametrize(("text", "thoughts", "answer"), ANSWERS)
def test_markers_around_an_answer_are_dropped(
    name: ReasoningParserName, text: str, thoughts: str, answer: str
) -> None:
    style = REASONING_FORMATS[name]
    opening = UNKNOWN if thoughts or "<think>" in text else OutputStart.CONTENT
    if name == "granite33":
        text = text.replace("answer>", "response>").replace("<answer", "<response")
        answer = answer.replace("answer>", "response>").replace("<answer", "<response")

    def parser() -> OutputParser:
        return style.new_parser(opening, PLAIN_TEXT, is_shown=True)

    for place in range(len(text) + 1):
        assert read(parser(), [text[:place], text[place:]]) == (thoughts, answer), place
    assert read(parser(), list(text)) == (thoughts, answer)
    for end in range(len(text)):
        parts = [*(cut := parser()).parse_delta(text[:end]), *cut.parse_end(is_cut=True)]
        said = "".join(part.text for part in parts if isinstance(part, ContentText))
        assert answer.startswith(said.rstrip("\n"))


@pytest.mark.parametrize("opening", [UNKNOWN, INSIDE])
def test_truncated_markers_are_dropped(opening: OutputStart) -> None:
    text, said = "<think>a < b</think>so", ""
    for end in range(len(text) + 1):
        parser = ReasoningParser(THINK, opening, PLAIN_TEXT)
        parts = [*parser.parse_delta(text[:end]), *parser.parse_end(is_cut=True)]
        said = "".join(part.text for part in parts)  # type: ignore[union-attr]
        assert "a < bso".startswith(said)
    assert said == "a < bso"


@pytest.mark.parametrize("name", REASONING_FORMATS)
def test_random_texts_in_random_chunks(name: str) -> None:
    style, random_ = REASONING_FORMATS[name], random.Random(name)
    words = [style.start, style.end, *style.start[:5], style.end[:-1], " ", "\n", "a", "\t" * 70]
    for _ in range(300):
        text = "".join(random_.choices(words, k=random_.randrange(12)))
        for opening in (INSIDE, UNKNOWN):
            whole = read(ReasoningParser(style, opening, PLAIN_TEXT), [text])
            pieces, rest = [], text
            while rest:
                length = random_.randrange(1, 9)
                pieces.append(rest[:length])
                rest = rest[length:]
            cut = read(ReasoningParser(style, opening, PLAIN_TEXT), pieces)
            assert cut == whole, (text, pieces)


def test_reasoning_is_streamed_immediately() -> None:
    parser = ReasoningParser(THINK, UNKNOWN, PLAIN_TEXT)
    assert parser.parse_delta("<think>") == []
    assert parser.parse_delta("One") == [ReasoningText("One")]
    assert parser.parse_delta(" \n") == []
    assert parser.parse_delta("two <") == [ReasoningText(" \ntwo")]
    assert parser.parse_delta("/think>\n") == []
    assert parser.parse_delta("\nx") == [ContentText("x")]


@pytest.mark.parametrize("piece", [" ", "<", "x", "</think", "\n<"])
def test_only_a_marker_prefix_is_held_back(piece: str) -> None:
    held = ReasoningParser(THINK, INSIDE, PLAIN_TEXT)
    for _ in range(10_000):
        held.parse_delta(piece)
    assert len(held._buffer) <= MAX_BLANKS + 2 * len(THINK.end)


@pytest.mark.parametrize(
    ("name", "prompt", "continued", "opening"),
    [
        ("qwen3", "user\nhi\nassistant\n", "", UNKNOWN),
        ("qwen3", "user\n<think>\nassistant\n", "", UNKNOWN),
        ("qwen3", "assistant\n<think>\n", "", INSIDE),
        ("qwen3", "assistant\n<think>\n\n</think>\n\n", "", OutputStart.CONTENT),
        ("qwen3", "assistant\n<think>a", "<think>a", INSIDE),
        ("qwen3", "assistant\n<think>a</think>b", "<think>a</think>b", OutputStart.CONTENT),
        ("qwen3", "assistant\nb", "b", OutputStart.CONTENT),
        ("deepseek_r1", "assistant\n", "", INSIDE),
        ("deepseek_r1", "assistant\n</think>", "", OutputStart.CONTENT),
        ("none", "assistant\n<think>\n", "", OutputStart.CONTENT),
    ],
)
def test_the_end_of_the_prompt_decides_whether_output_starts_with_reasoning(
    name: str, prompt: str, continued: str, opening: OutputStart
) -> None:
    assert reasoning_format(name, None).output_start(prompt, continued) is opening


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, NO_REASONING),
        ("{{ messages }}", NO_REASONING),
        ("{{ '<think>\n\n</think>' }}", THINK),
        ("{{ content.split('</think>')[-1] }}", REASONING_FORMATS["deepseek_r1"]),
        ("{{ '[THINK]' + text + '[/THINK]' }}", REASONING_FORMATS["mistral"]),
        ("{{ '<think></think><answer>' }}", REASONING_FORMATS["hunyuan_a13b"]),
        ("{{ '<think></think><response>' }}", REASONING_FORMATS["granite33"]),
    ],
)
def test_auto_detects_the_format_from_the_template(template: str | None, style: object) -> None:
    assert reasoning_format("auto", template) == style
    assert reasoning_format("none", template) == NO_REASONING
    assert reasoning_format("qwen3", template) == THINK


def test_every_format_has_a_setting() -> None:
    assert {"auto", "none", *REASONING_FORMATS} == set(ReasoningParserName.__args__)  # type: ignore[attr-defined]
    assert FrontEndConfig().reasoning_parser == "auto"


class Spelled:
    """A detokenizer whose token ids index a list of texts."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def decode_token(self, token_id: int) -> str:
        return self._texts[token_id]

    def flush_text(self) -> str:
        return "…"


@pytest.mark.parametrize(
    ("opening", "texts", "number"),
    [
        (INSIDE, ["a", "b", "</think>", "c"], 2),
        (INSIDE, ["a", "b", "</", "think", ">\n", "c"], 2),
        (INSIDE, ["a", "b<", "/think>", "c"], 2),
        (INSIDE, ["a", "", "b"], 3),
        (INSIDE, ["a", "\n", "", "</", "think>", "", "c"], 3),
        (INSIDE, ["</think>"], 0),
        (INSIDE, ["<think>", "a", "</think>", "b"], 1),
        (INSIDE, [" ", "a", "</think>"], 2),
        (UNKNOWN, ["<think>", "a", "b", "</think>", "c"], 2),
        (UNKNOWN, ["\n", "<", "think", ">", "a", "</", "think>", "c"], 1),
        (UNKNOWN, ["<think>a", "</think>"], 1),
        (UNKNOWN, ["<think>", "a"], 1),
        (UNKNOWN, ["a", "<think>", "b", "</think>"], 0),
        (UNKNOWN, ["<", "a"], 0),
        (UNKNOWN, [], 0),
    ],
)
def test_reasoning_tokens_are_counted(opening: OutputStart, texts: list[str], number: int) -> None:
    counting = ReasoningTokenCounter(Spelled(texts), THINK, opening)
    assert [counting.decode_token(each) for each in range(len(texts))] == texts
    assert counting.num_tokens == number
    assert counting.flush_text() == "…"


def test_special_tokens_that_are_markers_have_text() -> None:
    inner: Detokenizer = Spelled(["a", "", "b"])
    marked = MarkerDetokenizer(inner, {1: "[THINK]"})
    assert [marked.decode_token(each) for each in range(3)] == ["a", "…[THINK]", "b"]
    assert marked.flush_text() == "…"
