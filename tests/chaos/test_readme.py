"""All tests named in the table of faults exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_of_the_table_exists() -> None:
    named = re.findall(
        r"`(tests/\S+?\.py)(?:::(\w+))?`", Path(__file__).with_name("README.md").read_text()
    )
    assert len(named) > 20
    for file, name in named:
        assert f"def {name}" in (ROOT / file).read_text(), f"{file}::{name}"
