"""`python -m tests.benchmarks.sampling` with few rows: the process, the figures, the file."""

import json
from pathlib import Path

import pytest

from tests.benchmarks import sampling
from tests.benchmarks import sampling as sampling_bench
from tests.benchmarks.command import run
from tests.benchmarks.messages import SamplingCaseTimings, SamplingTimings, SamplingWorkload
from worker.cpu.kernels import KernelsUnavailableError, load_kernels


def test_cases_alternate_in_a_separate_process() -> None:
    try:
        variant = load_kernels().variant
    except KernelsUnavailableError as reason:
        pytest.skip(str(reason))
    cases = sampling_bench.cases(3)
    timings = sampling_bench.measure(
        SamplingWorkload(
            cases=cases,
            vocab_size=4000,
            context_tokens=20,
            num_steps=3,
            dtype="bfloat16",
            num_threads=1,
        )
    )
    assert (timings.kernels, timings.num_threads, timings.num_steps) == (variant, 1, 3)
    assert [each.name for each in timings.cases] == [each.name for each in cases]
    first = timings.cases[0]
    assert (first.ratio_median, first.ratio_min) == (1.0, 1.0)
    for each in timings.cases:
        assert each.num_rows == 3
        assert 0.0 < each.step_us_min <= each.step_us_median
        assert each.ratio_min == pytest.approx(each.step_us_min / first.step_us_min)


def test_the_file_has_the_figures_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def played(workload: SamplingWorkload) -> SamplingTimings:
        times = [
            SamplingCaseTimings(
                name=each.name,
                num_rows=len(each.rows),
                step_us_median=200.0,
                step_us_min=100.0,
                ratio_median=1.0,
                ratio_min=1.25,
            )
            for each in workload.cases
        ]
        return SamplingTimings(
            kernels="avx2",
            num_threads=workload.num_threads or 0,
            num_steps=workload.num_steps,
            cases=times,
        )

    monkeypatch.setattr(sampling_bench, "measure", played)
    path = tmp_path / "sampling.json"
    words = ["--rows", "5", "--steps", "7", "--cpu-threads", "3", "--json", str(path)]
    assert run(sampling.main, [*words]) == 0
    document = json.loads(path.read_text())
    assert document["command"] == "python -m tests.benchmarks.sampling"
    assert (document["num_threads"], document["num_steps"]) == (3, 7)
    assert {each["num_rows"] for each in document["cases"]} == {5}
    shown = capsys.readouterr().out
    assert "one of them with penalties" in shown
    assert "1.25" in shown
