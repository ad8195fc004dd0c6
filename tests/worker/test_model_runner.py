"""The model runner over several KV cache groups, against transformers.

The test acts as the engine: every group has its own block table, all blocks come from one pool, and
blocks behind a window are overwritten with NaN and reused.
"""

from pathlib import Path

import pytest
import torch

from tests.fakes.devices import CPU, create_backend, create_sampler
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.stepped_engine import BLOCK, CHUNKS, NUM_BLOCKS, NUM_OUTPUT_TOKENS, Engine
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.kv_cache import KVCache, KVLayout, kv_cache_geometry, kv_layout
from worker.batch.input_batch import InputBatch
from worker.loader.weights import load_model
from worker.models.decoder import Decoder
from worker.step.model_runner import ModelRunner


def runner_of(decoder: Decoder, layout: KVLayout, backend: str) -> tuple[ModelRunner, KVCache]:
    spec = decoder.spec
    heads = spec.attention_shape
    geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, torch.float32)
    cache = KVCache(geometry, layout, NUM_BLOCKS, BLOCK)
    cache.buffer[1:] = float("nan")
    shape = spec.attention_shape
    rows = InputBatch(len(CHUNKS), spec.max_position, BLOCK, layout.num_groups)
    attention = create_backend(backend, cache, shape)
    runner = ModelRunner(decoder, attention, create_sampler(), rows, cache, CPU.transfers())
    runner.warm_up()
    return runner, cache


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["gemma3", "mistral-window", "qwen2-window"])
def test_greedy_tokens_equal_transformers_past_the_window(
    name: str, backend: str, tmp_path: Path
) -> None:
    model = save_tiny(name, tmp_path)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    decoder = load_model(prepared, spec_of(prepared), torch.float32, CPU, lambda fraction: None)
    layout = kv_layout(decoder.spec.windows)
    runner, cache = runner_of(decoder, layout, backend)
    generator = torch.Generator().manual_seed(1)
    prompts = {
        seq_id: torch.randint(0, 96, (sum(chunks),), generator=generator).tolist()
        for seq_id, chunks in CHUNKS.items()
    }
    engine = Engine(runner, cache)
    outputs = engine.generate(prompts)
    for seq_id, prompt in prompts.items():
        tokens = torch.tensor([prompt + outputs[seq_id]])
        with torch.no_grad():
            best = model(tokens).logits[0, len(prompt) - 1 : -1].argmax(dim=-1)
        assert outputs[seq_id] == best.tolist()
    if decoder.spec.embedding_scale == 1.0:
        runner, cache = runner_of(decoder, layout, backend)
        assert Engine(runner, cache).generate(prompts, decoder) == outputs
    # The blocks that full attention would hold at the end.
    pages = sum(-(-(len(prompt) + NUM_OUTPUT_TOKENS - 1) // BLOCK) for prompt in prompts.values())
    assert engine.blocks.most_used < 0.7 * pages * layout.num_groups
