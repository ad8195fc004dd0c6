"""Beam search through scheduler and model runner equals transformers', on tiny models.

Without sockets and processes: steps are passed on directly. The rows that take over another's
tokens, the copied blocks and the candidates are real.
"""

from pathlib import Path

import pytest
import torch

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.attention.registry import create_backend
from worker.input_batch import InputBatch
from worker.kv_cache import KVCache, kv_cache_geometry, kv_layout
from worker.loader.weights import load_model
from worker.model_runner import ModelRunner
from worker.sampling.sampler import create_sampler

BLOCK = 4
PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
STOP_IDS = [2, 7, 40, 41]


class Model:
    """A tiny checkpoint, loaded by transformers and by our engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.transformers_model = save_tiny(name, folder).eval()
        prepared = prepare_checkpoint(folder, folder / "prepared")
        self.decoder = load_model(
            prepared, spec_of(prepared), torch.float32, torch.device("cpu"), lambda fraction: None
        )

    def engine(self, num_blocks: int, **settings: object) -> EngineHarness:
        spec = self.decoder.spec
        layout = kv_layout(spec.windows)
        heads = spec.attention_shape
        geometry = kv_cache_geometry(layout, heads.num_kv_heads, heads.head_dim, torch.float32)
        num_blocks *= layout.num_groups
        cache = KVCache(geometry, layout, num_blocks, BLOCK)
        cache.buffer[1:] = float("nan")
        shape = spec.attention_shape
        engine = EngineHarness(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_model_len=spec.max_position,
            windows=layout.windows,
            **settings,  # type: ignore[arg-type]
        )
        rows = InputBatch(16, spec.max_position, BLOCK, layout.num_groups)
        attention = create_backend("auto", cache, shape)
        engine.runner = ModelRunner(self.decoder, attention, create_sampler(), rows, cache)  # type: ignore[assignment]
        return engine

    def expected(self, width: int, max_tokens: int, **params: object) -> list[list[int]]:
        with torch.no_grad():
            sequences = self.transformers_model.generate(
                torch.tensor([PROMPT]),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=STOP_IDS,
                pad_token_id=0,
                **params,
            )
        outputs = sequences[:, len(PROMPT) :].tolist()
        ends = [[i for i, token in enumerate(each) if token in STOP_IDS] for each in outputs]
        return [
            each[: end[0] + 1] if end else each for each, end in zip(outputs, ends, strict=True)
        ]


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp(request.param))


LENGTH_PENALTIES = (0.0, 1.0, -1.0)
EARLY_STOPPING = (False, True, "never")
WIDTHS = ((2, 100), (5, 100), (5, 14), (1, 100))
"""Beams and blocks. The first three go through all pairs of the settings above, three each."""


@pytest.mark.parametrize("index", range(len(WIDTHS)), ids=map(str, WIDTHS))
def test_beam_search_equals_transformers(model: Model, index: int) -> None:
    width, num_blocks = WIDTHS[index]
    for place, length_penalty in enumerate(LENGTH_PENALTIES):
        settings: dict[str, object] = {
            "length_penalty": length_penalty,
            "early_stopping": EARLY_STOPPING[(place + index) % 3],
        }
        engine = model.engine(num_blocks)
        rows = engine.add(
            PROMPT,
            24,
            n=width,
            beam_width=width,
            eos_token_ids=tuple(STOP_IDS),
            **settings,  # type: ignore[arg-type]
        )
        engine.run()
        if width > 1:
            expected = model.expected(width, 24, **settings)
            assert [engine.tokens_of(row) for row in rows] == expected, settings
        assert engine.kv_cache.usage == 0
        preempted = sum(row.num_preemptions for row in rows)
        assert (preempted > 0) is (num_blocks == 14)
