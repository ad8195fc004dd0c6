"""The documents say what the command line does."""

import re
from pathlib import Path

from deploy.flags import all_flags
from deploy.serve_help import field_helps, markdown_table

ROOT = Path(__file__).parents[2]


def test_the_table_of_settings_is_current() -> None:
    """To renew it: python -c 'from deploy.serve_help import markdown_table as t; print(t())'."""
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert markdown_table() in text


def test_the_readme_names_flags_that_exist_and_says_what_they_say() -> None:
    helps = {flag.name: field_helps()[flag.field] for flag in all_flags()}
    rows = re.findall(r"^\| `(--[a-z-]+)` \| (.+?) \|$", (ROOT / "README.md").read_text(), re.M)
    assert len(rows) >= 10
    for name, meaning in rows:
        assert meaning == helps[name]
