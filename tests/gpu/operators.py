"""Every torch operator of the steps, by dtype, run once on a device by itself.

    python -m tests.gpu.operators            run them, a line for each that fails
    python -m tests.gpu.operators --write    find them again, on a machine without a GPU

Shapes and devices of the steps are checked by fake tensors (tests/fakes/fake_cuda_step.py), which
do not know of which dtypes an operator has a CUDA kernel. So they write down one call of each,
operators.json, and this makes small tensors of its shapes and runs it.
"""

import json
import sys
from pathlib import Path
from typing import Any, Final

import torch

FILE: Final = Path(__file__).with_name("operators.json")


def run_pairs(device: torch.device | None = None) -> dict[str, str]:
    """ "ok" or the error by operator and dtypes; on the GPU by default."""
    where = device or torch.device("cuda", 0)
    found: dict[str, str] = {}
    for call in json.loads(FILE.read_text()):
        found[name_of(call)] = _run(call, where)
    return found


def name_of(call: dict[str, Any]) -> str:
    """For example "aten.index_select.default(bfloat16, int64)"."""
    return f"{call['operator']}({', '.join(call['dtypes'])})"


def text_of(calls: list[dict[str, Any]]) -> str:
    """The content of the file: one call per line."""
    return "[\n" + ",\n".join(json.dumps(each) for each in calls) + "\n]\n"


def _run(call: dict[str, Any], device: torch.device) -> str:
    namespace, name, overload = call["operator"].split(".")
    try:
        operator = getattr(getattr(getattr(torch.ops, namespace), name), overload)
        args, kwargs = _made(call["args"], device), _made(call["kwargs"], device)
        if name == "repeat_interleave":
            # The sum of sizes is the size of the result.
            repeats = args[-1]
            repeats[0] = kwargs["output_size"]
        operator(*args, **kwargs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "ok"


def _made(value: Any, device: torch.device) -> Any:
    """An argument: ones for floats, so that logarithms exist, zeros for what may be an index."""
    match value:
        case {"tensor": shape, "dtype": dtype, "device": where}:
            there = torch.device("cpu") if where == "cpu" else device
            tensor = torch.zeros(shape, dtype=getattr(torch, dtype), device=there)
            return tensor.fill_(1) if tensor.is_floating_point() else tensor
        case {"torch": name}:
            return getattr(torch, name)
        case {"on": name}:
            return device if name == "cuda" else torch.device(name)
        case dict():
            return {name: _made(each, device) for name, each in value.items()}
        case list():
            return [_made(each, device) for each in value]
    return value


def main(arguments: list[str]) -> int:
    """Write the file or run its operators; returns 1 if an operator fails."""
    if arguments == ["--write"]:
        from tests.fakes.fake_cuda_step import seen_operators

        calls = seen_operators()
        FILE.write_text(text_of(calls))
        print(f"{FILE.name}: {len(calls)} operators and dtypes")
        return 0
    failed = {name: error for name, error in run_pairs().items() if error != "ok"}
    for name, error in failed.items():
        print(f"{name}: {error}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
