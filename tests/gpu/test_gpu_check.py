"""The parts of `make gpu-check` that need no GPU: formulas, verdicts, phases that fail alone."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tests.gpu.__main__ as gpu_check
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_flashinfer import FakeFlashInfer
from tests.fakes.openai_server import fake_openai, well
from tests.fakes.prepared_models import prepare_checkpoint
from tests.gpu import models, server
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.formulas import decode_floor, kv_bytes_per_token, prefill_operations, weight_bytes
from tests.gpu.kernels import exact_shares
from tests.gpu.phases import PHASES, TOTAL_SECONDS, Failed, Phase, demand
from tests.gpu.random_model import CONFIGS, random_decoder
from tests.worker.test_cuda_runner import compute_by_torch
from worker.attention.kv_store import store_by_index
from worker.loader.weights import load_model
from worker.models.registry import spec_from_config, spec_of
from worker.sample.filters import apply_filters

SMALL = CONFIGS["1B"] | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "head_dim": 64,
}


def test_bytes_of_models_of_known_sizes() -> None:
    """8,030,261,248 parameters, of which the embedding's are not read; 1,235,814,400 tied."""
    eight, one = (spec_from_config(CONFIGS[name]) for name in ("8B", "1B"))
    assert weight_bytes(eight) == 2 * (8_030_261_248 - 128256 * 4096)
    assert weight_bytes(one) == 2 * 1_235_814_400
    assert kv_bytes_per_token(eight) == 131072
    assert kv_bytes_per_token(one) == 32768
    floor = decode_floor(eight, [2048] * 64, read_rate=3e12)
    assert floor == pytest.approx((15.01e9 + 17.18e9) / 3e12, rel=1e-3)


def test_operations_of_a_prompt() -> None:
    spec = spec_from_config(CONFIGS["8B"])
    assert prefill_operations(spec, [8192]) == pytest.approx(114.3e12 + 17.6e12, rel=1e-2)
    assert prefill_operations(spec, [1024] * 8) < prefill_operations(spec, [8192])


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 9}])
def test_exact_shares_are_those_that_the_filters_leave(settings: dict[str, Any]) -> None:
    logits = 2 * torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = logits.float()[None].clone()
    apply_filters(
        scores,
        torch.tensor([settings.get("top_k", 0)]),
        torch.tensor([settings.get("top_p", 1.0)], dtype=torch.float64),
        torch.tensor([settings.get("min_p", 0.0)], dtype=torch.float64),
    )
    found = exact_shares(logits.numpy(), **settings)
    assert np.allclose(found, scores[0].softmax(0).numpy(), atol=1e-6)


def test_steps_that_are_made_up_lie_in_blocks_of_their_own() -> None:
    inputs = models.step_inputs([40, 3, 17], [1, 3, 5])
    assert inputs.positions.tolist() == [39, 0, 1, 2, 12, 13, 14, 15, 16]
    (attention,) = inputs.attention
    assert len(set(attention.slot_mapping.tolist())) == 9
    used = [
        table[: -(-n // 16)] for table, n in zip(attention.block_table, (40, 3, 17), strict=True)
    ]
    assert sorted(np.concatenate(used).tolist()) == [1, 2, 3, 4, 5, 6]
    assert attention.slot_mapping[0] == 3 * 16 + 39 % 16


def test_the_models_run_on_a_made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity with transformers, with a prompt in one go, in chunks, and by graphs."""
    compute_by_torch(monkeypatch)
    spec = spec_from_config(SMALL)
    with FakeCuda() as cuda, cuda.loading():
        library = FakeFlashInfer(cuda.device)
        monkeypatch.setattr(models, "Cuda", lambda device: cuda.device)
        monkeypatch.setattr(models, "load_library", lambda: library)
        monkeypatch.setattr(models, "TritonStore", lambda: store_by_index)
        decoder = random_decoder(spec, models.DTYPE, models.CUDA)
        tokens = torch.arange(30) % 64
        whole, in_parts = (
            models._logits(decoder, tokens.to(models.CUDA), chunks)
            for chunks in ([30], [20, 7, 1, 1, 1])
        )
    assert whole.shape == (30, 64)
    assert models._error(in_parts, whole) < 1e-2
    assert cuda.device.num_replays == 3


def test_a_checkpoint_that_is_written_can_be_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    decoder = load_model(
        prepared, spec_of(prepared), torch.bfloat16, torch.device("cpu"), lambda fraction: None
    )
    assert decoder.spec == spec_from_config(SMALL)
    assert decoder.logits(torch.ones(1, 32).bfloat16()).std() > 0


def test_nothing_is_checked_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    words = [sys.executable, "-m", "tests.gpu"]
    result = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 2
    assert "make gpu-check needs an NVIDIA GPU" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_every_phase_may_take_as_long_as_it_says() -> None:
    assert sum(phase.seconds for phase in PHASES) <= TOTAL_SECONDS == 8 * 60


def test_load_on_a_server_that_answers_and_on_one_that_does_not() -> None:
    with fake_openai(well) as fake:
        for how in (("--concurrency", "3"), ("--request-rate", "200")):
            run = server.load(fake.url, 6, *how, shape=(8, 4))
            assert set(server.shown(run)) == set(server.SHOWN)
            assert run["output_tokens"] == 24

    def short(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        return well(path, body | {"max_tokens": body["max_tokens"] - 1})

    with fake_openai(short) as fake, pytest.raises(Failed, match="not all are answered in full"):
        server.load(fake.url, 2, "--concurrency", "1", shape=(8, 4))


def test_a_phase_that_fails_hangs_or_dies_fails_alone() -> None:
    phases = [
        Phase("fine", "pretended:fine", 30.0),
        Phase("fails", "pretended:fails", 30.0),
        Phase("breaks", "pretended:breaks", 30.0),
        Phase("dies", "pretended:dies", 30.0),
        Phase("hangs", "pretended:hangs", 1.0),
    ]
    answers = gpu_check.run_all(phases, 120.0)
    assert answers["fine"]["figures"] == {"rate": 2.5, "missed": []}
    assert answers["fails"]["error"] == "2 is not 3"
    assert "ZeroDivisionError" in answers["breaks"]["error"]
    assert "failed: 7" in answers["dies"]["error"]
    assert "ended after 1 s" in answers["hangs"]["error"]
    assert not gpu_check.succeeded(answers)
    assert gpu_check.succeeded({"fine": answers["fine"]})
    shown = gpu_check.table(answers)
    assert shown.count("FAILED") == 4
    assert "rate                         2.5" in shown


def test_no_phase_begins_after_the_end() -> None:
    answers = gpu_check.run_all([Phase("late", "pretended:fine", 30.0)], 0.0)
    assert answers["late"]["error"] == "not run: no time was left"


def test_a_missed_target_is_no_success() -> None:
    missed = {"decode": {"figures": {"missed": ["batch 1: 0.80"]}, "seconds": 1.0}}
    assert "target missed" in gpu_check.table(missed)
    assert not gpu_check.succeeded(missed)


def test_each_phase_names_a_function_that_exists() -> None:
    for phase in PHASES:
        module, name = phase.function.split(":")
        source = (Path(__file__).parent / f"{module}.py").read_text()
        assert f"def {name}(" in source
    with pytest.raises(Failed, match="two numbers"):
        demand(False, "two numbers")
