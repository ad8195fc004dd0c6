"""The vocabulary o200k of the gpt-oss models, from the data of the package `quicktok-v1`.

The library `openai-harmony` checks its hash.
"""

import importlib.util
from pathlib import Path
from typing import Final

from api_server.text.harmony import vocabulary_file
from proto.byte_level import BYTE_LETTERS

SPECIAL_TOKENS: Final = (
    "<|startoftext|>",
    "<|endoftext|>",
    "<|reserved_200000|>",
    "<|reserved_200001|>",
    "<|return|>",
    "<|constrain|>",
    "<|reserved_200004|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    *(f"<|reserved_{token_id}|>" for token_id in (200009, 200010, 200011)),
    "<|call|>",
)
"""The special tokens of gpt-oss from id 199998 on."""


def o200k_ranks() -> dict[str, int] | None:
    """Return byte-level token → id; None if the package is not installed.

    Its file: the number of tokens (4 bytes); for each token its length (2 bytes), its bytes, its id
    (4 bytes).
    """
    found = importlib.util.find_spec("quicktok")
    if found is None or found.origin is None:
        return None
    data = Path(found.origin).parent.joinpath("data", "o200k.vocab").read_bytes()
    ranks, position = {}, 4
    while position < len(data):
        start = position + 2
        end = start + int.from_bytes(data[position:start], "little")
        token = "".join(map(BYTE_LETTERS.__getitem__, data[start:end]))
        position = end + 4
        ranks[token] = int.from_bytes(data[end:position], "little")
    assert len(ranks) == int.from_bytes(data[:4], "little")
    return ranks


def write_vocabulary(folder: Path) -> bool:
    """Write the library's file into a folder; return False without the package."""
    ranks = o200k_ranks()
    if ranks is not None:
        (folder / "o200k_base.tiktoken").write_bytes(vocabulary_file(ranks))
    return ranks is not None
