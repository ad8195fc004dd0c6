"""Data sets of the load test: sessions of requests, random but reproducible.

A `Dataset` yields sessions; a session yields requests, each after the answer to the last. All
random choices come from `SessionSeeds`.
"""

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

from deploy.bench.client import CHAT, COMPLETIONS, BenchRequest

# ---- Random prompts ----

LOWEST_TOKEN_ID: Final = 1000
HIGHEST_TOKEN_ID: Final = 30_000
"""Ordinary tokens in any vocabulary of the usual size; special ones are at its ends."""

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


class RandomTokenIds:
    """Random prompts as token ids, with an exact number of tokens."""

    def __init__(self, lowest: int = LOWEST_TOKEN_ID, highest: int = HIGHEST_TOKEN_ID) -> None:
        self._ids = range(lowest, highest + 1)

    def make_prompt(self, rng: random.Random, number: int) -> list[int]:
        return rng.choices(self._ids, k=number)


class RandomWords:
    """Random prompts as text, for servers that accept no token ids.

    Most tokenizers encode each word and the space before it as one token, so n words are about n
    tokens; reports use the count of the server.
    """

    def make_prompt(self, rng: random.Random, number: int) -> str:
        return " ".join(rng.choices(WORDS, k=number))


PromptSource = RandomTokenIds | RandomWords


def joined(first: Prompt, second: Prompt) -> Prompt:
    """Return the concatenation of two prompts of the same kind."""
    if isinstance(first, str):
        assert isinstance(second, str)
        return f"{first} {second}" if first and second else first + second
    assert isinstance(second, list)
    return first + second


def make_request(
    prompt: Prompt, output_tokens: int, *, checked: bool = False, chat: bool = False
) -> BenchRequest:
    """Return a completion request for a prompt, or a chat request if it is text."""
    if chat:
        assert isinstance(prompt, str)
        messages = [{"role": "user", "content": prompt}]
        return BenchRequest(CHAT, {"messages": messages}, output_tokens, checked)
    return BenchRequest(COMPLETIONS, {"prompt": prompt}, output_tokens, checked)


class BenchSession(Protocol):
    """Requests of one client, each sent after the answer to the last.

    needs_answers: whether later requests contain earlier answers.
    """

    needs_answers: bool

    def next_request(self, answer: str) -> BenchRequest | None:
        """Return the request that follows an answer ("" at first); None at the end."""
        ...


class SingleRequest:
    needs_answers = False

    def __init__(self, request: BenchRequest) -> None:
        self._requests = [request]

    def next_request(self, answer: str) -> BenchRequest | None:
        return self._requests.pop() if self._requests else None


@dataclass(frozen=True)
class SessionSeeds:
    """Random number generators of the sessions of a run, one per session.

    One of 1 / check_share sessions is checked, beginning with the first. Checked sessions are the
    same for all seeds, so that answers can be compared between rounds. All others differ between
    seeds, so that few prompts of a round are in the prefix cache of the server.
    """

    seed: int
    check_share: float = 0.0

    def is_checked(self, index: int) -> bool:
        """Whether the answers of a session are compared between rounds."""
        return math.ceil((index + 1) * self.check_share) > math.ceil(index * self.check_share)

    def rng(self, index: int) -> random.Random:
        """Return the generator of one session."""
        return random.Random(f"{self.name(index)}:{index}")

    def name(self, index: int) -> str:
        """Return the seed of a session as text; checked sessions share one seed."""
        return "checked" if self.is_checked(index) else f"seed {self.seed}"


@dataclass(frozen=True)
class RequestSizes:
    """Distribution of the tokens of requests: uniform in mean * (1 ± spread), at least 1.

    The bounds are rounded down and up, like `--random-range-ratio` of vLLM.
    """

    input_tokens: int
    output_tokens: int
    spread: float = 0.0

    def draw(self, rng: random.Random) -> tuple[int, int]:
        return self._draw_one(rng, self.input_tokens), self._draw_one(rng, self.output_tokens)

    def _draw_one(self, rng: random.Random, mean: int) -> int:
        low, high = math.floor(mean * (1 - self.spread)), math.ceil(mean * (1 + self.spread))
        return rng.randint(max(1, low), max(1, high))


class Dataset(Protocol):
    """A source of sessions."""

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        """Yield sessions in the order in which they begin; may be infinite."""
        ...


# ---- Data sets of independent requests ----


@dataclass(frozen=True)
class RandomDataset:
    """Random prompts without common prefixes."""

    sizes: RequestSizes
    prompt_source: PromptSource
    chat: bool = False

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        for index in itertools.count():
            rng, checked = seeds.rng(index), seeds.is_checked(index)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = self.prompt_source.make_prompt(rng, input_tokens)
            yield SingleRequest(
                make_request(prompt, output_tokens, checked=checked, chat=self.chat)
            )


@dataclass(frozen=True)
class SharedPrefixDataset:
    """Groups of prompts with a common prefix. sizes: of the part after the prefix.

    prefix 0 | own part    request 0
    prefix 1 | own part    request 1
    prefix 0 | own part    request 2, with two groups
    """

    sizes: RequestSizes
    prompt_source: PromptSource
    num_groups: int
    prefix_tokens: int
    chat: bool = False

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        for index in itertools.count():
            rng, checked = seeds.rng(index), seeds.is_checked(index)
            group = random.Random(f"{seeds.name(index)}:prefix {index % self.num_groups}")
            prefix = self.prompt_source.make_prompt(group, self.prefix_tokens)
            input_tokens, output_tokens = self.sizes.draw(rng)
            prompt = joined(prefix, self.prompt_source.make_prompt(rng, input_tokens))
            yield SingleRequest(
                make_request(prompt, output_tokens, checked=checked, chat=self.chat)
            )


# ---- Data sets of conversations ----


_CONVERSATION_WORDS: Final = RandomWords()


class ConversationSession:
    """A conversation; each request repeats all messages and answers before it.

    turns: text and requested output tokens of each turn. chat: send messages; otherwise one
    growing text. job: agent job for the server; "" for none.
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
        self._begun = False

    def next_request(self, answer: str) -> BenchRequest | None:
        if self._begun:
            self._messages.append({"role": "assistant", "content": answer})
        if not self._turns:
            return None
        text, output_tokens = self._turns.pop()
        self._begun = True
        self._messages.append({"role": "user", "content": text})
        content: dict[str, Any] = {"messages": list(self._messages)}
        if not self._chat:
            content = {"prompt": "\n".join(message["content"] for message in self._messages)}
        path, is_last = CHAT if self._chat else COMPLETIONS, bool(self._job) and not self._turns
        return BenchRequest(path, content, output_tokens, self._checked, self._job, is_last)


@dataclass(frozen=True)
class MultiTurnDataset:
    """Conversations of several turns. sizes: of a question and its answer.

    jobs: prefix of the agent jobs sent to the server, see `job_of`; "" for none.
    """

    sizes: RequestSizes
    num_turns: int
    chat: bool = True
    jobs: str = ""

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        for index in itertools.count():
            rng = seeds.rng(index)
            turns = [_turn(rng, self.sizes) for _ in range(self.num_turns)]
            yield ConversationSession(
                *("", turns),
                checked=seeds.is_checked(index),
                chat=self.chat,
                job=job_of(self.jobs, seeds, index),
            )


@dataclass(frozen=True)
class AgentDataset:
    """Agents that call tools: all sessions begin with the same instructions and tools.

    The tools are part of the instructions, as in the chat templates of models, so that any server
    accepts them. sizes: of a tool's result and of the model's next step.
    jobs: prefix of the agent jobs sent to the server, see `job_of`; "" for none.
    """

    sizes: RequestSizes
    num_turns: int
    system_tokens: int
    num_tools: int
    chat: bool = True
    jobs: str = ""

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        for index in itertools.count():
            rng = seeds.rng(index)
            system = self._instructions(random.Random(f"{seeds.name(index)}:instructions"))
            turns = [_turn(rng, self.sizes) for _ in range(self.num_turns)]
            messages = [
                (text if number == 0 else f"Tool result: {text}", tokens)
                for number, (text, tokens) in enumerate(turns)
            ]
            yield ConversationSession(
                *(system, messages),
                checked=seeds.is_checked(index),
                chat=self.chat,
                job=job_of(self.jobs, seeds, index),
            )

    def _instructions(self, rng: random.Random) -> str:
        tools = [_tool(rng, number) for number in range(self.num_tools)]
        text = _CONVERSATION_WORDS.make_prompt(rng, self.system_tokens)
        return f"{text}\nTools:\n{json.dumps(tools)}" if tools else text


def job_of(jobs: str, seeds: SessionSeeds, index: int) -> str:
    """Return the agent job of a session; "" without a prefix. jobs: prefix of all jobs of a run."""
    return f"{jobs}-{seeds.seed}-{index}" if jobs else ""


def _turn(rng: random.Random, sizes: RequestSizes) -> tuple[str, int]:
    input_tokens, output_tokens = sizes.draw(rng)
    return _CONVERSATION_WORDS.make_prompt(rng, input_tokens), output_tokens


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random function with two parameters, as JSON schema."""
    names = rng.sample(sorted(set(_CONVERSATION_WORDS.make_prompt(rng, 40).split())), 2)
    parameters = {
        name: {"type": "string", "description": _CONVERSATION_WORDS.make_prompt(rng, 8)}
        for name in names
    }
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": _CONVERSATION_WORDS.make_prompt(rng, 16),
            "parameters": {"type": "object", "properties": parameters, "required": names[:1]},
        },
    }
