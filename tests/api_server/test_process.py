"""The real front-end process; the test acts as supervisor and engine."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import httpx
import msgspec

from proto.codec import encode
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import (
    Alive,
    Fatal,
    FrontEndReady,
    HealthStatus,
    NewEngine,
    NotReady,
    Ping,
    Restarted,
    Shutdown,
    TakePlace,
    ToSupervisor,
)
from proto.messages.prepared_model import PreparedModel
from proto.runtime.run_directory import RunDirectory
from proto.runtime.sockets import Link, front_end_path, supervisor_path
from proto.settings.config import FrontEndConfig
from tests.api_server.conftest import make_boot
from tests.fakes.fake_engine import FakeEngine

ROOT = Path(__file__).parents[2]
TIMEOUT_SECONDS = 20


@dataclass
class Process:
    """A running api_server. `alive`: the supervisor's end of the death pipe, while it is open."""

    child: subprocess.Popen[bytes]
    supervisor: Link
    engine: FakeEngine
    http: httpx.AsyncClient
    alive: list[int]

    async def next_message(self, kind: type) -> object:
        """Return the next message of this type to the supervisor."""
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while True:
                self.supervisor.flush()
                for message in self.supervisor.receive():
                    if isinstance(message, kind):
                        return message
                await asyncio.sleep(0.01)

    def abandon(self) -> None:
        """Simulate the death of the supervisor."""
        while self.alive:
            os.close(self.alive.pop())

    async def status(self) -> int:
        return await asyncio.to_thread(self.child.wait, TIMEOUT_SECONDS)


@contextlib.asynccontextmanager
async def running(
    run_dir: str, model: PreparedModel, stderr: BinaryIO | None = None
) -> AsyncIterator[Process]:
    directory = RunDirectory.create(run_dir)
    path = directory.path
    listener = socket.create_server(("127.0.0.1", 0))
    death, alive = os.pipe()
    boot = msgspec.structs.replace(
        make_boot(path, model, FrontEndConfig()), death_fd=death, listen_fds=(listener.fileno(),)
    )
    descriptor = os.memfd_create("boot")
    os.write(descriptor, encode(boot))
    supervisor = Link.bind(supervisor_path(path, "api_server", 0, 0), ToSupervisor)
    engine = FakeEngine(front_end_path(path, 1, 0), vocab_size=model.vocab_size, accepts=True)
    child = subprocess.Popen(
        [sys.executable, "-P", "-m", "api_server", "--boot-fd", str(descriptor)],
        pass_fds=(death, descriptor, listener.fileno()),
        cwd=ROOT,
        stderr=stderr,
    )
    supervisor.send(TakePlace(boot))
    os.close(death)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_SECONDS) as http:
            process = Process(child, supervisor, engine, http, [alive])
            while child.poll() is None and not supervisor.flush():
                await asyncio.sleep(0.01)  # until it has connected
            yield process
            process.abandon()
    finally:
        child.kill()
        child.wait()
        await process.engine.close()
        supervisor.close()
        listener.close()
        os.close(descriptor)
        directory.leave()


async def test_start_serve_and_shutdown(run_dir, model):
    async with running(run_dir, model) as process:
        assert (await process.http.get("/health")).status_code == 503
        process.engine.announce()
        ready = await process.next_message(FrontEndReady)
        assert ready.index == 0
        names = [each.what for each in ready.phases]
        assert names == ["imports", "tokenizer", "routes", "engine"]
        assert all(each.seconds >= 0 for each in ready.phases)
        assert (await process.http.get("/health")).status_code == 200
        body = {"prompt": "hello", "stream": True}
        async with process.http.stream("POST", "/v1/completions", json=body) as response:
            request = await process.engine.requests.get()
            process.engine.emit(request, [40])
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            process.supervisor.send(Shutdown())
            rest = [line async for line in lines if line]
        assert '"code": 503' in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert await process.status() == 0


async def test_connects_to_the_next_engine_on_request(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        answer = asyncio.create_task(process.http.post("/v1/completions", json={"prompt": "x"}))
        request = await process.engine.requests.get()
        await process.engine.close()
        path = front_end_path(os.path.dirname(process.engine.link.path), 5, 0)
        process.engine = FakeEngine(path, vocab_size=model.vocab_size, epoch=5, accepts=True)
        process.supervisor.send(NewEngine(5, 5))
        process.supervisor.send(Restarted("engine_core", hung=True))
        process.engine.announce()
        again = await process.engine.requests.get()
        assert (again.request_id, again.epoch) == (request.request_id, 5)
        process.engine.emit(again, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        metrics = (await process.http.get("/metrics")).text
        assert 'tokend:restarts_total{role="engine"} 1.0' in metrics
        assert 'tokend:watchdog_kills_total{role="engine"} 1.0' in metrics
        assert 'tokend:watchdog_kills_total{role="worker"} 0.0' in metrics


async def test_sigterm(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        answer = asyncio.create_task(process.http.post("/v1/completions", json={"prompt": "x"}))
        request = await process.engine.requests.get()
        process.engine.emit(request, [40])
        process.child.send_signal(signal.SIGTERM)
        assert (await answer).status_code == 503
        assert await process.status() == 0


async def test_answers_pings_while_starting_and_prints_its_stacks(run_dir, model, tmp_path):
    log = tmp_path / "log"
    async with running(run_dir, model, log.open("wb")) as process:
        process.supervisor.send(Ping())
        await process.next_message(Alive)
        process.engine.announce()
        await process.next_message(FrontEndReady)
        for _ in range(20):
            process.supervisor.send(Ping())
            await process.next_message(Alive)
        process.child.send_signal(signal.SIGUSR1)
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while "api_server/server.py" not in log.read_text():
                await asyncio.sleep(0.01)
        process.supervisor.send(HealthStatus((NotReady("draining", 0.0),)))
        process.supervisor.send(Ping())
        await process.next_message(Alive)
        ready = await process.http.get("/health/ready")
        assert ready.status_code == 503
        assert ready.json()["reasons"][0].startswith("draining for ")


async def test_ctrl_c_is_left_to_the_supervisor(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce()
        await process.next_message(FrontEndReady)
        process.child.send_signal(signal.SIGINT)
        answer = asyncio.create_task(process.http.post("/v1/completions", json={"prompt": "x"}))
        request = await process.engine.requests.get()
        process.engine.emit(request, [40], finish=FinishReason.LENGTH)
        assert (await answer).status_code == 200
        process.abandon()
        assert await process.status() == 1, "the process ends with the supervisor"


async def test_a_folder_without_tokenizer_is_fatal(run_dir, model, tmp_path):
    empty = msgspec.structs.replace(model, folder=str(tmp_path))
    async with running(run_dir, empty) as process:
        message = await process.next_message(Fatal)
        assert "tokenizer.json" in message.error.message
        assert await process.status() == 1


async def test_an_engine_of_another_version_is_fatal(run_dir, model):
    async with running(run_dir, model) as process:
        process.engine.announce(protocol_version=99)
        message = await process.next_message(Fatal)
        assert "protocol 99" in message.error.message
        assert await process.status() == 1
