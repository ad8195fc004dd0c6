"""A front-end process from birth to end: loop, links, uvicorn.

Owns the event loop and the way to stop: on the supervisor's word, or SIGTERM, open
streams get an error event, connections close and the process ends within 2 s.
"""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
import uvloop

from api_server.app import create_app
from api_server.engine_client import EngineClient, FromEngine
from api_server.health import Health
from api_server.http_protocol import LimitedHttpProtocol
from api_server.inputs.chat_template import load_chat_template
from api_server.inputs.rendering import TimedRendering
from api_server.inputs.sampling import seeds
from api_server.inputs.tokenizer import ModelTokenizer, special_token_texts
from api_server.metrics import Metrics
from api_server.services import Services
from proto.codec import Message
from proto.config import FrontEndConfig
from proto.ids import request_ids
from proto.lifecycle import (
    Alive,
    Condition,
    Distrust,
    FrontEndReady,
    NewEngine,
    Ping,
    ProcessBoot,
    Restarted,
    Shutdown,
)
from proto.sockets import Link, front_end_path
from proto.tls import server_context

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


def main(boot: ProcessBoot, supervisor: Link) -> None:
    """Serve until told to stop."""
    uvloop.run(_serve(boot, supervisor))


def make_server(services: Services) -> Server:
    """uvicorn over these services; `serve(sockets=…)` runs it."""
    config = uvicorn.Config(
        create_app(services),
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
    config.ssl = _tls(services.config)
    return Server(config)


def _tls(config: FrontEndConfig) -> ssl.SSLContext | None:
    """The same that the supervisor has checked; None is uvicorn's word for plain HTTP."""
    return None if config.ssl_certfile is None else server_context(config)


def make_services(boot: ProcessBoot, link: Link) -> Services:
    """Everything the routes need, over a link to the engine."""
    model, config = boot.model, boot.config
    folder = config.model.tokenizer or model.folder
    name = config.model.served_model_name or model.name
    metrics = Metrics(name, model.max_position)
    ids = request_ids(boot.index, boot.incarnation)
    crashes_until_alone = config.scheduler.crashes_until_alone
    client = EngineClient(link, boot.epoch, ids, metrics, crashes_until_alone)
    template = load_chat_template((folder, model.folder), name, special_token_texts(folder))
    return Services(
        model=model,
        model_name=name,
        config=config.frontend,
        client=client,
        metrics=metrics,
        tokenizer=ModelTokenizer.load(folder),
        health=Health(client),
        chat_template=TimedRendering(template),
        seeds=seeds(config.model.seed, boot.index),
    )


async def _serve(boot: ProcessBoot, supervisor: Link) -> None:
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    services = make_services(boot, connect(boot, boot.epoch))
    server = make_server(services)
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be walked again and again
    stop = asyncio.Event()
    say = obey(supervisor, services, lambda epoch: connect(boot, epoch), stop)
    sockets = [socket.socket(fileno=descriptor) for descriptor in boot.listen_fds]
    serving = asyncio.create_task(server.serve(sockets=sockets))
    stopping = asyncio.create_task(stop.wait())
    ready = asyncio.create_task(_announce(services.client, say, boot.index))
    waiting = {serving, stopping, ready}
    while not stopping.done() and not serving.done():
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    ready.cancel()
    services.client.close()
    server.should_exit = True
    await serving


def connect(boot: ProcessBoot, epoch: int) -> Link:
    """This front end's link to the engine of an epoch."""
    path = front_end_path(boot.run_dir, epoch, boot.index, boot.incarnation)
    return Link.connect(path, FromEngine)


def obey(
    supervisor: Link, services: Services, meet: Callable[[int], Link], stop: asyncio.Event
) -> Callable[[Message], None]:
    """Do what the supervisor says from now on; set `stop` when that is Shutdown, or on SIGTERM.

    meet: makes the link to the engine of an epoch. Returns the way to tell it something.
    """
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def drain() -> None:
        for message in supervisor.receive():
            if isinstance(message, Shutdown):
                stop.set()
            elif isinstance(message, NewEngine):
                logger.warning("the engine died: %d requests wait", services.client.num_open)
                services.client.reconnect(meet(message.epoch), message.epoch)
            elif isinstance(message, Restarted):
                services.metrics.restarted(message.role, message.hung)
            elif isinstance(message, Condition):
                services.health.hear(message)
            elif isinstance(message, Ping):
                say(Alive())

    def say(message: Message) -> None:
        supervisor.send(message)
        loop.call_soon(drain)  # a send may swallow the link's wake-up

    def distrust(epoch: int) -> None:
        say(Distrust("engine_core", 0, epoch, "it sent what is no message"))

    services.client.when_nonsense(distrust)
    loop.add_reader(supervisor.fileno(), drain)
    loop.call_soon(drain)
    return say


async def _announce(client: EngineClient, say: Callable[[Message], None], index: int) -> None:
    engine = await client.wait_ready()
    logger.info("ready: up to %d tokens a request", engine.max_model_len)
    say(FrontEndReady(index))
