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
from proto.messages.prepared_model import PreparedModel
from tests.fakes.cuda_runner import (
    EDITS,
    NUM_ROWS,
    REQUEST_PARAMS,
    SHARED,
    VOCAB_SIZE,
    ConstrainedThirds,
    Harness,
    Model,
    OnFakeCuda,
    assert_mostly_equal,
    compute_by_torch,
    host_runner,
    num_cascades,
    serve,
)
from tests.fakes.devices import GPU, REFERENCE
from tests.fakes.drafts import SyntheticDrafts
from tests.fakes.fake_cuda import CUDA, FakeCuda
from tests.fakes.stepped_engine import BLOCK, NUM_BLOCKS
from tests.fakes.tiny_heads import head_config, head_tensors, prepare_head, save_head
from tests.worker.reference.torch_kernels import draw_by_torch
from tests.worker.sampling.settings import row_params
from worker.attention.kv_cache import KVCache
from worker.cuda.sampling.draft_draw import DeviceDraftDraw
from worker.loader.formats import DenseFormat
from worker.models.decoder import Decoder
from worker.plan.draft_settings import draft_cache
from worker.plan.memory_plan import layer_cache
from worker.reference.attention import ReferenceAttention
from worker.reference.sampling import TorchBackend
from worker.sampling.sampler import Sampler
from worker.speculation.draft_sampler import DraftDraws, host_draw
from worker.speculation.drafter import DraftedModel, Drafter
from worker.speculation.eagle import EagleDrafter
from worker.speculation.eagle_head import load_head, read_head
from worker.step.model_runner import ModelRunner, SyncModelRunner
from worker.step.runner_parts import Runner

pytestmark = pytest.mark.suite("rehearsal")

PARAMS = [*EDITS, *REQUEST_PARAMS[1:5]]
STEP_TOKENS = 16


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    compute_by_torch(monkeypatch)
    with FakeCuda() as fake:
        yield fake


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    names = ("llama", "gemma3-pattern-untied")
    return {name: Model(name, tmp_path_factory.mktemp(name)) for name in names}


class ProposalLog(SyntheticDrafts):
    """Drafts of a model in the workers, and what it proposes: (request, outputs, tokens)."""

    def __init__(self, acceptance: float, answer: Any) -> None:
        super().__init__(acceptance, answer, vocab_size=VOCAB_SIZE, has_draft_model=True)
        self.found: list[tuple[Request, int, list[int]]] = []

    def keep_proposal(
        self,
        request: Request,
        num_asked: int,
        token_ids: list[int],
        acceptance_probs: Sequence[float],
    ) -> None:
        super().keep_proposal(request, num_asked, token_ids, acceptance_probs)
        assert all(np.diff([1.0, *acceptance_probs]) <= 1e-6)
        self.found.append((request, request.num_output_tokens, list(token_ids)))


def with_draft_model(model: Model) -> Callable[[OnFakeCuda, Decoder], Drafter]:
    """Return what makes a drafter of a model of its own, in the KV blocks of the target."""

    def make(worker: OnFakeCuda, target: Decoder) -> Drafter:
        with worker.cuda.loading():
            draft = model.load(GPU)
            layout, geometry = draft_cache(draft.spec, model.dtype)
            cache = KVCache(
                geometry, layout, worker.cache.num_blocks, worker.cache.block_size, GPU.zeros
            )
        group = worker.cache.layout.windows.index(None)
        drafted = DraftedModel(
            worker.rows, group, target.spec.vocab_size, STEP_TOKENS, draft.spec.max_position
        )
        return worker.build_drafter(draft, model.dtype, cache, drafted)

    return make


def with_head(method: str, folder: Path) -> Callable[[OnFakeCuda, Decoder], Drafter]:
    """Return what makes a head of the target, with bfloat16 weights, loaded from a folder."""

    def make(worker: OnFakeCuda, target: Decoder) -> Drafter:
        dtype = worker.cache.dtype
        prepared = prepare_head(folder)
        spec = read_head(method, prepared, target.spec, GPU)
        with worker.cuda.loading():
            head = load_head(prepared, spec, target, dtype, GPU, DenseFormat(dtype))
            head.record_residuals(2 * STEP_TOKENS)
            layout, geometry = spec.cache(dtype)
            cache = KVCache(
                geometry, layout, worker.cache.num_blocks, worker.cache.block_size, GPU.zeros
            )
        group = worker.cache.layout.windows.index(None)
        drafted = DraftedModel(worker.rows, group, spec.vocab_size, STEP_TOKENS, spec.longest)
        return worker.build_drafter(head, dtype, cache, drafted)

    return make


def head_on_host(
    runner: ModelRunner, method: str, prepared: PreparedModel, dtype: torch.dtype
) -> None:
    """Give a reference runner a head, on plain torch."""
    target = runner._model
    spec = read_head(method, prepared, target.spec, REFERENCE)
    head = load_head(prepared, spec, target, dtype, REFERENCE, DenseFormat(dtype))
    head.record_residuals(2 * STEP_TOKENS)
    layout, geometry = spec.cache(dtype)
    cache = KVCache(geometry, layout, runner.kv_cache.num_blocks, BLOCK)
    group = runner.kv_cache.layout.windows.index(None)
    drafted = DraftedModel(runner.batch, group, spec.vocab_size, STEP_TOKENS, spec.longest)
    attention = ReferenceAttention(cache, spec.attention_shape)
    draw = host_draw(Sampler(TorchBackend()))
    transfers = REFERENCE.transfers()
    runner._drafter = EagleDrafter(head, attention, cache, draw, drafted, transfers)
    runner._drafter.warm_up()


class Answers:
    """The answers of the host without drafts: the tokens of each request, and those by number."""

    def __init__(self, model: Model) -> None:
        host = SyncModelRunner(host_runner(model, NUM_ROWS))
        harness = new_harness(host, model, NUM_BLOCKS, NUM_ROWS)
        self.in_order = serve(harness, PARAMS)
        self.by_request = {key[0]: found for key, found in harness.tokens.items()}

    def next_tokens(self, request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return self.by_request[request.request_id][first : first + num_tokens] or [5]


def new_harness(
    runner: Runner, model: Model, num_blocks: int, num_rows: int, **settings: Any
) -> Harness:
    windows = layer_cache(model.spec, model.dtype)[0].windows
    constraints = ConstrainedThirds()
    return Harness(runner, num_blocks, num_rows, windows=windows, grammars=constraints, **settings)


_ANSWERS: dict[str, Answers] = {}


def run(
    cuda: FakeCuda,
    models: dict[str, Model],
    target: str,
    make_drafter: Callable[[OnFakeCuda, Decoder], Drafter],
    *,
    num_blocks: int = NUM_BLOCKS,
    is_async: bool = True,
    **settings: Any,
) -> tuple[ProposalLog, Harness]:
    """Serve with a drafter; the answers must be those of the host."""
    model, num_rows = models[target], 2 * NUM_ROWS
    if target not in _ANSWERS:
        _ANSWERS[target] = Answers(model)
    worker = OnFakeCuda(model, cuda, num_rows, make_drafter=make_drafter, **settings)
    log = ProposalLog(0.3, _ANSWERS[target].next_tokens)
    harness = new_harness(
        worker.runner, model, num_blocks, num_rows, async_scheduling=is_async, drafting=log
    )
    assert serve(harness, PARAMS) == _ANSWERS[target].in_order
    return log, harness


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("llama", {}),
        ("llama", {"num_blocks": 26, "enforce_eager": True}),
        ("llama", {"is_async": False, "batch_invariant": True}),
        ("gemma3-pattern-untied", {}),
    ],
    ids=str,
)
def test_the_model_itself_drafts_what_it_will_answer(
    cuda: FakeCuda, models: dict[str, Model], target: str, settings: dict[str, Any]
) -> None:
    """With every sampling parameter; only a grammar, which it does not know, changes that."""
    log, harness = run(cuda, models, target, with_draft_model(models[target]), **settings)
    counts = Counter[int]()
    for request, first, proposed in log.found:
        rest = _ANSWERS[target].by_request[request.request_id][first:]
        if request.seq_id % 3:
            assert proposed[: len(rest)] == rest[: len(proposed)]
            counts[request.request_id] += len(proposed)
    is_full = settings.get("num_blocks") == 26
    assert harness.worker.num_preempted > 0 or not is_full
    assert counts.total() > (3 if is_full else 9)
    assert len(counts) > 2


def test_a_draft_model_reads_a_shared_prefix_once(cuda: FakeCuda, models: dict[str, Model]) -> None:
    model, num_rows = models["llama"], 2 * NUM_ROWS
    host = new_harness(SyncModelRunner(host_runner(model, num_rows)), model, NUM_BLOCKS, num_rows)
    expected = serve(host, PARAMS, num_shared=SHARED)
    answers = {key[0]: found for key, found in host.tokens.items()}

    def answer(request: Request, num_tokens: int) -> list[int]:
        first = request.num_output_tokens
        return answers[request.request_id][first : first + num_tokens] or [5]

    worker = OnFakeCuda(
        model, cuda, num_rows, make_drafter=with_draft_model(model), cascade_attention_from=2
    )
    log = ProposalLog(0.3, answer)
    harness = new_harness(
        worker.runner, model, NUM_BLOCKS, num_rows, async_scheduling=True, drafting=log
    )
    assert_mostly_equal(serve(harness, PARAMS, num_shared=SHARED), expected)
    assert num_cascades(worker) > 20
    right = [
        token == wanted
        for request, first, proposed in log.found
        for token, wanted in zip(proposed, answers[request.request_id][first:], strict=False)
    ]
    assert sum(right) > 9


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_reads_the_states_of_its_own_step(
    cuda: FakeCuda, models: dict[str, Model], tmp_path: Path, method: str
) -> None:
    """Later graphs have overwritten them when it drafts; it proposes what one on the host does."""
    config = head_config(method, head_dim=64)
    folder = save_head(tmp_path, config, head_tensors(method, config))
    log, _ = run(cuda, models, "llama", with_head(method, folder))
    model = models["llama"]
    runner = host_runner(model, 2 * NUM_ROWS)
    head_on_host(runner, method, prepare_head(folder), model.dtype)
    host_log = ProposalLog(0.3, _ANSWERS["llama"].next_tokens)
    harness = new_harness(
        SyncModelRunner(runner), model, NUM_BLOCKS, 2 * NUM_ROWS, drafting=host_log
    )
    assert serve(harness, PARAMS) == _ANSWERS["llama"].in_order
    expected = {(each.request_id, first): tokens for each, first, tokens in host_log.found}
    equal = different = 0
    for request, first, tokens in log.found:
        wanted = expected.get((request.request_id, first), [])
        shorter = min(len(wanted), len(tokens))
        equal += shorter > 0 and wanted[:shorter] == tokens[:shorter]
        different += wanted[:shorter] != tokens[:shorter]
    assert equal > 20
    assert different <= equal // 10


def test_survivals_on_a_device_are_those_of_the_host(cuda: FakeCuda) -> None:
    """Probabilities among the tokens that filters keep, behind logit edits and temperatures."""
    logits = 3 * torch.randn(6, 97, generator=torch.Generator().manual_seed(1))
    params = row_params(
        6,
        temperature=(0.0, 0.7, 1.0, 1.3, 0.9, 1.0),
        top_k=(0, 3, 0, 20, 5, 1),
        top_p=(1.0, 1.0, 0.8, 0.6, 1.0, 1.0),
        min_p=(0.0, 0.0, 0.0, 0.0, 0.1, 0.0),
        seed=np.arange(6),
    )
    draws = DraftDraws(params, [], [(1, np.array([5, 6], dtype=np.int64))])
    host = host_draw(Sampler(TorchBackend()))(logits.clone(), draws)
    with cuda.loading():
        on_device = logits.to(CUDA)
    found = DeviceDraftDraw(cuda.device, draw_by_torch)(on_device, draws)
    assert found[0].tolist() == host[0].tolist()
    np.testing.assert_allclose(found[1], host[1], rtol=1e-5)
    assert host[1][5] == 1.0
