"""The process that prepares a model.

Command line: `python -m deploy.models.prepare NAME SOURCE KIND MMPROJ TARGET FINAL`.
"""

import sys
import warnings

from deploy.models import gguf_file, hf_folder, prepared_folder, tokenizer_check
from deploy.models.child_process import ChildMessage
from proto.errors import ModelError


def prepare(
    name: str,
    source: str,
    kind: str,
    mmproj: str,
    target: str,
    final: str,
    report: prepared_folder.ProgressCallback,
) -> None:
    """Fill the folder `target`, which will be moved to `final`; raises ModelError or OSError.

    name, source, kind, mmproj: as in `store.ModelSource`.
    """
    if kind == "gguf":
        contents = gguf_file.read(source, report, mmproj)
    else:
        read = hf_folder.read if kind == "folder" else hf_folder.read_head
        contents = read(source, report)
    if kind != "head":
        report("checking the tokenizer")
        tokenizer_check.check(
            contents.tokenizer_json, f"{source}: tokenizer", is_converted=kind == "gguf"
        )
    prepared_folder.write(contents, name=name, source=source, target=target, final=final)


def _print_progress(what: str) -> None:
    ChildMessage("progress", what).send()


def main() -> int:
    """Prepare a model; return the exit status: 0 done, 2 the model cannot be used."""
    warnings.simplefilter("ignore")  # libraries warn about models in general
    try:
        name, source, kind, mmproj, target, final = sys.argv[1:]
        prepare(name, source, kind, mmproj, target, final, _print_progress)
    except (ModelError, OSError) as error:
        ChildMessage("error", " ".join(str(error).split())).send()
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
