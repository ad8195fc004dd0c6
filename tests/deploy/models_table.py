"""Write the table of supported models in README.md: python -m tests.deploy.models_table."""

import re
from pathlib import Path
from typing import Final

from worker.models.families import supported_models

README: Final = Path(__file__).parents[2] / "README.md"


def with_current_table(text: str) -> str:
    """Return the text of README.md with the table that `tokend models --supported` prints."""
    table, _, _ = "\n".join(supported_models()).partition("\n\n")
    return re.sub(r"^\| Models  .*\n(?:\|.*\n)+", lambda found: table + "\n", text, flags=re.M)


if __name__ == "__main__":
    README.write_text(with_current_table(README.read_text()))
