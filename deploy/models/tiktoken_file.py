"""Builds tokenizer.json from tiktoken.model, as Kimi K2 is published, without code of the model.

A line of the file is `base64(token) rank`. What else makes the tokenizer is in the model's code
(tokenization_kimi.py): the ids from the number of ranks on are special tokens, which
tokenizer_config.json names in added_tokens_decoder, and the regex of the pieces is a constant,
which is known here by the name of the class.
"""

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from deploy.models.gguf_tokenizer import KIMI_K2_PIECES, byte_level_bpe
from deploy.models.prepared_folder import as_model_error
from proto.byte_level import BYTE_LETTERS
from proto.errors import ModelError, shown
from proto.messages.prepared_model import read_model_file

FILE_NAME: Final = "tiktoken.model"

_PIECES: Final[Mapping[str, str]] = {"TikTokenTokenizer": KIMI_K2_PIECES}
"""Class in tokenizer_config.json → regex of the pieces within which tokens merge; that of Kimi is
`pat_str` in https://huggingface.co/moonshotai/Kimi-K2-Instruct/blob/main/tokenization_kimi.py."""
_MAX_TOKEN_BYTES: Final = 1024
"""Longest token whose merges are searched, which takes time with the square of its length."""
_MAX_SPECIAL_TOKENS: Final = 1 << 16


def convert(folder: Path, tokenizer_config: Mapping[str, Any]) -> bytes:
    """Return tokenizer.json of a folder that has tiktoken.model.

    Raises ModelError naming the file for a class of tokenizers that is not known, and for invalid
    ranks or special tokens.
    """
    class_name = tokenizer_config.get("tokenizer_class")
    pieces = _PIECES.get(class_name) if isinstance(class_name, str) else None
    if pieces is None:
        raise ModelError(
            f"{folder} has {FILE_NAME} and no tokenizer.json, and tokenizer_class in its "
            f"tokenizer_config.json is {shown(class_name)}: known is {', '.join(_PIECES)}"
        )
    path = folder / FILE_NAME
    ranks = _read_ranks(path)
    special = _special_tokens(folder / "tokenizer_config.json", tokenizer_config, len(ranks))
    with as_model_error(f"{path} cannot be converted to tokenizer.json"):
        return _tokenizer_json(path, ranks, special, pieces)


def _read_ranks(path: Path) -> dict[bytes, int]:
    """Return token → rank: each rank from 0 on once, and all tokens of one byte."""
    try:
        lines = read_model_file(path).splitlines()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            ranks[token] = int(rank)
        except ValueError:
            raise ModelError(f"{path}: line {number} is not `base64(token) rank`") from None
        if not 0 < len(token) <= _MAX_TOKEN_BYTES:
            raise ModelError(
                f"{path}: line {number} has a token of {len(token)} bytes; "
                f"supported are 1 to {_MAX_TOKEN_BYTES}"
            )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelError(f"{path} must have each token and each rank from 0 on once")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ModelError(f"{path} has no token for the byte {missing[0]}")
    return ranks


def _special_tokens(
    path: Path, tokenizer_config: Mapping[str, Any], first: int
) -> list[tuple[str, bool]]:
    """Return the tokens after the ranks in the order of their ids, and whether each is special.

    Ids without a name before the last named one are reserved.
    """
    named: Any = tokenizer_config.get("added_tokens_decoder", {})
    if not isinstance(named, dict):
        raise ModelError(f"{path}: added_tokens_decoder must be an object")
    tokens: dict[int, tuple[str, bool]] = {}
    for key, token in named.items():
        content = token.get("content") if isinstance(token, dict) else None
        number = int(key) if key.isdecimal() and len(key) < 10 else -1
        if not isinstance(content, str) or not content:
            raise ModelError(f"{path}: added_tokens_decoder has no content for {shown(key)}")
        if not first <= number < first + _MAX_SPECIAL_TOKENS:
            raise ModelError(
                f"{path}: added_tokens_decoder has the id {shown(key)}, and those after the ranks "
                f"of {FILE_NAME} begin with {first}"
            )
        tokens[number] = content, token.get("special", True) is not False
    return [
        tokens.get(number, (f"<|reserved_token_{number}|>", True))
        for number in range(first, max(tokens, default=first - 1) + 1)
    ]


def _tokenizer_json(
    path: Path, ranks: Mapping[bytes, int], special: list[tuple[str, bool]], pieces: str
) -> bytes:
    from tokenizers import AddedToken

    vocabulary = {_in_letters(token): rank for token, rank in ranks.items()}
    tokenizer = byte_level_bpe(vocabulary, _merges(ranks), [pieces], is_whole=True)
    tokenizer.add_tokens(
        [AddedToken(content, normalized=False, special=hidden) for content, hidden in special]
    )
    for number, (content, _) in enumerate(special, len(ranks)):
        if tokenizer.token_to_id(content) != number:
            raise ModelError(
                f"{path.parent / 'tokenizer_config.json'}: added_tokens_decoder names "
                f"{shown(content)} for {number}, which is another token's name too"
            )
    text: str = tokenizer.to_str()
    return text.encode()


def _merges(ranks: Mapping[bytes, int]) -> list[tuple[str, str]]:
    """Return all ways to make a token of two others, by the rank of the token.

    tiktoken merges two neighbours if they are a token together, those of the lowest rank first.
    """
    merges = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        found = [split for split in splits if split[0] in ranks and split[1] in ranks]
        found.sort(key=lambda split: (ranks[split[0]], ranks[split[1]]))
        merges += [(_in_letters(left), _in_letters(right)) for left, right in found]
    return merges


def _in_letters(token: bytes) -> str:
    """Return a token in GPT-2's letters, one for each byte."""
    return "".join(map(BYTE_LETTERS.__getitem__, token))
