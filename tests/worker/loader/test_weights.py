"""Loading finds every tensor or refuses by the tensor's name."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel, TensorIndex
from tests.fakes.devices import CPU
from tests.fakes.prepared_models import prepare, prepare_checkpoint, safetensors_index, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.loader.weights import load_model

Tensors = dict[str, torch.Tensor]


def load(
    prepared: PreparedModel, progress: Callable[[float], None] = lambda fraction: None
) -> None:
    load_model(prepared, spec_of(prepared), torch.float32, CPU, progress)


def changed(folder: Path, name: str, change: Callable[[Tensors], None]) -> PreparedModel:
    """Save the tiny checkpoint `name` with changed tensors."""
    save_tiny(name, folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({key: value.clone() for key, value in tensors.items()}, path)
    return prepare_checkpoint(folder, folder / "prepared")


def refused(folder: Path, name: str, change: Callable[[Tensors], None]) -> str:
    with pytest.raises(ModelError) as caught:
        load(changed(folder, name, change))
    return str(caught.value)


def test_progress_rises_to_one_and_threads_stay_as_they_were(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    seen: list[float] = []
    threads = torch.get_num_threads()
    load(prepare_checkpoint(tmp_path, tmp_path / "prepared"), seen.append)
    assert seen == sorted(seen)
    assert len(seen) == 4
    assert seen[-1] == 1.0
    assert torch.get_num_threads() == threads


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    message = refused(tmp_path, "llama", lambda tensors: tensors.__delitem__(name))
    assert message == f"tensor {name} of shape [32, 64] is missing"


def test_a_missing_head_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, "llama", lambda tensors: tensors.__delitem__("lm_head.weight"))
    assert "lm_head.weight" in message


def test_an_unknown_tensor_is_named(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    message = refused(tmp_path, "llama", lambda tensors: tensors.update({name: torch.zeros(64)}))
    assert name in message


def test_tensors_of_an_extra_layer_are_named(tmp_path: Path) -> None:
    name = "model.layers.3.mlp.up_proj.weight"
    message = refused(
        tmp_path, "llama", lambda tensors: tensors.update({name: torch.zeros(112, 64)})
    )
    assert name in message


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.down_proj.weight"
    message = refused(
        tmp_path, "qwen2", lambda tensors: tensors.update({name: torch.zeros(112, 64)})
    )
    assert message == f"tensor {name} has shape [112, 64], the configuration asks for [64, 112]"


def test_a_tensor_of_an_unsupported_type_is_named(tmp_path: Path) -> None:
    name = "model.norm.weight"
    message = refused(
        tmp_path, "llama", lambda tensors: tensors.update({name: torch.zeros(64, dtype=torch.int8)})
    )
    assert name in message
    assert "I8" in message


def test_a_tied_head_that_is_stored_must_be_the_embedding(tmp_path: Path) -> None:
    def store_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    def store_another_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    load(changed(tmp_path / "same", "llama-tied", store_head))
    message = refused(tmp_path / "other", "llama-tied", store_another_head)
    assert "lm_head.weight differs from model.embed_tokens.weight" in message


def test_stored_rotary_frequencies_are_ignored(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(changed(tmp_path, "llama", lambda tensors: tensors.update({name: torch.zeros(8)})))


def with_index(folder: Path, change: Callable[[TensorIndex], TensorIndex]) -> PreparedModel:
    save_tiny("llama", folder)
    config = json.loads((folder / "config.json").read_text())
    index = safetensors_index(folder / "model.safetensors")
    return prepare(folder / "prepared", config, change(index))


def replaced(index: TensorIndex, **fields: object) -> TensorIndex:
    first, *rest = index.tensors
    return msgspec.structs.replace(index, tensors=(msgspec.structs.replace(first, **fields), *rest))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: msgspec.structs.replace(index, tensors=index.tensors * 2), "is twice"),
        (lambda index: msgspec.structs.replace(index, format="bin"), "'bin'"),
        (lambda index: msgspec.structs.replace(index, files=("/nowhere/x",)), "/nowhere/x"),
        (lambda index: replaced(index, offset=1 << 40), "truncated"),
        (lambda index: replaced(index, file=1), "file 1"),
        (lambda index: replaced(index, num_bytes=8), "the file has 8"),
    ],
)
def test_an_index_that_contradicts_its_files_is_refused(
    change: Callable[[TensorIndex], TensorIndex], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        load(with_index(tmp_path, change))


def test_a_damaged_index_is_refused(tmp_path: Path) -> None:
    prepared = with_index(tmp_path, lambda index: index)
    path = Path(prepared.folder) / "tensors.msgpack"
    path.write_bytes(b"\x93")
    with pytest.raises(ModelError, match=r"tensors\.msgpack"):
        load(prepared)
    path.unlink()
    with pytest.raises(ModelError, match=r"tensors\.msgpack"):
        load(prepared)


def test_a_spec_with_missing_weights_is_refused(tmp_path: Path) -> None:
    prepared = with_index(tmp_path, lambda index: index)
    spec = spec_of(prepared)
    mixer = dataclasses.replace(spec.attention_layers[0], qk_norm=True)
    layer = dataclasses.replace(spec.layers[0], mixer=mixer)
    spec = dataclasses.replace(spec, layers=(layer, *spec.layers[1:]))
    with pytest.raises(ModelError, match=r"q_norm\.weight of shape \[16\] is missing"):
        load_model(prepared, spec, torch.float32, CPU, lambda fraction: None)
