"""Sessions that grow: each request repeats all that was said, the server's answers included."""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from deploy.loadtest.datasets.material import Words
from deploy.loadtest.datasets.sessions import Draws, Session, Sizes
from deploy.loadtest.openai.client import CHAT, COMPLETIONS, Ask

_WORDS: Final = Words()


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
        text = _WORDS.prompt(rng, self.system_tokens)
        return f"{text}\nTools:\n{json.dumps(tools)}" if tools else text


def job_of(jobs: str, draws: Draws, index: int) -> str:
    """What the server is told of a session. jobs: what all of a run begin with; empty for none."""
    return f"{jobs}-{draws.seed}-{index}" if jobs else ""


def _turn(rng: random.Random, sizes: Sizes) -> tuple[str, int]:
    input_tokens, output_tokens = sizes.draw(rng)
    return _WORDS.prompt(rng, input_tokens), output_tokens


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    """A function with two parameters, as a JSON schema."""
    names = rng.sample(sorted(set(_WORDS.prompt(rng, 40).split())), 2)
    parameters = {name: {"type": "string", "description": _WORDS.prompt(rng, 8)} for name in names}
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": _WORDS.prompt(rng, 16),
            "parameters": {"type": "object", "properties": parameters, "required": names[:1]},
        },
    }
