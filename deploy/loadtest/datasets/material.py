"""What random prompts are made of: token ids, or words for servers that take no ids.

The words are such that nearly every tokenizer has each of them, with the space before it, as
one token: a text of n words is about n tokens, and the server's own count is what is reported.
"""

import random
from typing import Final

from deploy.loadtest.openai.client import CHAT, COMPLETIONS, Ask

LOWEST_TOKEN_ID: Final = 1000
HIGHEST_TOKEN_ID: Final = 30_000
"""Plain tokens in any vocabulary of the usual size: special ones lie at the ends."""

_WORDS: Final = (
    "the of and to in is was for on as with by at from his her that it he she they we you this "
    "have had are were been has not but or an which their one all there when who will more no "
    "if out so said what up its about into than them can only other new some could time these "
    "two may then do first any my now such like our over man me even most made after also did "
    "many before must through back years where much your way well down should because each just "
    "those people how too little state good very make world still own see men work long get here "
    "between both life being under never day same another know while last might us great old "
    "year off come since against go came right used take three house water small city road door "
    "light night white black green red blue high low open close early late north south east west"
)
WORDS: Final = tuple(_WORDS.split())

Prompt = list[int] | str


class TokenIds:
    """Prompts as lists of token ids, which any count is exact of."""

    def __init__(self, lowest: int = LOWEST_TOKEN_ID, highest: int = HIGHEST_TOKEN_ID) -> None:
        self._ids = range(lowest, highest + 1)

    def prompt(self, rng: random.Random, number: int) -> list[int]:
        return rng.choices(self._ids, k=number)


class Words:
    """Prompts as text."""

    def prompt(self, rng: random.Random, number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))


Material = TokenIds | Words


def joined(first: Prompt, second: Prompt) -> Prompt:
    """One prompt of two of a kind."""
    if isinstance(first, str):
        assert isinstance(second, str)
        return f"{first} {second}" if first and second else first + second
    assert isinstance(second, list)
    return first + second


def ask_for(
    prompt: Prompt, output_tokens: int, *, checked: bool = False, chat: bool = False
) -> Ask:
    """A completion of the prompt, or a chat of one message, which must be text."""
    if chat:
        assert isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}]
        return Ask(CHAT, {"messages": messages}, output_tokens, checked)
    return Ask(COMPLETIONS, {"prompt": prompt}, output_tokens, checked)
