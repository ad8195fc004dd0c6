"""Whole models with random weights: against transformers, and against what the device can do."""

from typing import Any

import numpy as np
import torch

from tests.gpu.formulas import decode_floor, prefill_operations
from tests.gpu.phases import demand
from tests.gpu.random_model import CONFIGS, random_decoder
from tests.gpu.timing import CUDA, median_seconds, product_rate, read_rate
from worker.attention.base import AttentionInputs, AttentionShape
from worker.attention.flashinfer import FlashInferAttention, load_library
from worker.attention.flashinfer_group import Options
from worker.attention.kv_store import TritonStore
from worker.batch.block_table import BlockTable
from worker.batch.inputs import StepInputs
from worker.cuda_graphs import GraphForward
from worker.device.accelerator import Cuda
from worker.forward import EagerForward
from worker.kv_cache import KVCache, kv_cache_geometry
from worker.kv_layout import kv_layout
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec

DTYPE = torch.bfloat16
BLOCK = 16
BATCHES = (1, 8, 32, 64, 128)
CONTEXTS = (512, 2048)
PROMPTS = ((2048,), (8192,), (1024,) * 8)
TOLERANCE = 2e-2
DECODE_SHARE = 0.85
PREFILL_SHARE = 0.6


class Bench:
    """A model, a cache of so many tokens, and attention."""

    def __init__(
        self, decoder: Decoder, num_tokens: int, capture: int = 0, longest: int = 0
    ) -> None:
        spec = decoder.spec
        layout = kv_layout(spec.windows)
        geometry = kv_cache_geometry(layout, spec.num_kv_heads, spec.head_dim, DTYPE)
        self.decoder = decoder
        self.cache = KVCache(geometry, layout, 1 + -(-num_tokens // BLOCK), BLOCK, CUDA)
        self.accelerator = Cuda(CUDA)
        sizes = (capture,) if capture else ()
        self.attention = FlashInferAttention(
            self.cache,
            AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.attention_scale),
            DTYPE,
            self.accelerator,
            load_library(),
            TritonStore(),
            Options(sizes, capture * -(-longest // BLOCK)),
        )
        self.eager = EagerForward(decoder, self.attention)

    def graphs(self, size: int, longest: int) -> GraphForward:
        found = GraphForward(self.eager, self.decoder, self.attention, self.accelerator, (size,))
        found.capture(BlockTable(size, longest, BLOCK), lambda fraction: None)
        return found


def step_inputs(lengths: list[int], new: list[int]) -> StepInputs:
    """Sequences of these lengths in blocks of their own; the last `new` tokens are computed."""
    pages = [-(-length // BLOCK) for length in lengths]
    table = np.zeros((len(lengths), max(pages)), np.int32)
    first = 1
    for row, count in enumerate(pages):
        table[row, :count] = np.arange(first, first + count)
        first += count
    counts = np.array(new, np.int32)
    query_start = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    seq_lens = np.array(lengths, np.int32)
    rows = np.repeat(np.arange(len(lengths)), counts)
    positions = np.arange(query_start[-1]) - query_start[rows] + (seq_lens - counts)[rows]
    slots = table[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
    attention = AttentionInputs(query_start, seq_lens, table, slots)
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, 1000, len(positions)),
        positions=positions.astype(np.int64),
        rows=np.arange(len(lengths)),
        query_start=query_start,
        seq_lens=seq_lens,
        num_computed=seq_lens - counts,
        samples=np.ones(len(lengths), np.bool_),
        last_token=(query_start[1:] - 1).astype(np.int64),
        attention=(attention,),
    )


@torch.inference_mode()
def seconds_of_decode(decoder: Decoder, batch: int, context: int) -> float:
    """The median step of so many decodes by a graph, with logits and best tokens."""
    bench = Bench(decoder, batch * context, batch, context)
    forward = bench.graphs(batch, context)
    inputs = step_inputs([context] * batch, [1] * batch)
    token_ids, positions = (
        torch.from_numpy(each).to(CUDA) for each in (inputs.token_ids, inputs.positions)
    )
    return median_seconds(
        lambda: decoder.scores(forward(inputs, token_ids, positions)).argmax(dim=1), rounds=50
    )


@torch.inference_mode()
def decode(name: str, least_share: float) -> dict[str, Any]:
    """Graphs of steps with logits and best tokens, against reading weights and K and V once."""
    spec = spec_from_config(CONFIGS[name])
    decoder, rate = random_decoder(spec, DTYPE, CUDA), read_rate()
    figures: dict[str, Any] = {"read GB/s": rate / 1e9}
    missed = []
    for batch in BATCHES:
        for context in CONTEXTS:
            seconds = seconds_of_decode(decoder, batch, context)
            share = decode_floor(spec, [context] * batch, rate) / seconds
            figures[f"batch {batch}, context {context}"] = {"ms": seconds * 1e3, "share": share}
            if batch <= 64 and share < least_share:
                missed.append(f"batch {batch}, context {context}: {share:.2f}")
    figures["missed"] = missed
    return figures


def decode_1b() -> dict[str, Any]:
    """Reported; there is no target for it."""
    return decode("1B", 0.0)


def decode_8b() -> dict[str, Any]:
    """At least 0.85 of the floor up to a batch of 64."""
    return decode("8B", DECODE_SHARE)


@torch.inference_mode()
def prefill_8b() -> dict[str, Any]:
    """Prompts computed whole, against the rate of a product."""
    spec = spec_from_config(CONFIGS["8B"])
    decoder, rate = random_decoder(spec, DTYPE, CUDA), product_rate()
    figures: dict[str, Any] = {"product TFLOP/s": rate / 1e12}
    missed = []
    for prompts in PROMPTS:
        bench = Bench(decoder, sum(prompts))
        inputs = step_inputs(list(prompts), list(prompts))
        token_ids, positions, last = (
            torch.from_numpy(each).to(CUDA)
            for each in (inputs.token_ids, inputs.positions, inputs.last_token)
        )

        def step(
            bench: Bench = bench,
            inputs: StepInputs = inputs,
            token_ids: torch.Tensor = token_ids,
            positions: torch.Tensor = positions,
            last: torch.Tensor = last,
        ) -> torch.Tensor:
            hidden = bench.eager(inputs, token_ids, positions)
            return decoder.scores(hidden.index_select(0, last))

        seconds = median_seconds(step, rounds=5)
        reached = prefill_operations(spec, prompts) / seconds
        name = f"{len(prompts)} x {prompts[0]}"
        figures[name] = {"TFLOP/s": reached / 1e12, "share": reached / rate}
        if reached < PREFILL_SHARE * rate:
            missed.append(f"{name}: {reached / rate:.2f}")
    figures["missed"] = missed
    return figures


def parity() -> dict[str, Any]:
    """Logits of a prompt in one go, in chunks and by graphs, against transformers in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
    )
    model = LlamaForCausalLM(config).float().eval()
    spec = spec_from_config(
        CONFIGS["1B"]
        | {name: getattr(config, name) for name in config.to_dict() if name in CONFIGS["1B"]}
        | {
            "architectures": ["LlamaForCausalLM"],
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
        }
    )
    decoder = decoder_of(model, spec)
    tokens = torch.randint(0, 4096, (1, 300))
    with torch.inference_mode():
        exact = model(tokens).logits[0].double()
    tokens = tokens.to(CUDA)
    figures = {}
    for name, chunks in {"in one go": [300], "in chunks": [128, 17, 155]}.items():
        figures[name] = _error(_logits(decoder, tokens[0], chunks), exact)
    figures["decodes by graphs"] = _error(_logits(decoder, tokens[0], [292] + [1] * 8), exact)
    for name, error in figures.items():
        demand(error < TOLERANCE, f"{name}: relative error {error:.4f}")
    return figures


def decoder_of(model: Any, spec: ModelSpec) -> Decoder:
    """The weights of a transformers Llama, rounded to the dtype of this bench."""
    from worker.layers.embedding import DenseTable, Embedding
    from worker.layers.linear import make_linear
    from worker.layers.norm import RMSNorm
    from worker.layers.rotary import RotaryEmbedding
    from worker.models.kernel_stack import make_stacks
    from worker.models.layer_stack import LayerWeights

    def linear(*parts: Any) -> Any:
        return make_linear(torch.cat([each.weight for each in parts]).to(CUDA, DTYPE))

    def norm(part: Any) -> RMSNorm:
        return RMSNorm(part.weight.to(CUDA, DTYPE), spec.norm_eps)

    rotary = RotaryEmbedding(spec.ropes[0], spec.head_dim, spec.max_position, CUDA)
    layers = [
        LayerWeights(
            attention_norm=norm(each.input_layernorm),
            qkv=linear(each.self_attn.q_proj, each.self_attn.k_proj, each.self_attn.v_proj),
            head_norms=(),
            rotary=rotary,
            output=linear(each.self_attn.o_proj),
            mlp_norm=norm(each.post_attention_layernorm),
            gate_up=linear(each.mlp.gate_proj, each.mlp.up_proj),
            down=linear(each.mlp.down_proj),
        )
        for each in model.model.layers
    ]
    table = Embedding(DenseTable(model.model.embed_tokens.weight.to(CUDA, DTYPE)))
    stacks = make_stacks(spec, layers)
    return Decoder(spec, table, stacks, norm(model.model.norm), linear(model.lm_head))


@torch.inference_mode()
def _logits(decoder: Decoder, tokens: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Logits of all positions of one sequence, float64; single tokens go through a graph."""
    longest = len(tokens)
    bench = Bench(decoder, longest, 1, longest)
    forward = bench.graphs(1, longest)
    found, done = [], 0
    for count in chunks:
        inputs = step_inputs([done + count], [count])
        positions = torch.from_numpy(inputs.positions).to(CUDA)
        hidden = forward(inputs, tokens[done : done + count], positions)
        found.append(bench.accelerator.fetch(decoder.scores(hidden)).double())
        done += count
    return torch.cat(found)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
