"""Measure drafts from earlier tokens and grammars on recorded texts: acceptance, gain and time.

Texts are made from the repository's own files. Each request's outputs are fixed; a simulated step
accepts a draft as far as it agrees with them and takes the time c(rows), so what is measured is
what `engine_core/speculation` decides, not a model:

    edit     a file that is in the prompt, with some lines changed
    json     objects of one schema with random values, with and without white space
    agent    turns that call tools with parts of files that earlier turns read
    chat     paragraphs of the documentation
    random   random tokens, of which nothing can be known

The time of a decision and of indexing a token is measured with the engine's compiled modules, if
they are built.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from deploy.bench.options import BenchParser, at_least_one, several_counts, writable, write
from deploy.display import open_display
from deploy.environment import HostEnvironment
from deploy.models.store import prepared_model
from engine_core.compiled import use_compiled

if __name__ == "__main__":
    use_compiled()  # before the import of any module with a compiled form

from engine_core.request import Request, RequestStatus
from engine_core.speculation.drafting import Drafting, make_drafting
from engine_core.speculation.suffix_index import load_suffix_index
from engine_core.structured_output.backend import LLGuidanceBackend
from engine_core.structured_output.matchers import Matcher
from proto.messages.grammar import GrammarSource
from proto.messages.sampling_params import SamplingParams
from proto.settings.speculative_config import parse_speculative_config
from tests.benchmarks.command import run

ROOT: Final = Path(__file__).resolve().parents[2]
METHODS: Final = ("none", "ngram", "suffix", "grammar", "suffix+grammar")
Q4_1_COSTS: Final = ((1, 1.0), (4, 1.28), (8, 1.5))
"""Time of a step by rows, of Q4_1 weights on a CPU; further rows as between the last two."""
UNIT_SECONDS: Final = 0.005
"""Of a step with one row."""
MAX_TOKENS: Final = 16

Encode = Callable[[str], list[int]]


@dataclass
class Recording:
    """A request whose outputs are known. grammar: that the outputs follow, None for none."""

    prompt: list[int]
    outputs: list[int]
    grammar: GrammarSource | None = None


def edit_recordings(encode: Encode, number: int, generator: random.Random) -> list[Recording]:
    """Return files with a name replaced, and every 30th line or so rewritten."""
    files = sorted((ROOT / "engine_core").rglob("*.py"), key=lambda path: path.stat().st_size)
    recordings = []
    for path in generator.sample(files[len(files) // 3 : -8], number):
        text = path.read_text()
        words = [word for word in text.split() if word.isidentifier() and len(word) > 6]
        old = generator.choice(words)
        lines = text.replace(old, old + "_value").splitlines()
        for index in range(generator.randrange(30), len(lines), 30):
            lines[index] = f"{lines[index]}  # changed {generator.randrange(1000)}"
        prompt = f"Replace {old} by {old}_value in this file and return it.\n\n{text}\n\n"
        recordings.append(Recording(encode(prompt), encode("\n".join(lines))))
    return recordings


_CITIES: Final = ("Paris", "Oslo", "Lima", "Quito", "Accra", "Hanoi", "Turin", "Leeds")
_SCHEMA: Final = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "status": {"enum": ["active", "inactive"]},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "status", "address", "tags"],
    "additionalProperties": False,
}


def json_recordings(
    encode: Encode, number: int, generator: random.Random, *, compact: bool
) -> list[Recording]:
    source = GrammarSource("json_schema", json.dumps(_SCHEMA), compact)
    recordings = []
    for index in range(number):
        document = {
            "name": f"{generator.choice(_CITIES)} {generator.randrange(10_000)}",
            "age": generator.randrange(100),
            "status": generator.choice(("active", "inactive")),
            "address": {
                "street": f"{generator.choice(_CITIES)} Street {generator.randrange(300)}",
                "city": generator.choice(_CITIES),
            },
            "tags": generator.sample(_CITIES, 2),
        }
        separators = (",", ":") if compact else None
        prompt = f"Make up customer number {index} as JSON."
        outputs = json.dumps(document, separators=separators)
        recordings.append(Recording(encode(prompt), encode(outputs), source))
    return recordings


def agent_recordings(encode: Encode, number: int, generator: random.Random) -> list[Recording]:
    """Return turns of sessions: read a file, edit a part of it, run the tests, summarise."""
    files = sorted((ROOT / "engine_core").rglob("*.py"), key=lambda path: path.stat().st_size)
    recordings: list[Recording] = []
    while len(recordings) < number:
        path = generator.choice(files[len(files) // 4 : -len(files) // 4])
        name = str(path.relative_to(ROOT))
        lines = path.read_text().splitlines()
        start = generator.randrange(max(1, len(lines) - 8))
        part = "\n".join(lines[start : start + 6])
        changed = part.replace("self", "this", 1) + "\n    # checked"
        edit = {"path": name, "old_text": part, "new_text": changed}
        conversation = f"You are an agent with tools. Improve {name}.\n"
        for thought, tool, arguments, result in (
            (f"I will read {name} first.", "read_file", {"path": name}, "\n".join(lines)),
            ("I will change this part of it.", "edit_file", edit, f"{name} was changed"),
            ("I will run the tests.", "run", {"command": f"pytest {name}"}, "12 passed in 1.3s"),
        ):
            call = json.dumps({"name": tool, "arguments": arguments})
            answer = f"{thought}\n<tool_call>\n{call}\n</tool_call>"
            recordings.append(Recording(encode(conversation), encode(answer)))
            conversation += f"{answer}\n<tool_response>\n{result}\n</tool_response>\n"
        summary = f"I changed {name}: the part\n{part}\nis now\n{changed}\nand the tests pass."
        recordings.append(Recording(encode(conversation), encode(summary)))
    return recordings[:number]


def chat_recordings(encode: Encode, number: int, generator: random.Random) -> list[Recording]:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    paragraphs = [
        paragraph
        for page in pages
        for paragraph in page.read_text().split("\n\n")
        if len(paragraph) > 300 and not paragraph.startswith(("|", "```"))
    ]
    return [
        Recording(encode("Explain a part of tokend."), encode(paragraph))
        for paragraph in generator.sample(paragraphs, number)
    ]


def random_recordings(number: int, generator: random.Random) -> list[Recording]:
    def tokens(count: int) -> list[int]:
        return [generator.randrange(40_000) for _ in range(count)]

    return [Recording(tokens(50), tokens(150)) for _ in range(number)]


def all_recordings(encode: Encode, number: int) -> dict[str, list[Recording]]:
    """Return the requests of each kind of text, always the same ones."""
    return {
        "edit": edit_recordings(encode, max(1, number // 8), random.Random(1)),
        "json": json_recordings(encode, number, random.Random(2), compact=False),
        "json, compact": json_recordings(encode, number, random.Random(2), compact=True),
        "agent": agent_recordings(encode, number, random.Random(3)),
        "chat": chat_recordings(encode, number, random.Random(4)),
        "random": random_recordings(max(1, number // 2), random.Random(5)),
    }


class RecordedGrammars:
    """The grammars of recorded requests, as StructuredOutputManager has those of the engine."""

    def __init__(self, backend: LLGuidanceBackend | None) -> None:
        self._backend = backend
        self._compiled: dict[GrammarSource, Matcher] = {}
        self._matchers: dict[int, Matcher] = {}
        self._num_consumed: dict[int, int] = {}

    def add(self, request: Request, source: GrammarSource | None) -> None:
        if self._backend is None or source is None:
            return
        if source not in self._compiled:
            self._compiled[source] = self._backend.compile(source)
        self._matchers[request.seq_id] = self._compiled[source].copy()
        self._num_consumed[request.seq_id] = 0

    def has_grammar(self, request: Request) -> bool:
        return request.seq_id in self._matchers

    def forced_tokens(self, request: Request) -> list[int]:
        assert self._backend is not None
        matcher = self._matchers[request.seq_id]
        first = request.num_prompt_tokens + self._num_consumed[request.seq_id]
        matcher.consume(request.all_token_ids[first:])
        self._num_consumed[request.seq_id] = request.num_output_tokens
        return self._backend.forced_tokens(matcher)


@dataclass
class Result:
    """What was counted: numbers of tokens; seconds: of steps in units of a step with one row."""

    num_tokens: int = 0
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0
    decisions: list[float] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0


def row_cost(rows: int, costs: Sequence[tuple[int, float]]) -> float:
    """Interpolate the time of a step; beyond the last pair with the slope of the last two."""
    index = 1
    while index < len(costs) - 1 and rows > costs[index][0]:
        index += 1
    (first, low), (second, high) = costs[index - 1], costs[index]
    return low + (rows - first) * (high - low) / (second - first)


def play(
    recordings: Sequence[Recording],
    method: str,
    concurrency: int,
    costs: Sequence[tuple[int, float]],
    backend: LLGuidanceBackend | None = None,
) -> Result:
    """Run the requests, `concurrency` at a time, with the drafts of a method."""
    grammars = RecordedGrammars(backend)
    config = parse_speculative_config(json.dumps({"method": method}), MAX_TOKENS)
    drafting = make_drafting(config, grammars) or Drafting([], MAX_TOKENS)
    waiting = list(enumerate(recordings))[::-1]
    running: list[tuple[Request, Recording]] = []
    result = Result()
    while waiting or running:
        while waiting and len(running) < concurrency:
            seq_id, recording = waiting.pop()
            request = Request(
                seq_id=seq_id,
                request_id=seq_id,
                prompt_token_ids=recording.prompt,
                sampling_params=SamplingParams(max_tokens=len(recording.outputs)),
                hasher=None,
            )
            grammars.add(request, recording.grammar)
            drafting.add_request(request)
            running.append((request, recording))
        for request, _ in running:
            request.spec_token_ids = []
        limits = [
            len(recording.outputs) - request.num_output_tokens - 1 for request, recording in running
        ]
        drafting.begin_step()
        start = time.perf_counter()
        drafting.fill_drafts([request for request, _ in running], limits, 0)
        result.decisions.append(time.perf_counter() - start)
        rows = sum(1 + len(request.spec_token_ids) for request, _ in running)
        seconds = row_cost(rows, costs)
        drafting.learn_step(rows, seconds * UNIT_SECONDS)
        result.seconds += seconds
        result.num_steps += 1
        for request, recording in running:
            _verify(drafting, request, recording, result)
        for request, recording in running:
            if request.num_output_tokens == len(recording.outputs):
                request.status = RequestStatus.FINISHED_STOPPED
                drafting.end_request(request)
        running = [each for each in running if not each[0].is_finished]
    return result


def _verify(drafting: Drafting, request: Request, recording: Recording, result: Result) -> None:
    """Accept a draft as far as it agrees with the recorded outputs, and one token more."""
    coming = recording.outputs[request.num_output_tokens :]
    drafts = request.spec_token_ids
    num_accepted = 0
    while num_accepted < len(drafts) and drafts[num_accepted] == coming[num_accepted]:
        num_accepted += 1
    request.all_token_ids += coming[: num_accepted + 1]
    if drafts:
        drafting.record_verified(request, len(drafts), num_accepted)
    drafting.add_outputs(request, num_accepted + 1)
    result.num_tokens += num_accepted + 1
    result.num_drafted += len(drafts)
    result.num_accepted += num_accepted


def index_times(token_ids: list[int]) -> dict[str, float]:
    """Return nanoseconds and bytes per token of the index that `suffix` uses."""
    make_index = load_suffix_index()
    if make_index is None:
        return {}
    bulk = []
    for _ in range(5):
        index = make_index((2, 4, 8))
        start = time.perf_counter()
        index.extend(token_ids, 0, len(token_ids))
        bulk.append(time.perf_counter() - start)
    return {
        "index_tokens": len(token_ids),
        "index_ns_per_token": 1e9 * min(bulk) / len(token_ids),
        "index_bytes_per_token": index.num_bytes / len(token_ids),
    }


def decision_times(num_requests: int, *, repeats: bool, draft_model: bool = False) -> float:
    """Return the median microseconds of a decision for requests with or without candidates.

    draft_model: with the decision how many tokens a model in the workers proposes.
    """
    generator = random.Random(1)
    drafting = make_drafting(
        parse_speculative_config('{"method": "suffix+grammar"}', MAX_TOKENS),
        RecordedGrammars(None),
        "draft_model" if draft_model else "",
    )
    if drafting is None:
        return 0.0
    for _ in range(20):
        for rows in (1, 4, 16, 64, 256, 1024):
            drafting.learn_step(rows, 0.01 + 0.0001 * rows)
    requests = []
    for seq_id in range(num_requests):
        prompt = [generator.randrange(40_000) for _ in range(300)]
        if repeats:
            prompt += prompt[:20]
        request = Request(
            seq_id=seq_id,
            request_id=seq_id,
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=1000),
            hasher=None,
        )
        drafting.begin_step()
        drafting.add_request(request)
        requests.append(request)
    times = []
    limits = [900] * num_requests
    for _ in range(1000):
        for request in requests:
            request.spec_token_ids = []
        start = time.perf_counter()
        drafting.fill_drafts(requests, limits, 0)
        if draft_model and drafting.may_propose(num_requests, 0):
            drafting.choose_proposals(requests, limits, 0)
        times.append(time.perf_counter() - start)
        drafting.learn_step(num_requests, 0.01 + 0.0001 * num_requests)
    return 1e6 * statistics.median(times)


def main(words: Sequence[str]) -> None:
    parser = BenchParser(prog="python -m tests.benchmarks.drafting", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer is used")
    parser.add_argument("--requests", type=at_least_one, default=48, help="of most kinds of text")
    parser.add_argument("--concurrency", type=several_counts, default=[1, 4, 16])
    parser.add_argument(
        "--row-costs",
        metavar="ROWS:TIME",
        nargs="+",
        type=_pair,
        default=list(Q4_1_COSTS),
        help="time of a step by rows, at least two pairs",
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures to a file")
    options = parser.parse_args(words)
    with writable("--json", options.json) as files:
        figures = measure(options)
        write(files, json.dumps(figures, indent=1) + "\n")


def measure(options: argparse.Namespace) -> dict[str, object]:
    """Print the tables, and return their figures."""
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(options.model, HostEnvironment.of(os.environ), display)
    backend = LLGuidanceBackend(
        Path(model.folder, "tokenizer.json"), model.vocab_size, model.eos_token_ids
    )
    recordings = all_recordings(lambda text: backend.tokens_of(text.encode()), options.requests)
    figures: dict[str, object] = {"command": "python -m tests.benchmarks.drafting"}
    figures |= _print_times(recordings)
    table = Table(title="time per token with drafts, as a share of that without")
    for column in ("text", "at once", "method", "time", "tokens a step", "drafted", "accepted"):
        table.add_column(column, justify="left" if column in ("text", "method") else "right")
    for name, texts in recordings.items():
        for concurrency in options.concurrency:
            without = play(texts, "none", concurrency, options.row_costs)
            for method in METHODS[1:]:
                found = play(texts, method, concurrency, options.row_costs, backend)
                share = found.seconds / without.seconds
                steps = found.num_tokens / found.num_steps / (
                    without.num_tokens / without.num_steps
                )  # fmt: skip
                table.add_row(
                    name,
                    str(concurrency),
                    method,
                    f"{share:.2f}",
                    f"{steps:.2f}",
                    str(found.num_drafted),
                    f"{found.acceptance:.0%}",
                )
                figures[f"{name}, {concurrency}, {method}"] = {
                    "time_share": share,
                    "tokens_per_step": steps,
                    "num_drafted": found.num_drafted,
                    "acceptance": found.acceptance,
                    "decision_us_p50": 1e6 * statistics.median(found.decisions),
                }
    Console().print(table)
    return figures


def _print_times(recordings: dict[str, list[Recording]]) -> dict[str, object]:
    tokens = [token for texts in recordings.values() for each in texts for token in each.prompt]
    figures: dict[str, object] = dict(index_times(tokens[:100_000]))
    for repeats in (False, True):
        for number in (1, 16, 64):
            name = f"decision_us_{number}_{'with' if repeats else 'without'}_candidates"
            figures[name] = decision_times(number, repeats=repeats)
            figures[f"{name}_and_draft_model"] = decision_times(
                number, repeats=repeats, draft_model=True
            )
    for name, value in figures.items():
        print(f"{name}: {value:.1f}")
    return figures


def _pair(text: str) -> tuple[int, float]:
    rows, _, seconds = text.partition(":")
    try:
        return int(rows), float(seconds)
    except ValueError:
        raise argparse.ArgumentTypeError(f"takes pairs such as 4:1.28, not {text}") from None


if __name__ == "__main__":
    sys.exit(run(main))
