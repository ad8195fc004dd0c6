"""What is asked while processes die.

Prompts that share a beginning, greedy, seeded and several choices, of three priorities,
one that ends at a stop string, some that keep to a grammar. Each is asked over and over, so its
answer is known.
"""

from typing import Any, Final

SHARED: Final = (
    "The lighthouse keeper wrote in his log every evening, whatever the weather was, and what he "
    "wrote was read by nobody. He noted the wind, the swell, and the ships that he had seen. "
)
_LONG: Final = SHARED * 6
_GREEDY: Final = (
    "Once upon a time",
    "The capital of France is",
    SHARED + "On Monday",
    "1 2 3",
    _LONG + "In spring",
)
_SEEDED: Final = (
    "My name is",
    SHARED + "On Friday",
    "In the year 1900",
    "To",
    _LONG + "In autumn",
)
_SEVERAL: Final = (("Two roads diverged in", 2), (SHARED + "That night", 3), ("Roses are", 2))
_WORDS: Final = "([a-z]{2,9}[ ,]){1000}"
_LINES: Final = {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000}
"""Grammars that no answer here completes."""


def bodies(num_tokens: int) -> list[dict[str, Any]]:
    """The requests; each choice gets so many tokens, but where it stops."""
    asked: list[dict[str, Any]] = [{"prompt": text, "temperature": 0} for text in _GREEDY]
    asked += [
        {"prompt": text, "temperature": 0.8, "seed": seed} for seed, text in enumerate(_SEEDED)
    ]
    asked += [{"prompt": text, "temperature": 0.9, "seed": 70 + n, "n": n} for text, n in _SEVERAL]
    asked.append({"prompt": "A, B, C, D,", "temperature": 0, "stop": [" M"]})
    asked += [
        {"prompt": "They wrote", "seed": seed, "ignore_eos": False, "structured_outputs": grammar}
        for seed, grammar in enumerate(({"regex": _WORDS}, {"json": _LINES}))
    ]
    return [
        {"max_tokens": num_tokens, "ignore_eos": True, "return_token_ids": True}
        | {"priority": number % 3}
        | each
        for number, each in enumerate(asked)
    ]
