"""The process that prepares a model, and its messages to its parent process.

Command line: `python -m deploy.models.prepare NAME SOURCE KIND TARGET FINAL`. It prints lines of
JSON, each a list [kind, text].
"""

import json
import sys
import warnings
from typing import Final, NamedTuple

from deploy.models import draft_head, gguf_file, hf_folder, prepared_folder, tokenizer_check
from proto.errors import ModelError

QUIET_LIBRARIES: Final = {
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment variables that keep libraries from printing, and from requests to a model hub."""


class PrepareMessage(NamedTuple):
    """A line of the process. kind: "progress", "error", or "other" for output of a library."""

    kind: str
    text: str

    def to_line(self) -> str:
        return json.dumps(self)

    @classmethod
    def from_line(cls, line: str) -> "PrepareMessage":
        try:
            kind, text = json.loads(line)
        except (ValueError, TypeError):
            return cls("other", line.rstrip())
        return cls(kind, text)


def prepare(
    name: str,
    source: str,
    kind: str,
    target: str,
    final: str,
    report: prepared_folder.ProgressCallback,
) -> None:
    """Fill the folder `target`, which will be moved to `final`; raises ModelError or OSError.

    name, source, kind: as in `store.ModelSource`.
    """
    read = {"gguf": gguf_file.read, "folder": hf_folder.read, "head": draft_head.read}[kind]
    contents = read(source, report)
    if kind != "head":
        report("checking the tokenizer")
        tokenizer_check.check(
            contents.tokenizer_json, f"{source}: tokenizer", is_converted=kind == "gguf"
        )
    prepared_folder.write(contents, name=name, source=source, target=target, final=final)


def _print_progress(what: str) -> None:
    print(PrepareMessage("progress", what).to_line(), flush=True)


def main() -> int:
    """Prepare a model; return the exit status: 0 done, 2 the model cannot be used."""
    warnings.simplefilter("ignore")  # libraries warn about models in general
    try:
        name, source, kind, target, final = sys.argv[1:]
        prepare(name, source, kind, target, final, _print_progress)
    except (ModelError, OSError) as error:
        message = PrepareMessage("error", " ".join(str(error).split()))
        print(message.to_line(), flush=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
