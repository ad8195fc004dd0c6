"""`tokend list` and `tokend rm`, over a cache of huggingface_hub."""

import hashlib
import os
import re
from pathlib import Path

import pytest

from deploy.environment import HostEnvironment
from deploy.models import catalogue, inventory, store
from proto.codec import to_json
from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel

COMMITS = ("a" * 40, "b" * 40)
PACKAGED = catalogue.MODELS[0]


@pytest.fixture
def environment(tmp_path: Path) -> HostEnvironment:
    return HostEnvironment.of(
        {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "HF_HOME": "", "HF_HUB_CACHE": ""}
    )


def repository(environment: HostEnvironment, name: str) -> Path:
    return Path(environment.hugging_face_cache, f"models--{name.replace('/', '--')}")


def write(environment: HostEnvironment, name: str, commit: str, files: dict[str, bytes]) -> None:
    """Write files of a commit as huggingface_hub does: links to blobs with their hash as a name."""
    root = repository(environment, name)
    (root / "refs").mkdir(parents=True, exist_ok=True)
    (root / "refs/main").write_text(commit)
    (root / "blobs").mkdir(exist_ok=True)
    for path, content in files.items():
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        link = root / "snapshots" / commit / path
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))


def write_packaged(environment: HostEnvironment) -> Path:
    path = Path(catalogue.file_path(PACKAGED, environment.cache))
    path.parent.mkdir(parents=True)
    with path.open("wb") as stream:
        stream.truncate(PACKAGED.num_bytes)
    return path


def prepare(environment: HostEnvironment, source: Path) -> Path:
    """Write the manifest of a model that was prepared from `source`."""
    folder = Path(
        catalogue.prepared_root(environment.cache), f"p-{len(str(source))}-{source.name[:9]}"
    )
    folder.mkdir(parents=True)
    manifest = PreparedModel(
        folder=str(folder),
        name="m",
        source=os.path.realpath(source),
        architecture="LlamaForCausalLM",
        vocab_size=256,
        max_position=128,
        weights_sample="0" * 64,
    )
    (folder / "manifest.json").write_bytes(to_json(manifest))
    return folder


def listed(environment: HostEnvironment) -> dict[str, tuple[int, str]]:
    models = inventory.stored_models(environment)
    return {model.name: (model.num_bytes, model.form) for model in models}


FOLDER = {"config.json": b"{}", "model.safetensors": b"w" * 9}
GGUFS = {
    "x-Q4_K_M.gguf": b"4" * 100,
    "Q8_0/x-Q8_0-00001-of-00002.gguf": b"8" * 200,
    "Q8_0/x-Q8_0-00002-of-00002.gguf": b"9" * 300,
    "mmproj-F16.gguf": b"p" * 50,
}


def test_models_are_listed(environment: HostEnvironment) -> None:
    assert listed(environment) == {}
    write_packaged(environment)
    write(environment, "org/many-GGUF", COMMITS[0], GGUFS)
    write(environment, "org/one-GGUF", COMMITS[0], {"y-Q5_0.gguf": b"5"})
    write(environment, "org/folder", COMMITS[0], FOLDER)
    write(environment, "org/other", COMMITS[0], {"pytorch_model.bin": b"pickled"})
    begun = repository(environment, "org/begun") / "blobs"
    begun.mkdir(parents=True)
    (begun / ("0" * 64 + ".tokend.incomplete")).write_bytes(b"part")
    assert listed(environment) == {
        PACKAGED.name: (PACKAGED.num_bytes, "GGUF Q4_1"),
        "org/many-GGUF:Q4_K_M": (150, "GGUF Q4_K_M"),
        "org/many-GGUF:Q8_0": (550, "GGUF Q8_0"),
        "org/one-GGUF": (1, "GGUF Q5_0"),
        "org/folder": (11, "safetensors"),
        "org/begun": (4, "incomplete"),
    }
    head, *rows = inventory.table(inventory.stored_models(environment))
    assert head.split() == ["NAME", "SIZE", "FORMAT", "LAST", "USED"]
    assert all(re.fullmatch(r"\S+ +[\d.]+ [MG]B  [\w, ]+ -", row) for row in rows)


def test_a_start_is_listed_and_changes_no_file_of_the_model(environment: HostEnvironment) -> None:
    path = write_packaged(environment)
    write(environment, "org/many-GGUF", COMMITS[0], GGUFS)
    write(environment, "org/folder", COMMITS[0], FOLDER)
    write(environment, "org/other", COMMITS[0], {"model.safetensors": b"o"})
    snapshots = repository(environment, "org/many-GGUF") / "snapshots" / COMMITS[0]
    sources = [
        path,
        repository(environment, "org/folder") / "snapshots" / COMMITS[0],
        snapshots / "Q8_0/x-Q8_0-00001-of-00002.gguf",
    ]
    before = [each.stat() for each in sources]
    manifests = [store.read_manifest(str(prepare(environment, each))) for each in sources]
    store.note_start(*manifests, None)
    for each in manifests:
        assert each is not None
        os.utime(Path(each.folder, store.START_STAMP), (1e9, 1e9))
    times = {each.name: each.last_used for each in inventory.stored_models(environment)}
    assert times == {
        PACKAGED.name: 1e9,
        "org/folder": 1e9,
        "org/many-GGUF:Q8_0": 1e9,
        "org/many-GGUF:Q4_K_M": None,
        "org/other": None,
    }
    assert [each.stat() for each in sources] == before
    assert "2001-09-0" in "\n".join(inventory.table(inventory.stored_models(environment)))


def test_one_gguf_model_is_removed_with_what_was_prepared(environment: HostEnvironment) -> None:
    name = "org/many-GGUF"
    write(environment, name, COMMITS[0], GGUFS)
    write(
        environment, name, COMMITS[1], {"x-Q8_0.gguf": GGUFS["x-Q4_K_M.gguf"], "z-Q2_K.gguf": b"2"}
    )
    snapshot = repository(environment, name) / "snapshots" / COMMITS[0]
    gone = prepare(environment, snapshot / "Q8_0/x-Q8_0-00001-of-00002.gguf")
    kept = prepare(environment, snapshot / "x-Q4_K_M.gguf")
    file = "x-Q8_0-00001-of-00002.gguf"
    assert inventory.remove(f"{name}:{file}", environment) == 500
    assert not gone.exists()
    assert kept.exists()
    assert f"{name}:Q4_K_M" in listed(environment)
    # the content is also that of another file, which stays
    assert inventory.remove(f"{name}:x-Q8_0.gguf", environment) == 0
    assert (snapshot / "x-Q4_K_M.gguf").read_bytes() == GGUFS["x-Q4_K_M.gguf"]
    with pytest.raises(ModelError, match="no model that matches :Q8_0"):
        inventory.remove(f"{name}:Q8_0", environment)


def test_a_vision_part_is_removed_with_the_last_model(environment: HostEnvironment) -> None:
    name = "org/many-GGUF"
    write(environment, name, COMMITS[0], GGUFS)
    assert inventory.remove(f"{name}:Q4_K_M", environment) == 100
    assert listed(environment) == {name: (550, "GGUF Q8_0")}
    assert inventory.remove(f"{name}:Q8_0", environment) == 550
    assert listed(environment) == {}


def test_a_repository_is_removed(environment: HostEnvironment) -> None:
    write(environment, "org/folder", COMMITS[0], FOLDER)
    write(environment, "org/folder2", COMMITS[0], {"model.safetensors": b"w"})
    prepared = prepare(
        environment, repository(environment, "org/folder") / "snapshots" / COMMITS[0]
    )
    assert inventory.remove("org/folder", environment) == 11
    assert not prepared.exists()
    assert list(listed(environment)) == ["org/folder2"]
    assert not repository(environment, "org/folder").exists()
    with pytest.raises(ModelError, match=r"no model org/folder here; did you mean org/folder2\?"):
        inventory.remove("org/folder", environment)


def test_what_was_prepared_of_a_model_that_is_gone(
    environment: HostEnvironment, tmp_path: Path
) -> None:
    files = [tmp_path / "moved.gguf", tmp_path / "kept.gguf"]
    folders = []
    for file in files:
        file.touch()
        folders.append(prepare(environment, file))
    assert listed(environment) == {}
    files[0].rename(tmp_path / "elsewhere.gguf")
    size = (folders[0] / "manifest.json").stat().st_size
    assert listed(environment) == {str(files[0]): (size, "prepared, files gone")}
    assert inventory.would_remove(str(files[0]), [str(files[0])], environment)
    assert inventory.remove(str(files[0]), environment) == size
    assert [folder.exists() for folder in folders] == [False, True]
    with pytest.raises(ModelError, match="was not downloaded by tokend"):
        inventory.remove(str(tmp_path), environment)
    assert not inventory.would_remove(str(tmp_path), [str(files[1])], environment)
    files[1].unlink()
    assert inventory.would_remove(str(tmp_path), [str(files[1])], environment)
    assert inventory.remove(str(tmp_path), environment) > 0
    assert not folders[1].exists()
    assert listed(environment) == {}


def test_a_model_of_the_same_name_in_another_cache_is_not_removed(
    environment: HostEnvironment, tmp_path: Path
) -> None:
    """A daemon that serves one does not hold the other."""
    elsewhere = {"XDG_CACHE_HOME": str(tmp_path / "other"), "HF_HOME": "", "HF_HUB_CACHE": ""}
    other = HostEnvironment.of({**os.environ, **elsewhere})
    packaged = catalogue.file_path(PACKAGED, environment.cache)
    assert inventory.would_remove(PACKAGED.name, [packaged], environment)
    assert not inventory.would_remove(PACKAGED.name, [packaged], other)
    name = "org/many-GGUF"
    for each in (environment, other):
        write(each, name, COMMITS[0], GGUFS)
    folder = repository(environment, name) / "snapshots" / COMMITS[0]
    served = [str(folder / "x-Q4_K_M.gguf")]
    for given in (name, f"{name}:Q4_K_M"):
        assert inventory.would_remove(given, served, environment)
        assert not inventory.would_remove(given, served, other)
    assert not inventory.would_remove(f"{name}:Q8_0", served, environment)
    assert not inventory.would_remove("org/many", served, environment)


def test_a_packaged_model_is_removed(environment: HostEnvironment, tmp_path: Path) -> None:
    path = write_packaged(environment)
    prepared = prepare(environment, path)
    assert inventory.remove(PACKAGED.name, environment) == PACKAGED.num_bytes
    assert not path.parent.exists()
    assert not prepared.exists()
    with pytest.raises(ModelError, match="there is no model smollm2-135m-instruct here"):
        inventory.remove(PACKAGED.name, environment)
    (tmp_path / "mine.gguf").touch()
    with pytest.raises(ModelError, match="was not downloaded by tokend: remove it yourself"):
        inventory.remove(str(tmp_path / "mine.gguf"), environment)
