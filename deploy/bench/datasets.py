"""Data sets of the load test: sessions of requests, random but reproducible, or from files.

A data set yields sessions; a session yields requests, and is sent the answer to each. All random
choices come from `SessionSeeds`. The flags that select a data set are at the end.
"""

import argparse
import itertools
import json
import math
import random
import secrets
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from deploy.bench.client import CHAT, COMPLETIONS, BenchRequest
from deploy.bench.options import add_values, at_least_one, from_zero, positive, share
from proto.errors import ConfigError

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
MakePrompt = Callable[[random.Random, int], Prompt]
"""Returns a random prompt of a number of tokens."""


def random_ids(lowest: int = LOWEST_TOKEN_ID, highest: int = HIGHEST_TOKEN_ID) -> MakePrompt:
    """Return what makes prompts of token ids, which have exactly the number of tokens."""
    ids = range(lowest, highest + 1)
    return lambda rng, number: rng.choices(ids, k=number)


def random_words(rng: random.Random, number: int) -> str:
    """Return a prompt as text, for servers that accept no token ids.

    Most tokenizers encode each word and the space before it as one token, so n words are about n
    tokens; reports use the count of the server.
    """
    return " ".join(rng.choices(WORDS, k=number))


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


Session = Generator[BenchRequest, str | None, None]
"""Requests of one client; each is sent the answer to the request before, the first None."""


def single(request: BenchRequest) -> Session:
    """Return a session of one request."""
    yield request


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


Sessions = Callable[[SessionSeeds], Iterator[Session]]
"""Yields the sessions of a run in the order in which they begin, possibly without an end."""


def prompt_sessions(
    seeds: SessionSeeds,
    sizes: RequestSizes,
    make_prompt: MakePrompt,
    *,
    num_groups: int = 1,
    prefix_tokens: int = 0,
    chat: bool = False,
) -> Iterator[Session]:
    """Yield random prompts, in groups that have a common prefix.

    prefix 0 | own part    request 0
    prefix 1 | own part    request 1
    prefix 0 | own part    request 2, with two groups

    sizes: of the part after the prefix.
    """
    for index in itertools.count():
        rng = seeds.rng(index)
        group = random.Random(f"{seeds.name(index)}:prefix {index % num_groups}")
        prefix = make_prompt(group, prefix_tokens)
        input_tokens, output_tokens = sizes.draw(rng)
        prompt = joined(prefix, make_prompt(rng, input_tokens))
        checked = seeds.is_checked(index)
        yield single(make_request(prompt, output_tokens, checked=checked, chat=chat))


# ---- Conversations ----


def conversation(
    system: str, turns: Sequence[tuple[str, int]], *, checked: bool, chat: bool, job: str = ""
) -> Session:
    """Yield the requests of a conversation; each repeats all messages and answers before it.

    turns: text and requested output tokens of each turn. chat: send messages; otherwise one
    growing text. job: agent job for the server; "" for none.
    """
    messages = [{"role": "system", "content": system}] if system else []
    for number, (text, output_tokens) in enumerate(turns, 1):
        messages.append({"role": "user", "content": text})
        path, content = CHAT, dict[str, Any](messages=list(messages))
        if not chat:
            path, content = COMPLETIONS, {"prompt": "\n".join(each["content"] for each in messages)}
        is_last = bool(job) and number == len(turns)
        answer = yield BenchRequest(
            path, content, output_tokens, checked, job, is_last, keep_text=True
        )
        messages.append({"role": "assistant", "content": answer or ""})


class AgentTools(NamedTuple):
    """Instructions of agents: number of tokens, and of tools whose schemas follow them."""

    system_tokens: int
    num_tools: int


def conversation_sessions(
    seeds: SessionSeeds,
    sizes: RequestSizes,
    num_turns: int,
    *,
    agent: AgentTools | None = None,
    chat: bool = True,
    jobs: str = "",
) -> Iterator[Session]:
    """Yield conversations of several turns, or agents that call tools.

    All agents begin with the same instructions and tools. The tools are part of the instructions,
    as in the chat templates of models, so that any server accepts them.
    sizes: of a question and its answer, or of a tool's result and the model's next step.
    jobs: prefix of the agent jobs sent to the server; "" for none.
    """
    for index in itertools.count():
        rng, system, turns = seeds.rng(index), "", []
        if agent is not None:
            system = _instructions(random.Random(f"{seeds.name(index)}:instructions"), agent)
        for number in range(num_turns):
            input_tokens, output_tokens = sizes.draw(rng)
            text = random_words(rng, input_tokens)
            is_result = agent is not None and number > 0
            turns.append((f"Tool result: {text}" if is_result else text, output_tokens))
        job = f"{jobs}-{seeds.seed}-{index}" if jobs else ""
        yield conversation(system, turns, checked=seeds.is_checked(index), chat=chat, job=job)


def _instructions(rng: random.Random, agent: AgentTools) -> str:
    tools = [_tool(rng, number) for number in range(agent.num_tools)]
    text = random_words(rng, agent.system_tokens)
    return f"{text}\nTools:\n{json.dumps(tools)}" if tools else text


def _tool(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a random function with two parameters, as JSON schema."""
    names = rng.sample(sorted(set(random_words(rng, 40).split())), 2)
    parameters = {name: {"type": "string", "description": random_words(rng, 8)} for name in names}
    return {
        "type": "function",
        "function": {
            "name": f"tool_{number}",
            "description": random_words(rng, 16),
            "parameters": {"type": "object", "properties": parameters, "required": names[:1]},
        },
    }


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


def read_requests(file: str, output_tokens: int) -> list[BenchRequest]:
    """Return the requests of a file; raises ConfigError. output_tokens: default of a line."""
    names = ("output_tokens", "output_length", "max_tokens")
    requests = []
    for line in read_lines(file):
        if (content := line.content()) is None:
            raise line.missing("prompt or messages")
        number = int(line.number(*names, default=output_tokens))
        requests.append(BenchRequest(*content, max(1, number)))
    return requests


def repeated_sessions(seeds: SessionSeeds, requests: Sequence[BenchRequest]) -> Iterator[Session]:
    """Yield requests one by one, from the beginning again after the last."""
    for index, request in enumerate(itertools.cycle(requests)):
        yield single(replace(request, checked=seeds.is_checked(index)))


# Format of a trace: that of Mooncake (https://github.com/kvcache-ai/Mooncake), which `timed_trace`
# of vLLM reads, too:
#
#     {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
#
# `timestamp`: milliseconds since the beginning. A hash id identifies a block of prompt tokens (512
# in the public traces) together with all blocks before it, so equal ids are equal tokens. The
# tokens after the last block are random. A line may have a `prompt` or `messages` instead.


class TraceRequest(NamedTuple):
    """A request of a trace. stamp: its time, in the unit of the trace.

    content: path, and prompt or messages, of a line that has them.
    """

    stamp: float
    content: tuple[str, dict[str, Any]] | None
    input_tokens: int
    output_tokens: int
    hash_ids: list[int]


def read_trace(file: str) -> list[TraceRequest]:
    """Return the requests of a trace in the order of their time; raises ConfigError."""
    requests = []
    for line in read_lines(file):
        stamp, content = line.number("timestamp"), line.content()
        input_tokens = int(line.number("input_length", default=None if content is None else 0))
        lengths = max(1, input_tokens), max(1, int(line.number("output_length")))
        requests.append(TraceRequest(stamp, content, *lengths, line.numbers("hash_ids")))
    return sorted(requests, key=lambda request: request.stamp)


def trace_sessions(
    seeds: SessionSeeds,
    trace: Sequence[TraceRequest],
    make_prompt: MakePrompt,
    block_size: int,
    *,
    chat: bool = False,
) -> Iterator[Session]:
    """Yield the requests of a trace, once. block_size: tokens of a hash id."""
    for index, line in enumerate(trace):
        checked = seeds.is_checked(index)
        if line.content is not None:
            yield single(BenchRequest(*line.content, line.output_tokens, checked))
            continue
        prompt = _trace_prompt(line, make_prompt, block_size, seeds, index)
        yield single(make_request(prompt, line.output_tokens, checked=checked, chat=chat))


def _trace_prompt(
    line: TraceRequest, make_prompt: MakePrompt, block_size: int, seeds: SessionSeeds, index: int
) -> Prompt:
    """Return a prompt of `input_tokens`: truncated or extended with random tokens.

    | id 46 | id 47 | id 2353      |      blocks
    | input_tokens           |
    """
    prompt, left = make_prompt(random.Random(0), 0), line.input_tokens
    for hash_id in line.hash_ids:
        taken = min(left, block_size)
        block = make_prompt(random.Random(f"{seeds.name(index)}:block {hash_id}"), taken)
        prompt = joined(prompt, block)
        left -= taken
    return joined(prompt, make_prompt(seeds.rng(index), left)) if left else prompt


# ---- Flags ----


_NAMES: Final = ("random", "shared-prefix", "multi-turn", "agent", "file")
_CHATS: Final = ("multi-turn", "agent")
_MILLISECONDS: Final = 1e-3


def add_sizes(parser: argparse.ArgumentParser, input_tokens: int, output_tokens: int) -> None:
    add_values(
        parser,
        ("--input-tokens", at_least_one, input_tokens, ""),
        ("--output-tokens", at_least_one, output_tokens, ""),
        (
            *("--range-ratio", share, 0.0),
            "lengths vary uniformly by this share of the mean in both directions",
        ),
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
    add_values(
        parser,
        (
            *("--highest-token-id", from_zero, HIGHEST_TOKEN_ID),
            "highest id in random prompts; must be in the vocabulary",
        ),
        ("--seed", int, 0, "seed of prompts and arrivals"),
    )


def add_dataset(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--dataset", choices=_NAMES, default="random", help="(random)")
    group.add_argument("--file", help="for --dataset file: JSON lines with prompt or messages")
    group.add_argument(
        "--trace", help="JSON lines with time stamps, in the format of Mooncake; open loop"
    )
    add_values(
        group,
        (
            *("--trace-scale", positive, _MILLISECONDS),
            "seconds per unit of a time stamp; 0.0005 replays a trace twice as fast",
        ),
        ("--trace-block-size", at_least_one, 512, "tokens per hash id"),
        ("--prefix-groups", at_least_one, 8, "shared-prefix: number of groups"),
        ("--prefix-tokens", from_zero, 256, "shared-prefix: tokens before the input tokens"),
        ("--turns", at_least_one, 4, "multi-turn and agent: requests per session"),
        ("--system-tokens", from_zero, 512, "agent: tokens of the instructions"),
        ("--tools", from_zero, 8, "agent: tools in the instructions"),
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


def prompts_of(options: argparse.Namespace, *, chat: bool = False) -> MakePrompt:
    """Return what makes random prompts; messages of chats are always text."""
    if chat or options.prompts == "text":
        return random_words
    if options.highest_token_id < options.lowest_token_id:
        raise ConfigError("--highest-token-id must not be below --lowest-token-id")
    return random_ids(options.lowest_token_id, options.highest_token_id)


def sizes_of(options: argparse.Namespace) -> RequestSizes:
    return RequestSizes(options.input_tokens, options.output_tokens, options.range_ratio)


def is_chat(options: argparse.Namespace) -> bool:
    """Whether requests go to the chat endpoint; lines of a file may override it."""
    default = "chat" if options.dataset in _CHATS and not options.trace else "completions"
    return bool((options.endpoint or default) == "chat")


def unused_options(options: argparse.Namespace) -> set[str]:
    """Return the options that say nothing about the requests of the selected data set."""
    name = "trace" if options.trace else options.dataset
    unused = {"trace_scale", "trace_block_size"} if name != "trace" else {"dataset"}
    unused |= {"prefix_groups", "prefix_tokens"} if name != "shared-prefix" else set()
    unused |= {"turns"} if name not in _CHATS else set()
    unused |= {"system_tokens", "tools"} if name != "agent" else set()
    if name in ("trace", "file"):
        unused |= {"input_tokens", "range_ratio"}
    if name == "trace":
        unused.add("output_tokens")
    if name in (*_CHATS, "file") or is_chat(options):
        unused.add("prompts")
    if "prompts" in unused or options.prompts == "text":
        unused |= {"lowest_token_id", "highest_token_id"}
    return unused


class Dataset(NamedTuple):
    """A data set. offsets: seconds at which the sessions of a trace begin; None without one."""

    sessions: Sessions
    offsets: Sequence[float] | None = None


def dataset_of(options: argparse.Namespace) -> Dataset:
    """Return the selected data set; raises ConfigError for conflicting flags or an invalid file."""
    sizes, chat = sizes_of(options), is_chat(options)
    make_prompt = prompts_of(options, chat=chat)
    name = options.dataset
    if options.agent_hints and (options.trace or name not in _CHATS):
        raise ConfigError(f"--agent-hints goes with --dataset {' and '.join(_CHATS)}")
    if options.trace:
        trace = read_trace(options.trace)
        offsets = [(each.stamp - trace[0].stamp) * options.trace_scale for each in trace]
        size = options.trace_block_size
        return Dataset(
            lambda seeds: trace_sessions(seeds, trace, make_prompt, size, chat=chat), offsets
        )
    if (name == "file") != bool(options.file):
        raise ConfigError("--dataset file and --file FILE belong together")
    if name == "file":
        requests = read_requests(options.file, options.output_tokens)
        return Dataset(lambda seeds: repeated_sessions(seeds, requests))
    if name in _CHATS:
        jobs = f"bench-{secrets.token_hex(4)}" if options.agent_hints else ""
        agent = AgentTools(options.system_tokens, options.tools) if name == "agent" else None
        return Dataset(
            lambda seeds: conversation_sessions(
                seeds, sizes, options.turns, agent=agent, chat=chat, jobs=jobs
            )
        )
    shared = {}
    if name == "shared-prefix":
        shared = {"num_groups": options.prefix_groups, "prefix_tokens": options.prefix_tokens}
    return Dataset(lambda seeds: prompt_sessions(seeds, sizes, make_prompt, chat=chat, **shared))
