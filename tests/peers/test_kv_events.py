"""KV events as others read them: Dynamo counts overlaps, classes of vLLM decode."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import pytest
import zmq

from tests.e2e.daemon import Daemon, eventually
from tests.fakes.kv_events import events_config
from tests.peers.packages import DYNAMO, VLLM, unpack_package

pytestmark = pytest.mark.suite("peers")

MODEL: Final = "smollm2"
BLOCK_SIZE: Final = 16
PROMPT: Final = list(range(1000, 1160))
"""Ten blocks, of which the last one is full only if its last token is computed."""
OTHER: Final = list(range(2000, 2160))


class Router:
    """Dynamo's selection core in a process of its own, with one worker."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("dynamo_program.py"))],
            env={**os.environ, "PYTHONPATH": str(unpack_package(DYNAMO)), "DYN_LOG": "error"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        worker = self.call(
            "upsert_worker",
            {
                "worker_id": 7,
                "model_name": MODEL,
                "endpoint": "http://127.0.0.1:1",
                "block_size": BLOCK_SIZE,
                "kv_events_endpoint": endpoint,
                "replay_endpoint": replay_endpoint,
            },
        )
        assert worker["lifecycle"] == "schedulable", worker

    def call(self, method: str, argument: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, argument]) + "\n")
        self._process.stdin.flush()
        while not (line := self._process.stdout.readline()).startswith(("{", "[")):
            assert line, "the service has ended"
        return json.loads(line)

    def overlap(self, prompt: list[int]) -> int:
        """Return how many blocks of a prompt the worker has, by its events."""
        found = self.call("overlap_scores", {"model_name": MODEL, "token_ids": prompt})
        return next((int(each["device_blocks"]) for each in found["workers"]), 0)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Relay:
    """Passes messages of a PUB socket on, and drops the next ones if it shall."""

    def __init__(self, endpoint: str) -> None:
        self.num_to_drop = 0
        self.num_passed = 0
        self._context = zmq.Context()
        self._source, self._target = self._context.socket(zmq.SUB), self._context.socket(zmq.PUB)
        self._source.setsockopt(zmq.SUBSCRIBE, b"")
        self._source.connect(endpoint)
        self.endpoint = f"tcp://127.0.0.1:{self._target.bind_to_random_port('tcp://127.0.0.1')}"
        self._stops = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stops:
            if self._source.poll(20):
                message = self._source.recv_multipart()
                if self.num_to_drop:
                    self.num_to_drop -= 1
                else:
                    self._target.send_multipart(message)
                    self.num_passed += 1

    def close(self) -> None:
        self._stops = True
        self._thread.join()
        self._context.destroy(0)


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    config = events_config(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")
    flags = ("--kv-events-config", config, "--block-size", str(BLOCK_SIZE))
    with Daemon(*flags, "--num-gpu-blocks-override", "64") as running:
        yield running


@pytest.fixture
def sources(daemon: Daemon) -> dict[str, str]:
    found = httpx.get(f"{daemon.url}/kv_event_sources").json()
    assert found.keys() == {"0"}
    assert found["0"]["publisher"] == "zmq"
    source: dict[str, str] = found["0"]
    return source


def complete(daemon: Daemon, prompt: list[int], **fields: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, **fields}
    httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60).raise_for_status()


def test_dynamo_counts_overlaps_removals_and_a_replay_after_a_gap(
    daemon: Daemon, sources: dict[str, str]
) -> None:
    relay = Relay(sources["endpoint"])
    complete(daemon, PROMPT)  # before the router listens: it learns of it by a replay
    router = Router(relay.endpoint, sources["replay_endpoint"])
    try:
        assert router.overlap(OTHER) == 0

        def overlaps(prompt: list[int], number: int) -> bool:
            complete(daemon, [9, *range(3000, 3020)], cache_salt=os.urandom(4).hex())
            return eventually(lambda: router.overlap(prompt) == number, 0.5)

        assert eventually(lambda: overlaps(PROMPT, 10), 20)
        complete(daemon, OTHER[:64])
        assert eventually(lambda: router.overlap(OTHER) == 4)
        assert router.overlap([*PROMPT[:48], *OTHER]) == 3

        relay.num_to_drop = 1
        complete(daemon, OTHER)
        assert eventually(lambda: relay.num_to_drop == 0)
        assert router.overlap(OTHER) == 4, "the events were lost"
        assert eventually(lambda: overlaps(OTHER, 10), 20), "the next batch shows a gap"

        for start in range(4000, 4640, 160):  # evicts the oldest
            complete(daemon, list(range(start, start + 160)))
        assert eventually(lambda: router.overlap(PROMPT) < 10)

        httpx.post(f"{daemon.url}/reset_prefix_cache").raise_for_status()
        assert eventually(lambda: overlaps(OTHER, 0), 20)
    finally:
        router.close()
        relay.close()


def vllm_events() -> types.ModuleType:
    """vLLM's module of KV events, without what its publisher imports."""
    absent = {
        "vllm.config.kv_events": {"KVEventsConfig": object},
        "vllm.logger": {"init_logger": lambda name: None},
        "vllm.utils.network_utils": dict.fromkeys(
            ("get_ip", "get_tcp_uri", "is_valid_ipv6_address", "split_zmq_path")
        ),
        "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    }
    folder = unpack_package(VLLM)
    spec = importlib.util.spec_from_file_location(
        "vllm_kv_events", folder / "vllm" / "distributed" / "kv_events.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        for name, names in absent.items():
            stub = types.ModuleType(name)
            vars(stub).update(names)
            patch.setitem(sys.modules, name, stub)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        module.decoder = msgspec.msgpack.Decoder(module.KVEventBatch)
    return module


def test_classes_of_vllm_decode_the_events(daemon: Daemon, sources: dict[str, str]) -> None:
    vllm = vllm_events()
    context = zmq.Context()
    replay = context.socket(zmq.DEALER)
    replay.connect(sources["replay_endpoint"])
    complete(daemon, PROMPT, cache_salt="secret")
    httpx.post(f"{daemon.url}/reset_prefix_cache").raise_for_status()
    replay.send_multipart([b"", bytes(8)])
    stored, kinds = [], []
    while True:
        assert replay.poll(10_000)
        _, _, sequence, payload = replay.recv_multipart()
        if sequence == vllm.ZmqEventPublisher.END_SEQ:
            break
        batch = vllm.decoder.decode(payload)
        assert batch.data_parallel_rank == 0
        kinds += [type(event) for event in batch.events]
        stored += [event for event in batch.events if type(event) is vllm.BlockStored]
    context.destroy(0)
    assert kinds[0] is kinds[-1] is vllm.AllBlocksCleared
    assert [token for event in stored for token in event.token_ids] == PROMPT
    assert stored[0].parent_block_hash is None
    assert len(stored[0].extra_keys[0]) == 1
    assert "secret" not in str(stored[0].extra_keys)
    for event in stored:
        assert (event.group_idx, event.kv_cache_spec_kind) == (0, "full_attention")
        assert (event.block_size, event.medium, event.lora_name) == (BLOCK_SIZE, "GPU", None)
