"""The flags that say what to ask, and the data set that they mean."""

import argparse
import json
import random
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.bench.client import CHAT, COMPLETIONS, Ask
from deploy.bench.datasets import (
    HIGHEST_TOKEN_ID,
    LOWEST_TOKEN_ID,
    Agent,
    Dataset,
    Draws,
    Material,
    MultiTurn,
    OneRequest,
    Prompt,
    RandomPrompts,
    Session,
    SharedPrefix,
    Sizes,
    TokenIds,
    Words,
    ask_for,
    joined,
)
from deploy.bench.options import at_least_one, from_zero, positive, share
from proto.errors import ConfigError

# Files of one JSON object a line, read with the number of the line in every complaint.


class Line:
    """One object; what is missing or of the wrong kind is a ConfigError that names the line."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def number(self, *names: str, default: float | None = None) -> float:
        """The first of these fields that is there, at least 0."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{self._where}: {name} is no number from 0: {value!r}")
            return value
        if default is None:
            raise ConfigError(f"{self._where}: there is no {' or '.join(names)}")
        return default

    def numbers(self, name: str) -> list[int]:
        """A list of whole numbers; empty where there is none."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ConfigError(f"{self._where}: {name} is no list of whole numbers")
        return value

    def content(self) -> tuple[str, dict[str, Any]] | None:
        """(path, prompt or messages), if the line has them."""
        if messages := self._fields.get("messages"):
            return CHAT, {"messages": messages}
        prompt: Prompt | None = self._fields.get("prompt")
        return (COMPLETIONS, {"prompt": prompt}) if prompt else None

    def missing(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: there is no {what}")


def read_lines(file: str) -> list[Line]:
    """Every line that is not empty; raises ConfigError for a file without one."""
    try:
        texts = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    lines = list(_parsed(file, texts))
    if not lines:
        raise ConfigError(f"{file}: there is no line in it")
    return lines


def _parsed(file: str, texts: Iterable[str]) -> Iterator[Line]:
    for number, text in enumerate(texts, 1):
        if not text.strip():
            continue
        where = f"{file}, line {number}"
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: not an object")
        yield Line(where, fields)


# Requests from a file: with texts of their own, or as a trace with time stamps.
#
# A trace is in the format of Mooncake (https://github.com/kvcache-ai/Mooncake), which the
# `timed_trace` of vLLM reads, too:
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
#
# `timestamp` is in milliseconds since the beginning; each hash id stands for a block of prompt
# tokens (512 in the public traces) together with all blocks before it, so that equal ids are equal
# tokens. Tokens that no id stands for are new. A line may have a `prompt` or `messages` instead.


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


_NAMES: Final = ("random", "shared-prefix", "multi-turn", "agent", "file")
_CHATS: Final = ("multi-turn", "agent")
MILLISECONDS: Final = 1e-3


def add_sizes(parser: argparse.ArgumentParser, input_tokens: int, output_tokens: int) -> None:
    """Flags of how long requests and answers are, and of what prompts are made of."""
    parser.add_argument(
        "--input-tokens", type=at_least_one, default=input_tokens, help=f"({input_tokens})"
    )
    parser.add_argument(
        "--output-tokens", type=at_least_one, default=output_tokens, help=f"({output_tokens})"
    )
    parser.add_argument(
        "--range-ratio",
        type=share,
        default=0.0,
        help="lengths vary evenly by so much of themselves to both sides (0)",
    )
    add_prompts(parser)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Flags of what random prompts are made of."""
    parser.add_argument(
        "--prompts",
        choices=("ids", "text"),
        default="ids",
        help="random prompts are token ids, or words where a server takes no ids (ids)",
    )
    parser.add_argument("--lowest-token-id", type=from_zero, default=LOWEST_TOKEN_ID)
    parser.add_argument(
        "--highest-token-id",
        type=from_zero,
        default=HIGHEST_TOKEN_ID,
        help=f"of random prompts; must be in the vocabulary ({HIGHEST_TOKEN_ID})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and arrivals (0)")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    """Flags of the kind of requests."""
    group = parser.add_argument_group("what is asked")
    group.add_argument("--dataset", choices=_NAMES, default="random", help="(random)")
    group.add_argument("--file", help="of the data set file: JSON lines with prompt or messages")
    group.add_argument("--trace", help="JSON lines with time stamps, as Mooncake's; open loop")
    group.add_argument(
        "--trace-scale",
        type=positive,
        default=MILLISECONDS,
        help="seconds for 1 in a time stamp; 0.0005 plays a trace twice as fast (0.001)",
    )
    group.add_argument(
        "--trace-block-size", type=at_least_one, default=512, help="tokens of a hash id (512)"
    )
    group.add_argument("--prefix-groups", type=at_least_one, default=8, help="shared-prefix (8)")
    group.add_argument(
        "--prefix-tokens",
        type=from_zero,
        default=256,
        help="of shared-prefix, before the input tokens (256)",
    )
    group.add_argument("--turns", type=at_least_one, default=4, help="multi-turn and agent (4)")
    group.add_argument("--system-tokens", type=from_zero, default=512, help="agent (512)")
    group.add_argument("--tools", type=from_zero, default=8, help="agent: tools it is told of (8)")
    group.add_argument(
        "--agent-hints",
        action="store_true",
        help="multi-turn and agent: tell the server which job a request is a turn of",
    )
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        help="by default chat for multi-turn and agent, completions otherwise",
    )


def material_of(options: argparse.Namespace, *, chat: bool = False) -> Material:
    """What random prompts are made of; messages are always text."""
    if chat or options.prompts == "text":
        return Words()
    if options.highest_token_id < options.lowest_token_id:
        raise ConfigError("--highest-token-id must not be below --lowest-token-id")
    return TokenIds(options.lowest_token_id, options.highest_token_id)


def sizes_of(options: argparse.Namespace) -> Sizes:
    return Sizes(options.input_tokens, options.output_tokens, options.range_ratio)


def is_chat(options: argparse.Namespace) -> bool:
    """Whether requests go to the chat endpoint, unless a file says otherwise."""
    return bool((options.endpoint or _default_endpoint(options)) == "chat")


def dataset_of(options: argparse.Namespace) -> Dataset:
    """Raises ConfigError when the flags do not fit, or a file is not as it must be."""
    sizes, chat = sizes_of(options), is_chat(options)
    material = material_of(options, chat=chat)
    name = options.dataset
    if options.agent_hints and (options.trace or name not in _CHATS):
        raise ConfigError(f"--agent-hints goes with --dataset {' and '.join(_CHATS)}")
    jobs = f"bench-{secrets.token_hex(4)}" if options.agent_hints else ""
    if options.trace:
        return Trace.read(
            options.trace, options.trace_scale, options.trace_block_size, material, chat
        )
    if (name == "file") != bool(options.file):
        raise ConfigError("--dataset file and --file FILE belong together")
    if name == "file":
        return Recorded.read(options.file, options.output_tokens)
    if name == "shared-prefix":
        return SharedPrefix(sizes, material, options.prefix_groups, options.prefix_tokens, chat)
    if name == "multi-turn":
        return MultiTurn(sizes, options.turns, chat, jobs)
    if name == "agent":
        return Agent(sizes, options.turns, options.system_tokens, options.tools, chat, jobs)
    return RandomPrompts(sizes, material, chat)


def _default_endpoint(options: argparse.Namespace) -> str:
    return "chat" if options.dataset in _CHATS and not options.trace else "completions"
