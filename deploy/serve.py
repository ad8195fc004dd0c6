"""`tokend serve` in order: take the port, get the model ready, run the processes."""

import faulthandler
import os
import signal
import sys
import time

from deploy.display import Display, open_display
from deploy.environment import FAULTS_VARIABLE, HostEnvironment
from deploy.models.store import prepared_model
from deploy.supervisor import readiness as ready
from deploy.supervisor.launch import Launch, listen, url_of
from deploy.supervisor.notify import NotifyingDisplay, notifier_for
from deploy.supervisor.processes import Commands, process_age
from deploy.supervisor.supervisor import Supervisor
from proto.config import ServeConfig
from proto.errors import ConfigError
from proto.faults import Fault, parse_faults
from proto.lifecycle import PhaseClock
from proto.prepared_model import PreparedModel
from proto.security import read_api_keys


def serve(config: ServeConfig, around: HostEnvironment, commands: Commands) -> int:
    """Serve until told to stop; the exit status. Raises ConfigError and ModelError.

    commands: that start the processes.
    """
    clock = PhaseClock(time.monotonic() - process_age())
    clock.end("command")
    _check_tokenizer(config)
    _check_chat_template(config)
    scheme = _scheme(config)
    read_api_keys(config.frontend)
    faults = _faults(config, around)
    run_parent = around.run_parent()
    listener = listen(config.frontend.host, config.frontend.port)
    url = url_of(listener, scheme)
    notifier = notifier_for(around.service_manager)
    display = NotifyingDisplay(open_display(sys.stderr, config.frontend.log_format), notifier)
    try:
        model = _model(config, around, display)
        _check_length(config, model)

        def announce(readiness: ready.Readiness) -> None:
            print(ready.render(url, config, model, readiness, clock), flush=True)
            notifier.ready(f"serving {model.name} at {url}")

        clock.end("model")
        faulthandler.enable()  # a watchdog aborts a supervisor that hangs: show where
        display.progress(f"starting {model.name}")
        prepare = (sys.executable, "-P", "-m", "deploy.cli", "prepare", config.model.model)
        launch = Launch(config, model, (listener,), around.variables, commands, prepare, faults)
        return Supervisor(launch, run_parent, display, announce, notifier).run()
    finally:
        display.close()
        listener.close()


def _model(config: ServeConfig, around: HostEnvironment, display: Display) -> PreparedModel:
    """The prepared model. SIGTERM interrupts the set-up as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return prepared_model(config.model.model, around, display)
    finally:
        signal.signal(signal.SIGTERM, before)


def _scheme(config: ServeConfig) -> str:
    """http, or https when there is a certificate that can be used; raises ConfigError."""
    if config.frontend.ssl_certfile is None:
        return "http"
    from proto.security import server_context

    server_context(config.frontend)
    return "https"


def _faults(config: ServeConfig, around: HostEnvironment) -> tuple[Fault, ...]:
    faults = parse_faults(around.faults)
    if faults and not config.reliability.enable_fault_injection:
        raise ConfigError(
            f"{FAULTS_VARIABLE} is set: it breaks this daemon on purpose, "
            "and nothing of it is done without --enable-fault-injection"
        )
    return faults


def _check_tokenizer(config: ServeConfig) -> None:
    folder = config.model.tokenizer
    if folder is not None and not os.path.isfile(os.path.join(folder, "tokenizer.json")):
        raise ConfigError(f"--tokenizer {folder}: there is no tokenizer.json in it", "tokenizer")


def _check_chat_template(config: ServeConfig) -> None:
    path = config.model.chat_template
    if path is not None and not os.path.isfile(path):
        raise ConfigError(f"--chat-template {path}: there is no such file", "chat_template")


def _check_length(config: ServeConfig, model: PreparedModel) -> None:
    asked = config.model.max_model_len
    if asked is not None and asked > model.max_position:
        raise ConfigError(
            f"--max-model-len {asked} is more than the {model.max_position} positions "
            f"that {model.name} was made for",
            "max_model_len",
        )
