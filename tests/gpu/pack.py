"""An archive for bare GPU hosts: prebuilt kernels and unpacked wheels.

    python -m worker.cuda.build_flashinfer FOLDER --for-tests
    python -m tests.gpu.pack FOLDER [--file gpu-pack.tar.xz]

The host has Python 3.12, torch, transformers and pytest, and neither pip nor network: the archive
needs Python alone to be unpacked (`python3 -m tests.gpu.pack --unpack gpu-pack.tar.xz TO`), and
then one folder on PYTHONPATH. Together with the checkout it stays under 64 MiB.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KERNELS: Final = "flashinfer_jit_cache"
PYTHON: Final = "3.12"
GLIBC: Final = range(17, 40)
"""Minor versions of the host, which pip compares one by one."""
WHEELS: Final = (
    "annotated-doc",
    "annotated-types",
    "apache-tvm-ffi",
    "fastapi",
    "flashinfer-python",
    "gguf",
    "httptools",
    "llguidance",
    "msgspec",
    "openai-harmony",
    "opentelemetry-api",
    "pillow",
    "pydantic",
    "pydantic_core",
    "pyzmq",
    "setproctitle",
    "starlette",
    "typing-inspection",
    "uvicorn",
    "websockets",
)
"""What torch, transformers and pytest do not bring."""
LIMIT: Final = 64 << 20


def pins() -> dict[str, str]:
    """Package versions from constraints.txt and the extra `gpu`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    lines += project["optional-dependencies"]["gpu"]
    found = (line.partition(";")[0].strip().partition("==") for line in lines)
    return {canonical(name): version for name, _, version in found if version}


def canonical(name: str) -> str:
    """Normalise a package name."""
    return re.sub("[-_.]+", "-", name).lower()


def install(site: Path) -> None:
    """Install unpacked wheels for the host's Python."""
    versions = pins()
    tags = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    tags += ["--platform=manylinux2014_x86_64", f"--python-version={PYTHON}"]
    wanted = [f"{name}=={versions[canonical(name)]}" for name in WHEELS]
    words = ["--no-deps", "--only-binary=:all:", "--implementation=cp", "--no-compile", "-q"]
    pip = [sys.executable, "-m", "pip", "install", "--target", str(site)]
    subprocess.run([*pip, *words, *tags, *wanted], check=True)


def checkout_bytes() -> int:
    """The size of all files of this checkout that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True)
    files = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return sum(each.stat().st_size for each in files if each.is_file())


def pack(folder: Path, file: Path) -> int:
    """Write the archive; returns its size. Kernels are first, as the most valuable part."""
    site = folder / "site"
    with tarfile.open(file, "w:xz") as archive:
        archive.add(folder / KERNELS, KERNELS)
        for each in sorted(site.iterdir()):
            archive.add(each, each.name)
    return file.stat().st_size


def unpack(file: Path, to: Path) -> None:
    """Unpack an archive of `pack`, unless the folder exists, which means it is complete."""
    if to.exists():
        return
    new = to.with_name(f"{to.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(file) as archive:
        archive.extractall(new, filter="data")
    new.rename(to)


def main(words: list[str]) -> int:
    """Return the exit status: 1 if the archive is too large."""
    parser = argparse.ArgumentParser("python -m tests.gpu.pack", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the kernels were built; or unpack to")
    parser.add_argument("--file", type=Path, default=Path("gpu-pack.tar.xz"))
    parser.add_argument("--unpack", type=Path, help="an archive")
    options = parser.parse_args(words)
    if options.unpack:
        unpack(options.unpack, options.folder)
        return 0
    folder = options.folder.resolve()
    count = len(list((folder / KERNELS / "jit_cache").glob("*/*.so")))
    shutil.rmtree(folder / "site", ignore_errors=True)
    install(folder / "site")
    size, rest = pack(folder, options.file), checkout_bytes()
    print(f"{options.file}: {count} modules, {len(WHEELS)} wheels, {size / 2**20:.1f} MiB")
    print(f"with the checkout: {(size + rest) / 2**20:.1f} MiB of {LIMIT >> 20}")
    return 0 if size + rest < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
