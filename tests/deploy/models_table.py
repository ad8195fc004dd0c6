"""Write the tables of supported models in docs/models.md: python -m tests.deploy.models_table."""

import re
from pathlib import Path
from typing import Final

from worker.models.families import supported_models

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"


def with_current_tables(text: str) -> str:
    """Return the text of docs/models.md with what `tokend models --supported` prints."""
    lines = "\n".join(supported_models()) + "\n"
    return re.sub(r"^\| Models  (?:.*\n)*?.*and others\)\.\n", lambda _: lines, text, flags=re.M)


if __name__ == "__main__":
    PAGE.write_text(with_current_tables(PAGE.read_text()))
