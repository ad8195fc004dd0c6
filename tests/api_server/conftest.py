"""The real application over real HTTP, with a scripted engine behind a real link."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from api_server.app import create_app
from api_server.engine.engine_client import FromEngine
from api_server.generation.app_state import AppState
from api_server.generation.images import MediaReader
from api_server.http.http_server import HttpServer
from api_server.server import make_app_state, make_server
from proto.messages.engine_io import FinishReason
from proto.messages.lifecycle import ProcessBoot
from proto.messages.prepared_model import PreparedModel
from proto.runtime.sockets import Link, front_end_path
from proto.settings.config import (
    CacheConfig,
    FrontEndConfig,
    LoRAConfig,
    ModelConfig,
    ServeConfig,
    TraceConfig,
)
from tests.fakes import lifecycle_messages
from tests.fakes.fake_engine import FakeEngine, FakeSupervisor, Script
from tests.fakes.lifecycle_messages import profiler_config

CORPUS = [
    "the quick brown fox jumps over the lazy dog, said the old man to the sea.",
    "def main(): return [number for number in range(10) if number % 2 == 0]",
    "naïve café, 你好世界, emoji 😀 and 👩‍👩‍👧‍👦 and 🇩🇪, e\u0301 combining",
]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODEL = "toy"


def byte_level_tokenizer() -> Tokenizer:
    """A small byte-level BPE with three special tokens, ids 0 to 2; id 2 ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool call>", special=False)])
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    """A prepared folder with a toy tokenizer and template, without weights."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|endoftext|>"})
    )
    return prepared(folder, tokenizer.get_vocab_size(), has_chat_template=True)


def prepared(folder: Path, vocab_size: int, *, has_chat_template: bool) -> PreparedModel:
    return lifecycle_messages.model(
        folder=str(folder),
        name=MODEL,
        source=str(folder),
        vocab_size=vocab_size,
        max_position=256,
        eos_token_ids=(2,),
        has_chat_template=has_chat_template,
    )


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A temporary directory with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="td-") as path:
        yield path


def make_boot(
    run_dir: str,
    model: PreparedModel,
    frontend: FrontEndConfig,
    seed: int | None = None,
    index: int = 0,
    lora: LoRAConfig | None = None,
    engine_epochs: tuple[int, ...] = (1,),
    kv_transfer_config: str | None = None,
) -> ProcessBoot:
    trace = TraceConfig(profiler_config=profiler_config(f"{run_dir}/profiles"))
    config = ServeConfig(
        model=ModelConfig(seed=seed),
        frontend=frontend,
        trace=trace,
        lora=lora or LoRAConfig(),
        cache=CacheConfig(kv_transfer_config=kv_transfer_config),
    )
    return lifecycle_messages.boot(
        "api_server",
        run_dir=run_dir,
        config=config,
        model=model,
        index=index,
        engine_epochs=engine_epochs,
    )


@dataclass
class FrontEnd:
    """A running front end, its scripted engines and a client. engine: the first one."""

    app_state: AppState
    engines: list[FakeEngine]
    http: httpx.AsyncClient
    url: str
    run_dir: str
    server: HttpServer
    supervisor: FakeSupervisor
    boot: ProcessBoot
    app: FastAPI

    @property
    def engine(self) -> FakeEngine:
        return self.engines[0]

    async def lose_engine(self, index: int = 0) -> FakeEngine:
        """Replace a dead engine by a new one, which is not ready yet; return it."""
        old = self.engines[index]
        await old.close()
        epoch = max(engine.epoch for engine in self.engines) + 1
        path = front_end_path(self.run_dir, epoch, 0)
        new = FakeEngine(path, vocab_size=old.vocab_size, epoch=epoch, accepts=old.accepts)
        self.engines[index] = new
        self.app_state.client.reconnect(Link.connect(path, FromEngine), epoch, index)
        if index == 0:
            self.app.state.app_state = dataclasses.replace(self.app_state, epoch=epoch)
        return new

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"prompt": "hello", **fields})

    async def chat(self, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "hello"}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def events(self, path: str, **fields: object) -> list[object]:
        """Return the decoded events of a stream; the last one is the string [DONE]."""
        async with self.http.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, await response.aread()
            text = (await response.aread()).decode()
        assert text.endswith("\n\n")
        found: list[object] = []
        for event in text[:-2].split("\n\n"):
            assert event.startswith("data: ")
            data = event.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        return found

    async def one_by_one(self, token_ids: Sequence[int], **fields: object) -> list[Any]:
        """Return the first events of a completion, independent of timing: the engine, which has no
        script, sends the next token when the event of the last one has arrived.
        """
        body = {"prompt": "hello", **fields, "stream": True}
        found = []
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            events = (line async for line in response.aiter_lines() if line.startswith("data: "))
            request = await self.engine.requests.get()
            for token_id in token_ids:
                self.engine.emit(request, [token_id])
                found.append(json.loads((await anext(events)).removeprefix("data: ")))
            self.engine.emit(request, [], finish=FinishReason.LENGTH)
            assert [event async for event in events][-1] == "data: [DONE]"
        return found


async def concurrently(check: Callable[[Any], Awaitable[None]], cases: Iterable[Any]) -> None:
    """Check all cases, eight at a time, which is faster than one after the other."""
    left = iter(cases)

    async def check_next() -> None:
        for case in left:
            await check(case)

    await asyncio.gather(*(check_next() for _ in range(8)))


@contextlib.asynccontextmanager
async def websocket(
    front_end: FrontEnd, path: str, **headers: str
) -> AsyncIterator[ClientConnection]:
    """A WebSocket whose client sends no pings."""
    url = front_end.url.replace("http", "ws", 1) + path
    async with connect(url, additional_headers=headers, ping_interval=None) as client:
        yield client


async def message(client: ClientConnection) -> Any:
    """Return the next message, decoded."""
    async with asyncio.timeout(10):
        return json.loads(await client.recv())


async def closed(client: ClientConnection) -> int:
    """Wait until the server closes; return the close code."""
    with pytest.raises(ConnectionClosed) as caught:
        async with asyncio.timeout(10):
            await client.recv()
    assert caught.value.rcvd is not None
    return caught.value.rcvd.code


async def samples(front_end: FrontEnd) -> dict[str, float]:
    """Return the samples of /metrics by name and by the values of their further labels."""
    response = await front_end.http.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith("vllm:"):
                assert labels.pop("model_name") == MODEL
                assert labels.pop("engine") == "0"
            found[sample.name + "".join(f",{value}" for value in labels.values())] = sample.value
    return found


StartFrontEnd = Callable[..., contextlib.AbstractAsyncContextManager[FrontEnd]]


@contextlib.asynccontextmanager
async def serving(
    run_dir: str,
    model: PreparedModel,
    script: Script | None = None,
    *,
    accepts: bool = False,
    ready: bool = True,
    config: FrontEndConfig | None = None,
    seed: int | None = None,
    max_model_len: int = 256,
    port: int = 0,
    index: int = 0,
    host: str = "127.0.0.1",
    lora: LoRAConfig | None = None,
    admin_sockets: Sequence[socket.socket] = (),
    media: MediaReader | None = None,
    num_engines: int = 1,
    kv_transfer_config: str | None = None,
) -> AsyncIterator[FrontEnd]:
    """Run a front end that serves a model inside the context. media: reads images."""
    epochs = tuple(range(1, num_engines + 1))
    paths = [front_end_path(run_dir, epoch, index) for epoch in epochs]
    engines = [
        FakeEngine(
            path,
            vocab_size=model.vocab_size,
            max_model_len=max_model_len,
            script=script,
            accepts=accepts,
            epoch=epoch,
        )
        for path, epoch in zip(paths, epochs, strict=True)
    ]
    frontend = config or FrontEndConfig()
    boot = make_boot(
        run_dir, model, frontend, seed, index, lora, epochs, kv_transfer_config=kv_transfer_config
    )
    supervisor = FakeSupervisor()
    links = [Link.connect(path, FromEngine) for path in paths]
    app_state = make_app_state(boot, links, supervisor, media)
    if ready:
        for engine in engines:
            engine.announce()
        while app_state.client.missing_engines:
            await asyncio.sleep(0.001)
    app = create_app(app_state)
    server = make_server(app, app_state.config, app_state.metrics.connections, admin_sockets)
    listener = socket.create_server((host, port))
    for each in (listener, *admin_sockets):
        if each.family != socket.AF_UNIX:  # uvloop does this, asyncio's loop waits 40 ms for an ACK
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    ticking = asyncio.create_task(server.main_loop())
    answering = asyncio.create_task(app_state.peers.run())
    try:
        # Plain HTTP, since loading a CA bundle would take longer than the start of a front end.
        # A test may send hundreds of requests at once, which wait for connections.
        timeout = httpx.Timeout(60, pool=None)
        async with httpx.AsyncClient(base_url=url, timeout=timeout, verify=False) as http:
            front_end = FrontEnd(
                app_state, engines, http, url, run_dir, server, supervisor, boot, app
            )
            yield front_end
    finally:
        app_state.client.close()
        ticking.cancel()
        answering.cancel()
        await _close(server)
        app_state.peers.close()
        for engine in front_end.engines:
            await engine.close()


async def _close(server: HttpServer) -> None:
    """Shut down like uvicorn's `serve`, without its pauses of 0.1 s."""
    for listener in server.servers:
        listener.close()
    for connection in list(server.server_state.connections):
        connection.shutdown()
    async with asyncio.timeout(5):
        while server.server_state.connections or server.server_state.tasks:
            await asyncio.sleep(0.001)


@pytest.fixture
def start(run_dir: str, model: PreparedModel) -> StartFrontEnd:
    """start(script=…, …) runs a front end inside `async with`; served: another model."""

    def running(
        script: Script | None = None, *, served: PreparedModel | None = None, **fields: Any
    ) -> contextlib.AbstractAsyncContextManager[FrontEnd]:
        return serving(run_dir, served or model, script, **fields)

    return running


@pytest.fixture
def scripted(tokenizer: Tokenizer) -> Callable[[str], Script]:
    """scripted(text): the engine samples the tokens of `text` and then the end token."""

    def script_for(text: str) -> Script:
        ids = [*tokenizer.encode(text).ids, 2]
        return lambda request, choice: ids

    return script_for


@contextlib.contextmanager
def counted_turns() -> Iterator[list[None]]:
    """Yield a list that grows by one with each turn of other work on the event loop."""
    turns: list[None] = []

    async def count_turns() -> None:
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    counting = asyncio.get_running_loop().create_task(count_turns())
    yield turns
    counting.cancel()
