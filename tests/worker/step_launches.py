"""What the host launches on a GPU in each kind of step, counted on the one of fake_cuda_step.py.

    python -m tests.worker.step_launches --write    after a change that is meant to launch otherwise

The counts of all models and steps are in step_launches.json. The replay of a graph counts as one
launch. So does each operator of torch, kernel of Triton, call of FlashInfer and copy.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from proto.codec import changed
from proto.messages.logit_edits import LogitEdits
from proto.messages.scheduler_output import SchedulerOutput
from tests.fakes.fake_cuda_step import HotPath, all_tokens_allowed, build_runner, watched
from tests.fakes.step_messages import StepMessages
from worker.attention.kv_cache import KVLayout

FILE: Final = Path(__file__).with_name("step_launches.json")
_EDITS: Final = LogitEdits(
    frequency_penalty=0.5, bias_token_ids=(1,), bias_values=(2.0,), bad_words=((4, 5),)
)
_DECODES: Final[dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    "temperature": ({"temperature": 0.8}, {}),
    "filters": ({"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1}, {}),
    "penalties, bias and bad words": ({"temperature": 0.0, "edits": _EDITS}, {}),
    "logprobs": ({"temperature": 0.0, "logprobs": 3}, {}),
    "named logprobs": ({"temperature": 0.0, "logprobs": 0, "logprob_token_ids": (7, 8)}, {}),
    "grammar": ({"temperature": 0.0}, {"constrained_seq_ids": [3]}),
    "block copies": ({"temperature": 0.0}, {"block_copies": [1, 33, 9, 34]}),
    "drafts to verify": ({"temperature": 0.0}, {"drafts": {3: [5, 6]}}),
}
"""What a decode of sequence 3 has beside sequences 1 and 2: its sampling fields, and the step's."""
_MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "llama without graphs": ("llama", {"enforce_eager": True}),
    "gemma3": ("gemma3", {}),
    "mixtral without graphs": ("mixtral", {"enforce_eager": True}),
    "deepseek3 without graphs": ("deepseek3", {"enforce_eager": True}),
    "granitehybrid": ("granitehybrid", {}),
    "qwen3next without graphs": ("qwen3next", {"enforce_eager": True}),
    "llama with a draft model": ("llama", {"has_draft_model": True}),
    "llama with adapters": ("llama", {"has_adapters": True}),
    "llama with adapters, without graphs": (
        "llama",
        {"has_adapters": True, "enforce_eager": True},
    ),
}


def _script(layout: KVLayout, has_draft_model: bool) -> Iterator[tuple[str, SchedulerOutput]]:
    """Yield steps that follow each other, with names; "" for one that is not counted."""
    has_states = layout.states is not None
    steps = StepMessages(layout.num_block_groups, 12 if has_states else 4, has_states)
    yield "two prompts", steps.next_step({1: range(5), 2: range(7)})
    if has_draft_model:
        look = {"lookahead_seq_ids": [1, 2], "num_lookahead_tokens": [2, 2]}
        yield "decode with two drafts each", steps.next_step(**look)
        return
    yield "decode", steps.next_step()
    yield "chunk of a prompt, and decodes", steps.next_step({3: range(9)}, {3: 4})
    yield "last chunk, and decodes", steps.next_step(chunks={3: 5})
    yield "decode after a request has ended", steps.next_step(finished=(3,))
    for name, (params, fields) in _DECODES.items():
        yield "", steps.next_step({3: range(4)}, params=params)
        yield f"decode: {name}", steps.next_step(**fields)
        yield "", steps.next_step(finished=(3,))


def _script_with_adapters(num_groups: int) -> Iterator[tuple[str, SchedulerOutput]]:
    """Yield steps of sequence 1 without an adapter, and of others with the adapter of their number.

    Two adapters fit in a step, so the third one takes the place of the first.
    """
    steps = StepMessages(num_groups, num_pages=4)

    def begin(seq_id: int, *, number: int) -> SchedulerOutput:
        step = steps.next_step({seq_id: range(4)})
        return changed(step, new_requests=[changed(step.new_requests[0], lora_int_id=number)])

    yield "prompt without an adapter", begin(1, number=0)
    yield "decode without an adapter", steps.next_step()
    yield "prompt of a new adapter, and a decode", begin(2, number=1)
    yield "decode with an adapter", steps.next_step()
    yield "decode with the same rows", steps.next_step()
    yield "", begin(3, number=2)
    yield "decode after a request has ended", steps.next_step(finished=(2,))
    yield "prompt in a slot of another adapter", begin(4, number=3)
    yield "", steps.next_step(finished=(3, 4))
    yield "decode without an adapter any more", steps.next_step()


def launches_of(watch: HotPath, family: str, **settings: Any) -> dict[str, dict[str, int]]:
    """Return the launches of each kind of step by name."""
    runner, _, cache, _ = build_runner(watch, family, num_rows=4, **settings)
    found: dict[str, dict[str, int]] = {}
    if settings.get("has_adapters"):
        script = _script_with_adapters(cache.layout.num_groups)
    else:
        script = _script(cache.layout, settings.get("has_draft_model", False))
    with watch:
        for name, step in script:
            watch.launches.clear()
            runner.launch(step, all_tokens_allowed).result()
            if name:
                found[name] = dict(sorted(watch.launches.items()))
    return found


def all_launches() -> dict[str, dict[str, dict[str, int]]]:
    with warnings.catch_warnings():
        # Addresses of fake tensors, which are passed to no kernel.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        with watched() as watch:
            return {
                name: launches_of(watch, family, **settings)
                for name, (family, settings) in _MODELS.items()
            }


def text_of(found: dict[str, dict[str, dict[str, int]]]) -> str:
    """Return the content of the file, a line for each step."""
    models = (
        f'"{model}": {{\n'
        + ",\n".join(f'  "{step}": {json.dumps(counts)}' for step, counts in steps.items())
        + "\n}"
        for model, steps in found.items()
    )
    return "{\n" + ",\n".join(models) + "\n}\n"


if __name__ == "__main__":
    text = text_of(all_launches())
    if sys.argv[1:] == ["--write"]:
        FILE.write_text(text)
    else:
        print(text, end="")
