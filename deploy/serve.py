"""`tokend serve`: check the settings, bind the port, prepare the model, run the supervisor.

`plan` prints what that would take, without starting anything.
"""

import faulthandler
import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from types import FrameType
from typing import NoReturn

from deploy.display import Display, open_display
from deploy.environment import FAULTS_VARIABLE, HostEnvironment
from deploy.models import tokenizer_check
from deploy.models.store import note_start, prepared_draft_model, prepared_model
from deploy.notify import SystemdNotifier
from deploy.supervisor.epochs import ServedModels
from deploy.supervisor.launch import Commands, Launch, admin_listeners, check_length, listen, url_of
from deploy.supervisor.processes import child_environment, computes_on_cpu, process_age
from deploy.supervisor.supervisor import Supervisor
from proto.codec import Message, encode
from proto.errors import ConfigError, install_command
from proto.messages.lifecycle import PhaseClock, PlanBoot
from proto.messages.prepared_model import read_model_file
from proto.runtime.faults import Fault, parse_faults
from proto.runtime.host_resources import available_memory, total_memory, usable_cores
from proto.runtime.run_directory import TORCH_FOLDER_VARIABLE
from proto.runtime.security import read_api_keys, readable_key_files
from proto.settings.config import ServeConfig, memory_size
from proto.settings.generation_config import generation_defaults
from proto.settings.kv_media import make_private, own_folder
from proto.settings.kv_media_checks import disk_paths
from proto.settings.kv_transfer_config import config_key_error
from proto.settings.lora_modules import parse_lora_modules


class Terminated(KeyboardInterrupt):
    """SIGTERM came before the daemon had processes to end."""


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def serve(config: ServeConfig, environment: HostEnvironment, commands: Commands) -> int:
    """Serve until a stop signal; return the exit status. Raises ConfigError and ModelError.

    commands: command line of each role.
    """
    environment = environment.with_hub_token(config.model.hf_token)
    clock = PhaseClock(time.monotonic() - process_age())
    clock.end("command")
    _check_tokenizer(config)
    _check_chat_template(config)
    _check_tracing(config)
    _check_profiler(config)
    _check_disks(config)
    _check_files(config)
    _check_pool(config)
    _check_workers(config)
    scheme = _scheme(config)
    read_api_keys(config.frontend)
    faults = _faults(config, environment)
    run_parent = environment.run_parent()
    with ExitStack() as resources:
        listener = resources.enter_context(listen(config.frontend.host, config.frontend.port))
        url = url_of(listener, scheme)
        notifier = SystemdNotifier(environment.service_manager)
        display = open_display(
            sys.stderr, config.frontend.log_format, notifier, config.frontend.log_level
        )
        resources.enter_context(closing(display))
        for file in readable_key_files(config.frontend):
            display.notice(f"every user of this machine may read {file}", level="WARNING")
        for name, meant in environment.misspelt.items():
            display.notice(f"{name} has no effect: did you mean {meant}?", level="WARNING")
        address = ip_address(listener.getsockname()[0].partition("%")[0])
        if not config.frontend.has_client_keys and not address.is_loopback:
            reachable = f"--host {config.frontend.host} without --api-key"
            display.notice(f"{reachable}: who reaches the port can use the models", level="WARNING")
        before = signal.signal(signal.SIGTERM, _terminate)
        resources.callback(signal.signal, signal.SIGTERM, before)  # the supervisor has its own
        operators = resources.enter_context(admin_listeners(config.frontend))
        model, draft_model = _prepare_models(config, environment, display)
        check_length(config, model)
        note_start(model, draft_model)
        defaults = generation_defaults(config.model, model)
        clock.end("model")
        faulthandler.enable()  # print the stacks if the service manager aborts a hung supervisor
        display.progress(f"starting {model.name}")
        launch = Launch(
            config=config,
            model=model,
            listeners=(listener,),
            url=url,
            variables=environment.variables,
            commands=commands,
            prepare_command=(sys.executable, "-P", "-m", "deploy.cli", "prepare"),
            clock=clock,
            faults=faults,
            draft_model=draft_model,
            generation_defaults=defaults,
            admin_listeners=operators,
        )
        return Supervisor(launch, run_parent, display, notifier).run()


def plan(config: ServeConfig, environment: HostEnvironment, *, as_json: bool) -> int:
    """Print what `serve` would take of this machine; return the exit status, 0 if it fits.

    Raises ConfigError and ModelError.
    """
    _check_workers(config)
    with tempfile.TemporaryDirectory(prefix="tokend-plan-") as headers:
        environment = replace(
            environment.with_hub_token(config.model.hf_token),
            headers_folder=os.path.realpath(headers),
        )
        with closing(open_display(sys.stderr)) as display:
            model, draft_model = _prepare_models(config, environment, display)
        check_length(config, model)
        boot = PlanBoot(config=config, model=model, as_json=as_json, draft_model=draft_model)
        process = run_worker_program("worker.commands.plan", boot, config, environment)
    print(process.stdout.decode(), end="")
    return process.returncode if process.returncode >= 0 else 1


def run_worker_program(
    module: str, boot: Message, config: ServeConfig, environment: HostEnvironment
) -> subprocess.CompletedProcess[bytes]:
    """Run a program with the environment of a worker; it reads `boot` and prints its result."""
    variables = child_environment(
        environment.variables, "worker", config.device, config.parallel.num_workers
    )
    with tempfile.TemporaryDirectory(prefix="tokend-torch-") as folder:
        return subprocess.run(
            (sys.executable, "-P", "-m", module),
            input=encode(boot),
            env={TORCH_FOLDER_VARIABLE: folder, **variables},
            stdout=subprocess.PIPE,
            check=False,
            process_group=0,  # Ctrl-C goes to this process, which ends it
        )


def _prepare_models(
    config: ServeConfig, environment: HostEnvironment, display: Display
) -> ServedModels:
    model = prepared_model(
        config.model.model,
        environment,
        display,
        revision=config.model.revision,
        mmproj=config.model.mmproj_file,
    )
    model = model.served_with(config.media.max_images, config.model.max_model_len)
    return ServedModels(model, prepared_draft_model(config.speculation, environment, display))


def _check_tracing(config: ServeConfig) -> None:
    """Raise ConfigError if spans are wanted without the packages that export them."""
    if config.frontend.otlp_traces_endpoint is None:
        return
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp"):
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise ConfigError(
                f"--otlp-traces-endpoint needs the package {package}: {install_command('otel')}"
            )


def _check_profiler(config: ServeConfig) -> None:
    """Raise ConfigError if the folder of profiles cannot be written to; it is created."""
    profiler = config.trace.parsed_profiler()
    if profiler is None:
        return
    folder = profiler.torch_profiler_dir
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(
            f"--profiler-config: torch_profiler_dir {folder}: {error.strerror}"
        ) from None


def _check_disks(config: ServeConfig) -> None:
    """Raise ConfigError if KV cannot be stored in the folder of a disk, which is created."""
    for path in disk_paths(config):
        try:
            folder = own_folder(path)
            make_private(folder)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise config_key_error("disk_path", f"{path}: {error.strerror}") from None


def _check_files(config: ServeConfig) -> None:
    """Raise ConfigError for files that other processes would refuse after the model is loaded."""
    trace = config.trace.sched_trace
    if trace is not None and os.path.lexists(trace) and not stat.S_ISREG(os.lstat(trace).st_mode):
        raise ConfigError(f"--sched-trace {trace}: is not a regular file")
    for module in parse_lora_modules(config.lora.lora_modules):
        if not os.path.exists(module.path):
            raise ConfigError(
                f"--lora-modules: {module.name}: {module.path}: there is no such file or folder"
            )


def _check_pool(config: ServeConfig) -> None:
    """Raise ConfigError for a KV pool that is larger than the memory of this machine.

    A pool that fits beside nothing else is refused later, when the model is known.
    """
    size, total = config.cache.kv_cache_memory, total_memory()
    number = config.parallel.data_parallel_size
    if size is not None and number * size > total and computes_on_cpu(config.device):
        each = f" for each of {number} engines" if number > 1 else ""
        raise ConfigError(
            f"--kv-cache-memory {memory_size(size)}{each} is more than the {memory_size(total)} of "
            f"memory here, of which {memory_size(available_memory())} are free"
        )


def _check_workers(config: ServeConfig) -> None:
    """Raise ConfigError for engines whose workers have no core each, unless --cpu-threads is set.

    GPUs are counted by the workers, before they load the model.
    """
    parallel, cores = config.parallel, usable_cores()
    is_shared = config.device.cpu_threads is not None or not computes_on_cpu(config.device)
    if parallel.data_parallel_size > 1 and parallel.num_workers > cores and not is_shared:
        raise ConfigError(
            f"{parallel.flags} needs {parallel.num_workers} cores, and there are {cores}: "
            "--cpu-threads 1 lets workers share cores",
            "data_parallel_size",
        )


def _scheme(config: ServeConfig) -> str:
    """Return "https" if TLS is configured, else "http"; raises ConfigError for invalid files."""
    if config.frontend.ssl_certfile is None:
        return "http"
    from proto.runtime.security import server_context

    server_context(config.frontend)
    return "https"


def _faults(config: ServeConfig, environment: HostEnvironment) -> tuple[Fault, ...]:
    faults = parse_faults(environment.faults)
    if faults and not config.reliability.enable_fault_injection:
        raise ConfigError(
            f"{FAULTS_VARIABLE} is set: it injects faults into this daemon, "
            "which needs --enable-fault-injection"
        )
    return faults


def _check_tokenizer(config: ServeConfig) -> None:
    folder = config.model.tokenizer
    if folder is None:
        return
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.isdir(folder):
        raise ConfigError(
            f"--tokenizer {folder}: no such folder; it takes one with a tokenizer.json, no name"
        )
    if not os.path.isfile(path):
        raise ConfigError(f"--tokenizer {folder}: the folder has no tokenizer.json")
    tokenizer_check.check(read_model_file(path), f"--tokenizer {folder}: tokenizer.json")


def _check_chat_template(config: ServeConfig) -> None:
    path = config.model.chat_template
    if path is not None and not os.path.isfile(path):
        raise ConfigError(f"--chat-template {path}: no such file")
