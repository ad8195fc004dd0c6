"""The list of planted faults matches the current code."""

import ast
from pathlib import Path

import pytest

from tests.planted_faults.faults import FAULTS, Fault

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"proto", "engine_core", "worker", "api_server", "deploy"}

each_fault = pytest.mark.parametrize("fault", FAULTS, ids=[fault.name for fault in FAULTS])


@each_fault
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.new != fault.old
    planted = text.replace(fault.old, fault.new)
    if fault.file.endswith(".py"):
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(text))
    assert fault.tests
    for path in fault.tests:
        assert (ROOT / path).exists(), path


def test_every_folder_has_faults() -> None:
    assert {fault.file.partition("/")[0] for fault in FAULTS} == FOLDERS
    assert len(FAULTS) >= 34
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
