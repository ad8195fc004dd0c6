"""Heads of EAGLE as they are published: names of tensors, files of torch.save, refusals."""

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from deploy.environment import HostEnvironment
from deploy.models import hf_folder, torch_file
from deploy.models.store import prepared_draft_model
from proto.errors import ModelError
from proto.messages.prepared_model import TensorEntry
from proto.settings.config import SpeculationConfig
from tests.fakes.notices import Recorder
from tests.fakes.tiny_heads import head_config, head_tensors, save_head
from worker.loader.files import INDEX_FILE, TensorFiles, read_index
from worker.models.registry import read_config


def around(tmp_path: Path) -> HostEnvironment:
    return HostEnvironment.of({**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})


def names_of(folder: Path) -> list[str]:
    contents = hf_folder.read_head(str(folder), lambda _: None)
    return sorted(entry.name for entry in contents.tensors.tensors)


def renamed(tensors: dict[str, torch.Tensor], layer: str, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors as another publisher names them."""
    return {
        prefix + name.replace("midlayer.", layer).replace("layers.0.", layer): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_published_names_mean_the_same(method: str, tmp_path: Path) -> None:
    config = head_config(method)
    tensors = head_tensors(method, config)
    found = names_of(save_head(tmp_path / "plain", config, tensors))
    assert "fc.weight" in found
    assert "model.layers.0.self_attn.q_proj.weight" in found
    for layer, prefix in (("layers.0.", ""), ("layers.0.", "model."), ("midlayer.", "")):
        other = renamed(tensors, layer, prefix)
        assert names_of(save_head(tmp_path / f"{layer}{prefix}", config, other)) == found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_file_of_torch_is_read_where_it_is(dtype: torch.dtype, tmp_path: Path) -> None:
    config = head_config("eagle3")
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in head_tensors("eagle3", config).items()
    }
    whole = torch.randn(10, 4).to(dtype)
    tensors["part"] = whole[3:7]  # shares a storage
    folder = save_head(tmp_path, config, tensors, pickled=True)
    index = hf_folder.read_head(str(folder), lambda _: None).tensors
    files, found = TensorFiles(index), {entry.name: entry for entry in index.tensors}
    assert torch.equal(files.read(found["fc.weight"]), tensors["fc.weight"])
    assert torch.equal(files.read(found["part"]), whole[3:7])
    entry = found["d2t"]
    raw = bytes(files.bytes_at(entry.file, entry.offset, entry.num_bytes))
    assert raw == tensors["d2t"].numpy().tobytes()


class Attack:
    """Runs a command when it is unpickled by a reader that trusts its file."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch attacked",)


def pickled_archive(path: Path, document: object) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(document))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ({"fc.weight": Attack()}, "names posix.system, which is not run"),
        ([1, 2], "no dictionary of tensors"),
    ],
)
def test_code_in_a_file_of_torch_is_not_run(
    document: object, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    pickled_archive(path, document)
    with pytest.raises(ModelError, match=message):
        torch_file.read(str(path), 0)
    assert not Path("attacked").exists()


def test_other_files_of_torch_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"no archive")
    with pytest.raises(ModelError, match=r"not a file of torch\.save"):
        torch_file.read(str(path), 0)
    torch.save({"fc.weight": torch.randn(4, 6).t()}, path)
    with pytest.raises(ModelError, match=r"fc\.weight are not side by side"):
        torch_file.read(str(path), 0)
    torch.save({"fc.weight": torch.randn(4, 6)}, path)
    (entry,) = torch_file.read(str(path), 0)
    assert (entry.name, entry.type, entry.shape) == ("fc.weight", "F32", (4, 6))
    assert isinstance(entry, TensorEntry)


def test_a_folder_that_is_no_head_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(head_config("eagle")))
    save_file({"lm_head.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no tensor fc\.weight"):
        hf_folder.read_head(str(tmp_path), lambda _: None)


@pytest.mark.parametrize("pickled", [False, True])
def test_a_head_is_prepared_once(pickled: bool, tmp_path: Path) -> None:
    """By the process that prepares every model; again after a change of its files."""
    config = head_config("eagle3")
    folder = save_head(tmp_path / "head", config, head_tensors("eagle3", config), pickled=pickled)
    settings = SpeculationConfig(
        speculative_config=json.dumps({"method": "eagle3", "model": str(folder)})
    )
    first = prepared_draft_model(settings, around(tmp_path), Recorder())
    assert first is not None
    assert first.name == "head"
    assert read_config(first)["draft_vocab_size"] == config["draft_vocab_size"]
    assert {entry.name for entry in read_index(first).tensors} >= {"fc.weight", "d2t"}
    assert Path(first.folder, INDEX_FILE).is_file()
    assert prepared_draft_model(settings, around(tmp_path), Recorder()) == first
    save_head(folder, config, head_tensors("eagle3", config, seed=1), pickled=pickled)
    again = prepared_draft_model(settings, around(tmp_path), Recorder())
    assert again is not None
    assert again.folder != first.folder


def test_a_head_that_is_nowhere_is_refused(tmp_path: Path) -> None:
    settings = SpeculationConfig(speculative_config='{"method": "eagle", "model": "./nowhere"}')
    with pytest.raises(ModelError, match=r"--speculative-config: model: .*no folder './nowhere'"):
        prepared_draft_model(settings, around(tmp_path), Recorder())
