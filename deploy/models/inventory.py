"""The models on this machine: `tokend list` and `tokend rm`.

Packaged models are in tokend's cache folder, models of the hub in the cache of huggingface_hub,
where other programs may have put them. What was prepared of a model is in tokend's cache folder,
too, and stays when the model's files are moved or removed by others.
"""

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final

from deploy.environment import HostEnvironment
from deploy.models import catalogue, hub
from deploy.models.gguf_parts import choose_vision_file, is_vision_file, part_names
from deploy.models.hub import HubName
from deploy.models.lock_file import exclusive
from deploy.models.prepared_folder import size_text
from deploy.models.store import last_start, read_manifest
from proto.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

_UNFINISHED: Final = "incomplete"
_GONE: Final = "prepared, files gone"
_MAX_WIDTH: Final = 48
"""Letters of a name from which on the columns of its line are moved to the right."""


@dataclass(frozen=True)
class StoredModel:
    """A model on the disk.

    name: as `tokend serve` takes it, or the path of a model that is gone. form: format of the
    weights. last_used: when tokend last started with it, in seconds of the Unix clock; None if it
    has not.
    """

    name: str
    num_bytes: int
    form: str
    last_used: float | None


def stored_models(environment: HostEnvironment) -> list[StoredModel]:
    """Return the models, by name, that were downloaded, by tokend or others, in whole or in part.

    Repositories of the hub without weights that tokend reads are left out. What was prepared of
    models that are gone comes with them.
    """
    starts = _starts(environment)
    gone = [
        _stored(source, _GONE, chain(*(each.rglob("*") for each in folders)), starts, Path(source))
        for source, folders in _gone(environment).items()
    ]
    found = [*_packaged(environment, starts), *_of_hub(environment, starts), *gone]
    return sorted(found, key=lambda model: (model.form == _GONE, model.name.lower()))


def table(models: list[StoredModel]) -> list[str]:
    """Return the lines of `tokend list`."""
    width = max([4, *(min(len(model.name), _MAX_WIDTH) for model in models)])
    lines = [f"{'NAME':{width}}  {'SIZE':>9}  {'FORMAT':24}LAST USED"]
    for model in models:
        used = "-"
        if model.last_used is not None:
            used = datetime.fromtimestamp(model.last_used).strftime("%Y-%m-%d %H:%M")
        size = size_text(model.num_bytes)
        lines.append(f"{model.name:{width}}  {size:>9}  {model.form:24}{used}")
    return lines


Starts = Mapping[str, float]
"""When tokend last started with a model, by the path of its source, where links lead."""


def _starts(environment: HostEnvironment) -> Starts:
    starts: dict[str, float] = {}
    for folder, model in _prepared(environment):
        start = last_start(str(folder))
        if start is not None:
            source = os.path.realpath(model)
            starts[source] = max(start, starts.get(source, start))
    return starts


def _prepared(environment: HostEnvironment) -> Iterator[tuple[Path, str]]:
    """Yield each prepared folder and the path of its model."""
    for folder in Path(catalogue.prepared_root(environment.cache)).glob("*"):
        manifest = read_manifest(str(folder))
        if manifest is not None:
            yield folder, manifest.source


def _packaged(environment: HostEnvironment, starts: Starts) -> Iterator[StoredModel]:
    for model in catalogue.MODELS:
        if catalogue.is_fetched(model, environment.cache):
            path = Path(catalogue.file_path(model, environment.cache))
            yield _stored(model.name, f"GGUF {hub.quantisation(model.file_name)}", [path], starts)


def _of_hub(environment: HostEnvironment, starts: Starts) -> Iterator[StoredModel]:
    repositories = _repositories(environment)
    for name, repository in repositories.items():
        unfinished = f", {_UNFINISHED}" if _has_unfinished(repository.repo_path) else ""
        files = _blobs(repository)
        if any(each.endswith(".safetensors") and "/" not in each for each in files):
            form, blobs = f"safetensors{unfinished}", set().union(*files.values())
            yield _stored(name, form, blobs, starts, repository.repo_path)
            continue
        models = hub.gguf_models(files)
        kinds = [hub.quantisation(each) for each in models]
        for first, kind in zip(models, kinds, strict=True):
            tag = kind if kind and kinds.count(kind) == 1 else os.path.basename(first)
            hub_name = HubName(name, tag if len(models) > 1 else "")
            vision = choose_vision_file(first, files)
            own = [*part_names(first), *([vision] if vision else ())]
            blobs = {blob for each in own for blob in files.get(each, ())}
            yield _stored(str(hub_name), f"GGUF {kind}{unfinished}", blobs, starts)
    for folder in Path(environment.hugging_face_cache).glob("models--*--*"):
        name = hub.repository_of(folder)
        if name not in repositories and _has_unfinished(folder):
            yield _stored(name, _UNFINISHED, (folder / "blobs").iterdir(), starts)


def _stored(
    name: str, form: str, files: Iterable[Path], starts: Starts, root: Path | None = None
) -> StoredModel:
    """Describe a model. root: its path, or a folder above it, if it is not one of the files."""
    paths = list(files)
    roots = paths if root is None else [root]
    used = [start for source, start in starts.items() if _is_below(source, roots)]
    num_bytes = sum(each.stat().st_size for each in paths)
    return StoredModel(name, num_bytes, form, max(used, default=None))


def _repositories(environment: HostEnvironment) -> "dict[str, CachedRepoInfo]":
    """Return the repositories of models in the cache of the hub that have a snapshot, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        found = scan_cache_dir(environment.hugging_face_cache).repos
    except CacheNotFound:
        return {}
    return {each.repo_id: each for each in found if each.repo_type == "model"}


def _blobs(repository: "CachedRepoInfo") -> dict[str, set[Path]]:
    """Return the blobs of each file, by its path in the repository, in all its revisions."""
    found: dict[str, set[Path]] = {}
    for revision in repository.revisions:
        for file in revision.files:
            name = file.file_path.relative_to(revision.snapshot_path).as_posix()
            found.setdefault(name, set()).add(file.blob_path)
    return found


def _has_unfinished(repository: Path) -> bool:
    return any((repository / "blobs").glob("*.incomplete"))


def remove(name: str, environment: HostEnvironment) -> int:
    """Remove a model that was downloaded, with what was prepared of it; return the bytes freed.

    A name with a colon removes one GGUF model of a repository, a path what was prepared of models
    that are gone from there or from below it. Raises ModelError if there is no
    such model here.
    """
    stored = {model.name: model for model in stored_models(environment)}
    packaged, hub_name = catalogue.find(name), hub.parse_name(name)
    if packaged is not None and name in stored:
        folder = Path(catalogue.models_root(environment.cache), packaged.name)
        shutil.rmtree(folder)
        _remove_prepared([folder], environment)
        return stored[name].num_bytes
    repositories = {each.partition(":")[0] for each in stored}
    if hub_name is None or hub_name.repository not in repositories:
        path = Path(os.path.abspath(os.path.expanduser(name)))
        gone = [each for each in _gone(environment) if _is_below(each, [path])]
        if gone:
            _remove_prepared(map(Path, gone), environment)
            return sum(stored[each].num_bytes for each in gone)
        if os.path.exists(name):
            raise ModelError(f"{name} was not downloaded by tokend: remove it yourself")
        near = hub.near(name, stored)
        raise ModelError(f"there is no model {name} here{near}; tokend list lists them")
    cache = environment.hugging_face_cache
    with exclusive(hub.lock_path(cache, hub_name.repository)):
        if hub_name.file:
            return _remove_gguf(hub_name, environment)
        folder = hub.repository_folder(cache, hub_name.repository)
        num_bytes = sum(each.lstat().st_size for each in (folder / "blobs").glob("*"))
        _remove_prepared([folder], environment)
        shutil.rmtree(folder)
        shutil.rmtree(Path(cache, ".locks", folder.name), ignore_errors=True)
        return num_bytes


def would_remove(name: str, paths: Iterable[str], environment: HostEnvironment) -> bool:
    """Whether `remove` would take the files of a model at one of these absolute paths."""
    packaged, hub_name = catalogue.find(name), hub.parse_name(name)
    roots: Collection[Path] = [Path(os.path.abspath(os.path.expanduser(name)))]
    if packaged is not None:
        roots = [Path(catalogue.models_root(environment.cache), packaged.name)]
    elif (
        hub_name is not None
        and (
            folder := hub.repository_folder(environment.hugging_face_cache, hub_name.repository)
        ).exists()
    ):
        roots = [folder]
        if hub_name.file and hub_name.repository in (found := _repositories(environment)):
            roots = _gguf_blobs(found[hub_name.repository], hub_name)
    else:
        paths = [each for each in paths if not os.path.lexists(each)]
    return any(_is_below(path, roots) for path in paths)


def _is_below(path: str, roots: Iterable[Path]) -> bool:
    """Whether a path is one of the roots or below it, where links lead."""
    real = Path(os.path.realpath(path))
    return not {real, *real.parents}.isdisjoint(Path(os.path.realpath(each)) for each in roots)


def _remove_gguf(name: HubName, environment: HostEnvironment) -> int:
    """Remove the files of one GGUF model of a repository in all revisions; return the bytes."""
    repository = _repositories(environment)[name.repository]
    chosen = _gguf_files(_blobs(repository), name)
    blobs = _gguf_blobs(repository, name)
    num_bytes = sum(blob.stat().st_size for blob in blobs)
    _remove_prepared(blobs, environment)
    for revision in repository.revisions:
        for each in chosen:
            with contextlib.suppress(FileNotFoundError):
                (revision.snapshot_path / each).unlink()
    for blob in blobs:
        blob.unlink()
    return num_bytes


def _gguf_blobs(repository: "CachedRepoInfo", name: HubName) -> set[Path]:
    """Return the blobs of one GGUF model that are not those of other files, too."""
    files = _blobs(repository)
    chosen = _gguf_files(files, name)
    kept = {blob for each, blobs in files.items() if each not in chosen for blob in blobs}
    return {blob for each in chosen for blob in files[each]} - kept


def _gguf_files(files: Collection[str], name: HubName) -> list[str]:
    """Return the files of one GGUF model; after the last one of a repository vision parts, too."""
    chosen = hub.select_gguf(files, name)
    if set(hub.gguf_models(files)) <= set(chosen):
        chosen += filter(is_vision_file, files)
    return chosen


def _gone(environment: HostEnvironment) -> dict[str, list[Path]]:
    """Return the prepared folders of models that are gone, by the path of the model."""
    found: dict[str, list[Path]] = {}
    for folder, source in _prepared(environment):
        if not os.path.lexists(source):
            found.setdefault(source, []).append(folder)
    return found


def _remove_prepared(sources: Iterable[Path], environment: HostEnvironment) -> None:
    """Remove what was prepared of models whose files are one of the paths, or below it."""
    roots = list(sources)
    for folder, source in _prepared(environment):
        if _is_below(source, roots):
            shutil.rmtree(folder)
