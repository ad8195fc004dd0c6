"""Adapters that cannot be served: errors that name the tensor or the key."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file

from proto.errors import ModelError
from proto.messages.prepared_model import PreparedModel
from tests.fakes.adapters import Served, edit_config, load_in_thread, make_adapter
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from tests.worker.adapters.test_formats import write_gguf

Tensors = dict[str, torch.Tensor]
LAYER = "base_model.model.model.layers.0."
QUERY = f"{LAYER}self_attn.q_proj"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreparedModel, Path]:
    """A prepared model, and an adapter of it."""
    folder = tmp_path_factory.mktemp("llama")
    model = save_tiny("llama", folder)
    return prepare_checkpoint(folder, folder / "prepared"), make_adapter(model, folder / "adapter")


@pytest.fixture
def adapter(llama: tuple[PreparedModel, Path], tmp_path: Path) -> Path:
    """A copy of the adapter, for the test to spoil."""
    return Path(shutil.copytree(llama[1], tmp_path / "adapter"))


def refused(llama: tuple[PreparedModel, Path], path: Path, **limits: Any) -> str:
    """Return why an adapter is not loaded."""
    with pytest.raises(ModelError) as raised:
        Served(llama[0], **limits).load(path)
    return str(raised.value)


def change_tensors(folder: Path, change: Callable[[Tensors], Any]) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("peft_type", "LOHA", "peft_type LOHA"),
        ("init_lora_weights", "pissa_niter_4", "changes the weights of the model"),
        ("init_lora_weights", "olora", "changes the weights of the model"),
        ("init_lora_weights", "corda", "changes the weights of the model"),
        ("init_lora_weights", "loftq", "changes the weights of the model"),
        ("alora_invocation_tokens", [1, 2], "activated LoRA"),
        ("bias", "all", "changes the biases of the model"),
        ("layer_replication", [[0, 2]], "replicated layers"),
        ("use_qalora", True, "QA-LoRA"),
        ("an_idea_of_next_year", True, "not known"),
        ("r", 0, "a rank of at least 1"),
        ("r", "4", "a rank of at least 1"),
        ("lora_alpha", "many", "a finite number"),
        ("rank_pattern", {"q_proj": 0}, "must be at least 1"),
        ("rank_pattern", {"q_proj(": 4}, "no regular expression"),
        ("use_dora", "yes", "true or false"),
        ("trainable_token_indices", [-1], "token ids"),
        ("layers_to_transform", ["first"], "a list of layers"),
        ("target_modules", "(", "no regular expression"),
    ],
)
def test_keys_of_the_configuration(
    key: str, value: Any, reason: str, llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    edit_config(adapter, **{key: value})
    message = refused(llama, adapter)
    assert key in message
    assert reason in message


def test_a_rank_over_the_limit(llama: tuple[PreparedModel, Path], adapter: Path) -> None:
    message = refused(llama, adapter, max_rank=3)
    assert "lora_A" in message
    assert "rank 4: more than --max-lora-rank 3" in message


def test_a_module_that_the_settings_leave_out(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    message = refused(llama, adapter, modules=("q_proj", "v_proj"))
    assert "--lora-target-modules q_proj, v_proj leave out" in message


def test_another_rank_than_the_configuration_says(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    edit_config(adapter, rank_pattern={"q_proj": 6})
    message = refused(llama, adapter)
    assert "q_proj" in message
    assert "has rank 4" in message
    assert "says 6" in message


def _set(name: str, value: torch.Tensor) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.__setitem__(name, value)


def _pop(*names: str) -> Callable[[Tensors], Any]:
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "name", "reason"),
    [
        (_pop(f"{QUERY}.lora_B.weight"), f"{QUERY}.lora_A.weight", "no lora_B beside it"),
        (_pop(f"{QUERY}.lora_A.weight"), f"{QUERY}.lora_B.weight", "no lora_A beside it"),
        (
            _pop(f"{QUERY}.lora_A.weight", f"{QUERY}.lora_B.weight"),
            f"{QUERY}.lora_A.weight",
            "is missing",
        ),
        (
            _set(f"{QUERY}.lora_A.weight", torch.zeros(4, 63)),
            f"{QUERY}.lora_A.weight",
            "needs [4, 64]",
        ),
        (
            _set(f"{QUERY}.lora_B.weight", torch.zeros(65, 4)),
            f"{QUERY}.lora_B.weight",
            "needs [64, 4]",
        ),
        (
            _set(f"{QUERY}.lora_B.weight", torch.full((64, 4), torch.nan)),
            f"{QUERY}.lora_B.weight",
            "not finite",
        ),
        (
            _set(f"{QUERY}.lora_A.weight", torch.full((4, 64), torch.inf)),
            f"{QUERY}.lora_A.weight",
            "not finite",
        ),
        (
            _set(f"{QUERY}.lora_B.weight", torch.zeros(64, 4, dtype=torch.int8)),
            f"{QUERY}.lora_B.weight",
            "I8",
        ),
        (_set(f"{QUERY}.hada_w1_a", torch.zeros(4, 4)), f"{QUERY}.hada_w1_a", "no part"),
        (
            _set(f"{LAYER}input_layernorm.weight", torch.zeros(64)),
            f"{LAYER}input_layernorm.weight",
            "no weight",
        ),
        (
            _set("base_model.model.lm_head.weight", torch.zeros(96, 64)),
            "lm_head.weight",
            "modules_to_save",
        ),
        (
            _set(f"{LAYER}cross_attn.q_proj.lora_A.weight", torch.zeros(4, 64)),
            f"{LAYER}cross_attn.q_proj.lora_A.weight",
            "no weight",
        ),
        (
            _set(f"{QUERY}.lora_B.bias", torch.zeros(63)),
            f"{QUERY}.lora_B.bias",
            "needs [64]",
        ),
    ],
)
def test_tensors(
    change: Callable[[Tensors], Any],
    name: str,
    reason: str,
    llama: tuple[PreparedModel, Path],
    adapter: Path,
) -> None:
    change_tensors(adapter, change)
    message = refused(llama, adapter)
    assert name in message
    assert reason in message


def test_tensors_that_the_configuration_leaves_out(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    edit_config(adapter, exclude_modules=["k_proj"])
    message = refused(llama, adapter)
    assert "k_proj" in message
    assert "leaves the module out" in message


def test_a_vocabulary_of_another_size(llama: tuple[PreparedModel, Path], adapter: Path) -> None:
    edit_config(adapter, modules_to_save=["lm_head"])
    change_tensors(adapter, _set("base_model.model.lm_head.weight", torch.zeros(97, 64)))
    message = refused(llama, adapter)
    assert "base_model.model.lm_head.weight has shape [97, 64], the model needs [96, 64]" in message


def test_an_adapter_of_another_model(llama: tuple[PreparedModel, Path], tmp_path: Path) -> None:
    other = make_adapter(save_tiny("mistral-wide-heads", tmp_path / "model"), tmp_path / "adapter")
    assert "the model needs" in refused(llama, other)


def test_pickled_weights(llama: tuple[PreparedModel, Path], adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    assert "adapter_model.bin is pickled" in refused(llama, adapter)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_pipe_in_place_of_a_file(
    name: str, llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    """Opening it would wait for a writer for ever."""
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    assert f"{name} is no regular file" in refused(llama, adapter)


def test_an_effect_that_is_not_finite(llama: tuple[PreparedModel, Path], adapter: Path) -> None:
    """Though each number of the file is."""
    change_tensors(
        adapter,
        lambda tensors: tensors.update(
            {name: it * 1e25 for name, it in tensors.items() if name.startswith(QUERY)}
        ),
    )
    message = refused(llama, adapter)
    assert "changes a probe of ordinary numbers by NaN or infinity" in message
    assert "layers.0" in message


def test_files_that_are_missing(llama: tuple[PreparedModel, Path], adapter: Path) -> None:
    assert "No such file" in refused(llama, adapter / "elsewhere")
    (adapter / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(llama, adapter)
    (adapter / "adapter_config.json").unlink()
    assert "has no adapter_config.json" in refused(llama, adapter)


def test_files_that_are_cut_off_or_something_else(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    """At every kind of place: an error, never a crash."""
    path = adapter / "adapter_model.safetensors"
    whole = path.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    for end in (0, 4, 8, 20, 8 + length - 1, 8 + length, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert str(path) in refused(llama, adapter), end
    path.write_bytes(struct.pack("<Q", 1 << 60) + whole[8:])
    assert "no safetensors file" in refused(llama, adapter)
    header = json.loads(whole[8 : 8 + length])
    header[next(name for name in header if "lora" in name)]["data_offsets"] = [0, 1 << 50]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + length :])
    assert "bytes" in refused(llama, adapter)
    (adapter / "adapter_config.json").write_text("[1")
    assert "no JSON object" in refused(llama, adapter)


def test_gguf_files_that_are_cut_off_or_something_else(
    llama: tuple[PreparedModel, Path], adapter: Path, tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "adapter.gguf", adapter)
    whole = path.read_bytes()
    for end in (0, 3, 7, 23, 60, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert str(path) in refused(llama, path), end
    path.write_bytes(whole.replace(b"adapter.type", b"adapter.kind"))
    assert "adapter.type is not lora" in refused(llama, path)
    path.write_bytes(whole.replace(b"blk.0.attn_q.weight.lora_b", b"blk.0.attn_q.weight.lora_c"))
    assert "blk.0.attn_q.weight.lora_c" in refused(llama, path)
    quantised = write_gguf(
        tmp_path / "q8.gguf", _of_whole_blocks(adapter), kind=gguf.GGMLQuantizationType.Q8_0
    )
    assert "the model needs" in refused(llama, quantised)


def _of_whole_blocks(folder: Path) -> Path:
    """Return the adapter with rows of 64 numbers."""
    change_tensors(
        folder,
        lambda tensors: tensors.update(
            {name: torch.zeros(it.shape[0], 64) for name, it in tensors.items()}
        ),
    )
    return folder


def test_other_content_than_the_engine_expects(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    work = Served(llama[0]).loader.load(str(adapter), b"\x01" * 32)
    with pytest.raises(ModelError, match="other content"):
        for _ in work:
            pass


def test_the_answer_of_a_load_has_the_error(
    llama: tuple[PreparedModel, Path], adapter: Path
) -> None:
    change_tensors(adapter, _pop(f"{QUERY}.lora_B.weight"))
    store = Served(llama[0]).store
    try:
        answer = load_in_thread(store, adapter, 5)
        assert answer.lora_int_id == 5
        assert answer.error.kind == "invalid_request"
        assert f"{QUERY}.lora_A.weight" in answer.error.message
        answer = load_in_thread(store, llama[1], 6)
        assert answer.error is None
        assert (answer.lora_rank, len(answer.digest)) == (4, 32)
        assert answer.num_bytes > 0
    finally:
        store.close()
