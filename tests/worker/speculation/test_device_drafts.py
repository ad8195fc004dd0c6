"""Drafters in the workers on the fake CUDA device, behind steps that are queued ahead.

The engine asks for proposals as it does in a daemon, while steps overlap, verify drafts, preempt
and copy blocks. Every answer is that of the host without drafts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.request import Request
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.worker.test_cuda_runner import (
    EDITS,
    NUM_ROWS,
    REQUEST_PARAMS,
    VOCAB_SIZE,
    ConstrainedThirds,
    Harness,
    Model,
    OnFakeCuda,
    compute_by_torch,
    host_runner,
    serve,
)
from worker.kv_cache import KVCache
from worker.model_runner import SyncModelRunner
from worker.models.decoder import Decoder
from worker.runner_builder import DraftedModel
from worker.speculation.draft_model import DraftModel
from worker.speculation.draft_settings import draft_cache
from worker.speculation.drafter import Drafter

PARAMS = [*REQUEST_PARAMS, *EDITS]
STEP_TOKENS = 16


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    names = ("llama", "gemma3-pattern-untied", "mistral-window")
    return {name: Model(name, tmp_path_factory.mktemp(name)) for name in names}


class ProposalLog(SyntheticDrafts):
    """Drafts of a model in the workers, and what it proposes: (request, outputs, tokens)."""

    def __init__(self, acceptance: float, answer: Any) -> None:
        super().__init__(acceptance, answer, vocab_size=VOCAB_SIZE, has_draft_model=True)
        self.found: list[tuple[int, int, list[int]]] = []

    def keep_proposal(
        self, request: Request, num_asked: int, token_ids: list[int], survivals: Sequence[float]
    ) -> None:
        super().keep_proposal(request, num_asked, token_ids, survivals)
        assert all(np.diff([1.0, *survivals]) <= 1e-6)
        self.found.append((request.request_id, request.num_output_tokens, list(token_ids)))


def with_draft_model(model: Model) -> Callable[[OnFakeCuda, Decoder], Drafter]:
    """Return what makes a drafter of a model of its own, in the KV blocks of the target."""

    def make(worker: OnFakeCuda, target: Decoder) -> Drafter:
        with worker.cuda.loading():
            draft = model.load(CUDA)
            layout, geometry = draft_cache(draft.spec, model.dtype)
            cache = KVCache(
                geometry, layout, worker.cache.num_blocks, worker.cache.block_size, CUDA
            )
        group = worker.cache.layout.windows.index(None)
        drafted = DraftedModel(
            worker.rows, group, target.spec.vocab_size, STEP_TOKENS, draft.spec.max_position
        )
        builder = worker.new_builder(draft, model.dtype)
        return builder.build_drafter(DraftModel.method, cache, drafted, worker.progress.append)

    return make


def run(
    cuda: FakeCuda,
    target: Model,
    make_drafter: Callable[[OnFakeCuda, Decoder], Drafter],
    acceptance: float = 0.7,
    num_blocks: int = 81,
    *,
    is_async: bool = True,
    **settings: Any,
) -> tuple[ProposalLog, Harness, dict[int, list[int]]]:
    """Serve with a drafter; the answers must be those of the host. Returns them by request."""
    num_rows = 2 * NUM_ROWS
    host = SyncModelRunner(host_runner(target, num_rows))
    expected = Harness(host, num_blocks, num_rows, constraints=ConstrainedThirds())
    tokens = serve(expected, PARAMS)
    answers = {key[0]: found for key, found in expected.tokens.items()}

    def answer(request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return answers[request.request_id][first : first + num_tokens] or [5]

    worker = OnFakeCuda(target, cuda, num_rows, make_drafter=make_drafter, **settings)
    log = ProposalLog(acceptance, answer)
    found = Harness(
        worker.runner,
        num_blocks,
        num_rows,
        constraints=ConstrainedThirds(),
        async_scheduling=is_async,
        drafting=log,
    )
    assert serve(found, PARAMS) == tokens
    return log, found, answers


@pytest.mark.parametrize(
    ("target", "num_blocks", "settings"),
    [
        ("llama", 81, {}),
        ("llama", 24, {}),
        ("llama", 81, {"enforce_eager": True}),
        ("llama", 81, {"is_async": False}),
        ("llama", 81, {"batch_invariant": True}),
        ("gemma3-pattern-untied", 200, {}),
    ],
    ids=str,
)
def test_the_model_itself_drafts_what_it_will_answer(
    cuda: FakeCuda,
    models: dict[str, Model],
    target: str,
    num_blocks: int,
    settings: dict[str, Any],
) -> None:
    """With every sampling parameter; a grammar is not known to the drafter."""
    model = models[target]
    log, harness, answers = run(
        cuda, model, with_draft_model(model), num_blocks=num_blocks, **settings
    )
    counts = Counter[int]()
    for request_id, first, proposed in log.found:
        rest = answers[request_id][first:]
        if request_id % 3:
            assert proposed[: len(rest)] == rest[: len(proposed)]
        counts[request_id] += len(proposed)
    print(counts, log.num_proposed, harness.worker.num_preempted)
    assert len(counts) > 12
    assert log.num_proposed > 100
