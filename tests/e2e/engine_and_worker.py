"""A real engine and a real worker with the packaged model; the test is front end and supervisor."""

import asyncio
import os
import subprocess
import sys

from api_server.engine.engine_client import EngineClient, FromEngine
from api_server.live_view.events import ServerInfo
from api_server.live_view.publisher import LiveViewPublisher
from api_server.metrics.metric_sheet import MetricSheet
from api_server.metrics.metrics import Metrics
from deploy.supervisor.processes import child_environment
from proto.codec import encode
from proto.config import ServeConfig
from proto.engine_io import request_ids
from proto.lifecycle import Role, Shutdown, ToSupervisor
from proto.run_directory import RunDirectory
from proto.sockets import Link, front_end_path, supervisor_path
from tests.e2e.reference import packaged_model
from tests.fakes import boots
from tests.fakes.fake_supervisor import FakeSupervisor

EPOCH = 1
READY_LIMIT_SECONDS = 120.0
END_LIMIT_SECONDS = 15.0


class EngineAndWorker:
    """Two processes, and `client` to talk to the first; use it inside `async with`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._model = packaged_model()
        self._directory = RunDirectory.create("/tmp")
        self._death_fd, self._alive = os.pipe()
        self._links: list[Link] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> "EngineAndWorker":
        self._start("worker")
        self._start("engine_core")
        link = Link.connect(front_end_path(self._directory.path, EPOCH, 0), FromEngine)
        metrics = Metrics(self._model.name, MetricSheet.of_one())
        live_view = LiveViewPublisher(ServerInfo(self._model.name, "0", 1))
        self.client = EngineClient(
            link, EPOCH, request_ids(0, 0), metrics, 3, live_view, FakeSupervisor()
        )
        async with asyncio.timeout(READY_LIMIT_SECONDS):
            await self.client.wait_ready()
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.client.close()
        for link in self._links:
            link.send(Shutdown())
        try:
            for process in self._processes:
                process.wait(END_LIMIT_SECONDS)
        finally:
            for process in self._processes:
                process.kill()
                process.wait()
            for link in self._links:
                link.close()
            os.close(self._alive)
            os.close(self._death_fd)
            self._directory.leave()

    def _start(self, role: Role) -> None:
        boot = boots.boot(
            role,
            epoch=EPOCH,
            worker_epoch=EPOCH,
            run_dir=self._directory.path,
            death_fd=self._death_fd,
            config=self._config,
            model=self._model,
        )
        self._links.append(
            Link.bind(supervisor_path(self._directory.path, role, 0, 0), ToSupervisor)
        )
        descriptor = os.memfd_create("boot")
        os.write(descriptor, encode(boot))
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-P", "-m", role, "--boot-fd", str(descriptor)],
                pass_fds=(descriptor, self._death_fd),
                env=child_environment(os.environ, role, self._config.device),
            )
        )
        os.close(descriptor)
