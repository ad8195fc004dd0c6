"""Parts of the supervisor: shutdown, exit report, readiness, environment, socket, display."""

import io
import json
import re
import signal
import socket
import time
from dataclasses import dataclass, field, replace
from io import StringIO
from typing import get_args

import msgspec
import pytest

from deploy.display import Display, open_display
from deploy.environment import HostEnvironment
from deploy.supervisor import exit_report
from deploy.supervisor.launch import Launch, Readiness, listen, ready_message, url_of
from deploy.supervisor.processes import child_environment
from deploy.supervisor.shutdown import ShutdownLimits, ShutdownSequence
from deploy.supervisor.signals import SignalInbox
from proto.errors import ConfigError, ErrorInfo, ModelError
from proto.messages.lifecycle import (
    FrontEndReady,
    PhaseClock,
    ProcessStart,
    Role,
    StartPhase,
    WeightFormatMemory,
    process_name,
)
from proto.runtime.host_resources import allowed_cores, usable_cores
from proto.runtime.process import describe
from proto.settings.config import (
    CacheConfig,
    CpuKernels,
    DeviceConfig,
    FrontEndConfig,
    LogFormat,
    LogLevel,
    ModelConfig,
    ParallelConfig,
    ReliabilityConfig,
    ServeConfig,
)
from proto.settings.generation_config import GenerationDefaults
from tests.fakes import lifecycle_messages


@dataclass
class FakeChild:
    """The attributes that ShutdownSequence and exit_report read."""

    role: Role = "worker"
    exit_status: int | None = None
    fatal_error: ErrorInfo | None = None
    pid: int = 77
    got: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return process_name(self.role, 0)

    def request_shutdown(self) -> None:
        self.got.append("shutdown")

    def send_signal(self, number: signal.Signals) -> None:
        self.got.append(number.name)


class TestShutdownSequence:
    def test_shutdown_then_sigterm_then_sigkill(self) -> None:
        now = [100.0]
        child = FakeChild()
        shutdown = ShutdownSequence([child], ShutdownLimits(2.0, 4.0), lambda: now[0])
        shutdown.send_due_signals()
        assert child.got == ["shutdown"]
        assert shutdown.seconds_to_next_signal() == pytest.approx(2.0)
        now[0] = 102.0
        shutdown.send_due_signals()
        assert child.got == ["shutdown", "SIGTERM"]
        assert shutdown.seconds_to_next_signal() == pytest.approx(2.0)
        now[0] = 105.0
        shutdown.send_due_signals()
        assert child.got == ["shutdown", "SIGTERM", "SIGKILL"]
        assert shutdown.seconds_to_next_signal() is None

    def test_kill_all_skips_the_steps(self) -> None:
        child = FakeChild()
        shutdown = ShutdownSequence([child], ShutdownLimits(2.0, 4.0), lambda: 0.0)
        shutdown.kill_all()
        assert child.got == ["shutdown", "SIGKILL"]
        assert shutdown.seconds_to_next_signal() is None

    def test_knows_which_ends_it_caused(self) -> None:
        shutdown = ShutdownSequence([], ShutdownLimits(2.0, 4.0), lambda: 0.0)
        assert shutdown.has_caused(0)
        assert not shutdown.has_caused(-signal.SIGKILL)
        shutdown.kill_all()
        assert shutdown.has_caused(-signal.SIGKILL)
        assert not shutdown.has_caused(-signal.SIGSEGV)
        assert not shutdown.has_caused(1)


class TestExitReport:
    def test_a_signal_takes_precedence_over_errors(self) -> None:
        killed = FakeChild("worker", exit_status=-9)
        gave_up = FakeChild("engine_core", fatal_error=describe(RuntimeError("worker is gone")))
        assert exit_report.first_cause([gave_up, killed]) is killed

    def test_an_error_takes_precedence_over_an_exit_without_message(self) -> None:
        silent = FakeChild("worker", exit_status=1)
        failed = FakeChild("engine_core", exit_status=1, fatal_error=describe(ValueError("x")))
        assert exit_report.first_cause([silent, failed]) is failed

    def test_ties_go_to_the_process_nearest_to_the_device(self) -> None:
        each = [FakeChild(role, exit_status=-9) for role in ("api_server", "engine_core", "worker")]
        assert exit_report.first_cause(each).role == "worker"

    def test_names_role_process_and_signal(self) -> None:
        text = exit_report.exit_report(FakeChild("engine_core", exit_status=-11), "while serving")
        assert "engine 0 (pid 77) was killed by SIGSEGV while serving" in text

    def test_shows_the_traceback(self) -> None:
        info = ErrorInfo("internal", "ValueError: x", traceback="Traceback:\n  line\n")
        text = exit_report.exit_report(FakeChild(exit_status=1, fatal_error=info), "while starting")
        assert "failed with ValueError: x while starting" in text
        assert "  Traceback:\n    line\n" in text

    def test_a_real_time_signal_has_a_number(self) -> None:
        assert exit_report.describe_exit(FakeChild(exit_status=-40)) == "was killed by signal 40"

    @pytest.mark.parametrize("error", [ModelError("no such rope"), ConfigError("no such rope")])
    def test_errors_for_the_user_to_fix(self, error: Exception) -> None:
        assert exit_report.user_error(describe(error)) == "no such rope"

    def test_other_errors(self) -> None:
        assert exit_report.user_error(describe(ValueError("no such rope"))) is None
        assert exit_report.user_error(None) is None


ENGINE_READY = lifecycle_messages.engine_ready(
    max_model_len=8192,
    num_blocks=688,
    kv_cache_bytes=3 << 29,
    kv_cache_tokens=11_008,
    device_name="some cpu",
    kernels="amx, avx2",
    kv_cache_grows=True,
    drafts="suffix, up to 16 tokens a step",
    weights=(WeightFormatMemory("packed", 92 << 20), WeightFormatMemory("bf16", 257 << 20)),
    starts=(ProcessStart("worker", 0, (StartPhase("imports", 1.0), StartPhase("weights", 0.5))),),
)


class TestReady:
    def test_waits_for_engine_and_every_front_end(self) -> None:
        readiness = Readiness(1, 2)
        one = FrontEndReady(1, (StartPhase("imports", 0.5),))
        for message in (one, ENGINE_READY, one):
            readiness.note_ready(message)
            assert not readiness.complete
        readiness.note_ready(FrontEndReady(0))
        assert readiness.complete
        assert readiness.engine is ENGINE_READY
        assert readiness.starts == (
            *ENGINE_READY.starts,
            ProcessStart("api_server", 1, (StartPhase("imports", 0.5),)),
            ProcessStart("api_server", 0, ()),
        )

    @pytest.mark.parametrize("log_format", ["text", "json"])
    def test_the_ready_message_has_what_clients_need_and_no_key(
        self, log_format: LogFormat
    ) -> None:
        config = ServeConfig(
            model=ModelConfig(served_model_name=("it's mine",)),
            frontend=FrontEndConfig(api_key="hush", log_level="debug", log_format=log_format),
            reliability=ReliabilityConfig(standby_engines=1, standby_workers=2),
        )
        url = "http://127.0.0.1:81"
        readiness = Readiness(1, 1)
        readiness.note_ready(ENGINE_READY)
        readiness.note_ready(
            FrontEndReady(0, (StartPhase("imports", 0.8), StartPhase("engine", 1.25)))
        )
        clock = PhaseClock(time.monotonic() - 3.2)
        clock.end("command")
        launch = Launch(
            config,
            lifecycle_messages.model(name="file"),
            (),
            url,
            {},
            {},
            (),
            clock,
            generation_defaults=GenerationDefaults({"top_p": 0.9}, "a file", ("typical_p",)),
        )
        text = ready_message(launch, readiness)
        assert "hush" not in text
        ready = "tokend is ready: it's mine at http://127.0.0.1:81 after 3.2 s"
        if log_format == "json":
            first, timings = map(json.loads, text.splitlines())
            assert (first["message"], first["level"], first["url"]) == (ready, "INFO", url)
            assert (first["kv_cache_bytes"], first["kv_cache_tokens"]) == (3 << 29, 11_008)
            assert (first["device"], first["kernels"]) == ("some cpu", "amx, avx2")
            assert first["drafts"] == "suffix, up to 16 tokens a step"
            assert first["kv_cache_grows"] is True
            assert first["standby"] == "1 engine, 2 workers"
            assert first["sampling"] == "top_p 0.9 (a file); not applied: typical_p"
            assert timings["level"] == "DEBUG"
            assert timings["message"].startswith("started in 3.2")
            return
        assert text.startswith(f"{ready}\n")
        assert text.endswith("\n  Ctrl-C stops")
        assert "  length    up to 8,192 tokens," in text
        assert "  standby   1 engine, 2 workers, started" in text
        assert "  runs on   some cpu\n  kernels   amx, avx2\n" in text
        assert "  KV cache  grows as it is used, up to 1.50 GiB for 11,008 tokens; --kv" in text
        blocks = CacheConfig(num_gpu_blocks_override=9)
        counted = replace(launch, config=msgspec.structs.replace(config, cache=blocks))
        assert "; --num-gpu-blocks-override sets the limit" in ready_message(counted, readiness)
        assert "  weights   92 MiB packed as stored + 257 MiB bf16, in memory\n" in text
        assert "  drafts    suffix, up to 16 tokens a step\n" in text
        assert "  sampling  top_p 0.9 (a file); not applied: typical_p\n" in text
        assert "  web pages http://127.0.0.1:81/, of the API http://127.0.0.1:81/docs\n" in text
        assert re.search(
            r"start     3\.2\d s: command 3\.2\d s; worker 0: imports 1\.00 s, weights 0\.50 s; "
            r"api 0: imports 0\.80 s, engine 1\.25 s$",
            text,
            re.MULTILINE,
        )
        assert "Bearer $TOKEND_API_KEY" in text
        quiet = msgspec.structs.replace(config.frontend, log_level="info", page=False)
        launch = replace(launch, config=msgspec.structs.replace(config, frontend=quiet))
        text = ready_message(launch, readiness)
        assert "  start " not in text
        assert "web page" not in text

    @pytest.mark.parametrize("log_format", ["text", "json"])
    def test_weights_that_engines_share_count_once(self, log_format: LogFormat) -> None:
        shared = WeightFormatMemory("packed", 92 << 20, True)
        frontend = FrontEndConfig(log_format=log_format)

        def message(num_engines: int, *weights: WeightFormatMemory) -> str:
            parallel = ParallelConfig(data_parallel_size=num_engines)
            config = ServeConfig(frontend=frontend, parallel=parallel)
            launch = Launch(
                config, lifecycle_messages.model(), (), "http://x", {}, {}, (), PhaseClock(0.0)
            )
            readiness = Readiness(num_engines, 0)
            readiness.note_ready(msgspec.structs.replace(ENGINE_READY, weights=weights))
            return ready_message(launch, readiness)

        dense = WeightFormatMemory("f32", 1 << 20)
        texts = [message(2, shared), message(2, shared, dense), message(1, shared)]
        if log_format == "json":
            found = [json.loads(text).get("shared_weights") for text in texts]
            assert found == ["92 MiB packed as stored", "92 MiB packed as stored", None]
            return
        for text, line in zip(
            texts,
            (
                "packed as stored, in memory that the engines share\n",
                "packed as stored, in memory that the engines share, and 1.0 MiB f32 of each\n",
                "packed as stored, in memory\n",
            ),
            strict=True,
        ):
            assert f"  weights   92 MiB {line}" in text

    def test_what_a_model_does_not_have_has_no_line(self) -> None:
        """A GPU's KV cache is in memory from the start; an encoder has none, and no drafts."""
        launch = Launch(
            ServeConfig(), lifecycle_messages.model(), (), "http://x", {}, {}, (), PhaseClock(0.0)
        )

        def message(**changes: object) -> str:
            readiness = Readiness(1, 0)
            readiness.note_ready(msgspec.structs.replace(ENGINE_READY, **changes))
            return ready_message(launch, readiness)

        on_gpu = message(kernels="", kv_cache_grows=False)
        assert "  KV cache  1.50 GiB for 11,008 tokens, in memory\n" in on_gpu
        assert "  kernels " not in on_gpu
        encoder = message(kv_cache_bytes=0, kv_cache_tokens=0, drafts="")
        assert "  KV cache" not in encoder
        assert "  drafts" not in encoder
        assert "  try it    curl -N http://x/v1/completions" in on_gpu
        pooling = ServeConfig(model=ModelConfig(runner="pooling"))
        launch = replace(launch, config=pooling)
        assert "  try it    curl http://x/v1/embeddings" in message()


class TestEnvironment:
    def test_threads_of_a_worker(self) -> None:
        def threads(variables: dict[str, str], device: DeviceConfig) -> str:
            return child_environment(variables, "worker", device)["OMP_NUM_THREADS"]

        assert threads({}, DeviceConfig()) == str(usable_cores())
        assert threads({"OMP_NUM_THREADS": "5"}, DeviceConfig()) == "5"
        assert threads({"OMP_NUM_THREADS": "5"}, DeviceConfig(cpu_threads=3)) == "3"
        shared = child_environment({}, "worker", DeviceConfig(), num_workers=2)
        assert shared["OMP_NUM_THREADS"] == str(max(1, usable_cores() // 2))

    def test_libraries_of_a_worker_are_held_to_the_instruction_set_of_its_kernels(self) -> None:
        def limits(device: DeviceConfig) -> dict[str, str]:
            given = child_environment({}, "worker", device)
            return {name: given[name] for name in given if "OMP" not in name}

        assert limits(DeviceConfig()) == {}
        for name in get_args(CpuKernels)[1:]:
            assert len(limits(DeviceConfig(cpu_kernels=name))) == 3
        assert limits(DeviceConfig(cpu_kernels="avx2")) == {
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            "ATEN_CPU_CAPABILITY": "avx2",
            "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        }

    def test_idle_threads_spin_briefly_by_default(self) -> None:
        def openmp(variables: dict[str, str]) -> dict[str, str]:
            given = child_environment(variables, "worker", DeviceConfig())
            hidden = {"OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_PLACES"}
            return {name: value for name, value in given.items() if name not in hidden}

        assert openmp({}) == {"GOMP_SPINCOUNT": "4000"}
        assert openmp({"GOMP_SPINCOUNT": "0"}) == {"GOMP_SPINCOUNT": "0"}
        assert openmp({"OMP_WAIT_POLICY": "ACTIVE"}) == {"OMP_WAIT_POLICY": "ACTIVE"}

    def test_threads_are_bound_if_there_are_enough_cores(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def places(variables: dict[str, str], device: DeviceConfig) -> str | None:
            return child_environment(variables, "worker", device).get("OMP_PLACES")

        cores = allowed_cores()
        assert places({}, DeviceConfig(cpu_threads=cores)) == "cores"
        assert places({}, DeviceConfig(cpu_threads=cores + 1)) is None
        assert places({"OMP_NUM_THREADS": str(cores + 1)}, DeviceConfig()) is None
        assert places({}, DeviceConfig(device="cuda", cpu_threads=cores)) is None
        with monkeypatch.context() as patch:
            patch.setattr("deploy.supervisor.processes._NVIDIA_DRIVER", "/dev/null")
            assert places({}, DeviceConfig(cpu_threads=cores)) is None
            assert places({}, DeviceConfig(device="cpu", cpu_threads=cores)) == "cores"
        for user in ({"OMP_PROC_BIND": "false"}, {"GOMP_CPU_AFFINITY": "0"}):
            assert places(user, DeviceConfig(cpu_threads=cores)) is None

    def test_threads_are_bound_by_memory_node(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two nodes of two cores, whose CPUs are numbered in turn."""
        nodes = {0: [[0, 4], [2, 6]], 1: [[1, 5], [3, 7]]}
        for module in ("deploy.supervisor.processes", "proto.runtime.host_resources"):
            monkeypatch.setattr(f"{module}.cores_by_node", lambda *_: nodes)
        monkeypatch.setattr("deploy.supervisor.processes.allowed_cores", lambda: 4)

        def places(num_threads: int, num_workers: int = 1, rank: int = 0) -> str | None:
            device = DeviceConfig(device="cpu", cpu_threads=num_threads)
            given = child_environment({}, "worker", device, num_workers, rank)
            assert ("OMP_PROC_BIND" in given) == ("OMP_PLACES" in given)
            return given.get("OMP_PLACES")

        assert places(4) == "{0,4},{2,6},{1,5},{3,7}"
        assert places(3) is None
        assert [places(2, 2, rank) for rank in range(2)] == ["{0,2,4,6}", "{1,3,5,7}"]
        assert [places(1, 4, rank) for rank in range(4)] == ["{0,2,4,6}", "{1,3,5,7}"] * 2
        assert [places(3, 2, rank) for rank in range(2)] == [None, None]

    @pytest.mark.parametrize("role", ["engine_core", "api_server"])
    def test_other_processes_have_one_thread(self, role: Role) -> None:
        given = child_environment({"PATH": "/bin"}, role, DeviceConfig())
        assert given == {"PATH": "/bin", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def test_the_cache_follows_xdg(self) -> None:
        assert HostEnvironment.of({"XDG_CACHE_HOME": "/c"}).cache == "/c/tokend"
        assert HostEnvironment.of({}).cache.endswith("/.cache/tokend")

    def test_api_keys_are_removed_from_the_inherited_environment(self) -> None:
        environment = HostEnvironment.of({"TOKEND_API_KEY": "hush", "PATH": "/bin"})
        assert environment.settings == {"api_key": "hush"}
        assert environment.variables == {"PATH": "/bin"}
        assert HostEnvironment.of({}).settings == {}
        both = HostEnvironment.of({"TOKEND_API_KEY": "a", "TOKEND_ADMIN_API_KEY": "b"})
        assert both.settings == {"api_key": "a", "admin_api_key": "b"}
        assert both.variables == {}


class TestListening:
    def test_a_free_port(self) -> None:
        with listen("127.0.0.1", 0) as listener:
            port = int(url_of(listener).removeprefix("http://127.0.0.1:"))
            socket.create_connection(("127.0.0.1", port)).close()

    def test_the_url_of_all_interfaces_is_the_loopback_address(self) -> None:
        with listen("0.0.0.0", 0) as listener:
            assert url_of(listener).startswith("http://127.0.0.1:")

    def test_a_taken_port(self) -> None:
        with listen("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            with pytest.raises(ConfigError, match=f"--port {port} is in use"):
                listen("127.0.0.1", port)

    def test_a_host_that_does_not_exist(self) -> None:
        with pytest.raises(ConfigError, match="--host no-such-host"):
            listen("no-such-host.invalid", 0)


def test_signals_are_received_as_messages() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with SignalInbox([signal.SIGUSR1]) as inbox:
        assert inbox.receive() == []
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        assert inbox.receive() == [signal.SIGUSR1, signal.SIGUSR1]
        assert inbox.receive() == []
    assert signal.getsignal(signal.SIGUSR1) is before


class TestDisplay:
    def test_one_line_for_each_phase(self) -> None:
        stream = io.StringIO()
        display = open_display(stream)
        assert isinstance(display, Display)
        for fraction in (0.0, 0.5, 1.0):
            display.progress("loading", fraction, "worker 0")
        display.progress("warming up", None, "worker 0")
        display.notice("mind the gap")
        display.close()
        lines = stream.getvalue().splitlines()
        assert lines == ["worker 0: loading …", "worker 0: warming up …", "tokend: mind the gap"]

    def test_lines_after_the_start_have_the_form_of_the_log(self) -> None:
        stream = io.StringIO()
        display = open_display(stream)
        display.event("worker 0", "is back after 1 s")
        display.begin_log()
        display.event("worker 0", "(pid 7) was killed by SIGKILL", "WARNING")
        display.notice("a reload is in progress")
        display.error("worker 0 ended by itself")
        first, *rest = stream.getvalue().splitlines()
        assert first == "worker 0 is back after 1 s"
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in rest)
        assert [line[9:] for line in rest] == [
            "WARNING worker 0 (pid 7) was killed by SIGKILL",
            "INFO tokend: a reload is in progress",
            "ERROR tokend: worker 0 ended by itself",
        ]

    @pytest.mark.parametrize(("level", "number"), [("info", 5), ("warning", 2), ("error", 1)])
    def test_lines_below_the_log_level_are_left_out(self, level: LogLevel, number: int) -> None:
        stream = io.StringIO()
        display = open_display(stream, log_level=level)
        display.progress("loading", 0.5, "worker 0")
        display.event("worker 0", "is back after 1 s")
        display.notice("stopped; nothing is left running")
        display.event("worker 0", "(pid 7) was killed by SIGKILL", "WARNING")
        display.error("worker 0 ended by itself")
        assert len(stream.getvalue().splitlines()) == number

    def test_json_lines(self) -> None:
        stream = io.StringIO()
        display = open_display(stream, "json")
        display.progress("loading", 0.5, "worker 0")
        display.notice("mind the gap")
        lines = [json.loads(line) for line in stream.getvalue().splitlines()]
        assert [(line["process"], line["message"]) for line in lines] == [
            ("worker 0", "loading …"),
            ("tokend", "mind the gap"),
        ]

    def test_a_terminal_keeps_only_notices(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        display = open_display(stream)
        display.progress("loading [x]", 0.5, "worker 0")
        notice = "mind [the] gap :x: " + "pip install " * 20
        display.notice(notice)
        display.close()
        display.close()
        assert notice in stream.getvalue(), "unchanged, to be copied as a command"


def test_a_log_line_is_one_write() -> None:
    """Other processes write to the same stream, and lines must not be interleaved."""

    class Writes(StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.all: list[str] = []

        def write(self, text: str) -> int:
            self.all.append(text)
            return len(text)

    for log_format in ("text", "json"):
        stream = Writes()
        open_display(stream, log_format).notice("is back", "engine 0")
        (line,) = stream.all
        assert line.endswith("\n")
        assert "is back" in line
