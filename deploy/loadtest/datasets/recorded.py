"""Requests from a file: with texts of their own, or as a trace with time stamps.

A trace is in the format of Mooncake (https://github.com/kvcache-ai/Mooncake), which the
`timed_trace` of vLLM reads, too:

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}

`timestamp` is in milliseconds since the beginning; each hash id stands for a block of prompt
tokens (512 in the public traces) together with all blocks before it, so that equal ids are equal
tokens. Tokens that no id stands for are new. A line may have a `prompt` or `messages` instead.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from deploy.loadtest.datasets.json_lines import Line, read_lines
from deploy.loadtest.datasets.material import Material, Prompt, ask_for, joined
from deploy.loadtest.datasets.sessions import Draws, OneRequest, Session
from deploy.loadtest.openai.client import Ask


@dataclass(frozen=True)
class Recorded:
    """Prompts or messages of a file, one request a line; from its beginning again at its end."""

    lines: list[Line]
    output_tokens: int

    @classmethod
    def read(cls, file: str, output_tokens: int) -> "Recorded":
        """output_tokens: of lines that do not say it."""
        recorded = cls(read_lines(file), output_tokens)
        for line in recorded.lines:
            recorded._ask(line, checked=False)
        return recorded

    def sessions(self, draws: Draws) -> Iterator[Session]:
        index = 0
        while True:
            for line in self.lines:
                yield OneRequest(self._ask(line, checked=draws.checked(index)))
                index += 1

    def _ask(self, line: Line, *, checked: bool) -> Ask:
        found = line.content()
        if found is None:
            raise line.missing("prompt and no messages")
        names = ("output_tokens", "output_length", "max_tokens")
        number = int(line.number(*names, default=self.output_tokens))
        return Ask(*found, max(1, number), checked)


@dataclass(frozen=True)
class Trace:
    """The requests of a trace, once. offsets: seconds from the first to each."""

    lines: list[Line]
    offsets: list[float]
    material: Material
    block_size: int
    chat: bool = False

    @classmethod
    def read(
        cls, file: str, scale: float, block_size: int, material: Material, chat: bool
    ) -> "Trace":
        """scale: seconds for each unit of a time stamp."""
        lines = read_lines(file)
        stamps = [line.number("timestamp") for line in lines]
        order = sorted(range(len(lines)), key=stamps.__getitem__)
        first = stamps[order[0]]
        trace = cls(
            [lines[each] for each in order],
            [(stamps[each] - first) * scale for each in order],
            material,
            block_size,
            chat,
        )
        for line in lines:
            trace._sizes(line)
        return trace

    def sessions(self, draws: Draws) -> Iterator[Session]:
        for index, line in enumerate(self.lines):
            checked = draws.checked(index)
            input_tokens, output_tokens = self._sizes(line)
            found = line.content()
            if found is not None:
                yield OneRequest(Ask(*found, output_tokens, checked))
                continue
            prompt = self._prompt(line, input_tokens, draws, index)
            yield OneRequest(ask_for(prompt, output_tokens, checked=checked, chat=self.chat))

    def _sizes(self, line: Line) -> tuple[int, int]:
        default = None if line.content() is None else 0
        return (
            max(1, int(line.number("input_length", default=default))),
            max(1, int(line.number("output_length"))),
        )

    def _prompt(self, line: Line, number: int, draws: Draws, index: int) -> Prompt:
        """
        | id 46 | id 47 | id 2353      |      blocks
        | input_length           |            cut off there, or filled up with new tokens
        """
        prompt: Prompt = self.material.prompt(random.Random(0), 0)
        left = number
        for each in line.numbers("hash_ids"):
            taken = min(left, self.block_size)
            if not taken:
                break
            block = self.material.prompt(random.Random(f"{draws.name(index)}:block {each}"), taken)
            prompt = joined(prompt, block)
            left -= taken
        if left:
            prompt = joined(prompt, self.material.prompt(draws.rng(index), left))
        return prompt
