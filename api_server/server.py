"""A front-end process from birth to end: loop, links, uvicorn.

Owns the event loop and the way to stop: on the supervisor's word, or SIGTERM, open
streams get an error event, connections close and the process ends within 2 s.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
import uvloop
from fastapi import FastAPI

from api_server.app import create_app
from api_server.app_state import AppState, ModelTexts
from api_server.engine.engine_client import EngineClient, FromEngine
from api_server.http.fair_listener import FairListener
from api_server.http.http_protocol import LimitedHttpProtocol
from api_server.lifecycle.engine_switch import EngineSwitch
from api_server.lifecycle.health import DrainState, Health
from api_server.lifecycle.supervisor_link import SupervisorLink
from api_server.live_view.events import ServerInfo
from api_server.live_view.publisher import LiveViewPublisher
from api_server.metrics.collector import Metrics
from api_server.metrics.metric_sheet import Gauge, MetricSheet
from api_server.protocol.responses.stored import StoredResponses
from api_server.routes.system import daemon_version
from api_server.sampling import seeds
from api_server.stream import OpenStreams
from proto.codec import Message
from proto.config import FrontEndConfig
from proto.engine_io import request_ids
from proto.lifecycle import AbortRequests, DrainRequested, FrontEndReady, PhaseClock, ProcessBoot
from proto.process import REQUEST_LOOP_GC, freeze_heap
from proto.security import server_context
from proto.sockets import Link, front_end_path

logger = logging.getLogger("tokend.api")

GRACE_SECONDS = 1
"""For connections to take their last bytes."""
KEEP_ALIVE_SECONDS = 65
"""Longer than the idle time of common load balancers."""


class Server(uvicorn.Server):
    """Leaves signals to us: Ctrl-C is the supervisor's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class OneOfSeveral(Server):
    """Shares its sockets with other processes. connections: of each of them."""

    def __init__(self, config: uvicorn.Config, connections: Gauge) -> None:
        super().__init__(config)
        self._connections = connections

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls = self.config.ssl
        listeners: Any = [
            FairListener(each, self._protocol, tls, self._connections) for each in sockets or []
        ]
        self.servers = listeners
        self.started = True

    def _protocol(self) -> LimitedHttpProtocol:
        protocol = LimitedHttpProtocol(self.config, self.server_state, self.lifespan.state)
        protocol.presence = self._connections
        return protocol


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Serve until the supervisor stops this process."""
    clock = PhaseClock(boot.born_at)
    clock.end("imports")
    uvloop.run(_serve(boot, supervisor, clock))


def make_server(app: FastAPI, frontend: FrontEndConfig, connections: Gauge) -> Server:
    """uvicorn over the application; `serve(sockets=…)` runs it. connections: of all API servers."""
    config = uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    config.load()
    config.ssl = _tls(frontend)
    return OneOfSeveral(config, connections) if frontend.api_server_count > 1 else Server(config)


def _tls(config: FrontEndConfig) -> ssl.SSLContext | None:
    """The same that the supervisor has checked; None is uvicorn's word for plain HTTP."""
    return None if config.ssl_certfile is None else server_context(config)


def make_app_state(
    boot: ProcessBoot, link: Link, send: Callable[[Message], None] = lambda message: None
) -> AppState:
    """Return what the routes need, over a link to the engine. send: to the supervisor."""
    model, config = boot.model, boot.config
    name = config.model.served_model_name or model.name
    metrics = Metrics(name, metric_sheet(boot), boot.incarnation, boot.num_hung)
    ids = request_ids(boot.index, boot.incarnation)
    crashes_until_isolated = config.scheduler.crashes_until_isolated
    client = EngineClient(link, boot.epoch, ids, metrics, crashes_until_isolated)
    live_view = LiveViewPublisher(
        ServerInfo(name, daemon_version(), config.scheduler.max_num_seqs), client
    )
    client.attach_live_view(live_view)
    drain_state = DrainState(partial(send, DrainRequested(boot.index)))
    texts = ModelTexts.load(config.model, model)
    return AppState(
        model=model,
        model_name=name,
        config=config.frontend,
        client=client,
        metrics=metrics,
        tokenizer=texts.tokenizer,
        chat_template=texts.chat_template,
        health=Health(client, drain_state),
        drain_state=drain_state,
        epoch=boot.epoch,
        vocabulary=texts.vocabulary,
        settings=config,
        request_abort=lambda labels, owner: send(AbortRequests(labels, owner)),
        open_streams=OpenStreams(),
        responses=stored_responses(config.frontend),
        live_view=live_view,
        seeds=seeds(config.model.seed, boot.index),
    )


def stored_responses(config: FrontEndConfig) -> StoredResponses:
    """Return the store of responses."""
    most = config.max_stored_responses_mib << 20
    return StoredResponses(most, config.stored_response_seconds, time.monotonic)


def metric_sheet(boot: ProcessBoot) -> MetricSheet:
    """Return the metric sheet of this API server."""
    if boot.metrics_fd is None:
        return MetricSheet.of_one()
    return MetricSheet.shared(boot.metrics_fd, boot.index, boot.config.frontend.api_server_count)


async def _serve(boot: ProcessBoot, supervisor: Link, clock: PhaseClock) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    supervisor_link = SupervisorLink(supervisor, boot.index)
    app_state = make_app_state(boot, connect(boot, boot.epoch), supervisor_link.send)
    clock.end("tokenizer")
    app = create_app(app_state)
    server = make_server(app, app_state.config, app_state.metrics.connections)
    freeze_heap(REQUEST_LOOP_GC)
    meet = partial(connect, boot)
    supervisor_link.start(
        EngineSwitch(boot.index, app.state, boot.config.model, meet, supervisor_link.send)
    )
    sockets = [socket.socket(fileno=descriptor) for descriptor in boot.listen_fds]
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(supervisor_link.stopped.wait())
    clock.end("routes")
    ready = asyncio.create_task(_announce(app_state.client, supervisor_link, boot.index, clock))
    waiting = {serving, stopping, ready}
    while not stopping.done() and not serving.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    ready.cancel()
    app_state.client.close()
    server.should_exit = True
    await serving


def connect(boot: ProcessBoot, epoch: int) -> Link:
    """Return a link to the engine of an epoch."""
    path = front_end_path(boot.run_dir, epoch, boot.index, boot.incarnation)
    return Link.connect(path, FromEngine)


async def _announce(
    client: EngineClient, supervisor_link: SupervisorLink, index: int, clock: PhaseClock
) -> None:
    engine = await client.wait_ready()
    logger.info("ready: up to %d tokens a request", engine.max_model_len)
    clock.end("engine")
    supervisor_link.send(FrontEndReady(index, clock.phases))
