"""GGUF models in several files, and folders in which other files stand beside the model."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deploy.environment import HostEnvironment
from deploy.models import gguf_file, prepared_folder, store
from proto.errors import ModelError
from tests.deploy.test_prepare import Recorder, around, prepare_silently, silent
from tests.fakes.gguf_headers import U32, setting, tensor
from tests.fakes.gguf_headers import file as header
from tests.fakes.prepared_models import prepare
from tests.fakes.real_engine import engine_for, load, runner_of
from tests.fakes.tiny_model_files import write_gguf

__all__ = ["around"]
COUNT = 5
"""Files of the tiny model with three tensors each."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "parts").mkdir()
    write_gguf(tmp_path / "parts/tiny.gguf", part_tensors=3)
    return tmp_path / "parts"


def part(number: int, count: int = COUNT, name: str = "tiny") -> str:
    return f"{name}-{number:05}-of-{count:05}.gguf"


def contents(path: Path) -> prepared_folder.ModelContents:
    return gguf_file.read(str(path), silent)


def greedy_tokens(path: Path, folder: Path) -> list[int]:
    found = contents(path)
    decoder = load(prepare(folder, dict(found.config), found.tensors))
    engine, num_blocks = engine_for(decoder, 20)
    engine.runner = runner_of(decoder, num_blocks)  # type: ignore[assignment]
    request = engine.add_one([5, 17, 80, 3], 24, temperature=0.0, eos_token_ids=())
    engine.run()
    return engine.tokens_of(request)


def test_a_split_model_computes_what_the_whole_one_does(tmp_path: Path, folder: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    assert sorted(os.listdir(folder)) == [part(number) for number in range(1, COUNT + 1)]
    found = contents(folder / part(1))
    assert [Path(path).name for path in found.tensors.files] == sorted(os.listdir(folder))
    whole = contents(tmp_path / "tiny.gguf")
    assert found.config == whole.config
    samples = [prepared_folder.weights_sample(each.tensors) for each in (found, whole)]
    assert samples[0] == samples[1]
    expected = greedy_tokens(tmp_path / "tiny.gguf", tmp_path / "whole")
    assert len(set(expected)) > 3
    assert greedy_tokens(folder / part(1), tmp_path / "split") == expected


def located(model: Path, around: HostEnvironment) -> store.ModelSource:
    return store.locate(str(model), around, Recorder())


@pytest.mark.parametrize("given", ["", part(1), part(3), "link.gguf"])
def test_any_part_or_the_folder_names_the_model(
    folder: Path, around: HostEnvironment, given: str
) -> None:
    if given.startswith("link"):
        (folder.parent / given).symlink_to(folder / part(2))
    source = located((folder.parent if given.startswith("link") else folder) / given, around)
    assert source.name == {"": "parts", "link.gguf": "link"}.get(given, "tiny")
    assert source.path == str(folder / part(1))
    assert len(source.stamp) == COUNT


def test_parts_of_the_hub_are_links_to_files_without_names(
    folder: Path, around: HostEnvironment
) -> None:
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(folder.parent / f"blob{number}")
        path.symlink_to(folder.parent / f"blob{number}")
    (folder / "Q4_K_M").mkdir()
    for path in [path for path in folder.iterdir() if path.is_symlink()]:
        path.rename(folder / "Q4_K_M" / path.name)
    source = located(folder, around)
    assert (source.name, source.path) == ("parts", str(folder / "Q4_K_M" / part(1)))
    files = contents(Path(source.path)).tensors.files
    assert [Path(path).name for path in files] == [f"blob{number}" for number in range(COUNT)]


def test_a_changed_part_is_prepared_again(
    folder: Path, around: HostEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_run_preparation", prepare_silently)
    first = store.prepared_model(str(folder), around, Recorder())
    assert store.prepared_model(str(folder / part(4)), around, Recorder()).source == first.source
    os.utime(folder / part(4))
    assert store.prepared_model(str(folder), around, Recorder()).folder != first.folder


def overwrite(name: str, *settings: tuple[str, int], tensors: int = 3) -> Callable[[Path], Any]:
    """Return what replaces a part by one with these keys, and tensors of other names."""
    packed = [setting(key, U32, value.to_bytes(4, "little")) for key, value in settings]
    infos = [tensor(f"other.{number}", (4,)) for number in range(tensors)]
    return lambda folder: (folder / name).write_bytes(header(packed, infos))


NUMBER = b"split.no\2\0\0\0"
"""What the number of a part follows, a U16."""
KEYS = ("split.no", 1), ("split.count", COUNT)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda folder: (folder / part(3)).unlink(), rf"5 parts .* 1 of them is not .* {part(3)}$"),
        (
            lambda folder: [(folder / part(each)).unlink() for each in range(2, 6)],
            r"4 of them are not beside it: .*00002-of-00005\.gguf, .*, .*, …$",
        ),
        (
            lambda folder: (folder / part(3)).write_bytes((folder / part(4)).read_bytes()),
            rf"{part(3)} sets split\.no to 3, and by its name it is 2",
        ),
        (overwrite(part(2), ("split.count", COUNT)), r"split\.no to None, and by its name it is 1"),
        (overwrite(part(2), KEYS[0], ("split.count", 3)), r"split\.count to 3, .* it is 5"),
        (
            overwrite(part(2), *KEYS, ("llama.block_count", 7)),
            rf"{part(2)} belongs to another model: its llama\.block_count is not the first's",
        ),
        (overwrite(part(2), *KEYS, tensors=2), r"have 10 tensors, and split\.tensors\.count is 11"),
        (
            lambda folder: (folder / part(2)).write_bytes(
                (folder / part(3)).read_bytes().replace(NUMBER + b"\2", NUMBER + b"\1")
            ),
            rf"is in .*{part(2)} and in .*{part(3)}",
        ),
        (lambda folder: (folder / part(5)).write_bytes(b"GGUF"), rf"{part(5)} is damaged"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(
    folder: Path, damage: Callable[[Path], Any], error: str
) -> None:
    damage(folder)
    with pytest.raises(ModelError, match=error):
        contents(folder / part(1))


def test_a_part_without_its_name_is_refused(folder: Path) -> None:
    (folder / part(2)).rename(folder / "renamed.gguf")
    with pytest.raises(ModelError, match=r"renamed\.gguf sets split\.count to 5: .*-00001-of"):
        contents(folder / "renamed.gguf")


@pytest.mark.parametrize(
    "beside", ["mmproj-tiny-f16.gguf", "tiny.mmproj-Q8_0.gguf", "imatrix_tiny.gguf"]
)
def test_a_projector_beside_a_model_does_not_hide_it(
    folder: Path, around: HostEnvironment, beside: str
) -> None:
    (folder / beside).write_bytes(b"GGUF")
    assert located(folder, around).path == str(folder / part(1))
    write_gguf(folder / "other.gguf")
    names = rf"other\.gguf, {part(1)}$"
    with pytest.raises(ModelError, match=rf"several GGUF files, give the path of one: {names}"):
        located(folder, around)
