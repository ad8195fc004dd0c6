"""The texts whose tokens are predicted: prose and code that every installation of Python has.

Owns what they are. They are the same on each machine with the same Python, and their digest
stands beside every figure, for those that have another one.
"""

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from proto.errors import ConfigError

PROSE: Final = ("execmodel", "import", "objects", "attribute-access", "strings")
"""Chapters of Python's language reference, as its help() has them."""
CODE: Final = ("heapq.py", "textwrap.py", "shelve.py", "fractions.py")
"""Modules of the standard library."""
CHARACTERS_OF_EACH: Final = 20_000
"""Of prose, and of code."""
PIECE: Final = 3_000
"""Characters that are sent as one prompt: some 700 tokens."""


@dataclass(frozen=True)
class Text:
    """A kind of text, in pieces."""

    kind: str
    pieces: tuple[str, ...]


def default_texts() -> list[Text]:
    """Prose and code; raises ConfigError where this Python came without its library's sources."""
    return [_text("prose", _prose()), _text("code", _code())]


def text_of(path: Path) -> Text:
    """A file of one's own; raises ConfigError when it cannot be read."""
    try:
        return _text(path.name, path.read_text("utf-8"), None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text {path}: {error}", "text") from None


def digest(texts: list[Text]) -> str:
    """SHA-256 over all pieces, in hex."""
    whole = hashlib.sha256()
    for text in texts:
        for piece in text.pieces:
            whole.update(piece.encode() + b"\0")
    return whole.hexdigest()


def _text(kind: str, content: str, limit: int | None = CHARACTERS_OF_EACH) -> Text:
    content = content[:limit]
    starts = range(0, len(content), PIECE)
    return Text(kind, tuple(content[start : start + PIECE] for start in starts))


def _prose() -> str:
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in PROSE if name in topics)


def _code() -> str:
    library = Path(sysconfig.get_path("stdlib"))
    try:
        return "\n".join((library / name).read_text("utf-8") for name in CODE)
    except OSError as error:
        raise ConfigError(f"the texts are part of Python's library: {error}") from None
