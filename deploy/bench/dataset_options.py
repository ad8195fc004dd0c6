"""Flags that select a data set, and data sets read from files."""

import argparse
import json
import random
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from deploy.bench.client import CHAT, COMPLETIONS, BenchRequest
from deploy.bench.datasets import (
    HIGHEST_TOKEN_ID,
    LOWEST_TOKEN_ID,
    AgentDataset,
    BenchSession,
    Dataset,
    MultiTurnDataset,
    Prompt,
    PromptSource,
    RandomDataset,
    RandomTokenIds,
    RandomWords,
    RequestSizes,
    SessionSeeds,
    SharedPrefixDataset,
    SingleRequest,
    joined,
    make_request,
)
from deploy.bench.options import at_least_one, from_zero, positive, share
from proto.errors import ConfigError

# ---- Files of JSON lines ----


class JsonLine:
    """One line; raises ConfigError naming the line for missing or invalid fields."""

    def __init__(self, where: str, fields: dict[str, Any]) -> None:
        self._where = where
        self._fields = fields

    def number(self, *names: str, default: float | None = None) -> float:
        """Return the first of these fields that exists; must be at least 0."""
        for name in names:
            value = self._fields.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise ConfigError(f"{self._where}: {name} is not a number from 0: {value!r}")
            return value
        if default is None:
            raise ConfigError(f"{self._where}: {' or '.join(names)} is missing")
        return default

    def numbers(self, name: str) -> list[int]:
        """Return a list of whole numbers; empty if the field is missing."""
        value = self._fields.get(name) or []
        if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
            raise ConfigError(f"{self._where}: {name} is not a list of whole numbers")
        return value

    def content(self) -> tuple[str, dict[str, Any]] | None:
        """Return path and prompt or messages of the request; None if the line has neither."""
        if messages := self._fields.get("messages"):
            return CHAT, {"messages": messages}
        prompt: Prompt | None = self._fields.get("prompt")
        return (COMPLETIONS, {"prompt": prompt}) if prompt else None

    def missing(self, what: str) -> ConfigError:
        return ConfigError(f"{self._where}: {what} is missing")


def read_lines(file: str) -> list[JsonLine]:
    """Return all lines that are not empty; raises ConfigError if there are none."""
    try:
        texts = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: {getattr(error, 'strerror', None) or error}") from None
    lines = list(_parsed(file, texts))
    if not lines:
        raise ConfigError(f"{file}: the file is empty")
    return lines


def _parsed(file: str, texts: Iterable[str]) -> Iterator[JsonLine]:
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
        yield JsonLine(where, fields)


# ---- Data sets from files ----
#
# Format of a trace: that of Mooncake (https://github.com/kvcache-ai/Mooncake), which `timed_trace`
# of vLLM reads, too:
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
#
# `timestamp`: milliseconds since the beginning. A hash id identifies a block of prompt tokens (512
# in the public traces) together with all blocks before it, so equal ids are equal tokens. The
# tokens after the last block are random. A line may have a `prompt` or `messages` instead.


@dataclass(frozen=True)
class FileDataset:
    """Prompts or messages from a file, one request per line; repeated from the beginning."""

    lines: list[JsonLine]
    output_tokens: int

    @classmethod
    def read(cls, file: str, output_tokens: int) -> "FileDataset":
        """Read and check a file; raises ConfigError. output_tokens: default of a line."""
        dataset = cls(read_lines(file), output_tokens)
        for line in dataset.lines:
            dataset._request(line, checked=False)
        return dataset

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        index = 0
        while True:
            for line in self.lines:
                yield SingleRequest(self._request(line, checked=seeds.is_checked(index)))
                index += 1

    def _request(self, line: JsonLine, *, checked: bool) -> BenchRequest:
        found = line.content()
        if found is None:
            raise line.missing("prompt or messages")
        names = ("output_tokens", "output_length", "max_tokens")
        number = int(line.number(*names, default=self.output_tokens))
        return BenchRequest(*found, max(1, number), checked)


@dataclass(frozen=True)
class TraceDataset:
    """The requests of a trace with their times. offsets: seconds since the first request."""

    lines: list[JsonLine]
    offsets: list[float]
    prompt_source: PromptSource
    block_size: int
    chat: bool = False

    @classmethod
    def read(
        cls, file: str, scale: float, block_size: int, prompt_source: PromptSource, chat: bool
    ) -> "TraceDataset":
        """Read and check a trace; raises ConfigError. scale: seconds per unit of a time stamp."""
        lines = read_lines(file)
        stamps = [line.number("timestamp") for line in lines]
        order = sorted(range(len(lines)), key=stamps.__getitem__)
        first = stamps[order[0]]
        trace = cls(
            [lines[index] for index in order],
            [(stamps[index] - first) * scale for index in order],
            prompt_source,
            block_size,
            chat,
        )
        for line in lines:
            trace._sizes(line)
        return trace

    def sessions(self, seeds: SessionSeeds) -> Iterator[BenchSession]:
        for index, line in enumerate(self.lines):
            checked = seeds.is_checked(index)
            input_tokens, output_tokens = self._sizes(line)
            found = line.content()
            if found is not None:
                yield SingleRequest(BenchRequest(*found, output_tokens, checked))
                continue
            prompt = self._prompt(line, input_tokens, seeds, index)
            yield SingleRequest(
                make_request(prompt, output_tokens, checked=checked, chat=self.chat)
            )

    def _sizes(self, line: JsonLine) -> tuple[int, int]:
        default = None if line.content() is None else 0
        return (
            max(1, int(line.number("input_length", default=default))),
            max(1, int(line.number("output_length"))),
        )

    def _prompt(self, line: JsonLine, number: int, seeds: SessionSeeds, index: int) -> Prompt:
        """Return a prompt of `number` tokens: truncated or extended with random tokens.

        | id 46 | id 47 | id 2353      |      blocks
        | input_length           |
        """
        prompt: Prompt = self.prompt_source.make_prompt(random.Random(0), 0)
        left = number
        for hash_id in line.numbers("hash_ids"):
            taken = min(left, self.block_size)
            if not taken:
                break
            block = self.prompt_source.make_prompt(
                random.Random(f"{seeds.name(index)}:block {hash_id}"), taken
            )
            prompt = joined(prompt, block)
            left -= taken
        if left:
            prompt = joined(prompt, self.prompt_source.make_prompt(seeds.rng(index), left))
        return prompt


_NAMES: Final = ("random", "shared-prefix", "multi-turn", "agent", "file")
_CHATS: Final = ("multi-turn", "agent")
MILLISECONDS: Final = 1e-3


def add_sizes(parser: argparse.ArgumentParser, input_tokens: int, output_tokens: int) -> None:
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
        help="lengths vary uniformly by this share of the mean in both directions (0)",
    )
    add_prompts(parser)


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompts",
        choices=("ids", "text"),
        default="ids",
        help="random prompts are token ids, or text for servers that accept no ids (ids)",
    )
    parser.add_argument("--lowest-token-id", type=from_zero, default=LOWEST_TOKEN_ID)
    parser.add_argument(
        "--highest-token-id",
        type=from_zero,
        default=HIGHEST_TOKEN_ID,
        help=f"highest id in random prompts; must be in the vocabulary ({HIGHEST_TOKEN_ID})",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of prompts and arrivals (0)")


def add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset", choices=_NAMES, default="random", help="(random)")
    group.add_argument("--file", help="for --dataset file: JSON lines with prompt or messages")
    group.add_argument(
        "--trace", help="JSON lines with time stamps, in the format of Mooncake; open loop"
    )
    group.add_argument(
        "--trace-scale",
        type=positive,
        default=MILLISECONDS,
        help="seconds per unit of a time stamp; 0.0005 replays a trace twice as fast (0.001)",
    )
    group.add_argument(
        "--trace-block-size", type=at_least_one, default=512, help="tokens per hash id (512)"
    )
    group.add_argument(
        "--prefix-groups", type=at_least_one, default=8, help="shared-prefix: number of groups (8)"
    )
    group.add_argument(
        "--prefix-tokens",
        type=from_zero,
        default=256,
        help="shared-prefix: tokens before the input tokens (256)",
    )
    group.add_argument(
        "--turns",
        type=at_least_one,
        default=4,
        help="multi-turn and agent: requests per session (4)",
    )
    group.add_argument(
        "--system-tokens",
        type=from_zero,
        default=512,
        help="agent: tokens of the instructions (512)",
    )
    group.add_argument(
        "--tools", type=from_zero, default=8, help="agent: tools in the instructions (8)"
    )
    group.add_argument(
        "--agent-hints",
        action="store_true",
        help="multi-turn and agent: send the job of each request to the server",
    )
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        help="by default chat for multi-turn and agent, completions otherwise",
    )


def prompt_source_of(options: argparse.Namespace, *, chat: bool = False) -> PromptSource:
    """Return the source of random prompts; messages of chats are always text."""
    if chat or options.prompts == "text":
        return RandomWords()
    if options.highest_token_id < options.lowest_token_id:
        raise ConfigError("--highest-token-id must not be below --lowest-token-id")
    return RandomTokenIds(options.lowest_token_id, options.highest_token_id)


def sizes_of(options: argparse.Namespace) -> RequestSizes:
    return RequestSizes(options.input_tokens, options.output_tokens, options.range_ratio)


def is_chat(options: argparse.Namespace) -> bool:
    """Whether requests go to the chat endpoint; lines of a file may override it."""
    return bool((options.endpoint or _default_endpoint(options)) == "chat")


def dataset_of(options: argparse.Namespace) -> Dataset:
    """Return the selected data set; raises ConfigError for conflicting flags or an invalid file."""
    sizes, chat = sizes_of(options), is_chat(options)
    prompt_source = prompt_source_of(options, chat=chat)
    name = options.dataset
    if options.agent_hints and (options.trace or name not in _CHATS):
        raise ConfigError(f"--agent-hints goes with --dataset {' and '.join(_CHATS)}")
    jobs = f"bench-{secrets.token_hex(4)}" if options.agent_hints else ""
    if options.trace:
        return TraceDataset.read(
            options.trace, options.trace_scale, options.trace_block_size, prompt_source, chat
        )
    if (name == "file") != bool(options.file):
        raise ConfigError("--dataset file and --file FILE belong together")
    if name == "file":
        return FileDataset.read(options.file, options.output_tokens)
    if name == "shared-prefix":
        return SharedPrefixDataset(
            sizes, prompt_source, options.prefix_groups, options.prefix_tokens, chat
        )
    if name == "multi-turn":
        return MultiTurnDataset(sizes, options.turns, chat, jobs)
    if name == "agent":
        return AgentDataset(sizes, options.turns, options.system_tokens, options.tools, chat, jobs)
    return RandomDataset(sizes, prompt_source, chat)


def _default_endpoint(options: argparse.Namespace) -> str:
    return "chat" if options.dataset in _CHATS and not options.trace else "completions"
