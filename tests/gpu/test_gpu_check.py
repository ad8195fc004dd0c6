"""The parts of `make gpu-check` that need no GPU: formulas, verdicts, isolation of phases.

The slow ones rehearse the phases of hour.sh on the strict fake.
"""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import tests.gpu.__main__ as gpu_check
from tests.e2e.daemon import eventually
from tests.fakes.devices import CPU
from tests.fakes.openai_server import fake_openai, respond_normally
from tests.fakes.prepared_models import prepare_checkpoint, spec_of
from tests.gpu import kernels, models, pack, server
from tests.gpu.checkpoint import write_checkpoint
from tests.gpu.formulas import decode_floor, kv_bytes_per_token, prefill_operations, weight_bytes
from tests.gpu.hardware import REHEARSAL
from tests.gpu.kernels import chi_square, exact_shares
from tests.gpu.phases import COMMAND_SECONDS, HOUR_SECONDS, MAX_SECONDS, PHASES, Phase
from tests.gpu.random_model import CONFIGS
from tests.gpu.rehearsal import SMALL, rehearsed
from tests.gpu.report import Failed, Report
from tests.worker.reference.filters import apply_filters
from tests.worker.sampling.settings import row_params
from worker.loader.weights import load_model
from worker.models.registry import spec_from_config
from worker.sampling.row_params import FILTERS, torch_columns

pytestmark = pytest.mark.suite("devices")

ROOT = Path(__file__).parents[2]


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report(tmp_path / "report.json")


def test_weight_bytes_of_known_models() -> None:
    """8,030,261,248 parameters with an unread embedding; 1,235,814,400 with a tied one."""
    eight, one = (spec_from_config(CONFIGS[name]) for name in ("8B", "1B"))
    assert weight_bytes(eight) == 2 * (8_030_261_248 - 128256 * 4096)
    assert weight_bytes(one) == 2 * 1_235_814_400
    assert kv_bytes_per_token(eight) == 131072
    assert kv_bytes_per_token(one) == 32768
    floor = decode_floor(eight, [2048] * 64, read_rate=3e12)
    assert floor == pytest.approx((15.01e9 + 17.18e9) / 3e12, rel=1e-3)


def test_prefill_operations_of_a_prompt() -> None:
    spec = spec_from_config(CONFIGS["8B"])
    assert prefill_operations(spec, [8192]) == pytest.approx(114.3e12 + 17.6e12, rel=1e-2)
    assert prefill_operations(spec, [1024] * 8) < prefill_operations(spec, [8192])


@pytest.mark.parametrize("settings", [{"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 9}])
def test_exact_shares_equal_the_filtered_distribution(settings: dict[str, Any]) -> None:
    logits = 2 * torch.randn(50, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    scores = logits.float()[None].clone()
    columns = torch_columns(row_params(1, **settings), FILTERS)
    apply_filters(scores, *map(torch.from_numpy, columns))
    found = exact_shares(logits.numpy(), **settings)
    assert np.allclose(found, scores[0].softmax(0).numpy(), atol=1e-6)


@pytest.mark.parametrize(
    ("found", "expected"), [([100], [100]), ([50, 50], [50, 50]), ([10, 90], [50, 50])]
)
def test_the_deviations_of_counts(found: list[int], expected: list[int]) -> None:
    """A filter may keep one token; then nothing can deviate."""
    _, deviations = chi_square(np.array(found), np.array(expected, dtype=float))
    assert (deviations > 4) == (found == [10, 90])


def test_sequences_of_simulated_steps_have_their_own_blocks() -> None:
    inputs = models.step_inputs([40, 3, 17], [1, 3, 5])
    assert inputs.positions.tolist() == [39, 0, 1, 2, 12, 13, 14, 15, 16]
    (attention,) = inputs.attention
    assert len(set(attention.slot_mapping.tolist())) == 9
    used = [
        table[: -(-n // 16)] for table, n in zip(attention.block_table, (40, 3, 17), strict=True)
    ]
    assert sorted(np.concatenate(used).tolist()) == [1, 2, 3, 4, 5, 6]
    assert attention.slot_mapping[0] == 3 * 16 + 39 % 16


def test_parity_on_the_fake(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    """With transformers: a prompt in one go, in chunks, and by graphs."""
    monkeypatch.setenv(REHEARSAL, "1")
    with rehearsed():
        models.parity(report)
    assert report.errors == []
    assert sorted(report.figures) == ["decodes by graphs", "in chunks", "in one go"]
    assert Report.read(Path(report.beside("report.json")))["figures"] == report.figures


def test_a_written_checkpoint_can_be_loaded(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL)
    prepared = prepare_checkpoint(tmp_path, tmp_path / "prepared")
    decoder = load_model(prepared, spec_of(prepared), torch.bfloat16, CPU, lambda fraction: None)
    assert decoder.spec == spec_from_config(SMALL)
    assert decoder.float32_logits(torch.ones(1, 32).bfloat16()).std() > 0


def test_the_check_is_refused_without_a_gpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    words = [sys.executable, "-m", "tests.gpu"]
    result = subprocess.run(words, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 2
    assert "make gpu-check needs an NVIDIA GPU" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_the_hour_fits_its_time_and_begins_with_what_never_ran() -> None:
    names = [each.name for each in PHASES]
    assert len(names) == len(set(names))
    hour = gpu_check.chosen(None, hour=True)
    assert all(each.seconds <= MAX_SECONDS for each in hour)
    assert sum(each.seconds for each in hour) <= HOUR_SECONDS
    assert sum(each.seconds for each in PHASES) <= 26 * 60
    assert COMMAND_SECONDS + MAX_SECONDS <= 600
    first, *rest = hour
    assert first.name == "versions"
    have_run = [each.has_run for each in rest]
    assert have_run == sorted(have_run)
    assert all(each.has_run for each in PHASES if not each.in_hour)


def run_hour(out: Path, **variables: str) -> tuple[subprocess.CompletedProcess[str], Any]:
    """A rehearsed command of hour.sh, and the JSON that it writes."""
    own = {"OUT": str(out), "PYTHON": sys.executable, "REHEARSE": "1", "SITE": str(out / "site")}
    state = out / "state.json"
    # Not one of the checkout, which is for another Python.
    own |= {"PACK": str(out / "none.tar.xz"), "STATE": str(state)}
    words = ["bash", str(ROOT / "tests/gpu/hour.sh")]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own | variables
    result = subprocess.run(words, capture_output=True, text=True, cwd=out, env=environment)
    return result, json.loads(state.read_text()) if state.exists() else {}


@pytest.mark.suite("rehearsal")
@pytest.mark.parametrize("name", [each.name for each in PHASES])
def test_a_phase_runs_on_the_fake(name: str, tmp_path: Path) -> None:
    result, answers = run_hour(tmp_path, ONLY=name)
    assert list(answers) == [name], result.stdout
    assert not answers[name]["errors"], result.stdout
    # Times on this host miss all targets.
    assert ("next:" in result.stdout) == (result.returncode != 0)


@pytest.mark.suite("rehearsal")
def test_a_bare_host_unpacks_its_packages_or_the_error_names_the_command(tmp_path: Path) -> None:
    archive = tmp_path / "pack.tar.xz"
    with tarfile.open(archive, "w:xz") as file:
        file.add(ROOT / "LICENSE", "flashinfer_jit_cache/LICENSE")
    result, answers = run_hour(tmp_path, ONLY="versions ceilings", PACK=str(archive))
    assert (tmp_path / "site/flashinfer_jit_cache/LICENSE").exists()
    assert answers["versions"]["figures"]["FLASHINFER_DISABLE_JIT"] == "1"
    assert result.returncode == 0
    archive.write_bytes(b"no archive")
    result, _ = run_hour(tmp_path, PACK=str(archive), SITE=str(tmp_path / "other"))
    assert result.returncode == 1
    assert "next:" in result.stdout


def hour_of(
    monkeypatch: pytest.MonkeyPatch, file: Path, phases: list[Phase], *words: str
) -> tuple[int, dict[str, Any]]:
    """Run a command of an hour with other phases."""
    monkeypatch.setattr(gpu_check, "PHASES", phases)
    monkeypatch.setattr(gpu_check, "refusal", lambda: None)
    status = gpu_check.main(["--hour", "--json", str(file), *words])
    return status, json.loads(file.read_text())


def test_an_hour_goes_on_where_a_command_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A phase that might not end in time is left to the next command, and none runs twice."""
    file = tmp_path / "hour.json"
    phases = [Phase(name, f"pretended:{name}", 30.0) for name in ("fine", "misses", "fails")]
    status, found = hour_of(monkeypatch, file, phases, "--seconds", "30.05")
    assert (status, list(found)) == (gpu_check.LEFT, ["fine"])
    begun = found["fine"]["seconds"]
    status, found = hour_of(monkeypatch, file, phases)
    assert (status, list(found)) == (1, ["fine", "misses", "fails"])
    assert found["fine"]["seconds"] == begun
    assert json.loads((tmp_path / "hour.d/misses.json").read_text())["missed"]
    status, found = hour_of(monkeypatch, file, phases, "--only", "fine")
    assert found["fine"]["seconds"] != begun, "a phase that is named runs again"


def test_a_command_that_is_cut_off_keeps_what_its_phase_wrote(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The phase, during which the machine may have been lost, is not run again."""
    file = tmp_path / "hour.json"
    script = (
        "import tests.gpu.__main__ as check; from tests.gpu.phases import Phase\n"
        "check.PHASES = [Phase('hangs', 'pretended:hangs', 60.0)]\n"
        "check.refusal = lambda: None\n"
        f"check.main(['--hour', '--json', {str(file)!r}])"
    )
    words = [sys.executable, "-u", "-c", script]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("    daemon"):
            break
    process.kill()
    process.wait()
    phases = [Phase("hangs", "pretended:hangs", 60.0), Phase("fine", "pretended:fine", 30.0)]
    status, found = hour_of(monkeypatch, file, phases)
    assert status == 1
    assert found["hangs"]["errors"] == [gpu_check.CUT_OFF]
    daemon = found["hangs"]["figures"]["daemon"]
    assert found["fine"]["figures"] == {"rate": 2.5}
    assert eventually(lambda: not psutil.pid_exists(daemon)), "it ends with the command"


def test_kernel_tests_fail_if_none_passes(monkeypatch: pytest.MonkeyPatch, report: Report) -> None:
    monkeypatch.setattr(kernels.pytest, "main", lambda words, plugins: pytest.ExitCode.OK)
    with pytest.raises(Failed, match="no test passed"):
        kernels.run_tests(report, [])
    assert report.figures == {"tests passed": 0}


def test_an_operator_without_a_kernel_for_a_dtype_is_named(
    monkeypatch: pytest.MonkeyPatch, report: Report
) -> None:
    stub = type(sys)("tests.gpu.operators")
    outcomes = {"aten.add.Tensor bfloat16": "ok", "aten.index_copy_ float8_e4m3fn": "not for it"}
    vars(stub)["run_pairs"] = lambda: outcomes
    monkeypatch.setitem(sys.modules, "tests.gpu.operators", stub)
    kernels.operators(report)
    assert report.errors == ["aten.index_copy_ float8_e4m3fn: not for it"]
    assert report.figures == {"pairs": 2}


def _name_of(requirement: str) -> str:
    return pack.canonical(re.split("[^A-Za-z0-9._-]", requirement)[0])


def test_every_dependency_is_packed_or_preinstalled() -> None:
    """A bare host has torch, transformers, pytest and their dependencies."""
    there = {"httpx", "jinja2", "numpy", "prometheus-client", "pyyaml", "rich", "safetensors"}
    there |= {"tokenizers", "torch", "transformers", "uvloop"}
    # What those need themselves, or pytest.
    there |= {
        "anyio",
        "click",
        "h11",
        "httpcore",
        "huggingface-hub",
        "packaging",
        "requests",
        "tqdm",
        "typing-extensions",
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {_name_of(each) for each in project["dependencies"]}
    needed |= {_name_of(each) for each in project["optional-dependencies"]["gpu"]}
    packed = {pack.canonical(each) for each in pack.WHEELS}
    for name in packed - {"apache-tvm-ffi", "flashinfer-python"}:
        needed |= {
            _name_of(each) for each in importlib.metadata.requires(name) or [] if ";" not in each
        }
    assert needed <= packed | there
    assert packed <= pack.pins().keys()


def test_a_load_test_fails_for_missing_outputs() -> None:
    with fake_openai(respond_normally) as fake:
        for how in (("--concurrency", "3"), ("--request-rate", "200")):
            run = server.load(fake.url, 6, *how, shape=(8, 4))
            server.demand_answers(run, 6)
            assert set(server.shown(run)) == set(server.SHOWN)
            assert run["output_tokens"] == 24

    def short(path: str, body: dict[str, Any]) -> Iterable[bytes]:
        return respond_normally(path, body | {"max_tokens": body["max_tokens"] - 1})

    with fake_openai(short) as fake:
        run = server.load(fake.url, 2, "--concurrency", "1", shape=(8, 4))
    with pytest.raises(Failed, match="not all are answered in full"):
        server.demand_answers(run, 2)


def test_a_phase_that_fails_hangs_or_dies_keeps_its_figures(tmp_path: Path) -> None:
    names = ("fine", "misses", "fails", "breaks", "dies")
    phases = [Phase(each, f"pretended:{each}", 60.0) for each in names]
    seen: list[int] = []
    answers = gpu_check.run_all(
        phases, 600.0, lambda answers: seen.append(len(answers)), folder=tmp_path
    )
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5], "as each begins, and as it ends"
    for name in ("fine", "misses", "fails", "dies"):
        assert answers[name]["figures"] == {"rate": 2.5}
    assert answers["misses"]["missed"] == ["batch 1: 0.80"]
    assert answers["misses"]["errors"] == []
    assert "2 is not 3" in answers["fails"]["errors"][0]
    assert "ZeroDivisionError" in answers["breaks"]["errors"][0]
    assert "failed: 7" in answers["dies"]["errors"][0]
    assert [gpu_check.succeeded({name: answers[name]}) for name in names] == [True] + [False] * 4
    shown = gpu_check.table(answers)
    assert (shown.count("FAILED"), shown.count("target missed  ")) == (3, 1)
    assert "rate                             2.5" in shown


def test_child_sessions_end_with_their_phase(tmp_path: Path) -> None:
    phases = [Phase("hangs", "pretended:hangs", 4.0)]
    answers = gpu_check.run_all(phases, 60.0, folder=tmp_path)
    assert "ended after 4 s" in answers["hangs"]["errors"][-1]
    assert not psutil.pid_exists(answers["hangs"]["figures"]["daemon"])


def test_an_ended_check_ends_its_phase_and_keeps_figures(tmp_path: Path) -> None:
    """Ended by SIGTERM, as by `timeout`."""
    script = (
        "import sys; import tests.gpu.__main__ as check; from tests.gpu.phases import Phase\n"
        "check.PHASES = [Phase(n, 'pretended:hangs', 60.0) for n in ('one', 'two')]\n"
        "check.refusal = lambda: None\n"
        f"sys.exit(check.main(['--json', {str(tmp_path / 'found.json')!r}]))"
    )
    words = [sys.executable, "-u", "-c", script]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("    daemon"):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    assert process.wait() == 1
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["one"]["errors"] == ["this check was ended"]
    assert found["two"]["errors"] == ["not run: this check was ended"]
    assert eventually(lambda: not psutil.pid_exists(found["one"]["figures"]["daemon"]))
    assert "FAILED" in rest


def test_phases_without_time_left_are_not_started(tmp_path: Path) -> None:
    answers = gpu_check.run_all([Phase("late", "pretended:fine", 30.0)], 0.0, folder=tmp_path)
    assert answers["late"]["errors"] == ["not run: no time was left"]


def test_every_phase_names_an_existing_function() -> None:
    for phase in PHASES:
        module, name = phase.function.split(":")
        source = (Path(__file__).parent / f"{module}.py").read_text()
        assert f"def {name}(report: Report)" in source
