"""`python -m tests.benchmarks.attention` on a small shape: the process, the figures, the file."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import attention
from tests.benchmarks import attention as attention_bench
from tests.benchmarks.command import run
from tests.benchmarks.messages import AttentionTimings, AttentionWorkload
from worker.cpu.kernels import KernelsUnavailableError, load_kernels


def small(name: str, kv_cache_dtype: str) -> AttentionWorkload:
    return AttentionWorkload(
        name=name,
        num_seqs=3,
        context_tokens=40,
        query_tokens=2,
        dtype="bfloat16",
        kv_cache_dtype=kv_cache_dtype,  # type: ignore[arg-type]
        rounds=2,
        read_megabytes=1,
        num_threads=1,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
    )


def test_a_workload_runs_in_a_separate_process() -> None:
    try:
        variant = load_kernels().variant
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
    timings = attention_bench.measure([small("wide", "f32"), small("narrow", "int8")])
    assert [each.workload for each in timings] == ["wide", "narrow"]
    assert [each.kernels for each in timings] == [variant] * 2
    # tokens * layers * (K and V) * heads * bytes of a row
    assert timings[0].kv_megabytes == pytest.approx(120 * 2 * 2 * 2 * 64 / 1e6)
    assert timings[1].kv_megabytes == pytest.approx(120 * 2 * 2 * 2 * (16 + 4) / 1e6)
    for each in timings:
        assert 0.0 < each.step_ms_best <= each.step_ms_median
        assert 0.0 < each.read_gb_per_s_median <= each.read_gb_per_s_best
        assert each.kv_gb_per_s_best == pytest.approx(each.kv_megabytes / each.step_ms_best)
        assert each.share_of_read_median > 0.0


def test_the_file_has_the_figures_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def played(workloads: list[AttentionWorkload]) -> list[AttentionTimings]:
        return [
            AttentionTimings(
                workload=each.name,
                kernels="avx2",
                num_threads=each.num_threads or 0,
                step_ms_best=1.0,
                step_ms_median=2.0,
                kv_megabytes=30.0,
                kv_gb_per_s_best=30.0,
                kv_gb_per_s_median=15.0,
                read_gb_per_s_best=40.0,
                read_gb_per_s_median=20.0,
                share_of_read_median=0.75,
                attention_gflop_per_s_best=12.0,
            )
            for each in workloads
        ]

    monkeypatch.setattr(attention_bench, "measure", played)
    path = tmp_path / "attention.json"
    words = ["--kv-cache-dtype", "int8", "--cpu-threads", "3", "--json", str(path)]
    assert run(attention.main, [*words]) == 0
    rows = json.loads(path.read_text())
    assert [row["workload"].endswith(", int8") for row in rows] == [True] * 5
    assert rows[0]["num_threads"] == 3
    assert rows[0]["share_of_read_median"] == 0.75
    shown = capsys.readouterr().out
    assert "16 decodes, 1000 tokens each, int8" in shown
    assert "0.75" in shown


def test_an_unwritable_file_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_bench, "measure", lambda workloads: pytest.fail("measured"))
    assert run(attention.main, ["--json", str(tmp_path / "no" / "where")]) == 2
