"""22 prompts of 1 to 1,100 tokens from files of the Python installation."""

import argparse
import inspect
import textwrap

LENGTHS = [1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 50, 64, 100, 127, 128]
LENGTHS += [200, 256, 400, 511, 513, 1100]
NUM_OUTPUT_TOKENS = 64


def prompts(encode: object) -> list[list[int]]:
    """Token ids of the prompts; odd ones start in the middle of the text, so few share a prefix."""
    assert callable(encode)
    token_ids = list(encode(source_text()))
    assert len(token_ids) > 8000
    return [
        token_ids[(i % 2) * 97 * i : (i % 2) * 97 * i + length] for i, length in enumerate(LENGTHS)
    ]


def source_text() -> str:
    """More than 8,000 tokens of English and code."""
    return inspect.getsource(argparse) + inspect.getsource(textwrap)
