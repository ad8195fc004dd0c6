"""A vocabulary of bytes and a few longer tokens, as a tokenizer.json."""

import json
from pathlib import Path

EOS = 0
SPECIAL = 1
LONGER = ('{"', '":', '": ', "true", "ab", "abc", "bc}", "<t", ">{")
"""Tokens of several bytes; some of them span the boundary of JSON elements."""


def _byte_characters() -> list[str]:
    """Return the character of every byte in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


BYTE = 2
"""Id of the byte 0; the others follow."""
SIZE = BYTE + 256 + len(LONGER)


def write_toy_tokenizer(folder: Path) -> Path:
    """Write a tokenizer.json in this folder; return its path."""
    characters = _byte_characters()
    spelled = ["".join(characters[byte] for byte in text.encode()) for text in LONGER]
    vocab = {"<eos>": EOS, "<special>": SPECIAL}
    vocab |= {each: BYTE + byte for byte, each in enumerate(characters)}
    vocab |= {each: BYTE + 256 + number for number, each in enumerate(spelled)}
    document = {
        "version": "1.0",
        "added_tokens": [
            {
                "id": vocab[name],
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for name in ("<eos>", "<special>")
        ],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        },
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document))
    return path


def text_of(token_ids: list[int]) -> str:
    """Return the text of the tokens, without end tokens."""
    text = b""
    for each in token_ids:
        if each >= BYTE + 256:
            text += LONGER[each - BYTE - 256].encode()
        elif each >= BYTE:
            text += bytes([each - BYTE])
    return text.decode()


def tokens_of(text: str) -> list[int]:
    """Return one token for each byte."""
    return [BYTE + byte for byte in text.encode()]
