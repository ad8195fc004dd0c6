"""A pytest plugin for llama.cpp's server tests: what they start is a daemon of tokend.

llama.cpp's `ServerProcess` holds the settings of a server, which are translated to flags here. A
test whose settings have no translation fails at the start of its server. Daemons are shared by
tests with the same flags. The option --outcomes names a file for a JSON object from each test's id
to its outcome: "passed", "skipped" or why it failed.
"""

import atexit
import contextlib
import functools
import json
import re
import sys
import tempfile
import types
from pathlib import Path
from typing import Any, Final

import openai
import pytest
from requests.structures import CaseInsensitiveDict

from deploy.models import gguf_header, gguf_tokenizer
from tests.e2e.daemon import Daemon, DaemonPool
from tests.fakes.tiny_encoders import save_encoder
from tests.fakes.tiny_pooling import save_modules
from tests.peers.story_model import story_model

MODELS: Final = {
    "ggml-org/test-model-stories260K": "smollm2-135m-instruct",
    "ggml-org/test-model-stories260K-infill": "smollm2-135m-instruct",
    "bert-bge-small/ggml-model-f16.gguf": "encoder",
    "jina-reranker-v1-tiny-en/ggml-model-f16.gguf": "reranker",
    "stories15M_MOE-F16.gguf": "stories",
}
"""Small models by the repository or file of theirs. Encoders are random, with BGE's vocabulary."""
ADAPTER: Final = "moe_shakespeare15M.gguf"
"""Their file with an adapter, in place of which ours is served."""
TEMPLATES: Final = {"llama3": "meta-llama-Llama-3.1-8B-Instruct"}
"""Files in models/templates for names of templates in llama.cpp's code."""
PATHS_WITHOUT_VERSION: Final = ("/chat/completions", "/responses", "/models")
"""Paths of OpenAI's API that llama.cpp serves without /v1, too."""
COMPLETIONS: Final = ("/completion", "/completions")
"""Paths of completions in llama.cpp's own format, of which text and length are translated."""
OWN_PATHS: Final = (
    *("/embeddings", "/slots", "/props", "/predict"),
    *("/tools", "/cors-proxy", "/chat/completions/input_tokens"),
)
"""Paths of llama.cpp's own API, which tokend does not have."""
TRANSLATED: Final = {
    *("model_hf_repo", "model_hf_file", "model_alias", "n_ctx", "n_slots", "kv_unified"),
    *("pooling", "api_key", "no_ui", "chat_template", "chat_template_file", "reasoning", "seed"),
    *("temperature", "n_predict", "lora_files"),
}
WITHOUT_EFFECT: Final = {
    *("debug", "server_port", "offline", "n_batch", "n_ubatch", "fa", "external_server", "process"),
    *("server_embeddings", "server_reranking", "server_metrics", "server_slots", "jinja"),
}
SETTINGS_OF_ALL: Final = (
    *("--seed", "42", "--metrics-open", "--kv-cache-memory", "512M"),
    *("--allowed-origins", "*", "--allow-credentials"),
    *("--allowed-methods", "GET, POST, DELETE, OPTIONS"),
)
POOL: Final = DaemonPool(max_idle=3)
_workspace: Final = tempfile.TemporaryDirectory(prefix="tokend-peer-")
_outcomes: dict[str, str] = {}
_lent: dict[Any, contextlib.ExitStack] = {}
"""What gives its daemon back, by server."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", required=True, help="file for the outcome of each test")


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Replace what starts servers and downloads files, before a test module is imported."""
    sys.modules["wget"] = types.ModuleType("wget")
    sys.path.insert(0, str(early_config.rootpath))
    utils: Any = __import__("utils")
    utils.ServerProcess.start = start
    utils.ServerProcess.stop = stop
    utils.ServerProcess.make_request = _requesting(utils.ServerProcess.make_request)
    utils.ServerProcess.make_stream_request = _streaming(utils.ServerProcess.make_stream_request)
    utils.ServerPreset.load_all = lambda: None
    utils.download_file = _download
    openai.OpenAI = _Client
    atexit.register(POOL.stop_all)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    report = yield
    if report.skipped or (report.when == "call" and report.passed):
        _outcomes[item.nodeid] = report.outcome
    elif report.failed:
        _outcomes[item.nodeid] = str(call.excinfo and call.excinfo.value)[:400]
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    POOL.stop_all()
    Path(session.config.getoption("outcomes")).write_text(json.dumps(_outcomes, indent=1))


def start(server: Any, timeout_seconds: int = 0) -> None:
    """Lend the server's test a daemon; replaces ServerProcess.start."""
    stop(server)
    flags = _flags(server)
    try:
        if server.api_key:
            daemon = _daemon_with_key(*flags)
        else:
            _lent[server] = contextlib.ExitStack()
            daemon = _lent[server].enter_context(POOL.borrow(*flags))
    except AssertionError as error:
        pytest.exit(f"a daemon does not start: {error}", returncode=3)
    server.server_port = int(daemon.url.rpartition(":")[2])
    sys.modules["utils"].server_instances.add(server)


def stop(server: Any) -> None:
    """Give the daemon back; replaces ServerProcess.stop."""
    sys.modules["utils"].server_instances.discard(server)
    if server in _lent:
        _lent.pop(server).close()


@functools.cache
def _daemon_with_key(*flags: str) -> Daemon:
    """Start a daemon that is not reset after each test, for want of its key."""
    daemon = Daemon(*flags)
    atexit.register(daemon.stop)
    daemon.wait_ready()
    return daemon


class _Client(openai.OpenAI):
    """A client that names no model, since llama.cpp serves its one model by any name."""

    def __init__(self, *, base_url: str, **options: Any) -> None:
        super().__init__(base_url=f"{base_url.removesuffix('/v1')}/v1", **options)

    def _prepare_options(self, options: Any) -> Any:
        if isinstance(options.json_data, dict):
            options.json_data = {**options.json_data, "model": None}
        return super()._prepare_options(options)


def _flags(server: Any) -> list[str]:
    """Translate the settings of a server; raises NotImplementedError if it has others."""
    others = {**vars(type(server)), **vars(server)}.items()
    refused = [
        name
        for name, value in others
        if not name.startswith("_")
        and not callable(value)
        and value not in (None, False)
        and name not in TRANSLATED | WITHOUT_EFFECT
        and (name, value) not in (("server_host", "127.0.0.1"), ("n_prompts", 0))
    ]
    if refused:
        raise NotImplementedError(f"no flags for {', '.join(refused)}")
    model = MODELS.get(server.model_hf_file or server.model_hf_repo)
    if model is None:
        theirs = server.model_hf_file or server.model_hf_repo
        raise NotImplementedError(f"no small model for {theirs}" if theirs else "a router")
    flags = [model, *SETTINGS_OF_ALL]
    if model in ("encoder", "reranker"):
        flags[0] = str(_encoder(model))
        flags = [flag for flag in flags if flag not in ("--kv-cache-memory", "512M")]
        if server.pooling == "none":
            raise NotImplementedError("no flags for pooling none")
        if server.pooling:
            flags += ["--pooler-config", json.dumps({"pooling_type": server.pooling.upper()})]
    elif model == "stories":
        flags[0] = str(story_model(Path(_workspace.name)).folder)
    if server.n_ctx and model not in ("encoder", "reranker"):
        length = server.n_ctx // (1 if server.kv_unified else server.n_slots or 1)
        flags += ["--max-model-len", str(length)]
    if server.lora_files:
        modules = (f"adapter-{number}={path}" for number, path in enumerate(server.lora_files))
        flags += ["--enable-lora", "--lora-modules", *modules]
    if server.model_alias:
        flags += ["--served-model-name", server.model_alias]
    if server.api_key:
        flags += ["--api-key", server.api_key]
    if server.no_ui:
        flags += ["--no-page"]
    if server.chat_template:
        if server.chat_template not in TEMPLATES:
            raise NotImplementedError(f"no file for the template {server.chat_template!r}")
        name = f"../../../models/templates/{TEMPLATES[server.chat_template]}.jinja"
        flags += ["--chat-template", name]
    if server.chat_template_file:
        flags += ["--chat-template", server.chat_template_file]
    return flags


def _translated(server: Any, path: str, data: Any) -> tuple[str, Any]:
    """Return path and body of a request as tokend has them; raises NotImplementedError."""
    if re.match(f"({'|'.join(OWN_PATHS)})([/?]|$)", path):
        raise NotImplementedError(f"llama.cpp's own {path}")
    if path.startswith(PATHS_WITHOUT_VERSION):
        path = "/v1" + path
    if path == "/lora-adapters":
        return path, data
    data = data and dict(data)
    if data and data.get("model"):
        data["model"] = server.model_alias  # llama.cpp serves its model by any name
    if path in COMPLETIONS and data:
        path, data["max_tokens"] = "/v1/completions", data.pop("n_predict", server.n_predict)
        data = {"seed": server.seed, "temperature": server.temperature} | data
    elif path == "/apply-template":
        path = "/tokenize"
        if server.reasoning:
            data["chat_template_kwargs"] = {"enable_thinking": server.reasoning != "off"}
    elif path == "/tokenize":
        special = data.pop("add_special", False)
        data |= {"prompt": data.pop("content"), "add_special_tokens": special}
    return path, data


def _requesting(request: Any) -> Any:
    """Wrap ServerProcess.make_request."""

    def sent(server: Any, method: str, path: str, data: Any = None, *args: Any, **kw: Any) -> Any:
        answer = request(server, method, *_translated(server, path, data), *args, **kw)
        answer.headers = CaseInsensitiveDict(answer.headers)
        if answer.status_code != 200:
            return answer
        if path == "/apply-template":
            answer = request(server, "POST", "/detokenize", {"tokens": answer.body["tokens"]})
        elif path == "/detokenize":
            answer.body["content"] = answer.body["prompt"]
        elif path in COMPLETIONS and method == "POST":
            answer.body["content"] = answer.body["choices"][0]["text"]
        return answer

    return sent


def _streaming(request: Any) -> Any:
    """Wrap ServerProcess.make_stream_request; the first content of a chat is "" at OpenAI."""

    def sent(server: Any, method: str, path: str, data: Any = None, *args: Any, **kw: Any) -> Any:
        for event in request(server, method, *_translated(server, path, data), *args, **kw):
            for choice in event.get("choices", ()):
                if choice.get("delta", {}).get("role"):
                    choice["delta"]["content"] = choice["delta"].get("content") or None
                if path in COMPLETIONS:
                    event |= {
                        "content": choice["text"],
                        "stop": choice["finish_reason"] is not None,
                    }
            yield event

    return sent


def _encoder(kind: str) -> Path:
    """Return the folder of a random encoder with BGE's vocabulary: of vectors, or of one score."""
    folder = Path(_workspace.name, kind)
    if not folder.exists():
        vocabulary = "../../../models/ggml-vocab-bert-bge.gguf"
        tokenizer, settings, _ = gguf_tokenizer.convert(
            vocabulary, gguf_header.read(vocabulary).values
        )
        size = len(json.loads(tokenizer)["model"]["vocab"])
        model = save_encoder(
            "bert",
            folder,
            num_labels=int(kind == "reranker"),
            vocab_size=size,
            max_position_embeddings=512,
        )
        if kind == "encoder":
            save_modules(folder, model.config.hidden_size, "cls_token")
        (folder / "tokenizer.json").write_bytes(tokenizer)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def _download(url: str, output_file_path: str | None = None) -> str:
    """Return the path of our adapter for theirs; replaces download_file."""
    if url.endswith(f"/{ADAPTER}"):
        return str(story_model(Path(_workspace.name)).gguf)
    raise NotImplementedError(f"{url} is not downloaded")
