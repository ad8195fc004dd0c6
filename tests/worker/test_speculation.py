"""Scheduler and runner with drafts: tokens and log-probabilities are those without, bit by bit.

The answers of a run without drafts are recorded; drafts are then right with a chosen probability,
so rows of any length are accepted and rejected, with every sampling parameter, in full pools, and
after workers were lost.
"""

from collections import Counter
from typing import Any

import pytest
import torch

from engine_core.request import Request
from proto.settings.config import ModelConfig
from tests.e2e.reference import packaged_model
from tests.fakes.devices import CPU
from tests.fakes.drafted_engine import EOS, Setup, all_requests, answers_of, serve
from tests.fakes.engine_harness import EngineHarness
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.fakes.tiny_checkpoints import save_tiny
from worker.cpu.formats import Bf16Format, choose_format
from worker.cpu.kernels import load_kernels
from worker.loader.files import read_index
from worker.loader.formats import DenseFormat, WeightFormat
from worker.loader.weights import load_model


def add_all(engine: EngineHarness) -> list[Request]:
    requests = []
    for params, prompt, index, n in all_requests():
        requests += engine.add(prompt, 30 + index, n=n, seed=index, eos_token_ids=(EOS,), **params)
    return requests


MODELS = {
    "llama": (torch.float32, torch.float32),
    "llama bf16": (torch.bfloat16, torch.bfloat16),
    "llama f16 pages": (torch.bfloat16, torch.float16),
    "llama int8 pages": (torch.bfloat16, torch.int8),
    "gemma3": (torch.bfloat16, torch.bfloat16),
    "mixtral": (torch.bfloat16, torch.bfloat16),
    "deepseek2": (torch.bfloat16, torch.bfloat16),
    "granitehybrid": (torch.bfloat16, torch.bfloat16),
    "granitehybrid-dense int8 pages": (torch.bfloat16, torch.int8),
    "lfm2": (torch.float32, torch.float32),
    "nemotronh": (torch.bfloat16, torch.bfloat16),
    "qwen35": (torch.bfloat16, torch.float32),
}
"""Activations and pages."""


@pytest.fixture(scope="module", params=MODELS)
def setup(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    dtype, kv_dtype = MODELS[request.param]
    name = request.param.split()[0]
    folder = tmp_path_factory.mktemp(name)
    save_tiny(name, folder)
    prepared = prepare_checkpoint(folder, folder / "prepared")
    weight_format: WeightFormat = DenseFormat(dtype)
    spec = spec_of(prepared)
    if spec.state_layers:  # the products of most of their sizes have other bits in other batches
        weight_format = Bf16Format(load_kernels())
    decoder = load_model(prepared, spec, dtype, CPU, lambda _: None, weight_format)
    made = Setup(decoder, kv_dtype, returns_experts=name == "mixtral")
    made.record_answers()
    return made


@pytest.mark.parametrize(
    ("acceptance", "settings"),
    [
        (0.0, {}),
        (0.3, {"is_full": True}),
        (0.7, {"async_scheduling": True}),
        (0.7, {"is_full": True, "async_scheduling": True}),
        (1.0, {}),
    ],
    ids=str,
)
def test_answers_are_those_without_drafts_bit_by_bit(
    setup: Setup, acceptance: float, settings: dict[str, Any]
) -> None:
    drafting = setup.drafts(acceptance)
    engine = setup.harness(drafting=drafting, **settings)
    found = answers_of(engine, serve(engine))
    for answer, wanted in zip(found, setup.expected, strict=True):
        if settings:  # other requests are in the cache
            answer, wanted = ({**each, "cached": 0} for each in (answer, wanted))
        assert answer == wanted
    assert drafting.num_drafted > 50
    assert (drafting.num_accepted > 0) is (acceptance > 0)


def test_answers_survive_lost_workers(setup: Setup) -> None:
    drafting = setup.drafts(0.7)
    engine = setup.harness(drafting=drafting)
    requests = serve(engine, loses_workers_at=6, new_runner=setup.runner)
    for request in requests:
        assert engine.tokens_of(request) == setup.answers[request.request_id, request.choice]


def test_answers_survive_a_lost_engine(setup: Setup) -> None:
    """The next engine gets the tokens that front ends have received."""
    first = setup.harness(drafting=setup.drafts(0.7))
    requests = add_all(first)
    for _ in range(12):
        first.step()
    engine = setup.harness(drafting=setup.drafts(0.7))
    for params, prompt, index, n in all_requests():
        request_id = 100 + index
        ended = [choice for choice in range(n) if (request_id, choice) in first.final]
        if len(ended) == n:
            next(engine.ids)
            continue
        outputs = tuple(tuple(first.tokens.get((request_id, choice), ())) for choice in range(n))
        engine.add(
            prompt,
            30 + index,
            n=n,
            seed=index,
            eos_token_ids=(EOS,),
            output_token_ids=outputs,
            finished_choices=tuple(ended),
            **params,
        )
    engine.run()
    for request in requests:
        key = request.request_id, request.choice
        assert first.tokens[key] + engine.tokens.get(key, []) == setup.answers[key]


@pytest.mark.suite("daemons")
def test_the_packaged_model_gives_the_same_tokens() -> None:
    """With its blocks as they are in the file, and bfloat16 pages."""
    prepared = packaged_model()
    index = read_index(prepared)
    weight_format = choose_format(ModelConfig(), torch.bfloat16, index, load_kernels())
    decoder = load_model(
        prepared, spec_of(prepared), torch.bfloat16, CPU, lambda _: None, weight_format
    )
    made = Setup(decoder, torch.bfloat16, returns_experts=False)
    made.record_answers()
    engine = made.harness(drafting=made.drafts(0.7))
    assert answers_of(engine, serve(engine)) == made.expected


@pytest.mark.parametrize("setup", ["llama bf16"], indirect=True)
def test_layers_one_by_one_verify_the_same(setup: Setup) -> None:
    stacks = setup.decoder._stacks
    assert len(stacks) == 2, "all layers in one call, and one by one"
    setup.decoder._stacks = stacks[1:]
    try:
        engine = setup.harness(drafting=setup.drafts(0.7))
        found = answers_of(engine, serve(engine))
    finally:
        setup.decoder._stacks = stacks
    assert found == setup.expected


@pytest.mark.parametrize("setup", ["llama bf16"], indirect=True)
def test_nonfinite_logits_after_a_wrong_draft_have_no_effect(setup: Setup) -> None:
    """After an accepted one they end the request in the next step, as without drafts."""
    for acceptance in (0.0, 1.0):
        engine = setup.harness(drafting=setup.drafts(acceptance))
        request = engine.add_one([5, 6, 8], 12, seed=0, temperature=0.0, ignore_eos=True)
        plain = EngineHarness.tokens_of
        runner = engine.runner
        compute = runner.compute_logits
        poisoned = Counter[int]()

        def poison(forward: Any, compute: Any = compute, poisoned: Any = poisoned) -> torch.Tensor:
            logits = compute(forward)
            for index in range(1, len(logits)):
                logits[index] = float("nan")
                poisoned["rows"] += 1
            return logits

        setup.answers[request.request_id, 0] = []
        runner.compute_logits = poison  # type: ignore[method-assign]
        engine.run()
        assert len(plain(engine, request)) == 12, "every step begins with a finite row"
        assert poisoned["rows"] > 5
