"""The ahead-of-time build of FlashInfer's kernels: preparation and packing, without nvcc."""

import importlib.util
from pathlib import Path

import pytest
import torch

from proto.errors import ConfigError
from tests.worker.attention.flashinfer_cases import CASES, MIXED, case_of
from tests.worker.attention.steps import Case
from worker.attention.kv_cache import kv_layout
from worker.cuda.build_flashinfer import (
    EIGHT_BITS,
    TEST_VARIANTS,
    UNUSED_HEADERS,
    FlashInferVariant,
    build_environment,
    find_toolkit,
    pack,
    parser,
    variants,
)
from worker.cuda.flashinfer_library import VERSION


def toolkit(root: Path, name: str) -> Path:
    folder = root / name
    for file in ("include/cuda_runtime.h", "bin/nvcc"):
        (folder / file).parent.mkdir(parents=True)
        (folder / file).touch()
    return folder


def test_the_newest_cuda_toolkit_is_found_and_compiler_wrappers_are_not(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch()
    (tmp_path / "cuda-13.2").mkdir()
    with pytest.raises(ConfigError, match="no CUDA toolkit"):
        find_toolkit(tmp_path)
    toolkit(tmp_path, "cuda-12.9")
    newest = toolkit(tmp_path, "cuda-13.0")
    assert find_toolkit(tmp_path) == newest


def test_the_build_environment_names_existing_files(tmp_path: Path) -> None:
    found = build_environment(tmp_path / "work", Path("/cuda"), "9.0a", 3)
    assert found["CUDA_HOME"] == "/cuda"
    assert (found["FLASHINFER_CUDA_ARCH_LIST"], found["MAX_JOBS"]) == ("9.0a", "3")
    headers = Path(found["FLASHINFER_EXTRA_CUDAFLAGS"].removeprefix("-I"))
    assert {each.name for each in headers.iterdir()} == set(UNUSED_HEADERS)
    stubs = Path(found["FLASHINFER_EXTRA_LDFLAGS"].removeprefix("-L"))
    assert (stubs / "libcuda.so").stat().st_size > 0


def test_the_package_has_the_names_that_the_library_looks_for(tmp_path: Path) -> None:
    libraries = [tmp_path / f"{name}.so" for name in ("page", "fa2_of_some_kind")]
    for each in libraries:
        each.write_bytes(each.stem.encode())
    place = pack(libraries, tmp_path / "out") / "__init__.py"
    spec = importlib.util.spec_from_file_location("flashinfer_jit_cache_of_a_test", place)
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    assert package.__version__.startswith(VERSION)
    cache = Path(package.get_jit_cache_dir())
    assert (cache / "page/page.so").read_bytes() == b"page"
    assert (cache / "fa2_of_some_kind/fa2_of_some_kind.so").exists()


def test_unsupported_head_sizes_are_refused(tmp_path: Path) -> None:
    assert parser().parse_args([str(tmp_path), "--head-dims", "256"]).head_dims == [256]
    with pytest.raises(SystemExit):
        parser().parse_args([str(tmp_path), "--head-dims", "96"])


def variants_of(case: Case) -> set[FlashInferVariant]:
    """The modules that the wrappers of a case's layer groups use."""
    dtype, kv_dtype = (
        "" if each is None else str(each).removeprefix("torch.")
        for each in (case.dtype, case.kv_dtype)
    )
    windows = kv_layout([None, case.window]).windows
    return {
        FlashInferVariant(case.head_dim, dtype, kv_dtype, window is not None, case.soft_cap > 0)
        for window in windows
    }


def test_the_modules_for_tests_cover_the_tests_on_a_gpu() -> None:
    cases = [each for each in CASES.values() if not each.latent_dim]
    cases.append(case_of(MIXED, kv_dtype=getattr(torch, EIGHT_BITS)))
    # The phase `families` of the GPU check has Gemma 2 beside them.
    gemma2 = FlashInferVariant(64, window=True, soft_cap=True)
    assert set().union({gemma2}, *map(variants_of, cases)) == set(TEST_VARIANTS)


def test_variants_are_the_product_of_the_flags(tmp_path: Path) -> None:
    chosen = parser().parse_args([str(tmp_path), "--head-dims", "64", "--soft-cap", "--windows"])
    assert variants(chosen) == [
        FlashInferVariant(64, window=window, soft_cap=soft_cap)
        for window in (False, True)
        for soft_cap in (False, True)
    ]
    chosen = parser().parse_args([str(tmp_path), "--head-dims", "64", "--fp8"])
    assert variants(chosen) == [FlashInferVariant(64), FlashInferVariant(64, kv_dtype=EIGHT_BITS)]
