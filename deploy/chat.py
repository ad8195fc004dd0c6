"""`tokend chat`: a chat in the terminal, or one question in a pipe.

tokend chat                   with the running daemon; without one, with the default model
tokend chat MODEL             with a daemon that serves it, or one that is started for the chat
tokend chat http://HOST:PORT  with any server of OpenAI's API
echo hi | tokend chat         prints the answer and ends
"""

import contextlib
import difflib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TextIO

import httpx

from deploy.bench.client import base_url, is_up, not_reached
from deploy.bench.servers import OwnedProcess
from deploy.bench.stream import EventSplitter
from deploy.daemons import is_loopback, matching, running_daemons, select
from deploy.display import open_display
from deploy.environment import API_KEY_VARIABLE, HostEnvironment
from deploy.flags import parse_words
from deploy.models import hub
from deploy.models.catalogue import find
from deploy.models.store import prepared_model
from proto.errors import ConfigError, TokendError
from proto.settings.config import ModelConfig

_HELP: Final = """\
  \"\"\"               begins a message of several lines, and ends it
  /system TEXT      set the system message; without TEXT, show it
  /clear            forget the conversation
  /help             show these lines
  /exit             leave (or Ctrl-D)
  Ctrl-C            stop an answer
"""
_QUOTES: Final = '"""'
_COMMANDS: Final = ("/system", "/clear", "/help", "/exit")
_TEMPERATURE: Final = 0.7
_REPETITION: Final = {"min_pattern_size": 8, "max_pattern_size": 256, "min_count": 4}
"""Field `repetition_detection`: an answer ends when 8 to 256 tokens come four times in a row."""
_LOG_LEVEL: Final = "warning"
"""Of a daemon that is started for the chat. Its progress is shown on a terminal, its end is not."""
_START_POLL_SECONDS: Final = 0.1
_START_SECONDS: Final = 120.0
_ANSWER_SECONDS: Final = 600.0
"""Longest wait for the next token: the request may be queued."""
_HEALTH_SECONDS: Final = 5.0
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that could change the terminal."""
_HOST_AND_PORT: Final = re.compile(r"[^/\s]+:\d+/?")
_DIM: Final = "\x1b[2m"
_PLAIN: Final = "\x1b[0m"


def main(arguments: Sequence[str], environment: HostEnvironment) -> int:
    """Run the command and return its exit status; raises TokendError."""
    words, values = parse_words(arguments, ("--system", "--max-tokens"))
    if len(words) > 1:
        raise ConfigError(f"unexpected {words[1]}: tokend chat takes one MODEL or URL")
    limit = values.get("--max-tokens")
    if limit is not None and (not limit.isdecimal() or int(limit) == 0):
        raise ConfigError(f"--max-tokens takes a whole number from 1, not {limit}")
    target = words[0] if words else None
    if target is not None and (name := hub.parse_name(target)) is not None:
        target = str(name)
    interactive = sys.stdin.isatty()
    question = "" if interactive else sys.stdin.read().strip()
    if not interactive and not question:
        raise ConfigError("tokend chat: the input is empty")
    api_key = environment.settings.get("api_key")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    # The certificate of a daemon of this user has the name of the server, not of this machine; its
    # address is known from the daemon itself, so that no other program answers there.
    with (
        _server(target, environment) as url,
        httpx.Client(
            base_url=url,
            headers=headers,
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=10.0),
            verify=given_url(target) is not None or not is_loopback(url),
        ) as client,
    ):
        model, sampling = find_model(client, target)
        max_tokens = None if limit is None else int(limit)
        chat = Chat(client, model, sys.stdout, values.get("--system"), max_tokens, sampling)
        if interactive:
            chat.run()
        else:
            chat.ask(question)
    return 0


def given_url(target: str | None) -> str | None:
    """Return the URL that a target means: one, or HOST:PORT; None for a model or a daemon."""
    if target is None or target.startswith(("http://", "https://")):
        return target
    return f"http://{target}" if _HOST_AND_PORT.fullmatch(target) else None


@contextlib.contextmanager
def _server(target: str | None, environment: HostEnvironment) -> Iterator[str]:
    """Yield the URL of the server to chat with; one that was started ends with the block."""
    given = given_url(target)
    if given is not None:
        yield base_url(given)
        return
    daemons = running_daemons(environment.run_parents())
    if matching(target, daemons) if target is not None else daemons:
        yield select(target, daemons).state.url
        return
    with _started(target or ModelConfig().model, environment) as url:
        yield url


@contextlib.contextmanager
def _started(model: str, environment: HostEnvironment) -> Iterator[str]:
    """Start a daemon for the chat; its progress and its errors go to the terminal.

    Raises ConfigError for a model that does not chat, before a daemon loads it.
    """
    _check_chats(model, environment)
    variables = dict(environment.variables)
    if "api_key" in environment.settings:
        variables[API_KEY_VARIABLE] = environment.settings["api_key"]
    flags = ["--port", "0", "--log-level", _LOG_LEVEL, "--no-page", "--max-num-seqs", "4"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.cli", "serve", model, *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=variables,
        process_group=0,  # Ctrl-C stops an answer
    )
    with OwnedProcess(process):
        yield _wait_ready(process, environment)


def _check_chats(model: str, environment: HostEnvironment) -> None:
    """Raise ConfigError if a model does not chat, ModelError if there is none of this name."""
    completes = ConfigError(
        f"{model} has no chat template: it completes texts. tokend serve {model}, and "
        "Completion on its page or /v1/completions"
    )
    packaged = find(model)
    if packaged is not None and not packaged.chats:
        raise completes  # before it is downloaded
    with contextlib.closing(open_display(sys.stderr, log_level=_LOG_LEVEL)) as display:
        prepared = prepared_model(model, environment, display)
    if not prepared.generates:
        raise ConfigError(f"{model} gives vectors or scores, no text: tokend serve {model}")
    if not prepared.has_chat_template:
        raise completes


def _wait_ready(process: "subprocess.Popen[bytes]", environment: HostEnvironment) -> str:
    """Wait until a daemon accepts requests, and return its URL; raises TokendError if it ends."""
    while process.poll() is None:
        for daemon in running_daemons(environment.run_parents()):
            url = daemon.state.url
            if daemon.state.pid == process.pid and is_up(f"{url}/health", _HEALTH_SECONDS):
                return url
        time.sleep(_START_POLL_SECONDS)
    error = ConfigError if process.returncode == 2 else TokendError
    raise error("the daemon for the chat has ended, see above")


def find_model(client: httpx.Client, target: str | None) -> tuple[str, dict[str, Any]]:
    """Return the name of the model of a server, and sampling parameters; raises TokendError.

    Waits for a server that is starting. A model of tokend without a temperature of its own gets
    one, because small ones ramble at 1, and tokend ends an answer that only repeats itself.
    """
    deadline = time.monotonic() + _START_SECONDS
    try:
        while client.get("/health").status_code == 503 and time.monotonic() < deadline:
            time.sleep(_START_POLL_SECONDS)
        response = client.get("/v1/models")
    except httpx.HTTPError as error:
        raise TokendError(not_reached(str(client.base_url), error)) from None
    if not response.is_success:
        raise TokendError(_refusal(response))
    try:
        cards = response.json()["data"]
        card = next((card for card in cards if card["id"] == target), cards[0])
        defaults = card.get("default_sampling_params")
        if defaults is None:  # another server, which may refuse the fields
            return str(card["id"]), {}
        temperature = {} if "temperature" in defaults else {"temperature": _TEMPERATURE}
        return str(card["id"]), {**temperature, "repetition_detection": _REPETITION}
    except (ValueError, KeyError, TypeError, IndexError, AttributeError):
        raise TokendError(f"{client.base_url}v1/models does not list a model") from None


def _refusal(response: httpx.Response) -> str:
    """Return the message of a response that is an error."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        error = response.json()["error"]
        message = str(error["message"] if isinstance(error, dict) else error)
        key = " (set TOKEND_API_KEY)" if response.status_code == 401 else ""
        return message + key
    return f"the server answered with status {response.status_code}"


@dataclass
class Chat:
    """A conversation with one model.

    out: gets the answers. system: system message. max_tokens: of an answer; None for what the
    server allows. sampling: fields of each request.
    """

    client: httpx.Client
    model: str
    out: TextIO
    system: str | None = None
    max_tokens: int | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def run(self) -> None:
        """Read messages from the terminal until the user leaves."""
        with contextlib.suppress(ImportError):  # keys for editing, and earlier lines
            import readline  # noqa: F401
        self._print(f"{self.model}: /help lists the commands, Ctrl-D leaves\n")
        while (text := self._read()) is not None:
            if not text.strip():
                continue
            command, _, rest = text.strip().partition(" ")
            if command == "/exit":
                return
            if re.fullmatch(r"/\w*", command):
                self._run_command(command, rest.strip())
                continue
            try:
                self.ask(text)
            except TokendError as error:
                self._print(f"{error}\n")

    def ask(self, text: str) -> None:
        """Send a message and print the answer as it comes; Ctrl-C stops it in a terminal.

        Raises TokendError if there is none; the message is then not part of the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        answer: list[str] = []
        try:
            try:
                for piece in self._stream():
                    answer.append(piece)
            except KeyboardInterrupt:
                if not sys.stdin.isatty():
                    raise
                self._print("\n(stopped)", style=_PLAIN if self.out.isatty() else "")
            self._print("\n")
        finally:
            if answer:
                self.messages.append({"role": "assistant", "content": "".join(answer)})
            else:
                self.messages.pop()

    def _stream(self) -> Iterator[str]:
        """Print the answer to the messages, and yield its pieces."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {
            "model": self.model,
            "messages": [*first, *self.messages],
            "stream": True,
            **self.sampling,
        }
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        reasons = False
        for choice in self._choices(body):
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought and self.out.isatty():
                self._print(thought, style="" if reasons else _DIM)
                reasons = True
            if piece := delta.get("content"):
                self._print(piece, style=_PLAIN + "\n\n" if reasons else "")
                reasons = False
                yield piece
            if choice.get("finish_reason") == "length":
                self._note(
                    "cut: the server allows no more tokens, /clear makes room"
                    if self.max_tokens is None
                    else f"cut after {self.max_tokens} tokens, see --max-tokens"
                )
            if choice.get("finish_reason") == "repetition":
                self._note("ended: the model repeats itself")
        if reasons:
            self._print("", style=_PLAIN)

    def _choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Send a request and yield the choice of each event; raises TokendError."""
        splitter = EventSplitter()
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise TokendError(_refusal(response))
                for chunk in response.iter_bytes():
                    for data in splitter.feed(chunk):
                        if data == b"[DONE]":
                            return
                        event = json.loads(data)
                        if "error" in event:
                            raise TokendError(str(event["error"].get("message", event["error"])))
                        yield from event.get("choices", ())[:1]
        except httpx.ConnectError as error:
            raise TokendError(f"the server does not answer any more: {error}") from None
        except (httpx.HTTPError, ValueError, AttributeError) as error:
            raise TokendError(f"the answer ended: {error}") from None

    def _read(self) -> str | None:
        """Read a message, of several lines between quotes; None at the end of the input."""
        try:
            line = input(">>> ")
            if not line.startswith(_QUOTES):
                return line
            lines = [line.removeprefix(_QUOTES)]
            while not lines[-1].endswith(_QUOTES):
                lines.append(input("... "))
            return "\n".join(lines).removesuffix(_QUOTES)
        except KeyboardInterrupt:
            self._print("\n(/exit or Ctrl-D leaves)\n")
            return ""
        except EOFError:
            self._print("\n")
            return None

    def _run_command(self, command: str, rest: str) -> None:
        if command == "/clear":
            self.messages.clear()
            self._print("the conversation is forgotten\n")
        elif command == "/system":
            self.system = rest or self.system
            self._print(f"system message: {self.system or 'none'}\n")
        elif command == "/help":
            self._print(_HELP)
        else:
            near = difflib.get_close_matches(command, _COMMANDS, 1)
            hint = f"did you mean {near[0]}?" if near else "/help lists the commands"
            self._print(f"unknown command {command}; {hint}\n")

    def _note(self, text: str) -> None:
        """Print a remark about an answer, not into a pipe that takes the answer."""
        sys.stdout.flush()
        print(f"\n({text})", file=self.out if self.out.isatty() else sys.stderr, flush=True)

    def _print(self, text: str, *, style: str = "") -> None:
        """Print a text after codes for the terminal; codes in the text itself are left out."""
        self.out.write(style + _CONTROL.sub("", text))
        self.out.flush()
