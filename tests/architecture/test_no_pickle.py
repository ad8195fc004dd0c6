"""External input is never deserialised into code: neither tokend nor its dependencies unpickle it.

The sources of tokend are searched for all unsafe calls; the packages that handle external input
are searched for pickle, so that a version that introduces it fails here.
"""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from tests.architecture.test_imports import FOLDERS, FOREIGN, ROOT, imports_of

UNPICKLERS = {"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {
    "send_pyobj",  # zmq
    "recv_pyobj",
    "torch.load",
    "torch.jit.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "eval",
    "exec",
    "compile",
    "__import__",
}
UNSAFE_SWITCHES = {"allow_pickle", "trust_remote_code"}

KNOWN = {
    "gguf": set(),
    "httptools": set(),
    "jinja2": {"bccache.py"},  # a cache of compiled templates, unused here
    "msgspec": set(),
    "numpy": {"_core/_methods.py", "lib/_format_impl.py", "lib/_npyio_impl.py"},  # np.load, dump
    "prometheus_client": set(),
    "safetensors": set(),
    "setproctitle": set(),
    "starlette": set(),
    "tokenizers": set(),
    "uvicorn": {"supervisors/multiprocess.py"},  # its worker processes, unused here
    "yaml": set(),
    "zmq": {"eventloop/zmqstream.py", "sugar/socket.py"},  # send_pyobj and recv_pyobj
}
"""Files that import pickle in the packages that handle requests, settings or weights."""


def unsafe_calls_in(source: str) -> list[str]:
    """Return the calls and imports of a module that can turn bytes into code."""
    tree = ast.parse(source)
    found = [name for name, _, _ in imports_of(tree) if name in UNPICKLERS | {"multiprocessing"}]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS or called.rsplit(".", 1)[-1] in ("send_pyobj", "recv_pyobj"):
                found.append(called)
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in UNSAFE_SWITCHES and not off:
                    found.append(f"{called}({keyword.arg})")
    return found


def test_no_source_file_deserialises_code() -> None:
    broken = {
        str(path.relative_to(ROOT)): found
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        if FOREIGN not in path.parents and (found := unsafe_calls_in(path.read_text()))
    }
    assert broken == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing import Queue",
        "link.recv_pyobj()",
        "torch.load(path)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
        "eval(text)",
    ],
)
def test_the_check_finds_unsafe_calls(source: str) -> None:
    assert unsafe_calls_in(source)
    assert unsafe_calls_in("re.compile('x'); load(path, allow_pickle=False)") == []


@pytest.mark.parametrize("package", sorted(KNOWN))
def test_dependencies_import_pickle_only_in_known_files(package: str) -> None:
    """For a new file, check whether external input can reach it before adding it to the list."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    pattern = re.compile(
        rf"^\s*(?:import|from)\s+(?:\w+,\s*)*({'|'.join(UNPICKLERS)})\b", re.MULTILINE
    )
    found = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if "tests" not in path.relative_to(root).parts
        and pattern.search(path.read_text(encoding="utf-8"))
    }
    assert found <= KNOWN[package]
