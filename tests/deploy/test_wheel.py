"""`make wheel` packs the kernels of every CPU; what it packs serves without a compiler."""

import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import httpx
import pytest

from tests.e2e.daemon import Daemon
from worker.cpu.build_kernels import SOURCE_DIR, X86_VARIANTS, cpu_flags, usable_variants

pytestmark = pytest.mark.suite("wheel")

ROOT = Path(__file__).parents[2]
MAX_BYTES = 100 << 20
TORCH_GLIBC = (2, 28)
"""Of torch's own wheels: a system that is older cannot run tokend anyway."""


@pytest.fixture(scope="module")
def wheel() -> Path:
    made = subprocess.run(
        ["make", "wheel", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    (file,) = (ROOT / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's packages alone, which nothing can write into."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True)
    for path in [folder, *folder.rglob("*")]:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    return folder


def test_the_wheel_serves_every_python_and_says_which_systems(wheel: Path) -> None:
    """auditwheel has read the versions of symbols that the libraries need."""
    tag = re.fullmatch(r"tokend-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_x86_64\.whl", wheel.name)
    assert tag is not None, wheel.name
    assert TORCH_GLIBC <= (int(tag[1]), int(tag[2])) <= (2, 34), "RHEL 9 has 2.34"
    assert wheel.stat().st_size < MAX_BYTES


def test_the_wheel_has_all_kernels_and_both_libraries_of_the_engine(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for variant in X86_VARIANTS:
        assert f"worker/csrc/{variant.library(SOURCE_DIR).name}" in names
    libraries = {name.rpartition("_")[0] for name in names if name.startswith("engine_core/csrc/")}
    assert {"engine_core/csrc/libtokend_block_hash", "engine_core/csrc/libtokend_suffix_index"} <= (
        libraries
    )
    assert any(re.match(r"engine_core/compiled_modules/.*/scheduler\.cpython", n) for n in names)


def test_it_serves_without_a_compiler(installed: Path, tmp_path: Path) -> None:
    """With nothing on the PATH, and from packages that cannot be written to."""
    variables = {"PYTHONPATH": str(installed), "PATH": str(tmp_path)}
    where = "import worker; print(worker.__file__)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", where],
        env=os.environ | variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(installed)
    with Daemon(environment=variables) as daemon:
        best = usable_variants(X86_VARIANTS, cpu_flags())[0].name
        assert f"  kernels   {best}" in daemon.text
        assert "slow" not in daemon.text
        assert "  drafts    grammar, suffix," in daemon.text
        body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["text"].startswith(" Paris")
