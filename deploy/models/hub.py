"""Models of the Hugging Face hub: which files of a repository are needed, and where they are.

    org/name           a repository: its safetensors, or its only GGUF model (of several, Q4_K_M)
    org/name:Q8_0      one GGUF model of a repository, by its quantisation
    org/name:x.gguf    the same by file name; a file of a vision part comes with it
    hf.co/org/name     these with the address of a page of the hub

`snapshot` returns a folder in the cache of huggingface_hub, which other programs share. What is not
there is downloaded by hub_download.py, in a process of its own.
"""

import difflib
import fnmatch
import json
import os
import re
from collections.abc import Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Final, Literal, NamedTuple

from deploy.display import Display
from deploy.environment import HostEnvironment
from deploy.models import catalogue, gguf_parts
from deploy.models.child_process import NotOnHubError, UnreachableError, run_child
from deploy.models.lock_file import exclusive
from proto.errors import ModelError
from proto.messages.prepared_model import TEMPLATE_FILES

INDEX_FILE: Final = "model.safetensors.index.json"
FOLDER_SUFFIXES: Final = (".safetensors", ".json", ".model", ".jinja", ".txt", ".tiktoken")
"""Files of a model folder that are read."""
_SINGLE_FILE: Final = "model.safetensors"
_DEFAULT_QUANTISATION: Final = "Q4_K_M"
_ACCOMPANYING: Final = ("mmproj", "imatrix")
"""Parts of the names of GGUF files beside a model: a projector of images, and the statistics that
a quantisation used."""
_NAME: Final = re.compile(
    r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?::([A-Za-z0-9][\w.-]*(?:/[\w.-]+)*))?"
)
_ADDRESS: Final = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/main(?:/([^?#]*\.gguf))?)?/?(?:[?#].*)?"
)
"""Address of a model, or of a file of its main branch, on the hub."""
_QUANTISATION: Final = re.compile(
    r"(?:UD-)?(?:I?Q\d(?:_\w+)?|TQ\d_\d|BF16|F16|FP16|F32|MXFP4(?:_\w+)?|NVFP4)", re.IGNORECASE
)
_MODULE: Final = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors)")
"""Files of a module of sentence-transformers, as pooler_files.py reads them."""
_MIN_BEGIN: Final = 4
"""Letters from which on a name is taken for the begin of another."""
_MAX_NAMES: Final = 12
"""Names in an error."""

_WITHOUT_HUB: Final = (
    "without the hub: a packaged model (tokend models), the path of a model, or HF_ENDPOINT with "
    "the address of a mirror"
)
Kind = Literal["model", "head"]
"""A head of EAGLE may be pickled, because it is read without running code."""


class HubName(NamedTuple):
    """A name on the hub. file: quantisation or file name after the colon; "" without one."""

    repository: str
    file: str = ""

    def __str__(self) -> str:
        return f"{self.repository}:{self.file}" if self.file else self.repository


def parse_name(text: str) -> HubName | None:
    """Return the name on the hub that a text is, or whose page it is; None if it is neither."""
    if (address := _ADDRESS.fullmatch(text)) is not None:
        text = ":".join(each for each in address.groups() if each)
    match = _NAME.fullmatch(text)
    return HubName(match[1], match[2] or "") if match else None


# ---- Which files are needed ----


def select_files(
    names: Collection[str], name: HubName, kind: Kind = "model", *, with_mmproj: bool = True
) -> list[str]:
    """Return the files of a repository that serving it needs; raises ModelError without weights.

    names: of all files, relative, with slashes. Where the result has INDEX_FILE, the files of
    `indexed_files` are needed, too. with_mmproj: the file of a GGUF model's vision part, if there
    is one, comes last.
    """
    top = [each for each in names if "/" not in each]
    tensors = [each for each in top if each.endswith(".safetensors")]
    if kind == "model" and (name.file or not tensors):
        if any(each.endswith(".gguf") for each in names):
            parts = select_gguf(names, name)
            vision = gguf_parts.choose_vision_file(parts[0], names) if with_mmproj else None
            return parts if vision is None or vision in parts else [*parts, vision]
        if name.file:
            raise ModelError(f"{name.repository} has no GGUF files, of which :{name.file} is one")
    if kind == "head":
        weights = tensors or [each for each in top if each.endswith(".bin")]
    elif INDEX_FILE in top:
        weights = [INDEX_FILE]
    elif _SINGLE_FILE in top:
        weights = [_SINGLE_FILE]
    else:
        weights = tensors
        if len(weights) > 1:
            raise ModelError(f"{name} has several .safetensors files and no {INDEX_FILE}")
    if not weights:
        pickled = [each for each in top if each.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        raise ModelError(
            f"{name} has no weights in safetensors or GGUF files"
            + (f", and reading {pickled[0]} would run code in it" if pickled else "")
        )
    others = [
        each
        for each in top
        if each.endswith(FOLDER_SUFFIXES) and not each.endswith((".safetensors", ".index.json"))
    ]
    others += fnmatch.filter(names, TEMPLATE_FILES)
    if "modules.json" in top:
        others += filter(_MODULE.fullmatch, names)
    return [*others, *weights]


def select_gguf(names: Collection[str], name: HubName) -> list[str]:
    """Return the files of the GGUF model that a name means; raises ModelError if it is not one."""
    models = gguf_models(names)
    if name.file:
        found = [each for each in models if name.file in (each, os.path.basename(each))]
        found = found or [each for each in models if _has_quantisation(each, name.file)]
    elif len(models) > 1:
        found = [each for each in models if _has_quantisation(each, _DEFAULT_QUANTISATION)]
    else:
        found = models
    if len(found) != 1:
        problem = "several models that match" if found else "no model that matches"
        problem = f"{problem} :{name.file}" if name.file else "several GGUF models"
        listed = sorted({quantisation(each) or os.path.basename(each) for each in models})
        if len(found) > 1:
            listed = [os.path.basename(each) for each in found]
        more = ", …" if listed[_MAX_NAMES:] else ""
        raise ModelError(
            f"{name.repository} has {problem}: {name.repository}:NAME with NAME one of "
            f"{', '.join(listed[:_MAX_NAMES])}{more}"
        )
    parts = gguf_parts.part_names(found[0])
    missing = [each for each in parts if each not in names]
    if missing:
        raise ModelError(f"{name} is not complete: {os.path.basename(missing[0])} is missing")
    return parts


def gguf_models(names: Iterable[str]) -> list[str]:
    """Return the first file of each GGUF model, without what only accompanies a model.

    A file that accompanies is returned if there is nothing else.
    """
    found = [each for each in names if each.endswith(".gguf")]
    models = [each for each in found if not any(map(os.path.basename(each).count, _ACCOMPANYING))]
    return gguf_parts.models_among(models or found)


def quantisation(path: str) -> str:
    """Return the quantisation in the name of a GGUF file or of its folder; "" without one."""
    found = _QUANTISATION.findall(path.removesuffix(".gguf"))
    return found[-1] if found else ""


def _has_quantisation(path: str, tag: str) -> bool:
    """Whether a path has a quantisation as a whole word: Q4_K is not in x-Q4_K_M.gguf."""
    word = rf"(?:^|[-./_]){re.escape(tag)}(?=[-./]|$)"
    return re.search(word, path.removesuffix(".gguf"), re.IGNORECASE) is not None


def indexed_files(index: Path) -> list[str]:
    """Return the files that an index of weights names; raises ModelError if it is invalid."""
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        return sorted(set(weight_map.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ModelError(f"{index.name} of the model is not an index of weights: {error}") from None


# ---- Where the files are ----


def snapshot(
    name: HubName,
    environment: HostEnvironment,
    display: Display,
    *,
    kind: Kind = "model",
    revision: str | None = None,
    refresh: bool = False,
    with_mmproj: bool = True,
) -> str:
    """Return the folder with the files of a model, downloaded if they are not all there.

    revision: branch, tag or commit; None: the default branch. refresh: ask the hub for a newer one,
    also if the files are there. with_mmproj: as in `select_files`. With a headers_folder in the
    environment, of weights that are not there only the headers are downloaded, into it. Raises
    ModelError.
    """
    find = partial(find_snapshot, name, environment, kind=kind, revision=revision)
    found = find(with_mmproj=with_mmproj)
    if found is not None and not refresh:
        return found
    headers = environment.headers_folder
    cache = headers or environment.hugging_face_cache
    on_wait = partial(
        display.notice, f"waiting for another process that downloads {name.repository}"
    )
    try:
        with exclusive(lock_path(cache, name.repository), on_wait):
            if not refresh and headers is None:
                found = find(with_mmproj=with_mmproj)
                if found is not None:
                    return found
            variables = {**environment.variables, "HF_HUB_DISABLE_XET": "1"}
            extent = "all" if headers is None else "headers"
            vision = "mmproj" if with_mmproj else ""
            arguments = [name.repository, name.file, kind, revision or "", cache, extent, vision]
            what = f"downloading {name}" if headers is None else f"reading headers of {name}"
            return run_child("deploy.models.hub_download", arguments, variables, display, what)
    except NotOnHubError as error:
        raise ModelError(f"{error}{near(name.repository, known_names(environment))}") from None
    except UnreachableError as error:
        found = found or find(with_mmproj=False)
        if found is None:
            raise UnreachableError(f"{error}; {_WITHOUT_HUB}") from None
        display.notice(f"{error}; the files that are here are used", level="WARNING")
        return found
    except OSError as error:
        raise ModelError(
            f"{name} cannot be downloaded to {cache}: {error.strerror} ({error.filename}); set "
            f"HF_HOME to a folder that user {os.getuid()} can write to"
        ) from None


def find_snapshot(
    name: HubName,
    environment: HostEnvironment,
    *,
    kind: Kind = "model",
    revision: str | None = None,
    with_mmproj: bool = True,
) -> str | None:
    """Return the folder in the cache if all files that the model needs are there, else None.

    with_mmproj: as in `select_files`.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download
    from huggingface_hub.errors import (
        CachedRepoTreeNotFoundError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
    )

    cache = environment.hugging_face_cache
    try:
        folder: str = snapshot_download(
            name.repository, revision=revision, cache_dir=cache, local_files_only=True
        )
    except IncompleteSnapshotError as error:  # files that other programs have not downloaded
        folder = str(error.snapshot_path)
    except LocalEntryNotFoundError:
        return None
    present = files_below(folder)
    select = partial(select_files, name=name, kind=kind, with_mmproj=with_mmproj)
    try:
        needed = select(present)
        has_gguf = any(each.endswith(".gguf") for each in needed)
        if not has_gguf or (with_mmproj and not gguf_parts.is_vision_file(needed[-1])):
            tree = get_cached_repo_tree(name.repository, revision=revision, cache_dir=cache)
            needed = select([each.path for each in tree])
    except CachedRepoTreeNotFoundError:  # downloaded by an older program
        needed = select(present)
    except ModelError:
        return None
    if INDEX_FILE in needed and INDEX_FILE in present:
        try:
            needed += indexed_files(Path(folder, INDEX_FILE))
        except ModelError:
            return None
    return folder if present.issuperset(needed) else None


def files_below(folder: str) -> set[str]:
    """Return the relative paths of the files of a folder, links to nothing left out."""
    root = Path(folder)
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


def repository_folder(cache: str, repository: str) -> Path:
    """Return the folder of a repository in the cache of huggingface_hub."""
    return Path(cache, f"models--{repository.replace('/', '--')}")


def repository_of(folder: Path) -> str:
    """Return the name of the repository of such a folder."""
    return folder.name.removeprefix("models--").replace("--", "/", 1)


def lock_path(cache: str, repository: str) -> str:
    """Return the lock file of tokend's downloads of a repository."""
    return os.path.join(cache, ".locks", f"tokend--{repository.replace('/', '--')}.lock")


def known_names(environment: HostEnvironment) -> list[str]:
    """Return the names of packaged models and of the repositories in the cache."""
    folders = Path(environment.hugging_face_cache).glob("models--*--*")
    return [*(model.name for model in catalogue.MODELS), *map(repository_of, folders)]


def near(name: str, known: Iterable[str]) -> str:
    """Return the end of an error that suggests a similar or longer name; "" without one."""
    known = list(known)
    begun = [each for each in known if len(name) >= _MIN_BEGIN and each.startswith(name.lower())]
    found = difflib.get_close_matches(name, known, 1, 0.7) or begun
    return f"; did you mean {found[0]}?" if found else ""
