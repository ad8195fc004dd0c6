"""Whole models with random weights, against transformers and the peak rates of the device."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from tests.fakes.devices import REFERENCE
from tests.fakes.gpu_families import GPU_CONFIGS
from tests.fakes.prepared_models import build_decoder, shapes_of
from tests.gpu.formulas import decode_floor, prefill_operations
from tests.gpu.hardware import Hardware, hardware, rehearsing
from tests.gpu.random_model import CONFIGS, random_decoder
from tests.gpu.report import Report, demand
from tests.gpu.timing import product_rate, read_rate
from worker.attention.backend import AttentionBackend, AttentionInputs
from worker.attention.kv_cache import KVCache
from worker.attention.state_cache import AttentionWithStates, StateCache
from worker.batch.input_batch import BlockTable
from worker.batch.step_inputs import StepInputs
from worker.cuda.attention.flashinfer_group import Options
from worker.cuda.attention.flashinfer_latent import create_flashinfer
from worker.cuda.graphs import DecodeGraphs
from worker.cuda.states import NoAttention
from worker.models.decoder import Decoder
from worker.models.registry import spec_from_config
from worker.models.spec import ModelSpec
from worker.plan.memory_plan import layer_cache
from worker.reference.attention import ReferenceAttention

DTYPE = torch.bfloat16
BLOCK = 16
MAX_LOGGED = 4
"""Tokens of a draft that states have a log of."""
TOLERANCE = 2e-2
FAMILY_TOLERANCE = 4e-2
"""Small models round more: each sum has few terms."""
FAMILY_PROMPT = 40
DECODE_SHARE = 0.85
PREFILL_SHARE = 0.6


class Bench:
    """A model, a cache of `num_tokens` tokens with random K and V, states, and attention.

    Not zeros, which are read faster because they take less power. A state has a slot for each block
    of tokens.
    """

    def __init__(
        self,
        gpu: Hardware,
        decoder: Decoder,
        num_tokens: int,
        capture: Sequence[int] = (),
        longest: int = 0,
    ) -> None:
        spec, kernels = decoder.spec, gpu.kernels()
        layout, geometry = layer_cache(spec, DTYPE, MAX_LOGGED)
        self.gpu = gpu
        self.decoder = decoder
        self.num_groups = layout.num_groups
        num_blocks = 1 + self.num_groups * -(-num_tokens // BLOCK)
        self.cache = KVCache(geometry, layout, num_blocks, BLOCK, gpu.gpu.zeros)
        self.cache.buffer.normal_()
        self.accelerator = gpu.accelerator()
        self.attention: AttentionBackend = NoAttention()
        if spec.has_attention:
            self.attention = create_flashinfer(
                self.cache,
                spec.attention_shape,
                DTYPE,
                self.accelerator,
                kernels.load_flashinfer(),
                kernels.store,
                Options(tuple(capture), max(capture, default=0) * -(-longest // BLOCK)),
            )
        if layout.states is not None:
            states = gpu.states(layout.states, num_blocks, BLOCK)
            states.reserve_graphs(max(capture, default=0))
            self.attention = AttentionWithStates(self.attention, states)

    def eager(
        self, inputs: StepInputs, token_ids: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Hidden states of a step without graphs."""
        self.attention.plan(inputs.attention)
        return self.decoder.forward(token_ids, positions, self.attention)

    def graphs(self, sizes: Sequence[int], longest: int) -> DecodeGraphs:
        found = DecodeGraphs(self.decoder, self.attention, self.accelerator, tuple(sizes))
        table = BlockTable(max(sizes), longest, BLOCK, self.num_groups)
        found.capture(table, lambda fraction: None)
        return found

    def sent(self, inputs: StepInputs) -> list[torch.Tensor]:
        """Token ids, positions and indices of last tokens, on the device."""
        return [
            torch.from_numpy(each).to(self.gpu.device)
            for each in (inputs.token_ids, inputs.positions, inputs.sample_tokens)
        ]


def step_inputs(lengths: list[int], new: list[int], num_groups: int = 1) -> StepInputs:
    """Inputs of sequences of these lengths; the last `new` tokens are computed.

    num_groups: of the KV cache; their blocks follow each other.
    """
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
    attention = []
    for group in range(num_groups):
        blocks = table + np.int32(group * sum(pages))
        slots = blocks[rows, positions // BLOCK].astype(np.int64) * BLOCK + positions % BLOCK
        attention.append(AttentionInputs(query_start, seq_lens, blocks, slots))
    return StepInputs(
        token_ids=np.random.default_rng(0).integers(0, 64, len(positions)),
        positions=positions.astype(np.int64),
        rows=np.arange(len(lengths)),
        query_start=query_start,
        seq_lens=seq_lens,
        num_computed=seq_lens - counts,
        sample_start=np.arange(len(lengths) + 1, dtype=np.int32),
        sample_tokens=(query_start[1:] - 1).astype(np.int64),
        attention=tuple(attention),
    )


@torch.inference_mode()
def seconds_of_decode(gpu: Hardware, decoder: Decoder, contexts: Sequence[int]) -> float:
    """Median seconds of a decode step by a graph, with logits and best tokens."""
    batch, longest = len(contexts), max(contexts)
    num_tokens = sum(-(-each // BLOCK) * BLOCK for each in contexts)
    bench = Bench(gpu, decoder, num_tokens, (batch,), longest)
    graphs = bench.graphs((batch,), longest)
    inputs = step_inputs(list(contexts), [1] * batch)
    token_ids, positions, _ = bench.sent(inputs)
    return gpu.median_seconds(
        lambda: decoder.logits(graphs.replay(inputs.attention, token_ids, positions)).argmax(dim=1)
    )


@torch.inference_mode()
def decode(report: Report, name: str, least_share: float) -> None:
    """Graphs of steps with logits and best tokens, against reading weights and K and V once."""
    gpu = hardware()
    spec = spec_from_config(gpu.sizes.configs[name])
    decoder, rate = random_decoder(spec, DTYPE, gpu.gpu), read_rate(gpu)
    report.figure("read GB/s", rate / 1e9)
    for batch in gpu.sizes.batches:
        for context in gpu.sizes.contexts:
            what = f"batch {batch}, context {context}"
            with report.part(what):
                seconds = seconds_of_decode(gpu, decoder, [context] * batch)
                share = decode_floor(spec, [context] * batch, rate) / seconds
                report.figure(what, {"ms": seconds * 1e3, "share": share})
                if batch <= 64 and share < least_share:
                    report.miss(f"{what}: {share:.2f} of the floor, not {least_share}")


def decode_1b(report: Report) -> None:
    """Decode rates of 1B, without a target."""
    decode(report, "1B", 0.0)


def decode_8b(report: Report) -> None:
    """Decode rates of 8B: at least 0.85 of the lower bound up to a batch of 64."""
    decode(report, "8B", DECODE_SHARE)


def decode_latent(report: Report) -> None:
    """Decode rates of a model with latent KV, without a target."""
    decode(report, "latent", 0.0)


@torch.inference_mode()
def prefill_8b(report: Report) -> None:
    """Prefill of whole prompts, against the peak rate of products."""
    gpu = hardware()
    spec = spec_from_config(gpu.sizes.configs["8B"])
    decoder, rate = random_decoder(spec, DTYPE, gpu.gpu), product_rate(gpu)
    report.figure("product TFLOP/s", rate / 1e12)
    for prompts in gpu.sizes.prompts:
        name = f"{len(prompts)} x {prompts[0]}"
        with report.part(name):
            bench = Bench(gpu, decoder, sum(-(-each // BLOCK) * BLOCK for each in prompts))
            seconds = gpu.median_seconds(eager_step(bench, list(prompts), list(prompts)), rounds=5)
            reached = prefill_operations(spec, prompts) / seconds
            report.figure(name, {"TFLOP/s": reached / 1e12, "share": reached / rate})
            if reached < PREFILL_SHARE * rate:
                report.miss(f"{name}: {reached / rate:.2f} of a product, not {PREFILL_SHARE}")


def eager_step(bench: Bench, lengths: list[int], new: list[int]) -> Callable[[], torch.Tensor]:
    """A step without graphs, with the logits of every sequence's last token."""
    inputs = step_inputs(lengths, new)
    token_ids, positions, last = bench.sent(inputs)

    def step() -> torch.Tensor:
        hidden = bench.eager(inputs, token_ids, positions)
        return bench.decoder.logits(hidden.index_select(0, last))

    return step


@torch.inference_mode()
def layers(report: Report) -> None:
    """Events after the layers of a replayed graph: in their order, and K is there at each.

    Nothing waits for the later layers: those of the first half are reached before the step ends.
    """
    gpu = hardware()
    spec = spec_from_config(gpu.sizes.configs["1B"])
    decoder = random_decoder(spec, DTYPE, gpu.gpu)
    progress = gpu.progress(len(spec.layers))
    decoder.track_layers(progress)
    batch, context = max(gpu.sizes.batches), max(gpu.sizes.contexts)
    bench = Bench(gpu, decoder, batch * -(-context // BLOCK) * BLOCK, (batch,), context)
    graphs = bench.graphs((batch,), context)
    inputs = step_inputs([context] * batch, [1] * batch)
    token_ids, positions, _ = bench.sent(inputs)
    block = int(inputs.attention[0].slot_mapping[0]) // BLOCK
    rows = bench.cache.block_rows()
    copier = gpu.block_bytes(rows)
    memory = bytearray(rows.shape[1])
    shape = (bench.cache.layout.num_slots, -1)
    for copies in (False, True):
        bench.cache.buffer.normal_()
        gpu.synchronize()
        started = time.perf_counter()
        graphs.replay(inputs.attention, token_ids, positions)
        times, found = [], []
        for layer in range(len(spec.layers)):
            progress.wait_computed(layer)
            times.append((time.perf_counter() - started) * 1e3)
            if copies:
                copier.copy_out(block, memoryview(memory))
                slot = bench.cache.layout.layer_slots[layer].slot
                found.append(np.frombuffer(bytes(memory), np.uint8).reshape(shape)[slot])
        gpu.synchronize()
        times.append((time.perf_counter() - started) * 1e3)
        if not copies:
            report.figure("ms until layers are computed", times)
            demand(times == sorted(times), "events are reached out of order")
            half = times[len(spec.layers) // 2]
            if not rehearsing():
                demand(half < 0.8 * times[-1], f"half of the layers after {half / times[-1]:.2f}")
    copier.copy_out(block, memoryview(memory))
    last = np.frombuffer(bytes(memory), np.uint8).reshape(shape)
    for layer, part in enumerate(found):
        slot = bench.cache.layout.layer_slots[layer].slot
        demand(np.array_equal(part, last[slot]), f"layer {layer} was not written at its event")
    report.figure("layers written at their events", len(found))


def parity(report: Report) -> None:
    """Logits of a prompt in one go, in chunks and by graphs, against transformers in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    gpu = hardware()
    sizes = gpu.sizes
    config = LlamaConfig(
        vocab_size=sizes.parity_vocab,
        hidden_size=sizes.parity_hidden,
        intermediate_size=sizes.parity_hidden * 11 // 4,
        num_hidden_layers=4,
        num_attention_heads=sizes.parity_heads,
        num_key_value_heads=sizes.parity_heads // 4,
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
    decoder = decoder_of(gpu, model, spec)
    count = sizes.parity_tokens
    tokens = torch.randint(0, sizes.parity_vocab, (1, count))
    with torch.inference_mode():
        exact = model(tokens).logits[0].double()
    tokens = tokens.to(gpu.device)
    for name, chunks in {
        "in one go": [count],
        "in chunks": [count // 2, count // 4, count - count // 2 - count // 4],
        "decodes by graphs": [count - 8] + [1] * 8,
    }.items():
        with report.part(name):
            error = _error(_logits(gpu, decoder, tokens[0], chunks), exact)
            report.figure(name, error)
            if not error < TOLERANCE:
                report.error(f"{name}: relative error {error:.4f}, not under {TOLERANCE}")


@torch.inference_mode()
def families(report: Report) -> None:
    """Logits of a small model of every family against float32 on the host, with the same weights.

    A prompt in one go, then tokens by graphs. Positions are compared by themselves: a mixture may
    choose another expert for a token where two scores are nearly equal.
    """
    for name, config in GPU_CONFIGS.items():
        with report.part(name):
            errors = _family_errors(spec_from_config(config))
            median = float(errors.median())
            report.figure(name, {"median": median, "largest": float(errors.max())})
            demand(bool(errors.isfinite().all()), "logits are not finite")
            demand(median < FAMILY_TOLERANCE, f"the median error is {median:.4f}")


def _family_errors(spec: ModelSpec) -> torch.Tensor:
    """The relative error of each position's logits, float64 [T]."""
    gpu, tokens = hardware(), torch.arange(FAMILY_PROMPT + 4) * 7 % spec.vocab_size
    weights = _random_weights(spec)
    exact = _logits_on_host(spec, weights, tokens)
    decoder = build_decoder(spec, lambda name: weights[name].to(gpu.device), DTYPE, gpu.gpu)
    found = _logits(gpu, decoder, tokens.to(gpu.device), [FAMILY_PROMPT, 1, 1, 1, 1])
    return (found - exact).norm(dim=1) / exact.norm(dim=1)


def _random_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Weights in bfloat16 on the host, of a size at which hidden states neither vanish nor grow."""
    generator = torch.Generator().manual_seed(1)
    found = {}
    for name, shape in shapes_of(spec).items():
        weight = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            weight *= shape[-1] ** -0.5
        else:
            weight = 0.1 * weight + float("norm" in name and not spec.norms_add_one)
        found[name] = weight.to(DTYPE)
    return found


def _logits_on_host(
    spec: ModelSpec, weights: dict[str, torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Logits of all positions in one step, float64, computed in float32."""
    decoder = build_decoder(spec, lambda name: weights[name].float(), torch.float32, REFERENCE)
    layout, geometry = layer_cache(spec, torch.float32)
    num_blocks = 1 + layout.num_groups * -(-len(tokens) // BLOCK)
    attention: AttentionBackend = ReferenceAttention(
        KVCache(geometry, layout, num_blocks, BLOCK), spec.attention_shape
    )
    if layout.states is not None:
        attention = AttentionWithStates(attention, StateCache(layout.states, num_blocks, BLOCK))
    inputs = step_inputs([len(tokens)], [len(tokens)], layout.num_groups)
    attention.plan(inputs.attention)
    hidden = decoder.forward(tokens, torch.from_numpy(inputs.positions), attention)
    return decoder.logits(hidden).double()


def decoder_of(gpu: Hardware, model: Any, spec: ModelSpec) -> Decoder:
    """The weights of a transformers Llama, rounded to the dtype of this bench."""
    names = {name: weight.hugging_face for name, weight in spec.weights().items()}
    state = model.state_dict()
    return build_decoder(
        spec, lambda name: state[names[name]].to(gpu.device, DTYPE), DTYPE, gpu.gpu
    )


@torch.inference_mode()
def _logits(
    gpu: Hardware, decoder: Decoder, tokens: torch.Tensor, chunks: list[int]
) -> torch.Tensor:
    """Logits of all positions of one sequence, float64; single tokens go through a graph."""
    longest = len(tokens)
    bench = Bench(gpu, decoder, longest, (1,), longest)
    graphs = bench.graphs((1,), longest)
    found, done = [], 0
    for count in chunks:
        inputs = step_inputs([done + count], [count], bench.num_groups)
        positions = torch.from_numpy(inputs.positions).to(gpu.device)
        these = tokens[done : done + count]
        if graphs.fits(inputs.attention):
            hidden = graphs.replay(inputs.attention, these, positions)
        else:
            hidden = bench.eager(inputs, these, positions)
        found.append(bench.accelerator.fetch(decoder.logits(hidden)).double())
        done += count
    return torch.cat(found)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found - exact).norm() / exact.norm())
