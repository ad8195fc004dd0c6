"""Code of the worker outside of the devices' folders does not know which device it has."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "worker"
DEVICES = ("host", "reference", "cpu", "cuda")
CHOICE = WORKER / "create_device.py"
"""The only file that names devices."""
PRODUCTS = WORKER / "commands" / "products.py"
"""Times the kernels of a CPU."""
QUESTIONS = re.compile(
    r"\bdevice\.type\b|\.is_cuda\b|\bon_cuda\b|\bon_gpu\b|\btorch\.cuda\b|\bshares_memory\b"
    r"|\bkernels is (?:not )?None\b|\bHost(?:Placement|Transfers|Device)\)"
    r"|[\"'](?:cuda|cpu)[\"']"
)
"""Questions that only a Device may answer."""
NEUTRAL = [
    path
    for path in sorted(WORKER.rglob("*.py"))
    if path not in (CHOICE, PRODUCTS) and path.relative_to(WORKER).parts[0] not in DEVICES
]


def imported_devices(source: str) -> list[tuple[str, int]]:
    """Return module and line of each import of a device's folder, also inside functions."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{each.name}" for each in node.names]
        found += [
            (name, node.lineno)
            for name in names
            if name.startswith(tuple(f"worker.{device}." for device in DEVICES))
        ]
    return found


def questions(source: str) -> list[str]:
    """Return what a source asks, without comments and docstrings of their own lines."""
    return [
        found[0]
        for line in re.sub(r'""".*?"""', "", source, flags=re.DOTALL).splitlines()
        if (found := QUESTIONS.search(line.partition("  #")[0]))
    ]


@pytest.mark.parametrize("path", NEUTRAL, ids=lambda path: str(path.relative_to(WORKER)))
def test_neutral_code_imports_no_device_and_asks_for_none(path: Path) -> None:
    source = path.read_text()
    assert imported_devices(source) == []
    assert questions(source) == []


def test_devices_ignore_each_other() -> None:
    """But for the host's memory and sampling, which a GPU's host and the reference have, too."""
    shared = ("worker.host.", "worker.reference.", "worker.cpu.sampling.")
    for device in ("cpu", "cuda"):
        others = tuple(f"worker.{each}." for each in DEVICES if each != device)
        for path in sorted((WORKER / device).rglob("*.py")):
            found = [name for name, _ in imported_devices(path.read_text())]
            assert not [name for name in found if name.startswith(others) and
                        not name.startswith(shared)], path  # fmt: skip


def test_the_check_finds_imports_and_questions() -> None:
    assert imported_devices("def f():\n    from worker.cuda.graphs import X\n") == [
        ("worker.cuda.graphs.X", 2)
    ]
    asked = 'if x.device.type == "cpu":\n    pass\nif kernels is None:\n    torch.cuda.f()\n'
    assert questions(asked) == ["device.type", "kernels is None", "torch.cuda"]
    assert questions('"""torch.cuda"""\nx = 1  # on_cuda\n') == []
