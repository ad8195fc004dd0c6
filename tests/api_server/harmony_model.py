"""A toy model of the harmony format: a small tokenizer with harmony's special tokens."""

import tempfile
from functools import cache
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from api_server.parsers.harmony import MARK, MARKERS, Harmony, HarmonyParser
from api_server.parsers.output import OutputPart, ReasoningText, ToolCallArguments, ToolCallStart
from api_server.text import harmony
from api_server.text.harmony import HarmonyEncoding
from api_server.text.tokenizer import ModelTokenizer
from tests.api_server.conftest import byte_level_tokenizer
from tests.fakes.o200k import write_vocabulary

SOURCE = "{{ '<|channel|>analysis<|message|>' }}"
"""A chat template by which the format is detected."""


@cache
def library_encoding() -> HarmonyEncoding:
    """The library's encoding; skips the test without the vocabulary."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if not write_vocabulary(Path(folder)):
            pytest.skip("the vocabulary o200k is not installed")
        patch.setenv(harmony.VOCABULARY_FOLDER, folder)
        return harmony.load_encoding(Path(folder, "none"))


@cache
def harmony_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in MARKERS])
    return tokenizer


def harmony_of(tokenizer: Tokenizer) -> Harmony:
    return Harmony.for_tokenizer(library_encoding(), ModelTokenizer(tokenizer))


def marked(text: str) -> str:
    """Return an answer as the detokenizer gives it to the parser."""
    for name in MARKERS:
        text = text.replace(f"<|{name}|>", f"{MARK}<|{name}|>")
    return text


def read(pieces, names=("find", "now"), opening=None, *, is_cut=False) -> list[OutputPart]:
    parser = HarmonyParser(library_encoding(), opening, names)
    parts = [part for piece in pieces for part in parser.parse_delta(piece)]
    return [*parts, *parser.parse_end(is_cut=is_cut)]


def joined(parts) -> tuple[str, str, list[tuple[str, str]]]:
    """Return (reasoning, content, [(name, arguments)])."""
    reasoning, content, calls = "", "", []
    for part in parts:
        match part:
            case ToolCallStart(index, _, name):
                assert index == len(calls)
                calls.append((name, ""))
            case ToolCallArguments(index, text):
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case ReasoningText(text):
                reasoning += text
            case _:
                content += part.text
    return reasoning, content, calls
