"""vllm-router and SMG in front of two daemons: discovery, answers, affinity, retries, drain.

The daemons are real, with the packaged model; their own metrics say which one computed a request.
"""

import contextlib
import itertools
import json
import re
import socket
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
import psutil
import pytest

from tests.e2e.daemon import Daemon, eventually, metric_value
from tests.fakes.kv_events import events_config
from tests.peers.packages import SMG, VLLM_ROUTER, install_program

pytestmark = [pytest.mark.suite("peers"), pytest.mark.timeout(180)]

MODEL: Final = "smollm2-135m-instruct"
FLAGS: Final = (
    *("--dtype", "float32", "--cpu-threads", "1", "--max-model-len", "1024"),
    *("--num-gpu-blocks-override", "512", "--block-size", "16"),
)
ENDS: Final = {
    **{"--retry-initial-backoff-ms": "50", "--retry-max-retries": "5"},
    **{"--health-check-interval-secs": "1", "--health-check-timeout-secs": "5"},
    **{"--health-failure-threshold": "1", "--health-success-threshold": "1"},
    **{"--worker-startup-check-interval": "1", "--log-level": "debug"},
}
"""Flags of both routers: a daemon that has gone, and one that is back, are noticed in a second."""
BREAKER: Final = {
    **{"--cb-failure-threshold": "1", "--cb-success-threshold": "1"},
    "--cb-timeout-duration-secs": "1",
}
"""vllm-router's policies of affinity choose a daemon again until its circuit breaker is open."""


HTTP: Final = httpx.Client(verify=False, timeout=60)
"""Keeps connections open, since there are hundreds of requests."""


@dataclass(frozen=True)
class Kind:
    """A router and its policy. session_header: decides where a request goes; "" for its prompt."""

    package: str
    module: str
    policy: str
    session_header: str = ""

    def __str__(self) -> str:
        return f"{self.package.partition('=')[0]} {self.policy}"


KINDS: Final = (
    Kind(VLLM_ROUTER, "vllm_router.launch_router", "cache_aware"),
    Kind(SMG, "smg.launch_router", "cache_aware"),
    Kind(VLLM_ROUTER, "vllm_router.launch_router", "kv_aware"),
    Kind(VLLM_ROUTER, "vllm_router.launch_router", "consistent_hash", "x-session-id"),
    Kind(SMG, "smg.launch_router", "consistent_hashing", "x-smg-routing-key"),
)
ONE_OF_EACH: Final = KINDS[:2]
"""One policy of each router, for what does not depend on the policy."""


def free_ports(number: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


class Replica:
    """A daemon whose addresses stay the same when it is started again."""

    def __init__(self) -> None:
        port, *events = free_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.events, self.replay = (f"tcp://127.0.0.1:{each}" for each in events)
        config = events_config(endpoint=self.events, replay_endpoint=self.replay)
        self._flags = (*FLAGS, "--port", str(port), "--kv-events-config", config)
        self.daemon = Daemon(*self._flags)

    def kill(self) -> None:
        """End all processes at once, without a drain."""
        children = psutil.Process(self.daemon.pid).children(recursive=True)
        self.daemon.process.kill()  # first, or it would start them again
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(children, 10)
        self.daemon.stop()

    def start_again(self) -> None:
        """Start the daemon if it is down."""
        if self.daemon.process.poll() is not None:
            self.daemon = Daemon(*self._flags)
        self.daemon.wait_ready()

    @property
    def num_finished(self) -> float:
        """Choices that it has finished; 0 while it is down."""
        if self.daemon.process.poll() is not None:
            return 0.0
        return metric_value(HTTP.get(f"{self.url}/metrics").text, "vllm:request_success_total")


class Router:
    """A router in a process of its own."""

    def __init__(self, kind: Kind, replicas: list[Replica], log: Path) -> None:
        port, metrics_port = free_ports(2)
        self.kind = kind
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        flags = {
            **{"--host": "127.0.0.1", "--port": str(port), "--policy": kind.policy},
            **{"--prometheus-host": "127.0.0.1", "--prometheus-port": str(metrics_port)},
            **ENDS,
            **(BREAKER if kind.package == VLLM_ROUTER else {}),
        }
        command = [install_program(kind.package, "python"), "-m", kind.module]
        command += [word for flag in flags.items() for word in flag]
        if kind.policy == "kv_aware":
            command += ["--kv-event-model", MODEL, "--kv-event-block-size", "16"]
            for each in replicas:
                command += ["--kv-event-source", f"{each.url}={each.events}"]
                command += ["--kv-event-replay-source", f"{each.url}={each.replay}"]
        command += ["--worker-urls", *(replica.url for replica in replicas)]
        with log.open("w") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        assert eventually(lambda: self.num_healthy == len(replicas), 60), self.text()

    @property
    def log_size(self) -> int:
        return self._log.stat().st_size

    def text(self, start: int = 0) -> str:
        """Return the log from byte `start` on, without colours."""
        with self._log.open("rb") as log:
            log.seek(start)
            return re.sub(r"\x1b\[[0-9;]*m", "", log.read().decode(errors="replace"))

    @property
    def num_healthy(self) -> int:
        """Daemons that it sends requests to."""
        try:
            return int(HTTP.get(f"{self.url}/readiness").json().get("healthy_workers", 0))
        except (httpx.HTTPError, ValueError):
            return 0

    def post(self, path: str, session: str = "", **body: Any) -> httpx.Response:
        """Send a request. session: that it belongs to, in the policy's header if it has one."""
        name = self.kind.session_header
        headers = {name: session} if name and session else {}
        return HTTP.post(f"{self.url}{path}", json=body, headers=headers)

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Replica]]:
    pair = [Replica(), Replica()]
    try:
        for replica in pair:
            replica.daemon.wait_ready()
        yield pair
    finally:
        for replica in pair:
            replica.daemon.stop()


@pytest.fixture(scope="module", params=KINDS, ids=str)
def router(
    request: pytest.FixtureRequest,
    replicas: list[Replica],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Router]:
    for replica in replicas:
        replica.start_again()  # a test may have failed while it was down
    log = tmp_path_factory.mktemp("router") / "log"
    running = Router(request.param, replicas, log)
    try:
        yield running
    finally:
        running.close()


def where(
    router: Router, replicas: list[Replica], body: dict[str, Any], session: str = ""
) -> tuple[int, dict[str, Any]]:
    """Send a completion or chat of one choice; return the index of its daemon, and the answer."""
    before = [replica.num_finished for replica in replicas]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    answer = router.post(path, session, **body)
    assert answer.status_code == 200, answer.text

    def more() -> list[float]:
        return [each.num_finished - old for each, old in zip(replicas, before, strict=True)]

    assert eventually(lambda: sum(more()) == 1), more()
    return more().index(1), answer.json()


_numbers = itertools.count()


def new_prompt(num_words: int = 30) -> str:
    """Return a text whose first block no other prompt has; by default of more than four blocks."""
    return f"{next(_numbers)} " + " ".join(f"word{n}" for n in range(num_words))


def completion(prompt: str, **fields: Any) -> dict[str, Any]:
    return {
        **{"model": MODEL, "prompt": prompt, "max_tokens": 2},
        **{"temperature": 0, "ignore_eos": True, **fields},
    }


def chat(text: str, **fields: Any) -> dict[str, Any]:
    body = completion("", messages=[{"role": "user", "content": text}], **fields)
    del body["prompt"]
    return body


def streamed(url: str, path: str, body: dict[str, Any]) -> dict[int, str]:
    """Return the text of each choice of a stream."""
    texts: dict[int, str] = defaultdict(str)
    with HTTP.stream("POST", f"{url}{path}", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    for line in lines[:-1]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] += choice.get("text") or choice["delta"].get("content") or ""
    return texts


def test_answers_are_those_of_a_daemon(router: Router, replicas: list[Replica]) -> None:
    for path, body in (
        ("/v1/completions", completion("The sea is", max_tokens=12, logprobs=1)),
        ("/v1/completions", completion("The sea is", n=2, temperature=0.7, seed=3)),
        ("/v1/chat/completions", chat("Say hello.", max_tokens=12)),
        (
            "/v1/chat/completions",
            chat("Say hello.", ignore_eos=False, structured_outputs={"regex": "(ab){2}c"}),
        ),
    ):
        direct = HTTP.post(f"{replicas[0].url}{path}", json=body).json()
        answer = router.post(path, **body)
        assert answer.status_code == 200, answer.text
        assert answer.headers.get("x-tokend-ignored") is None
        assert answer.json()["choices"] == direct["choices"]
        assert answer.json()["usage"]["completion_tokens"] == direct["usage"]["completion_tokens"]
        assert streamed(router.url, path, body) == {
            choice["index"]: choice.get("text") or choice["message"]["content"]
            for choice in direct["choices"]
        }
    refused = router.post("/v1/completions", **completion("x", temperature=-1))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


def test_other_apis_pass(router: Router) -> None:
    named = {"model": MODEL}
    answer = router.post("/v1/responses", **named, input="Say hello.", max_output_tokens=16)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["output_tokens"] > 0
    messages = chat("Say hello.")["messages"]
    answer = router.post("/v1/messages", **named, max_tokens=8, messages=messages)
    assert answer.status_code == 200, answer.text
    assert answer.json()["content"][0]["type"] == "text"


def test_a_router_finds_the_model(router: Router, replicas: list[Replica]) -> None:
    listed = HTTP.get(f"{router.url}/v1/models").json()["data"]
    assert [card["id"] for card in listed] == [MODEL]
    known = HTTP.get(f"{router.url}/workers").json()["workers"]
    assert {worker["url"] for worker in known} == {replica.url for replica in replicas}
    if router.kind.package == SMG:
        assert {worker["runtime_type"] for worker in known} == {"vllm"}
        assert {worker["labels"]["max_model_len"] for worker in known} == {"1024"}
        return
    info = HTTP.get(f"{router.url}/server_info", params={"config_format": "json"}).json()
    assert info["vllm_config"]["cache_config"]["block_size"] == 16
    body = chat("Say hello.")
    rendered = router.post("/v1/chat/completions/render", **body).json()
    direct = router.post("/v1/chat/completions", **body, return_token_ids=True).json()
    assert rendered["token_ids"] == direct["prompt_token_ids"]


def test_requests_go_where_the_policy_promises(router: Router, replicas: list[Replica]) -> None:
    found: dict[str, int] = {}
    if router.kind.policy == "kv_aware":
        check_events(router, replicas, (0, 1))
        return
    if router.kind.session_header:
        for session in map(str, range(16)):
            for _ in range(2):
                index, _ = where(router, replicas, completion(new_prompt(3)), session)
                assert found.setdefault(session, index) == index, session
        assert set(found.values()) == {0, 1}
        return
    for _ in range(3):
        prefix = new_prompt()
        for ending in ("a", "b"):
            index, answer = where(router, replicas, completion(f"{prefix} {ending}"))
            assert found.setdefault(prefix, index) == index
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert (cached >= 64) == (ending != "a")


def check_events(router: Router, replicas: list[Replica], indices: Iterable[int]) -> None:
    """Prefixes that only a daemon of these knows of lead to it, in completions and chats."""

    def compute(index: int, body: dict[str, Any]) -> bool:
        """Have a daemon compute a body itself; return whether the router gets its events."""
        url = replicas[index].url
        line, start = f"kv_index live sequence advanced source={url}", router.log_size
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        HTTP.post(f"{url}{path}", json=body).raise_for_status()
        return eventually(lambda: line in router.text(start), 2)

    for index in indices:
        assert eventually(lambda: compute(index, completion(new_prompt())), 30)  # noqa: B023
        for make in (completion, chat, completion, chat):
            prefix = new_prompt()
            assert compute(index, make(f"{prefix} a"))
            assert where(router, replicas, make(f"{prefix} b"))[0] == index


def test_a_killed_daemon_is_replaced_by_the_other_one(
    router: Router, replicas: list[Replica]
) -> None:
    body = completion(new_prompt())
    index, answer = where(router, replicas, body, "a")
    replicas[index].kill()
    for _ in range(3):
        other, again = where(router, replicas, body, "a")
        assert (other, again["choices"]) == (1 - index, answer["choices"])
    assert eventually(lambda: router.num_healthy == 1)
    replicas[index].start_again()
    assert eventually(lambda: router.num_healthy == 2, 30)
    check_is_back(router, replicas, index)


@pytest.mark.parametrize("router", ONE_OF_EACH, indirect=True, ids=str)
def test_a_draining_daemon_gets_no_more_requests(router: Router, replicas: list[Replica]) -> None:
    body = completion(new_prompt())
    index, _ = where(router, replicas, body, "b")
    url = f"{replicas[index].url}/v1/completions"
    long = completion("The sea is", max_tokens=900, stream=True)
    with HTTP.stream("POST", url, json=long) as running:
        lines = running.iter_lines()
        next(lines)
        HTTP.post(f"{replicas[index].url}/admin/drain").raise_for_status()
        refused = HTTP.post(url, json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        for _ in range(3):
            assert where(router, replicas, body, "b")[0] == 1 - index
        assert eventually(lambda: router.num_healthy == 1)
    replicas[index].daemon.wait_exit()
    replicas[index].start_again()
    assert eventually(lambda: router.num_healthy == 2, 30)
    check_is_back(router, replicas, index)


def check_is_back(router: Router, replicas: list[Replica], index: int) -> None:
    """A daemon that was started again gets requests."""
    if router.kind.policy == "kv_aware":
        check_events(router, replicas, (index,))
        return
    sessions = map(str, itertools.count())
    assert eventually(
        lambda: where(router, replicas, completion(new_prompt()), next(sessions))[0] == index, 20
    )
