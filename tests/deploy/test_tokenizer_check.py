"""A tokenizer that multiplies texts or takes very long is refused by the name of its part."""

import base64
import json
import subprocess
import sys
from typing import Any

import pytest

from deploy.models import tokenizer_check
from deploy.models.tokenizer_check import check
from proto.errors import ModelError

BYTE_LEVEL = {
    **{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
}


def tokenizer(**parts: Any) -> bytes:
    """A tokenizer of single characters with other parts."""
    vocabulary = {chr(code): code for code in range(256)}
    given = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": []},
        **{"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }
    return json.dumps(given | parts).encode()


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def split(pattern: str) -> dict[str, Any]:
    return {
        **{"type": "Split", "pattern": {"Regex": pattern}},
        **{"behavior": "Isolated", "invert": False},
    }


def template(pieces: list[Any], ids: list[int]) -> dict[str, Any]:
    token = {"id": "x", "ids": ids, "tokens": ["a"] * len(ids)}
    return {
        **{"type": "TemplateProcessing", "single": pieces, "pair": [text_piece("A")]},
        "special_tokens": {"x": token},
    }


def text_piece(name: str) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}


SPECIAL = {"SpecialToken": {"id": "x", "type_id": 0}}


def charmap(text: bytes) -> dict[str, Any]:
    data = (4).to_bytes(4, "little") + b"\0" * 4 + text + b"\0"
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(data).decode()}


def sequence(name: str, parts: list[Any]) -> dict[str, Any]:
    return {"type": "Sequence", name: parts}


MULTIPLYING: dict[str, tuple[dict[str, Any], str]] = {
    "a long replacement": ({"normalizer": replace("a", "b" * 100_000)}, "normalizer: Replace"),
    "forty replacements": (
        {"normalizer": sequence("normalizers", [replace("a", "aa")] * 40)},
        "normalizer: Replace",
    ),
    "nested sequences": (
        {
            "normalizer": sequence(
                "normalizers", [sequence("normalizers", [replace("a", "aa")] * 2)] * 10
            )
        },
        "normalizer: Replace",
    ),
    "a regular expression": (
        {
            "normalizer": {
                **{"type": "Replace", "pattern": {"Regex": ""}},
                "content": "b" * 100,
            }
        },
        "normalizer: Replace",
    ),
    "a prefix": ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "Prepend: prepend"),
    "a character map": ({"normalizer": charmap(b"x" * 10**6)}, "normalizer: Precompiled"),
    "two character maps": (
        {"normalizer": sequence("normalizers", [charmap(b"x" * 60)] * 2)},
        "normalizer: Precompiled: more than one",
    ),
    "many parts": ({"normalizer": sequence("normalizers", [{"type": "NFC"}] * 1000)}, "parts"),
    "byte levels": (
        {"pre_tokenizer": sequence("pretokenizers", [BYTE_LEVEL] * 30)},
        "ByteLevel",
    ),
    "a decoder": (
        {"decoder": sequence("decoders", [replace("a", "aa")] * 40)},
        "decoder: Replace",
    ),
    "padding": (
        {
            "padding": {
                **{"strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None},
                **{"pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
            }
        },
        "padding",
    ),
    "a stride": (
        {
            "truncation": {
                **{"direction": "Right", "max_length": 10_000, "strategy": "LongestFirst"},
                "stride": 9_999,
            }
        },
        "truncation",
    ),
    "a repeated text": (
        {"post_processor": template([text_piece("A")] * 1000, [1])},
        "post_processor",
    ),
    "many special tokens": (
        {"post_processor": template([text_piece("A"), *[SPECIAL] * 1000], [1] * 1000)},
        "post_processor",
    ),
    "long words": (
        {
            "model": {
                **{"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a"},
                **{"continuing_subword_prefix": "##", "max_input_chars_per_word": 10**9},
            }
        },
        "max_input_chars_per_word",
    ),
    "long tokens": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "b" * 10**5: 1}, "unk_token": "a"}},
        "model: a token",
    ),
    "long added tokens": (
        {"added_tokens": [{"id": 0, "content": "a" * 10**5, "special": True}]},
        "added_tokens",
    ),
    "long pieces": (
        {"model": {"type": "Unigram", "unk_id": 0, "vocab": [["a", 0.0], ["a" * 10**5, 0.0]]}},
        "piece",
    ),
}


@pytest.mark.parametrize("kind", MULTIPLYING)
def test_parts_that_multiply_are_refused_by_name(kind: str, monkeypatch) -> None:
    """Before the library reads the file."""
    monkeypatch.setattr(tokenizer_check, "_probe", lambda *arguments: pytest.fail("it was loaded"))
    parts, named = MULTIPLYING[kind]
    with pytest.raises(ModelError, match=named):
        check(tokenizer(**parts), "m: tokenizer")


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"a*a*b",
        r"a*b",
        r"(?<=zxqv)(x+x+)+y",
        r"zx(?:qv|q|v)*w",
        r"(\p{L}|é)+\p{N}",
        r"([a-c]|[b-d])*e",
    ],
)
def test_regular_expressions_that_never_end_are_refused(pattern: str) -> None:
    with pytest.raises(ModelError, match=r"pre_tokenizer.*(takes more than|retry-limit)"):
        check(tokenizer(pre_tokenizer=split(pattern)), "m: tokenizer")


def replace_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Let another program try the parts of a tokenizer."""
    run = subprocess.run

    def run_instead(command: list[str], **options: Any) -> Any:
        return run([sys.executable, "-c", program], **options)

    monkeypatch.setattr(subprocess, "run", run_instead)


def test_many_regular_expressions_have_one_budget_of_time(monkeypatch) -> None:
    replace_program(
        monkeypatch,
        "import sys; from deploy.models import tokenizer_check as check; "
        "check.ALL_PROBES_SECONDS = 0.5; sys.exit(check.main())",
    )
    patterns = ["|".join(f"x{number}{each}+" for each in "abcdefgh") for number in range(20)]
    pre_tokenizer = sequence("pretokenizers", list(map(split, patterns)))
    with pytest.raises(ModelError, match=r"pre_tokenizer: it takes more than 0\.5 s in all"):
        check(tokenizer(pre_tokenizer=pre_tokenizer), "m: tokenizer")


HONEST = (
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


def test_regular_expressions_of_known_models_pass() -> None:
    parts = [*map(split, HONEST), BYTE_LEVEL]
    normalizers = [{"type": "NFKC"}, replace(" ", "▁"), charmap("صلى الله عليه وسلم".encode())]
    decoders = [replace("▁", " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    given = tokenizer(
        pre_tokenizer=sequence("pretokenizers", parts),
        normalizer=sequence("normalizers", normalizers[:2]),
        decoder=sequence("decoders", decoders),
        post_processor=template([SPECIAL, text_piece("A"), SPECIAL], [1]),
    )
    check(given, "m: tokenizer")


def test_repetitions_are_found_after_what_comes_before_them() -> None:
    pumps = tokenizer_check._pumps(r"(?<=zx)(?:qv|\p{N}[^\s\p{L}])+w|(?:ab){3}c*")
    assert ("zx", "qv") in pumps
    assert ("zx", "01") in pumps
    assert ("ababab", "c") in pumps
    assert tokenizer_check._pumps("(((") == []


def test_a_file_that_ends_the_process_is_refused(monkeypatch) -> None:
    replace_program(
        monkeypatch,
        "import os, sys; sys.stdin.read(); print('the file', flush=True); os.abort()",
    )
    with pytest.raises(ModelError, match="the file takes too much memory or ends its process"):
        check(tokenizer(), "m: tokenizer")


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"[" * 10_000, b'{"model": 3}', b"\xff"])
def test_other_files_are_refused(text: bytes) -> None:
    with pytest.raises(ModelError):
        check(text, "m: tokenizer")
