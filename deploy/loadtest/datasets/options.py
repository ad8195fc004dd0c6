"""The flags that say what to ask, and the data set that they mean."""

import argparse
import secrets
from typing import Final

from deploy.loadtest.datasets.conversations import Agent, MultiTurn
from deploy.loadtest.datasets.material import (
    HIGHEST_TOKEN_ID,
    LOWEST_TOKEN_ID,
    Material,
    TokenIds,
    Words,
)
from deploy.loadtest.datasets.random_prompts import RandomPrompts, SharedPrefix
from deploy.loadtest.datasets.recorded import Recorded, Trace
from deploy.loadtest.datasets.sessions import Dataset, Sizes
from deploy.loadtest.options import at_least_one, from_zero, positive, share
from proto.errors import ConfigError

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
