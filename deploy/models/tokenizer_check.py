"""Refuses a tokenizer.json whose parts multiply texts, or take very long for some.

The file of a model that is not trusted could pad each prompt to a billion tokens, replace each
character by a million others, or split texts by a regular expression that never ends. `check` looks
at what its parts say, and then has them process texts that are hard for its regular expressions, in
a process with limits of time and memory:

    python -m deploy.models.tokenizer_check < tokenizer.json

That process prints the part that it is about to try, so that the part at which it was ended is
known.
"""

import base64
import binascii
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from proto.errors import ModelError, shown
from proto.runtime.host_resources import process_limits

MAX_PARTS: Final = 64
"""Of a normalizer, pre-tokenizer, post-processor or decoder."""
MAX_GROWTH: Final = 8
"""How many times longer all replacements of a normalizer or decoder together make a text."""
MAX_CHARMAP_BYTES: Final = 64
"""Longest replacement of one character in a character map; that of Unicode's NFKC has 33 bytes."""
MAX_BYTE_LEVELS: Final = 2
"""Each changes every byte into a character of two bytes."""
MAX_ADDED_TOKENS: Final = 1024
"""Tokens that post-processors add to a prompt."""
MAX_PADDING: Final = 1 << 16
"""Length to which short prompts are padded."""
MAX_WINDOWS: Final = 64
"""Overlapping windows of a truncated text that may contain the same token."""
MAX_WORD_CHARACTERS: Final = 1024
"""Longest word of WordPiece and piece of Unigram: the time for a character grows with it."""
MAX_TOKEN_CHARACTERS: Final = 4096
"""Longest token of other vocabularies, and longest added token: a text may be full of it."""
MAX_AFFIX: Final = 256
"""Characters that are put before or after a text or a word."""
PROBE_CHARACTERS: Final = 1 << 15
PROBE_SECONDS: Final = 1.0
"""Processor time for a text of PROBE_CHARACTERS; an ordinary part takes about 0.02 s."""
MAX_PROBES: Final = 256
ALL_PROBES_SECONDS: Final = 20.0
"""Processor time for all texts; those of an ordinary regular expression take about 0.2 s."""
LOAD_SECONDS: Final = 60.0
PROBE_MEMORY: Final = 2 << 30
MAX_TOKENS: Final = 8
"""Tokens of a probe for each of its characters, in addition to MAX_ADDED_TOKENS."""

_PANIC: Final = "PanicException"
_LISTS: Final = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}


def check(tokenizer_json: bytes, where: str, *, is_converted: bool = False) -> None:
    """Raise ModelError naming the part of a tokenizer.json that is refused.

    where: begin of the message. is_converted: our own code has made the file of a vocabulary, so
    that only what its parts say is checked.
    """
    try:
        tokenizer = json.loads(tokenizer_json)
        if not isinstance(tokenizer, dict):
            raise _Refused("it is no object")
        parts = {name: list(_parts(tokenizer.get(name), name)) for name in _LISTS}
        _check_settings(tokenizer)
        _check_replacements([*parts["normalizer"], *parts["pre_tokenizer"]], "normalizer")
        _check_replacements(parts["decoder"], "decoder")
        _check_post_processors(parts["post_processor"])
        _check_model(tokenizer.get("model"))
        _check_added_tokens(tokenizer.get("added_tokens"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where}: {shown(error)}") from None
    if not is_converted:
        _probe(tokenizer_json, where)


class _Refused(ValueError):
    """A part of a tokenizer is refused, or has failed; the message is for the user."""


def _parts(value: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the parts of a component, those within sequences too."""
    rest, count = [value], 0
    while rest:
        part = rest.pop(0)
        if not isinstance(part, dict):
            continue
        count += 1
        if count > MAX_PARTS:
            raise _Refused(f"{name}: it has more than {MAX_PARTS} parts")
        inner = part.get(_LISTS[name])
        if part.get("type") == "Sequence" and isinstance(inner, list):
            rest = [*inner[: MAX_PARTS + 1], *rest]
        else:
            yield part


def _check_settings(tokenizer: Mapping[str, Any]) -> None:
    padding, truncation = tokenizer.get("padding"), tokenizer.get("truncation")
    if isinstance(padding, dict):
        strategy = padding.get("strategy")
        fixed = strategy.get("Fixed") if isinstance(strategy, dict) else 0
        if _number(fixed) > MAX_PADDING or _number(padding.get("pad_to_multiple_of")) > MAX_PADDING:
            raise _Refused(f"padding: it fills prompts up to more than {MAX_PADDING} tokens")
    if isinstance(truncation, dict):
        length, stride = _number(truncation.get("max_length")), _number(truncation.get("stride"))
        if stride and length > MAX_WINDOWS * (length - stride):
            raise _Refused(f"truncation: the stride {stride} repeats each token too often")


def _number(value: Any) -> int:
    return value if type(value) is int else 0


def _check_replacements(parts: Sequence[Mapping[str, Any]], component: str) -> None:
    """Refuse parts that together make a text many times longer."""
    growth, byte_levels, charmaps = 1.0, 0, 0
    for part in parts:
        kind = part.get("type")
        for key in ("prepend", "content", "prefix", "replacement"):
            if kind != "Replace" and len(_text(part.get(key))) > MAX_AFFIX:
                raise _Refused(f"{component}: {kind}: {key} is longer than {MAX_AFFIX} characters")
        if kind == "Replace":
            pattern = part.get("pattern")
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            content = len(_text(part.get("content")))
            growth *= max(1.0, content / max(1, len(_text(replaced))))
            if growth > MAX_GROWTH:
                raise _Refused(
                    f"{component}: Replace: its replacements make texts more than {MAX_GROWTH} "
                    "times as long"
                )
        elif kind == "Precompiled":
            longest = _longest_replacement(_text(part.get("precompiled_charsmap")))
            charmaps += 1
            if charmaps > 1:
                raise _Refused(f"{component}: Precompiled: more than one of them")
            if longest > MAX_CHARMAP_BYTES:
                raise _Refused(
                    f"{component}: Precompiled: a character becomes {longest} bytes; at most "
                    f"{MAX_CHARMAP_BYTES} are supported"
                )
        elif kind == "ByteLevel":
            byte_levels += 1
            if byte_levels > MAX_BYTE_LEVELS:
                raise _Refused(f"{component}: ByteLevel: more than {MAX_BYTE_LEVELS} of them")


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _longest_replacement(charmap: str) -> int:
    """Return the bytes of the longest text in a character map of SentencePiece.

    The map is the length of a trie in bytes, the trie, and texts that end with a zero each.
    """
    try:
        data = base64.b64decode(charmap, validate=True)
    except binascii.Error:
        raise _Refused("normalizer: Precompiled: the character map is not in base64") from None
    texts = data[4 + int.from_bytes(data[:4], "little") :]
    return max(map(len, texts.split(b"\0")), default=0)


def _check_post_processors(parts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse templates that repeat a text or add many tokens."""
    added = 0
    for part in parts:
        if part.get("type") != "TemplateProcessing":
            continue
        tokens = part.get("special_tokens")
        lengths = {
            name: len(token["ids"])
            for name, token in (tokens.items() if isinstance(tokens, dict) else ())
            if isinstance(token, dict) and isinstance(token.get("ids"), list)
        }
        of_template = 0
        for key in ("single", "pair"):
            pieces = [piece for piece in part.get(key) or () if isinstance(piece, dict)]
            texts = [str(piece["Sequence"].get("id")) for piece in pieces if _is(piece, "Sequence")]
            if len(set(texts)) < len(texts):
                raise _Refused("post_processor: TemplateProcessing: it repeats the text")
            names = [
                piece["SpecialToken"].get("id") for piece in pieces if _is(piece, "SpecialToken")
            ]
            of_template = max(of_template, sum(lengths.get(str(name), 1) for name in names))
        added += of_template
        if added > MAX_ADDED_TOKENS:
            raise _Refused(
                f"post_processor: TemplateProcessing: it adds more than {MAX_ADDED_TOKENS} tokens"
            )


def _is(piece: Mapping[str, Any], kind: str) -> bool:
    return isinstance(piece.get(kind), dict)


def _check_model(model: Any) -> None:
    """Refuse a model whose time grows with the square of a word, or with very long tokens."""
    if not isinstance(model, dict):
        return
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if len(_text(model.get(key))) > MAX_AFFIX:
            raise _Refused(f"model: {key} is longer than {MAX_AFFIX} characters")
    if _number(model.get("max_input_chars_per_word")) > MAX_WORD_CHARACTERS:
        raise _Refused(
            f"model: max_input_chars_per_word is more than {MAX_WORD_CHARACTERS} characters"
        )
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, list):  # of Unigram
        pieces = (piece[0] for piece in vocabulary if isinstance(piece, list) and piece)
        if max((len(_text(piece)) for piece in pieces), default=0) > MAX_WORD_CHARACTERS:
            raise _Refused(f"model: a piece is longer than {MAX_WORD_CHARACTERS} characters")
    elif isinstance(vocabulary, dict) and max(map(len, vocabulary), default=0) > (
        MAX_TOKEN_CHARACTERS
    ):
        raise _Refused(f"model: a token is longer than {MAX_TOKEN_CHARACTERS} characters")


def _check_added_tokens(tokens: Any) -> None:
    for token in tokens if isinstance(tokens, list) else ():
        if isinstance(token, dict) and len(_text(token.get("content"))) > MAX_TOKEN_CHARACTERS:
            raise _Refused(f"added_tokens: one is longer than {MAX_TOKEN_CHARACTERS} characters")


def _probe(tokenizer_json: bytes, where: str) -> None:
    """Have the parts of a tokenizer process hard texts in another process."""
    process = subprocess.run(
        [sys.executable, "-P", "-m", "deploy.models.tokenizer_check"],
        input=tokenizer_json,
        capture_output=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
        check=False,
    )
    *_, last = process.stdout.decode(errors="replace").splitlines() or [""]
    if process.returncode == 0 and last == _DONE:
        return
    if process.returncode == 2:
        raise ModelError(f"{where}: {last}")
    reason = f"takes more than {PROBE_SECONDS:g} s for {PROBE_CHARACTERS} characters"
    if process.returncode != -signal.SIGPROF:
        reason = "takes too much memory or ends its process"
    raise ModelError(f"{where}: {last or 'the library'} {reason}")


# In the process that tries the parts.


_DONE: Final = "done"


def main() -> int:
    """Try the tokenizer on standard input; print its parts and last the error, if there is one."""
    warnings.simplefilter("ignore")
    try:
        with process_limits(LOAD_SECONDS, PROBE_MEMORY):
            _try_parts(sys.stdin.buffer.read().decode())
    except _Refused as error:
        print(error, flush=True)
        return 2
    print(_DONE, flush=True)
    return 0


def _try_parts(text: str) -> None:
    from tokenizers import Tokenizer

    with _step("the file"):
        tokenizer = Tokenizer.from_str(text)
    end = time.process_time() + ALL_PROBES_SECONDS
    tokenizer.no_truncation()
    tokenizer.no_padding()
    parsed = json.loads(text)
    for component in ("normalizer", "pre_tokenizer", "decoder"):
        part = getattr(tokenizer, component)
        if part is None:
            continue
        for probe in _probes(parsed.get(component)):
            if time.process_time() > end:
                raise _Refused(f"{component}: it takes more than {ALL_PROBES_SECONDS:g} s in all")
            with _step(component):
                if component == "normalizer":
                    part.normalize_str(probe)
                elif component == "pre_tokenizer":
                    part.pre_tokenize_str(probe)
                else:
                    part.decode([probe])
    for probe in ("", "a", "Once upon a time, é 123 🦙\n" * 40, "\0" * 100):
        with _step("the tokenizer"):
            for added in (False, True):
                ids = tokenizer.encode(probe, add_special_tokens=added).ids
                if len(ids) > MAX_TOKENS * len(probe.encode()) + MAX_ADDED_TOKENS:
                    raise _Refused(f"a text of {len(probe)} characters becomes {len(ids)} tokens")
            tokenizer.decode(ids, skip_special_tokens=False)


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Print what is about to be tried, and limit its time."""
    print(name, flush=True)
    if name != "the file":
        signal.setitimer(signal.ITIMER_PROF, PROBE_SECONDS)
    try:
        yield
    except _Refused:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise _Refused(f"{name}: {shown(' '.join(str(error).split()))}") from None


# Texts that are hard for regular expressions: for each repetition, what must come before it, then
# what it repeats, many times, and then something that it does not match.


_ORDINARY: Final = ("a", "A", " ", "1", ".", "\n", "é", "中", "ab", "a ", "\0")
_CLASSES: Final = {
    "L": "a-zA-Zé中", "Ll": "a-z", "Lu": "A-Z", "Lt": "ǅ", "Lm": "ʰ", "Lo": "中", "Letter": "a-z",
    "N": "0-9", "Nd": "0-9", "Nl": "Ⅷ", "No": "²", "P": "!-.", "S": "+$", "Z": " ", "Zs": " ",
    "M": "\u0301", "Mn": "\u0301", "C": "\0", "Han": "中", "Cc": "\0",
}  # fmt: skip
"""Property of Unicode → characters that have it, in the notation of a character class."""


def _probes(component: Any) -> Iterator[str]:
    """Yield the texts for a component.

    A text that is repeated ends with a character that is seldom matched; and then, since
    Oniguruma looks first for characters without which there is no match, with those of the pattern.
    """
    for text in _ORDINARY:
        yield text * (PROBE_CHARACTERS // len(text)) + "\0"
    for pattern in list(_patterns(component))[:MAX_PROBES]:
        literals = "".join(dict.fromkeys(re.findall(r"\w", pattern)))[:1000]
        for before, repeated in list(dict.fromkeys(_pumps(pattern)))[:MAX_PROBES]:
            text = before + repeated * (PROBE_CHARACTERS // len(repeated)) + "\0"
            yield text
            yield text + literals


def _patterns(value: Any) -> Iterator[str]:
    """Yield all regular expressions within a component."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from _patterns(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _patterns(inner)


def _pumps(pattern: str) -> list[tuple[str, str]]:
    """Return, for each repetition in a pattern, a text before it and a text that it repeats.

    Empty for a pattern that Python does not understand; then only ordinary texts are tried.
    """
    found: list[tuple[str, str]] = []
    with contextlib.suppress(Exception):
        _find_pumps(list(re._parser.parse(_translated(pattern))), "", found)  # type: ignore[attr-defined]
    return found


def _translated(pattern: str) -> str:
    """Return a pattern with properties of Unicode as characters that have them."""
    pieces, is_class = [], False
    for token in re.findall(r"\\[pP](?:\{\^?\w+\}|\w)|\\.|.", pattern, re.DOTALL):
        if token[:2] in (r"\p", r"\P"):
            is_negated = (token[1] == "P") != ("^" in token)
            name = token[2:].strip("{^}")
            characters = "!-/" if is_negated else _CLASSES.get(name, "a-z")
            pieces.append(characters if is_class else f"[{characters}]")
            continue
        if token == "[" and is_class:  # a set within a set
            token = r"\["
        elif token in ("[", "]"):
            is_class = token == "["
        pieces.append("0-9a-f" if token == r"\h" else token)
    return "".join(pieces)


def _find_pumps(items: list[Any], before: str, found: list[tuple[str, str]]) -> str:
    """Add the repetitions of a sequence to `found`; return a text that the sequence matches."""
    text = before
    for operator, value in items:
        name = str(operator)
        if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            least, most, inner = value
            for body in _examples(list(inner), 0):
                if body and int(most) > 1 and len(found) < MAX_PROBES:
                    found.append((text[:1000], body[:1000]))
            once = _find_pumps(list(inner), text, found)
            text += once[len(text) :] * min(int(least), 100)
        elif name == "BRANCH":
            ends = [_find_pumps(list(branch), text, found) for branch in value[1]]
            text = ends[0]
        elif name == "SUBPATTERN":
            text = _find_pumps(list(value[-1]), text, found)
        elif name == "ATOMIC_GROUP":
            text = _find_pumps(list(value), text, found)
        elif name in ("ASSERT", "ASSERT_NOT"):
            inside = _find_pumps(list(value[1]), text, found)
            if name == "ASSERT" and value[0] < 0:
                text = inside
        else:
            text += next(iter(_examples([(operator, value)], 0)), "")
    return text


def _examples(items: list[Any], depth: int) -> list[str]:
    """Return up to four texts that a sequence matches."""
    texts = [""]
    for operator, value in items:
        name = str(operator)
        choices = [""]
        if name == "LITERAL":
            choices = [chr(value)]
        elif name == "NOT_LITERAL":
            choices = ["a" if value != ord("a") else "b"]
        elif name == "ANY":
            choices = ["a"]
        elif name == "IN":
            choices = _members(value)
        elif depth > 50:
            pass
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            choices = [one * max(1, min(int(value[0]), 100)) for one in _inner(value[2], depth)]
        elif name == "BRANCH":
            choices = [one for branch in value[1] for one in _inner(branch, depth)[:2]]
        elif name == "SUBPATTERN":
            choices = _inner(value[-1], depth)
        elif name == "ATOMIC_GROUP":
            choices = _inner(value, depth)
        texts = [text + choice for text in texts for choice in choices[:4]][:4]
    return texts


def _inner(items: Any, depth: int) -> list[str]:
    return _examples(list(items), depth + 1)


def _members(items: Sequence[Any]) -> list[str]:
    """Return up to four members of a character class."""
    categories = {"CATEGORY_SPACE": " ", "CATEGORY_DIGIT": "1", "CATEGORY_WORD": "a"}
    given = [item for item in items if str(item[0]) != "NEGATE"]
    if len(given) < len(items):
        shape = {str(value) for name, value in given if str(name) == "CATEGORY"}
        literals = {chr(value) for name, value in given if str(name) == "LITERAL"}
        ranges = [value for name, value in given if str(name) == "RANGE"]
        return [
            each
            for each in "a 1.\n中é"
            if each not in literals
            and not any(low <= ord(each) <= high for low, high in ranges)
            and each not in {categories.get(category) for category in shape}
        ][:4] or [""]
    found = []
    for name, value in given:
        if str(name) == "LITERAL":
            found.append(chr(value))
        elif str(name) == "RANGE":
            found.append(chr(value[0]))
        else:
            found.append(categories.get(str(value), "."))
    return found[:4] or [""]


if __name__ == "__main__":
    sys.exit(main())
