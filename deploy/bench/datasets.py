"""A client's conversation with a server, and where its chances come from."""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from deploy.bench.client import CHAT, COMPLETIONS, Ask

# What random prompts are made of: token ids, or words for servers that take no ids.
#
# The words are such that nearly every tokenizer has each of them, with the space before it, as
# one token: a text of n words is about n tokens, and the server's own count is what is reported.


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


class Session(Protocol):
    """Requests of one client, each after the other's answer.

    needs_answers: later requests contain what the server answered.
    """

    needs_answers: bool

    def next_ask(self, answer: str) -> Ask | None:
        """What follows on this answer (empty at first); None when the session is over."""
        ...


class OneRequest:
    """A session of a single request."""

    needs_answers = False

    def __init__(self, ask: Ask) -> None:
        self._asks = [ask]

    def next_ask(self, answer: str) -> Ask | None:
        return self._asks.pop() if self._asks else None


@dataclass(frozen=True)
class Draws:
    """Chances of the sessions of a run: each has its own, so that their order is of no matter.

    Of every 1 / check_share sessions one is checked, the first among them. What is checked is
    the same whatever the seed is, and all else is new with each seed: answers can be compared
    between rounds, and few of the prompts of a round are in the server's cache.
    """

    seed: int
    check_share: float = 0.0

    def checked(self, index: int) -> bool:
        return math.ceil((index + 1) * self.check_share) > math.ceil(index * self.check_share)

    def rng(self, index: int) -> random.Random:
        """Of one session."""
        return random.Random(f"{self.name(index)}:{index}")

    def name(self, index: int) -> str:
        """Of the round that a session belongs to: those that are checked belong to all."""
        return "checked" if self.checked(index) else f"seed {self.seed}"


@dataclass(frozen=True)
class Sizes:
    """Tokens of a request: uniform from `mean * (1 - spread)`, rounded down, to
    `mean * (1 + spread)`, rounded up, and at least one, as `--random-range-ratio` of vLLM."""

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """(input, output)"""
        return self._one(rng, self.input_tokens), self._one(rng, self.output_tokens)

    def _one(self, rng: random.Random, mean: int) -> int:
        low, high = math.floor(mean * (1 - self.spread)), math.ceil(mean * (1 + self.spread))
        return rng.randint(max(1, low), max(1, high))


class Dataset(Protocol):
    """Where sessions come from."""

    def sessions(self, draws: Draws) -> Iterator[Session]:
        """In the order in which they begin; may be without end."""
        ...


# Prompts that have nothing in common, or only how they begin.


@dataclass(frozen=True)
class RandomPrompts:
    """None is like another."""

    sizes: Sizes
    material: Material
    chat: bool = False

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng, checked = draws.rng(index), draws.checked(index)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = self.material.prompt(rng, input_tokens)
            yield OneRequest(ask_for(prompt, output_tokens, checked=checked, chat=self.chat))


@dataclass(frozen=True)
class SharedPrefix:
    """Groups of prompts that begin alike; the sizes are those of what follows the prefix.

    prefix 0 | own        request 0
    prefix 1 | own        request 1
    prefix 0 | own        request 2, of two groups
    """

    sizes: Sizes
    material: Material
    num_groups: int
    prefix_tokens: int
    chat: bool = False

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng, checked = draws.rng(index), draws.checked(index)
            group = random.Random(f"{draws.name(index)}:prefix {index % self.num_groups}")
            prefix = self.material.prompt(group, self.prefix_tokens)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = joined(prefix, self.material.prompt(rng, input_tokens))
            yield OneRequest(ask_for(prompt, output_tokens, checked=checked, chat=self.chat))


# Sessions that grow: each request repeats all that was said, the server's answers included.


_CONVERSATION_WORDS: Final = Words()


class Conversation:
    """turns: what the client says, and how many tokens it wants for an answer, in order.

    chat: as messages, otherwise as one growing text. job: told to the server; empty for none.
    """

    needs_answers = True

    def __init__(
        self,
        system: str,
        turns: list[tuple[str, int]],
        *,
        checked: bool,
        chat: bool,
        job: str = "",
    ) -> None:
        self._messages = [{"role": "system", "content": system}] if system else []
        self._turns = turns[::-1]
        self._checked = checked
        self._chat = chat
        self._job = job
        self._said = False

    def next_ask(self, answer: str) -> Ask | None:
        if self._said:
            self._messages.append({"role": "assistant", "content": answer})
        if not self._turns:
            return None
        text, output_tokens = self._turns.pop()
        self._said = True
        self._messages.append({"role": "user", "content": text})
        said: dict[str, Any] = {"messages": list(self._messages)}
        if not self._chat:
            said = {"prompt": "\n".join(each["content"] for each in self._messages)}
        path, is_last = CHAT if self._chat else COMPLETIONS, bool(self._job) and not self._turns
        return Ask(path, said, output_tokens, self._checked, self._job, is_last)


@dataclass(frozen=True)
class MultiTurn:
    """People who ask again. sizes: of a question, and of its answer. jobs: as `job_of` has it."""

    sizes: Sizes
    num_turns: int
    chat: bool = True
    jobs: str = ""

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng = draws.rng(index)
            turns = [_turn(rng, self.sizes) for _ in range(self.num_turns)]
            yield Conversation(
                *("", turns),
                checked=draws.checked(index),
                chat=self.chat,
                job=job_of(self.jobs, draws, index),
            )


@dataclass(frozen=True)
class Agent:
    """A program that calls tools: all its sessions begin with the same instructions and tools.

    sizes: of what a tool returns, and of the model's next step. The tools are told in the
    instructions, as the templates of models do it, so that any server takes them.
    jobs: as `job_of` has it.
    """

    sizes: Sizes
    num_turns: int
    system_tokens: int
    num_tools: int
    chat: bool = True
    jobs: str = ""

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index in itertools.count():
            rng = draws.rng(index)
            system = self._instructions(random.Random(f"{draws.name(index)}:instructions"))
            turns = [_turn(rng, self.sizes) for _ in range(self.num_turns)]
            told = [
                (text if number == 0 else f"Tool result: {text}", tokens)
                for number, (text, tokens) in enumerate(turns)
            ]
            yield Conversation(
                *(system, told),
                checked=draws.checked(index),
                chat=self.chat,
                job=job_of(self.jobs, draws, index),
            )

    def _instructions(self, rng: random.Random) -> str:
        tools = [_tool(rng, number) for number in range(self.num_tools)]
        text = _CONVERSATION_WORDS.prompt(rng, self.system_tokens)
        return f"{text}\nTools:\n{json.dumps(tools)}" if tools else text


def job_of(jobs: str, draws: Draws, index: int) -> str:
    """What the server is told of a session. jobs: what all of a run begin with; empty for none."""
    return f"{jobs}-{draws.seed}-{index}" if jobs else ""


def _turn(rng: random.Random, sizes: Sizes) -> tuple[str, int]:
    input_tokens, output_tokens = sizes.draw(rng)
    return _CONVERSATION_WORDS.prompt(rng, input_tokens), output_tokens


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    """A function with two parameters, as a JSON schema."""
    names = rng.sample(sorted(set(_CONVERSATION_WORDS.prompt(rng, 40).split())), 2)
    parameters = {
        name: {"type": "string", "description": _CONVERSATION_WORDS.prompt(rng, 8)}
        for name in names
    }
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": _CONVERSATION_WORDS.prompt(rng, 16),
            "parameters": {"type": "object", "properties": parameters, "required": names[:1]},
        },
    }
