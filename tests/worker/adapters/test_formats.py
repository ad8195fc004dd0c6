"""Adapters in every format of their files: logits against transformers with merged weights."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fakes.adapters import SEVEN, Served, edit_config, make_adapter, merged
from tests.fakes.dense_attention import logits_in_chunks
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.tiny_checkpoints import save_tiny
from worker.loader.adapters import build, files

TOKENS = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(7))
NEAR = 2e-4
ATTENTION = SEVEN[:4]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
STACKED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
DELTA = ["in_proj_qkvz", "in_proj_ba", "out_proj"]
SHARED = [f"shared_expert.{name}_proj" for name in ("gate", "up", "down")]
OF_EXPERTS = {"target_modules": ATTENTION, "target_parameters": EXPERTS}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seven targets": ("llama", {}),
    "patterns": (
        "llama",
        {
            "use_rslora": True,
            "rank_pattern": {"q_proj": 8, r"layers\.[01]\.mlp\.up_proj": 2},
            "alpha_pattern": {"layers.1.mlp.down_proj": 3},
        },
    ),
    "dora": ("llama-biases", {"use_dora": True}),
    "dora of a mixture": ("qwen2moe", {"target_modules": [*ATTENTION, *SHARED], "use_dora": True}),
    "biases": ("llama", {"lora_bias": True}),
    "saved ends": ("llama", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "saved ends of tied weights": ("llama-tied", {"modules_to_save": ["lm_head", "embed_tokens"]}),
    "a saved embedding stays tied": (
        "llama-tied",
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tokens": ("llama", {"trainable_token_indices": [70, 3, 9]}),
    "tokens of tied weights": ("llama-tied", {"trainable_token_indices": [70, 3, 9]}),
    "ends": ("llama", {"target_modules": [*SEVEN, "embed_tokens", "lm_head"]}),
    "scaled embedding": ("gemma3", {"target_modules": [*SEVEN, "embed_tokens"]}),
    "scaled embedding stays tied": (
        "gemma3",
        {"target_modules": [*SEVEN, "embed_tokens"], "ensure_weight_tying": True},
    ),
    "one layer": ("llama", {"layers_to_transform": [1]}),
    "excluded module": (
        "llama",
        {"target_modules": "all-linear", "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
    ),
    "regular expression": ("llama", {"target_modules": r".*\.[02]\..*(q_proj|down_proj)"}),
    "stacked projections": ("phi3", {"target_modules": STACKED}),
    "stacked projections with dora": ("phi3", {"target_modules": STACKED, "use_dora": True}),
    "post norms": ("gemma2", {"target_modules": "all-linear"}),
    "parallel blocks": ("cohere2", {"target_modules": "all-linear"}),
    "no gate": ("starcoder2", {"target_modules": "all-linear"}),
    "latent": ("deepseek3", {"target_modules": LATENT}),
    "latent without query rank": ("deepseek2", {"target_modules": ["q_proj", *LATENT[2:]]}),
    "recurrent": ("qwen3next", {"target_modules": [*ATTENTION, *DELTA]}),
    "experts": ("qwen3moe", OF_EXPERTS),
    "experts of mixtral": ("mixtral", OF_EXPERTS),
    "experts by turns": ("gptoss", OF_EXPERTS),
    "experts beside shared ones": (
        "qwen2moe",
        {"target_modules": [*ATTENTION, *SHARED], "target_parameters": EXPERTS},
    ),
    "one parameter of experts": ("qwen3moe", OF_EXPERTS | {"target_parameters": EXPERTS[1:]}),
}


class Case:
    """A tiny model, an adapter of it, and the logits of transformers with and without it."""

    def __init__(self, name: str, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.model = save_tiny(name, folder)
        self.prepared = prepare_checkpoint(folder, folder / "prepared")
        self.adapter = make_adapter(self.model, folder / "adapter", **settings)
        with torch.no_grad():
            self.base = self.model(TOKENS[None]).logits[0]
            self.expected = merged(self.model, self.adapter)(TOKENS[None]).logits[0]
        assert (self.expected - self.base).abs().max() > 1, "a difference would not be visible"

    def assert_served(self, path: Path | None = None) -> None:
        """Serve the adapter of a path, and no adapter, and compare the logits."""
        served = Served(self.prepared)
        adapter = served.load(path or self.adapter, 1)
        assert adapter.effect > 0.1
        assert adapter.rank >= 2
        with served.running([1] * len(TOKENS)):
            logits = logits_in_chunks(served.decoder, TOKENS, 30)
        assert (logits - self.expected).abs().max() < NEAR
        logits = logits_in_chunks(served.decoder, TOKENS, 30)
        assert (logits - self.base).abs().max() < NEAR

    def rewritten(
        self, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]
    ) -> Path:
        """Save the adapter's tensors in another form; return its folder."""
        path = self.adapter / "adapter_model.safetensors"
        tensors = {
            name: it.clone(memory_format=torch.contiguous_format)
            for name, it in change(load_file(path)).items()
        }
        save_file(tensors, path)
        return self.adapter


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_merged_weights(case: str, tmp_path: Path) -> None:
    name, settings = CASES[case]
    Case(name, tmp_path, settings).assert_served()


def _experts_apart(tensors: dict[str, torch.Tensor], num_experts: int) -> dict[str, torch.Tensor]:
    """Return the tensors with two-dimensional ones of each expert."""
    found = {}
    for module, part, down, up in _stacks(tensors, num_experts):
        rows = len(up[0]) // (2 if part == "gate_up" else 1)
        for expert in range(num_experts):
            pieces = {"down": up[expert]} if part == "down" else {
                "gate": up[expert][:rows],
                "up": up[expert][rows:],
            }  # fmt: skip
            for name, piece in pieces.items():
                prefix = f"{module}.{expert}.{name}_proj"
                found[f"{prefix}.lora_A.weight"] = down[expert]
                found[f"{prefix}.lora_B.weight"] = piece
    return found | {name: it for name, it in tensors.items() if ".experts." not in name}


def _stacks(tensors: dict[str, torch.Tensor], num_experts: int) -> Any:
    """Yield module, projection, A [experts, rank, in] and B [experts, out, rank] of PEFT's form."""
    for name in sorted(tensors):
        match = re.fullmatch(r"(.*\.experts)(\.base_layer)?\.lora_A\.weight", name)
        if match is None:
            continue
        down, up = tensors[name], tensors[name.replace("lora_A", "lora_B")]
        down = down.view(num_experts, -1, down.shape[1])
        up = up.view(len(up), -1, num_experts).permute(2, 0, 1)
        yield match[1], "gate_up" if match[2] else "down", down, up


def test_experts_in_tensors_of_their_own(tmp_path: Path) -> None:
    case = Case("qwen3moe", tmp_path, OF_EXPERTS)
    path = case.rewritten(lambda tensors: _experts_apart(tensors, 6))
    edit_config(path, target_parameters=None, target_modules=SEVEN)
    case.assert_served(path)


@pytest.mark.parametrize("names", [("gate_up_proj", "down_proj"), ("gate_up_proj", "w2")])
def test_stacked_experts_in_three_dimensions(names: tuple[str, str], tmp_path: Path) -> None:
    case = Case("qwen3moe", tmp_path, OF_EXPERTS)

    def stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name: it for name, it in tensors.items() if ".experts." not in name}
        for module, part, down, up in _stacks(tensors, 6):
            name = names[part == "down"]
            found[f"{module}.{name}.lora_A.weight"] = down
            found[f"{module}.{name}.lora_B.weight"] = up
        return found

    case.assert_served(case.rewritten(stacked))


def test_experts_that_share_their_outer_matrices(tmp_path: Path) -> None:
    """A of gate and up is one for all experts, and so is B of down."""
    case = Case("qwen3moe", tmp_path, OF_EXPERTS)
    of_peft = load_file(case.adapter / "adapter_model.safetensors")
    shared = {name: it for name, it in of_peft.items() if ".experts." not in name}
    equal = dict(of_peft)
    for module, part, down, up in list(_stacks(of_peft, 6)):
        prefix = f"{module}.base_layer" if part == "gate_up" else module
        if part == "gate_up":
            down = down[:1]
            equal[f"{prefix}.lora_A.weight"] = down.repeat(6, 1, 1).flatten(0, 1)
        else:
            up = up[:1]
            whole = up.repeat(6, 1, 1).permute(1, 2, 0).reshape(len(up[0]), -1)
            equal[f"{prefix}.lora_B.weight"] = whole
        shared[f"{module}.{part}_proj.lora_A.weight"] = down
        shared[f"{module}.{part}_proj.lora_B.weight"] = up
    case.rewritten(lambda tensors: equal)
    with torch.no_grad():
        case.expected = merged(case.model, case.adapter)(TOKENS[None]).logits[0]
    case.assert_served(case.rewritten(lambda tensors: shared))


@pytest.mark.parametrize("place", ["language_model", "text_model"])
def test_names_inside_another_model(place: str, tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {})

    def renamed(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name.replace("model.model.layers", f"model.model.{place}.layers"): it
            for name, it in tensors.items()
        }

    case.assert_served(case.rewritten(renamed))


# ---- llama.cpp ----

_GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def rotated_rows(up: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows as llama.cpp's converter orders those of Llama's queries and keys."""
    heads = up.view(num_heads, 2, len(up) // num_heads // 2, -1)
    return heads.transpose(1, 2).reshape(up.shape)


def write_gguf(
    path: Path, folder: Path, alpha: float = 8.0, kind: gguf.GGMLQuantizationType | None = None
) -> Path:
    """Write a Llama's adapter of PEFT as convert_lora_to_gguf does."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
    for name, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = re.fullmatch(
            r"base_model\.model\.model\.layers\.(\d+)\.(.*)\.lora_([AB])\.weight", name
        )
        assert match is not None
        layer, module, part = match.groups()
        heads = {"self_attn.q_proj": 4, "self_attn.k_proj": 2}.get(module)
        if part == "B" and heads:
            tensor = rotated_rows(tensor, heads)
        theirs = f"blk.{layer}.{_GGUF_NAMES[module]}.weight.lora_{part.lower()}"
        numbers = tensor.numpy()
        if kind is None:
            writer.add_tensor(theirs, numbers)
        else:
            writer.add_tensor(theirs, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_of_llama_cpp(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {})
    case.assert_served(write_gguf(tmp_path / "adapter.gguf", case.adapter))


def test_half_precision_files_of_llama_cpp(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {})
    for kind in (gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
        path = write_gguf(tmp_path / f"{kind.name}.gguf", case.adapter, kind=kind)
        served = Served(case.prepared)
        served.load(path, 1)
        with served.running([1] * len(TOKENS)):
            logits = logits_in_chunks(served.decoder, TOKENS, 30)
        assert NEAR < (logits - case.expected).abs().max() < 0.5


def test_a_file_without_alpha_has_a_scale_of_one(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {"lora_alpha": 4})
    case.assert_served(write_gguf(tmp_path / "adapter.gguf", case.adapter, alpha=0.0))


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {})
    served = Served(case.prepared)
    first = served.load(case.adapter)
    moved = case.adapter.rename(tmp_path / "other name")
    assert served.load(moved).digest == first.digest
    assert len(first.digest) == 32
    edit_config(moved, base_model_name_or_path="elsewhere")
    assert served.load(moved).digest == first.digest
    edit_config(moved, lora_alpha=9)
    assert served.load(moved).digest != first.digest
    edit_config(moved, lora_alpha=8)
    case.adapter = moved
    case.rewritten(lambda tensors: {name: it * 1.001 for name, it in tensors.items()})
    assert served.load(moved).digest != first.digest


def test_an_adapter_of_zeros_has_no_effect(tmp_path: Path) -> None:
    case = Case("llama", tmp_path, {"modules_to_save": ["lm_head"]})

    def without_effect(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: case.model.lm_head.weight.data if "lm_head" in name else it * ("lora_A" in name)
            for name, it in tensors.items()
        }

    assert Served(case.prepared).load(case.rewritten(without_effect)).effect == 0.0


class LargestWork(TorchDispatchMode):
    """Notes how many numbers operations write between two yields of a load."""

    FREE: ClassVar = {"empty", "view", "_unsafe_view", "slice", "select", "t", "transpose"}
    """Operations that write none: memory, and views of it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket.__name__ not in self.FREE and isinstance(result, torch.Tensor):
            self.now += result.numel()
            self.most = max(self.most, self.now)
        return result


@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"trainable_token_indices": {"embed_tokens": list(range(0, 96, 2))}},
    ],
)
def test_tables_are_read_and_converted_in_slices(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step waits for one of them. Each operation on a whole table writes its 96 * 64 numbers."""
    for module, name in ((build, "_NUMBERS_AT_ONCE"), (files, "_CHECKED_NUMBERS")):
        monkeypatch.setattr(module, name, 8 * 64)
    case = Case("llama", tmp_path, {"target_modules": ["q_proj"], "r": 2} | settings)
    served = Served(case.prepared)
    served.load(case.adapter)  # what is done once, for the first adapter
    work, slices = served.loader.load(str(case.adapter)), LargestWork()
    with slices:
        for _ in work:
            slices.now = 0
    assert 8 * 64 <= slices.most <= 1.5 * 96 * 64
    case.assert_served(case.adapter)


def test_an_adapter_is_read_before_any_of_it_is_worked_on(tmp_path: Path) -> None:
    """Work that follows a read may have to wait for a step."""
    case = Case("llama", tmp_path, {"target_modules": ["q_proj", "down_proj"], "r": 2})
    pieces = list(Served(case.prepared).loader.load(str(case.adapter)))
    num_reads = pieces.count(files.READS)
    assert num_reads > 4
    assert pieces[:num_reads] == [files.READS] * num_reads
