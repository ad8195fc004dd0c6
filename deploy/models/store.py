"""Finds the prepared folder of a model, or creates it. Start reading at `prepared_model`.

A folder is complete if it has a manifest: it is moved into place as a whole. So a start that finds
one takes no lock and reads one small file.
"""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import catalogue, fetch
from deploy.models.fetch import exclusive
from deploy.models.prepare import QUIET_LIBRARIES, PrepareJob, PrepareMessage
from proto.codec import from_json
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import MANIFEST_VERSION, PreparedModel

PREPARE_VERSION: Final = 2
"""Raise it whenever preparing the same source writes something else than before."""

_FOLDER_SUFFIXES: Final = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")


@dataclass(frozen=True)
class ModelSource:
    """A model file or folder on this machine.

    name: name of a packaged model, or the last component of the path. path: absolute, links
    resolved. stamp: path, bytes and modification time (ns) of every file of the model.
    """

    name: str
    path: str
    kind: Literal["gguf", "folder"]
    stamp: tuple[tuple[str, int, int], ...]

    @property
    def key(self) -> str:
        """Name of the prepared folder: readable, and another one whenever a file has changed.

        Depends on names, sizes and times of the files, not on their contents.
        """
        identity = repr((self.path, self.stamp, MANIFEST_VERSION, PREPARE_VERSION))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.name)
        return f"{readable.lstrip('.')[:80]}-{digest[:16]}"


def locate(model: str, environment: HostEnvironment, display: Display) -> ModelSource:
    """Return the source that MODEL on the command line means, downloaded if necessary.

    An existing path takes precedence over the name of a packaged model. Raises ModelError if
    `model` is neither.
    """
    packaged = catalogue.find(model)
    path = os.path.realpath(os.path.expanduser(model))
    if os.path.isdir(path):
        return ModelSource(os.path.basename(path), path, "folder", _stamp(path, _model_files(path)))
    if os.path.isfile(path):
        return ModelSource(_file_name(path), path, "gguf", _stamp(path, [path]))
    if packaged is not None:
        return packaged_source(packaged, environment, display)
    raise ModelError(
        f"no model {model!r}: there is no such file or folder, "
        f"and the packaged models are {catalogue.names()}"
    )


def packaged_source(
    model: catalogue.PackagedModel, environment: HostEnvironment, display: Display
) -> ModelSource:
    """Return the source of a packaged model, downloaded if necessary."""
    path = os.path.realpath(fetch.fetch(model, environment, display))
    return ModelSource(model.name, path, "gguf", _stamp(path, [path]))


def _file_name(path: str) -> str:
    return os.path.basename(path).removesuffix(".gguf")


def _model_files(folder: str) -> list[str]:
    return sorted(
        entry.path
        for entry in os.scandir(folder)
        if entry.name.endswith(_FOLDER_SUFFIXES) and entry.is_file()
    )


def _stamp(root: str, paths: Sequence[str]) -> tuple[tuple[str, int, int], ...]:
    stamps = []
    for path in paths:
        status = os.stat(path)
        stamps.append((os.path.relpath(path, root), status.st_size, status.st_mtime_ns))
    return tuple(stamps)


def prepared_model(
    model: str, environment: HostEnvironment, display: Display, *, packaged: bool = False
) -> PreparedModel:
    """Return the manifest of a model, downloaded and prepared now if it was not before.

    packaged: `model` is the name of a packaged model, even if a path of that name exists.
    Raises ModelError if there is no such model or it cannot be used.
    """
    try:
        source = (
            packaged_source(catalogue.get(model), environment, display)
            if packaged
            else locate(model, environment, display)
        )
        root = catalogue.prepared_root(environment.cache)
        folder = os.path.join(root, source.key)
        found = _read(folder)
        if found is None:
            with exclusive(folder + ".lock"):
                found = _read(folder) or _prepare(source, folder, environment, display)
    except OSError as error:
        path = f" ({error.filename})" if error.filename else ""
        raise ModelError(f"cannot set up {model}: {error.strerror}{path}") from None
    return found


def _read(folder: str) -> PreparedModel | None:
    """Return the manifest in `folder`; None if there is none, or of another version."""
    try:
        manifest = from_json(Path(folder, "manifest.json").read_bytes(), PreparedModel)
    except (FileNotFoundError, ProtocolError):
        return None
    # a user may have moved the whole cache
    return manifest if (manifest.version, manifest.folder) == (MANIFEST_VERSION, folder) else None


def _prepare(
    source: ModelSource, folder: str, environment: HostEnvironment, display: Display
) -> PreparedModel:
    """Create the folder in a process of its own, which imports large libraries."""
    root, key = os.path.split(folder)
    for left_over in Path(root).glob(
        f".{key}.*"
    ):  # left by a start that was killed; this process holds the lock
        shutil.rmtree(left_over)
    workspace = tempfile.mkdtemp(prefix=f".{key}.", dir=root)
    try:
        job = PrepareJob(source.name, source.path, source.kind, workspace, folder)
        _run_job(job, environment, display)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.rename(workspace, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    manifest = _read(folder)
    if manifest is None:
        raise ModelError(f"preparing {source.path} wrote no manifest to {folder}")
    return manifest


def _run_job(job: PrepareJob, environment: HostEnvironment, display: Display) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.models.prepare", *job.to_arguments()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**environment.variables, **QUIET_LIBRARIES},
        process_group=0,  # Ctrl-C goes to the parent, which ends this process
        text=True,
    )
    assert process.stdout is not None, "stdout is a pipe"
    failure = ""
    try:
        for line in process.stdout:
            message = PrepareMessage.from_line(line)
            if message.kind == "error":
                failure = message.text
            elif message.kind == "progress":
                display.progress(f"preparing {job.name}: {message.text}", message.fraction)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    if failure:
        raise ModelError(failure)
    if status != 0:
        raise ModelError(f"preparing {job.source} failed with exit status {status}")
