"""An MLP kind that the product lacks: a mixture of four experts, two per token.

It needs only the interface of worker/models/parts.py; no line of the product refers to it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from proto.prepared_model import PreparedModel
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.prepared_models import prepare, safetensors_index
from tests.fakes.ranks import Ranks
from tests.fakes.tiny_checkpoints import CONFIGS
from worker.layers.linear import Linear, PartOutput
from worker.loader.weights import load_model
from worker.models.common import llama_like
from worker.models.config_reader import ConfigReader
from worker.models.decoder import Decoder
from worker.models.gated_mlp import GatedMlpSpec
from worker.models.layer_stack import EagerLayers
from worker.models.parts import ForwardContext, Shard, WeightSpec, divide_evenly, projection
from worker.models.registry import spec_from_config
from worker.models.spec import LayerSpec, ModelSpec
from worker.parallel.group import RankGroup

if TYPE_CHECKING:
    from worker.loader.weights import LayerReader

Tensors = dict[str, torch.Tensor]
NUM_EXPERTS, TOP_K = 4, 2
CPU = torch.device("cpu")
TOKENS = torch.randint(0, 96, (30,), generator=torch.Generator().manual_seed(7))


@dataclass(frozen=True, kw_only=True)
class MixtureSpec:
    """Mixtral's MLP (Jiang et al., section 2); ranks split the inner columns of each expert."""

    hidden_size: int
    intermediate_size: int

    @property
    def weights(self) -> tuple[WeightSpec, ...]:
        hidden, inner = self.hidden_size, self.intermediate_size
        router = projection(
            "router", "block_sparse_moe.gate", "ffn_gate_inp", (NUM_EXPERTS, hidden)
        )
        experts = [
            weight
            for number in range(NUM_EXPERTS)
            for name, theirs, shape in (
                ("gate", "w1", (inner, hidden)),
                ("up", "w3", (inner, hidden)),
                ("down", "w2", (hidden, inner)),
            )
            for weight in projection(
                f"experts.{number}.{name}",
                f"block_sparse_moe.experts.{number}.{theirs}",
                f"ffn_{name}.{number}",
                shape,
            )
        ]
        return (*router, *experts)

    @property
    def max_ranks(self) -> int:
        return self.intermediate_size

    def shard(
        self, rank: int, size: int, block_columns: Mapping[str, int]
    ) -> tuple["MixtureSpec", dict[str, Shard]]:
        share = divide_evenly(self.intermediate_size, size)[rank]
        inner = slice(share.start, share.stop)
        shards = {
            f"experts.{number}.{name}.weight": shard
            for number in range(NUM_EXPERTS)
            for name, shard in (
                ("gate", Shard(rows=inner)),
                ("up", Shard(rows=inner)),
                ("down", Shard(columns=inner)),
            )
        }
        return replace(self, intermediate_size=len(share)), shards

    def read(self, reader: "LayerReader") -> Callable[[], "Mixture"]:
        router = reader.tensor("router.weight")
        experts = [
            (
                reader.linear(f"experts.{number}.gate", f"experts.{number}.up"),
                reader.linear(f"experts.{number}.down"),
            )
            for number in range(NUM_EXPERTS)
        ]
        output = reader.output()
        return lambda: Mixture(router, [(gate_up(), down()) for gate_up, down in experts], output())


class Mixture:
    """The MLP of one layer with its weights."""

    def __init__(
        self, router: torch.Tensor, experts: list[tuple[Linear, Linear]], output: PartOutput
    ) -> None:
        self._router = router
        self._experts = experts
        self._output = output

    def add_to(
        self, residual: torch.Tensor, x: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        weights, chosen = (x @ self._router.t()).float().softmax(-1).topk(TOP_K)
        weights /= weights.sum(-1, keepdim=True)
        output = torch.zeros_like(residual)
        for number, (gate_up, down) in enumerate(self._experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                gate, up = gate_up(x[token]).chunk(2, dim=-1)
                expert = down(F.silu(gate) * up) * weights[token, place, None].to(x.dtype)
                output.index_add_(0, token, expert)
        return self._output.add_to(residual, output)


def spec_with_mixtures(name: str) -> ModelSpec:
    """A tiny model whose first layer is dense and whose others are mixtures."""
    spec = spec_from_config(config_of(name))
    dense = spec.layers[0].mlp
    assert isinstance(dense, GatedMlpSpec)
    mixture = MixtureSpec(hidden_size=spec.hidden_size, intermediate_size=48)
    mixed = [LayerSpec(mixer=layer.mixer, mlp=mixture) for layer in spec.layers[1:]]
    return replace(spec, layers=(spec.layers[0], *mixed))


def config_of(name: str) -> dict[str, object]:
    config: dict[str, object] = json.loads(CONFIGS[name].to_json_string(use_diff=False))
    return config | {"architectures": [f"{name.capitalize()}ForCausalLM"]}


def test_a_family_passes_the_mlp_of_every_layer() -> None:
    config = dict(config_of("llama"))
    del config["intermediate_size"], config["hidden_act"]  # families read the keys of their MLP
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    mixture = MixtureSpec(hidden_size=hidden, intermediate_size=48)
    spec = llama_like(
        ConfigReader(config), architecture="LlamaForCausalLM", mlps=(mixture,) * num_layers
    )
    assert [layer.mlp for layer in spec.layers] == [mixture] * num_layers


def write_checkpoint(name: str, spec: ModelSpec, folder: Path) -> tuple[PreparedModel, Tensors]:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for weight in spec.weights().values():
        noise = torch.randn(weight.shape, generator=generator)
        is_norm = len(weight.shape) == 1
        tensors[weight.hugging_face] = (
            1.0 + 0.3 * noise if is_norm else 1.5 * noise / weight.shape[-1] ** 0.5
        )
    save_file(tensors, folder / "model.safetensors")
    index = safetensors_index(folder / "model.safetensors")
    return prepare(folder / "prepared", config_of(name), index), tensors


def reference_logits(spec: ModelSpec, tensors: Tensors) -> torch.Tensor:
    """Logits of the whole model in plain torch, from the tensors of the file."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = tensors[f"{name}.weight"] + (1.0 if spec.norms_add_one else 0.0)
        return F.rms_norm(x, [x.shape[-1]], weight, spec.norm_eps)

    hidden = tensors["model.embed_tokens.weight"][TOKENS] * spec.embedding_scale
    for number, layer in enumerate(spec.layers):
        prefix = f"model.layers.{number}."
        attended = reference_attention(
            spec, number, norm(hidden, prefix + "input_layernorm"), tensors
        )
        if spec.post_norms:
            attended = norm(attended, prefix + "post_attention_layernorm")
        hidden = hidden + attended
        before = "pre_feedforward_layernorm" if spec.post_norms else "post_attention_layernorm"
        x = norm(hidden, prefix + before)
        if isinstance(layer.mlp, GatedMlpSpec):
            gelu = layer.mlp.activation == "gelu_tanh"
            output = expert(
                x, tensors, prefix + "mlp.", ("gate_proj", "up_proj", "down_proj"), gelu
            )
        else:
            output = torch.stack([mixture(row, tensors, prefix) for row in x])
        if spec.post_norms:
            output = norm(output, prefix + "post_feedforward_layernorm")
        hidden = hidden + output
    head = "model.embed_tokens" if spec.tied_embeddings else "lm_head"
    return norm(hidden, "model.norm") @ tensors[f"{head}.weight"].t()


def expert(
    x: torch.Tensor, tensors: Tensors, prefix: str, names: tuple[str, str, str], gelu: bool = False
) -> torch.Tensor:
    gate, up, down = (tensors[f"{prefix}{name}.weight"].t() for name in names)
    inner = F.gelu(x @ gate, approximate="tanh") if gelu else F.silu(x @ gate)
    return (inner * (x @ up)) @ down


def mixture(x: torch.Tensor, tensors: Tensors, prefix: str) -> torch.Tensor:
    """Mix the two best experts of a token with weights that sum to 1."""
    moe = f"{prefix}block_sparse_moe."
    best, chosen = (tensors[f"{moe}gate.weight"] @ x).topk(TOP_K)
    outputs = [
        expert(x, tensors, f"{moe}experts.{number}.", ("w1", "w3", "w2"))
        for number in chosen.tolist()
    ]
    return sum(
        (weight * output for weight, output in zip(best.softmax(0), outputs, strict=True)),
        torch.zeros_like(x),
    )


def reference_attention(
    spec: ModelSpec, layer: int, x: torch.Tensor, tensors: Tensors
) -> torch.Tensor:
    from worker.layers.rotary import RotaryEmbedding

    attention = spec.attention_layers[layer]
    prefix = f"model.layers.{layer}.self_attn."
    query, key, value = (
        (x @ tensors[f"{prefix}{name}_proj.weight"].t()).view(len(x), -1, attention.head_dim)
        for name in "qkv"
    )
    if attention.qk_norm:
        query, key = (
            F.rms_norm(
                heads,
                [attention.head_dim],
                tensors[f"{prefix}{name}_norm.weight"] + (1.0 if spec.norms_add_one else 0.0),
                spec.norm_eps,
            )
            for heads, name in ((query, "q"), (key, "k"))
        )
    rotary = RotaryEmbedding(attention.rope, attention.head_dim, spec.max_position, CPU)
    dense = DenseAttention(spec)
    attended = dense.run(layer, query, key, value, rotary.at(torch.arange(len(x))))
    return attended.flatten(1) @ tensors[f"{prefix}o_proj.weight"].t()


def logits(decoder: Decoder) -> torch.Tensor:
    attention = DenseAttention(decoder.spec)
    chunks = zip(TOKENS.split((17, 1, 12)), torch.arange(30).split((17, 1, 12)), strict=True)
    hidden = [decoder.forward(tokens, positions, attention) for tokens, positions in chunks]
    return decoder.float32_logits(torch.cat(hidden))


def load(prepared: PreparedModel, spec: ModelSpec, group: RankGroup | None = None) -> Decoder:
    group = group or RankGroup()
    return load_model(prepared, spec, torch.float32, CPU, lambda fraction: None, group=group)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_model_with_mixtures_equals_plain_torch(name: str, tmp_path: Path) -> None:
    spec = spec_with_mixtures(name)
    prepared, tensors = write_checkpoint(name, spec, tmp_path)
    decoder, expected = load(prepared, spec), reference_logits(spec, tensors)
    assert expected.std() > 0.5, "a difference would not be visible"
    assert (logits(decoder) - expected).abs().max() < 1e-4
    (stack,) = decoder._stacks
    assert isinstance(stack, EagerLayers), "csrc/stack.cpp knows no mixtures"


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_two_ranks_share_the_experts(name: str, tmp_path: Path) -> None:
    spec = spec_with_mixtures(name)
    prepared, tensors = write_checkpoint(name, spec, tmp_path)
    with Ranks(2) as ranks:
        decoders = [load(prepared, spec, group) for group in ranks.groups]
        found = ranks.run_on_all(lambda rank: logits(decoders[rank]))
    assert (found[0] - reference_logits(spec, tensors)).abs().max() < 1e-4
    assert torch.equal(found[0], found[1])


def test_a_missing_expert_is_named_by_its_tensor(tmp_path: Path) -> None:
    spec = spec_with_mixtures("llama")
    prepared, tensors = write_checkpoint("llama", spec, tmp_path)
    name = "model.layers.2.block_sparse_moe.experts.3.w2.weight"
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    index = safetensors_index(tmp_path / "model.safetensors")
    prepared = prepare(tmp_path / "prepared", config_of("llama"), index)
    with pytest.raises(Exception, match=f"tensor {name}"):
        load(prepared, spec)
