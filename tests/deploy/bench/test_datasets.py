"""Datasets of load tests: deterministic by seed, with the requested sizes."""

import itertools
import json
import math
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from deploy.bench.client import CHAT, COMPLETIONS, BenchRequest
from deploy.bench.datasets import (
    AgentTools,
    Dataset,
    MakePrompt,
    RequestSizes,
    Session,
    Sessions,
    SessionSeeds,
    TraceRequest,
    conversation_sessions,
    dataset_of,
    prompt_sessions,
    random_ids,
    random_words,
    read_requests,
    read_trace,
    repeated_sessions,
    trace_sessions,
)
from deploy.bench.serve import parse
from proto.errors import ConfigError

IDS = random_ids(10, 20)
TRACE = [
    {"timestamp": 2000, "input_length": 5, "output_length": 3, "hash_ids": [7, 9]},
    {"timestamp": 1500, "input_length": 4, "output_length": 2, "hash_ids": [7]},
    {"timestamp": 4000, "input_length": 12, "output_length": 1, "hash_ids": [7, 9, 11]},
    {"timestamp": 4000, "output_length": 1, "prompt": "as it is"},
]


def random_prompts(
    sizes: RequestSizes, make_prompt: MakePrompt, groups: int = 1, prefix: int = 0
) -> Sessions:
    return partial(
        prompt_sessions,
        sizes=sizes,
        make_prompt=make_prompt,
        num_groups=groups,
        prefix_tokens=prefix,
    )


def conversations(sizes: RequestSizes, num_turns: int, **settings: Any) -> Sessions:
    return partial(conversation_sessions, sizes=sizes, num_turns=num_turns, **settings)


def traced(trace: list[TraceRequest], make_prompt: MakePrompt) -> Sessions:
    return partial(trace_sessions, trace=trace, make_prompt=make_prompt, block_size=4)


def first_asks(sessions: Sessions, seeds: SessionSeeds, number: int) -> list[BenchRequest]:
    return [next(each) for each in itertools.islice(sessions(seeds), number)]


def prompts(sessions: Sessions, seeds: SessionSeeds, number: int) -> list[Any]:
    return [each.content["prompt"] for each in first_asks(sessions, seeds, number)]


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0])
def test_random_prompts_have_their_sizes(spread: float) -> None:
    asks = first_asks(random_prompts(RequestSizes(10, 6, spread), IDS), SessionSeeds(1), 400)
    for mean, sizes in (
        (10, {len(each.content["prompt"]) for each in asks}),
        (6, {each.output_tokens for each in asks}),
    ):
        low, high = max(1, math.floor(mean * (1 - spread))), math.ceil(mean * (1 + spread))
        assert sizes == set(range(low, high + 1))
    assert {token for each in asks for token in each.content["prompt"]} == set(range(10, 21))
    assert {each.path for each in asks} == {COMPLETIONS}


@pytest.mark.parametrize(
    "sessions",
    [
        random_prompts(RequestSizes(8, 4, 0.5), random_ids()),
        random_prompts(RequestSizes(8, 4), random_ids(), 2, 5),
        random_prompts(RequestSizes(8, 4), random_words, 2, 5),
    ],
)
def test_requests_depend_on_the_seed_but_checked_ones_do_not(sessions: Sessions) -> None:
    one, other = SessionSeeds(1, 0.25), SessionSeeds(2, 0.25)
    asked, again, differently = (
        first_asks(sessions, each, 40) for each in (one, SessionSeeds(1, 0.25), other)
    )
    assert asked == again
    assert [each.checked for each in asked] == [index % 4 == 0 for index in range(40)]
    for mine, theirs in zip(asked, differently, strict=True):
        assert (mine == theirs) == mine.checked


@pytest.mark.parametrize(("share", "number"), [(0.0, 0), (1.0, 100), (0.05, 5), (0.333, 34)])
def test_number_of_checked_requests(share: float, number: int) -> None:
    assert sum(SessionSeeds(0, share).is_checked(index) for index in range(100)) == number


def test_prompts_of_a_group_share_a_prefix() -> None:
    found = prompts(
        random_prompts(RequestSizes(3, 1), random_ids(), groups=2, prefix=6),
        SessionSeeds(0),
        6,
    )
    assert [len(each) for each in found] == [9] * 6
    assert len({tuple(each[:6]) for each in found}) == 2
    assert found[0][:6] == found[2][:6] != found[1][:6]
    assert len({tuple(each[6:]) for each in found}) == 6
    (text,) = prompts(random_prompts(RequestSizes(3, 1), random_words, 1, 2), SessionSeeds(0), 1)
    assert len(text.split()) == 5


def load_result(session: Session) -> list[BenchRequest]:
    """Return all requests of a session whose n-th answer is `answer n`."""
    found = [next(session)]
    with suppress(StopIteration):
        while True:
            found.append(session.send(f"answer {len(found)}"))
    return found


def test_a_conversation_repeats_earlier_messages() -> None:
    first, second, third = load_result(next(conversations(RequestSizes(4, 2), 3)(SessionSeeds(0))))
    assert first.path == CHAT
    assert second.content["messages"][:-1] == [
        *first.content["messages"],
        {"role": "assistant", "content": "answer 1"},
    ]
    roles = [each["role"] for each in third.content["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert len(third.content["messages"][-1]["content"].split()) == 4
    text, longer = load_result(
        next(conversations(RequestSizes(4, 2), 2, chat=False)(SessionSeeds(0)))
    )
    assert longer.path == COMPLETIONS
    assert longer.content["prompt"].startswith(text.content["prompt"] + "\nanswer 1\n")


def test_sessions_of_an_agent_share_their_instructions_and_tools() -> None:
    agents = conversations(RequestSizes(4, 2), 2, agent=AgentTools(5, 3))
    sessions = [load_result(each) for each in itertools.islice(agents(SessionSeeds(0)), 2)]
    systems = {json.dumps(each.content["messages"][0]) for asks in sessions for each in asks}
    assert len(systems) == 1
    text, _, tools = sessions[0][0].content["messages"][0]["content"].split("\n")
    assert len(text.split()) == 5
    assert [each["function"]["name"] for each in json.loads(tools)] == [
        "tool_0",
        "tool_1",
        "tool_2",
    ]
    assert sessions[0][1].content["messages"][-1]["content"].startswith("Tool result: ")
    assert sessions[0][0] != sessions[1][0]


def test_sessions_may_be_agent_jobs() -> None:
    agents = conversations(RequestSizes(4, 2), 3, agent=AgentTools(5, 1), jobs="run")
    first, second = (load_result(each) for each in itertools.islice(agents(SessionSeeds(7)), 2))
    assert [each.job for each in first] == ["run-7-0"] * 3
    assert [each.is_last_step for each in first] == [False, False, True]
    assert {each.job for each in second} == {"run-7-1"}
    alone = load_result(next(conversations(RequestSizes(4, 2), 2)(SessionSeeds(0))))
    assert [(each.job, each.is_last_step) for each in alone] == [("", False)] * 2


def test_agent_jobs_need_sessions() -> None:
    def dataset(*words: str) -> Dataset:
        return dataset_of(parse(["--url", "http://x", *words], ""))

    jobs = [
        next(next(dataset("--dataset", "agent", "--agent-hints").sessions(SessionSeeds(0))))
        for _ in "ab"
    ]
    assert all(each.job.startswith("bench-") for each in jobs)
    assert jobs[0] != jobs[1]
    for words in ([], ["--dataset", "shared-prefix"], ["--trace", "x"]):
        with pytest.raises(ConfigError, match="--agent-hints goes with"):
            dataset(*words, "--agent-hints")


def test_a_trace_keeps_its_order_and_prefixes(tmp_path: Path) -> None:
    file = write(tmp_path / "x", TRACE)
    options = parse(["--url", "http://x", "--trace", file], "")
    assert dataset_of(options).offsets == [0.0, 0.5, 2.5, 2.5]
    trace = traced(read_trace(file), IDS)
    asks = first_asks(trace, SessionSeeds(0), 10)
    assert [each.output_tokens for each in asks] == [2, 3, 1, 1]
    short, middle, long, given = (each.content["prompt"] for each in asks)
    assert [len(each) for each in (short, middle, long)] == [4, 5, 12]
    assert middle[:4] == short
    assert long[:5] == middle
    assert given == "as it is"
    assert prompts(trace, SessionSeeds(0), 4) == [short, middle, long, given]
    assert prompts(trace, SessionSeeds(1), 4)[0] != short


def test_tokens_without_a_hash_id_are_unique(tmp_path: Path) -> None:
    """A trace without hash ids, or with a smaller block size than ours."""
    line = {"timestamp": 0, "input_length": 9, "output_length": 1}
    file = write(tmp_path / "x", [line, line, {**line, "hash_ids": [1]}, {**line, "hash_ids": [1]}])
    trace = traced(read_trace(file), random_ids())
    a, b, c, d = prompts(trace, SessionSeeds(0), 4)
    assert [len(each) for each in (a, b, c, d)] == [9] * 4
    assert a[0] != b[0]
    assert c[:4] == d[:4]
    assert c[4:] != d[4:]


def test_a_prompt_file_is_used_unchanged_and_repeated(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    lines = [
        {"prompt": "a", "output_tokens": 3},
        {"prompt": [1, 2], "max_tokens": 0},
        {"messages": messages},
    ]
    requests = read_requests(write(tmp_path / "x", lines), output_tokens=9)
    asks = first_asks(partial(repeated_sessions, requests=requests), SessionSeeds(0), 4)
    assert [(each.path, each.output_tokens) for each in asks] == [
        (COMPLETIONS, 3),
        (COMPLETIONS, 1),
        (CHAT, 9),
        (COMPLETIONS, 3),
    ]
    assert asks[2].content == {"messages": messages}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"timestamp": 1, "output_length": 2}', "line 1: input_length is missing"),
        ('{"timestamp": 1, "input_length": 2}', "line 1: output_length is missing"),
        ('\n{"input_length": 1, "output_length": 2}', "line 2: timestamp is missing"),
        ('{"timestamp": "1"}', "line 1: timestamp is not a number"),
        ('{"timestamp": NaN}', "line 1: timestamp is not a number"),
        ("[]", "line 1: not an object"),
        ("{", "line 1: not JSON"),
        ("\n", "the file is empty"),
    ],
)
def test_an_invalid_line_is_named(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=expected):
        read_trace(str(file))


def test_an_empty_file_or_one_without_prompts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 1: prompt or messages is missing"):
        read_requests(write(tmp_path / "x", [{"text": "a"}]), 1)
    with pytest.raises(ConfigError, match="No such file"):
        read_requests(str(tmp_path / "y"), 1)
