"""The alphabet of byte-level tokenizers (Radford et al. 2019, GPT-2)."""

from typing import Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = sorted({*range(0x100)} - {*_PRINTABLE})
BYTE_LETTERS: Final = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(0x100 + rank) for rank, byte in enumerate(_OTHERS)
}
"""Byte → letter: printable Latin-1 characters stand for themselves; the characters from U+0100 on
stand for the other bytes, in order."""
LETTER_BYTES: Final = {letter: byte for byte, letter in BYTE_LETTERS.items()}
