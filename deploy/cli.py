"""The `tokend` command: runs a subcommand and turns errors into exit statuses.

0 done, 1 the daemon failed, 2 the user must change something, 130, 129 and 143 ended by Ctrl-C,
SIGHUP and SIGTERM. Environment variables are read only here. Each subcommand imports large modules
itself.
"""

import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from proto.errors import ConfigError, ModelError, TokendError

if TYPE_CHECKING:
    from deploy.environment import HostEnvironment
    from deploy.supervisor.launch import Commands
    from proto.settings.config import LogFormat


_BENCHES: Final = {
    "serve": "deploy.bench.serve",
    "compare": "deploy.bench.compare",
    "startup": "deploy.bench.startup",
    "chaos": "deploy.bench.chaos.bench",
}
_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(arguments)
        print(end="", flush=True)
        return status
    except TokendError as error:
        from deploy.display import error_line
        from proto.runtime.log_lines import guard_output

        guard_output("tokend")  # a reader that has gone must not change the exit status
        print(error_line(str(error), _log_format(arguments)), file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError | ModelError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        for stream in (sys.stdout, sys.stderr):  # both are flushed once more at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141


def _log_format(arguments: list[str]) -> "LogFormat":
    """Return the --log-format of `tokend serve`, also if other arguments are wrong."""
    if arguments[:1] != ["serve"]:
        return "text"
    from deploy import flags

    return flags.log_format(arguments[1:])


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_usage("COMMAND"), end="", file=sys.stderr)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(_usage("COMMAND"), end="")
        return 0
    command = "version" if command == "--version" else command
    if command not in _COMMANDS:
        raise ConfigError(_unknown_command(command))
    if command != "serve" and rest in (["-h"], ["--help"]):
        print(_usage(command), end="")
        return 0
    from deploy.environment import HostEnvironment

    environment = HostEnvironment.of(os.environ)
    if command == "serve":
        return serve_with(rest, environment)
    with ended_by_signals():
        run = _COMMANDS[command]
        if isinstance(run, str):
            module, _, name = run.partition(":")
            run = getattr(import_module(module), name)
        return run(rest, environment)


def _usage(command: str) -> str:
    """Return the --help of a command; COMMAND: the list of all commands."""
    texts = Path(__file__).with_name("usage.txt").read_text("utf-8")
    (usage,) = (text for text in re.split(r"\n(?=usage: )", texts) if text.split()[2] == command)
    return usage


def _unknown_command(command: str) -> str:
    """Return the error about a command that does not exist."""
    from deploy.flags import unknown
    from deploy.models import catalogue, hub

    is_model = catalogue.find(command) or hub.parse_name(command) or os.path.exists(command)
    if is_model:
        return f"unknown command {command}; did you mean tokend serve {command}?"
    error = unknown("command", command, _COMMANDS)
    return error if ";" in error else f"{error}; tokend --help lists the commands"


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP leave the block like Ctrl-C, which ends servers and downloads.

    Further signals are ignored, because they would interrupt that and leave processes behind.
    """

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        for further in _ENDING:
            signal.signal(further, signal.SIG_IGN)
        sys.exit(128 + number)

    before = {
        number: signal.signal(number, leave)
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup sets it
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_with(
    arguments: list[str], environment: "HostEnvironment", commands: "Commands | None" = None
) -> int:
    """Serve until a stop signal and return the exit status.

    arguments: flags of `tokend serve`. commands: replace the command lines of the processes.
    """
    from deploy import flags

    parsed = flags.parse(arguments)
    if parsed.help:
        print(flags.render())
        return 0
    config = flags.build(parsed, environment.settings)

    from deploy.display import open_display
    from proto.runtime.log_lines import guard_output

    guard_output("tokend", config.frontend.log_format)
    display = open_display(
        sys.stderr, config.frontend.log_format, log_level=config.frontend.log_level
    )
    for notice in parsed.notices:
        display.notice(notice)
    from deploy.serve import Terminated, serve
    from deploy.supervisor.processes import computes_on_cpu, module_commands

    if "gpu_memory_utilization" in parsed.values and computes_on_cpu(config.device):
        display.notice("--gpu-memory-utilization has no effect on a CPU; see --kv-cache-memory")

    _hide_secrets("serve", arguments)
    try:
        return serve(config, environment, commands or module_commands())
    except KeyboardInterrupt as interrupt:
        display.notice("stopped before it was ready")
        return 0 if isinstance(interrupt, Terminated) else 130


def _plan(arguments: list[str], environment: "HostEnvironment") -> int:
    from deploy import flags
    from deploy.serve import plan

    as_json = "--json" in arguments
    parsed = flags.parse([word for word in arguments if word != "--json"])
    if parsed.help:
        print(_usage("plan"), end="")
        return 0
    _hide_secrets("plan", arguments)
    return plan(flags.build(parsed, environment.settings), environment, as_json=as_json)


def _hide_secrets(command: str, arguments: list[str]) -> None:
    """Name this process in process listings without the secrets among its arguments."""
    from deploy.flags import without_secrets
    from proto.runtime.process import set_title

    shown = without_secrets(arguments)
    if shown != arguments:
        set_title(" ".join(["tokend", command, *shown]))


def _pull(arguments: list[str], environment: "HostEnvironment") -> int:
    from deploy.display import open_display
    from deploy.flags import parse_words
    from deploy.models.store import prepared_model

    names, values = parse_words(arguments, ("--revision", "--hf-token"), ("--no-mmproj",))
    if len(names) != 1:
        raise ConfigError("tokend pull takes one name: see tokend pull --help")
    _hide_secrets("pull", arguments)
    environment = environment.with_hub_token(values.get("--hf-token"))
    revision = values.get("--revision")
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(
            names[0],
            environment,
            display,
            revision=revision,
            refresh=True,
            mmproj=values.get("--no-mmproj"),
        )
    print(f"{names[0]} is prepared: {model.source}")
    return 0


def _list(arguments: list[str], environment: "HostEnvironment") -> int:
    _require_none("list", arguments)
    from deploy.models import inventory

    models = inventory.stored_models(environment)
    if not models:
        print("there are no models here yet; tokend pull NAME downloads one", file=sys.stderr)
        return 0
    print("\n".join(inventory.table(models)))
    return 0


def _remove(arguments: list[str], environment: "HostEnvironment") -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("tokend rm takes one name; see tokend list")
    from deploy.daemons import running_daemons
    from deploy.models import inventory
    from deploy.models.prepared_folder import size_text

    (name,) = arguments
    for daemon in running_daemons(environment.run_parents()):
        if inventory.would_remove(name, daemon.state.paths, environment):
            raise ConfigError(f"{name} is served by {daemon}: tokend stop {daemon.state.pid}")
    num_bytes = inventory.remove(name, environment)
    print(f"removed {name}: {size_text(num_bytes)}")
    return 0


def _prepare(arguments: list[str], environment: "HostEnvironment") -> int:
    from deploy.display import open_display
    from deploy.flags import parse_words
    from deploy.models.store import prepared_draft_model, prepared_model
    from proto.codec import to_json_line
    from proto.settings.config import SpeculationConfig

    with_value = ("--revision", "--mmproj", "--speculative-config")
    names, values = parse_words(arguments, with_value, ("--no-mmproj",))
    if len(names) != 1:
        raise ConfigError("tokend prepare takes one model: a folder, a .gguf file or a name")
    speculation = SpeculationConfig(speculative_config=values.get("--speculative-config"))
    with closing(open_display(sys.stderr)) as display:
        revision = values.get("--revision")
        mmproj = values.get("--mmproj", values.get("--no-mmproj"))
        models = [prepared_model(names[0], environment, display, revision=revision, mmproj=mmproj)]
        if (draft := prepared_draft_model(speculation, environment, display)) is not None:
            models.append(draft)
    print("".join(to_json_line(each).decode() for each in models), end="")
    return 0


def _models(arguments: list[str], environment: "HostEnvironment") -> int:
    if arguments == ["--supported"]:
        from worker.models.families import supported_models

        print("\n".join(supported_models()))
        return 0
    _require_none("models", arguments)
    from deploy.models import catalogue

    for model in catalogue.MODELS:
        state = "downloaded" if catalogue.is_fetched(model, environment.cache) else "not downloaded"
        size = f"{model.num_bytes / 1e6:.0f} MB"
        print(f"{model.name:24}{size:>8}  {state:14}  {model.description}")
    return 0


def _bench(arguments: list[str], environment: "HostEnvironment") -> int:
    name = arguments[0] if arguments else ""
    if name not in _BENCHES:
        raise ConfigError(_usage("bench").rstrip())
    words = arguments[1:]
    if name == "serve" and "api_key" in environment.settings:
        # one that follows replaces it
        words.insert(0, f"--api-key={environment.settings['api_key']}")
    import_module(_BENCHES[name]).main(words)
    return 0


def _trace(arguments: list[str], environment: "HostEnvironment") -> int:
    if arguments[:1] != ["view"]:
        raise ConfigError(_usage("trace").rstrip())
    from deploy.trace import command

    return command.view(arguments[1:])


def _version(arguments: list[str], environment: "HostEnvironment") -> int:
    _require_none("version", arguments)
    from importlib.metadata import version

    print(f"tokend {version('tokend')}")
    return 0


def _require_none(command: str, arguments: list[str]) -> None:
    """Raise ConfigError for arguments of a command that takes none."""
    if arguments:
        raise ConfigError(f"tokend {command} takes no arguments, got {arguments[0]}")


_COMMANDS: Final[dict[str, Callable[[list[str], "HostEnvironment"], int] | str]] = {
    "serve": serve_with,
    "chat": "deploy.chat:main",
    "plan": _plan,
    "ps": "deploy.daemons:ps",
    "stop": "deploy.daemons:stop",
    "reload": "deploy.daemons:reload",
    "pull": _pull,
    "list": _list,
    "rm": _remove,
    "models": _models,
    "prepare": _prepare,
    "trace": _trace,
    "bench": _bench,
    "version": _version,
}
"""Command → what runs it, or its place as MODULE:FUNCTION, which is imported then."""

if __name__ == "__main__":
    sys.exit(main())
