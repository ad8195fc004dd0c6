"""Beam search through scheduler and model runner equals transformers', on tiny models.

Without sockets and processes: steps are passed on directly. The rows that take over another's
tokens, the copied blocks and the candidates are real.
"""

from pathlib import Path

import pytest
import torch

from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint
from tests.fakes.real_engine import engine_for, load, runner_of
from tests.fakes.tiny_checkpoints import save_tiny

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
STOP_IDS = [2, 7, 40, 41]


class Model:
    """A tiny checkpoint, loaded by transformers and by our engine."""

    def __init__(self, name: str, folder: Path) -> None:
        self.transformers_model = save_tiny(name, folder).eval()
        self.decoder = load(prepare_checkpoint(folder, folder / "prepared"))

    def engine(self, num_blocks: int, **settings: object) -> EngineHarness:
        engine, num_blocks = engine_for(self.decoder, num_blocks, **settings)
        engine.runner = runner_of(self.decoder, num_blocks)  # type: ignore[assignment]
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
