"""Flags of vLLM, llama.cpp, SGLang and Ollama: what `tokend serve` makes of each, as data.

    --enable-auto-tool-choice    NO_EFFECT   taken; a notice says why it changes nothing
    --task embed                 SAME        taken as --runner pooling
    --enable-lora                MISSING     refused; the reason names what is missing
    --ctx-size 8192              MEANT       refused; --max-model-len is suggested

Names are without dashes; `_` in a flag counts as `-`, as in vLLM.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class NoEffect(NamedTuple):
    """A flag that changes nothing here. reason: why, as the end of a sentence.

    values: the values for which that is true; None for any value, empty for a flag without one.
    """

    reason: str
    values: tuple[str, ...] | None = ()


_TEXT_ONLY: Final = "models are served for text"
_GRAPHS: Final = "there is no compilation to set up; --enforce-eager turns CUDA graphs off"
_PROCESSES: Final = "scheduler, workers and front ends are always processes of their own"

NO_EFFECT: Final[Mapping[str, NoEffect]] = {
    "enable-auto-tool-choice": NoEffect("calls of tools are always parsed (--tool-call-parser)"),
    "trust-remote-code": NoEffect(
        "code in a model's folder is never run; a model that needs it is refused by name"
    ),
    "enable-reasoning": NoEffect("reasoning is always parsed (--reasoning-parser)"),
    "enable-prompt-tokens-details": NoEffect("usage always has them"),
    "enable-log-stats": NoEffect("/metrics always has them"),
    "disable-log-stats": NoEffect("the log has no regular statistics; /metrics has them"),
    "enable-server-load-tracking": NoEffect("/load is always there"),
    "disable-fastapi-docs": NoEffect("there are no pages of documentation to turn off"),
    "disable-frontend-multiprocessing": NoEffect(_PROCESSES),
    "use-v2-block-manager": NoEffect("there is one block manager"),
    "disable-custom-all-reduce": NoEffect("there is no other all-reduce"),
    "disable-hybrid-kv-cache-manager": NoEffect("KV groups of a model are always managed apart"),
    "calculate-kv-scales": NoEffect("scales of an fp8 KV cache are the model's or 1"),
    "swap-space": NoEffect(
        "KV beyond the pool is in host memory, on disk or in Redis by --kv-transfer-config", None
    ),
    "download-dir": NoEffect("models of the hub are kept in HF_HOME", None),
    "max-logprobs": NoEffect("the most is 20", None),
    "max-seq-len-to-capture": NoEffect(_GRAPHS, None),
    "compilation-config": NoEffect(_GRAPHS, None),
    "O": NoEffect(_GRAPHS, None),
    "cuda-graph-sizes": NoEffect(_GRAPHS, None),
    "guided-decoding-backend": NoEffect("grammars have one backend, llguidance", None),
    "structured-outputs-config": NoEffect("grammars have one backend, llguidance", None),
    "limit-mm-per-prompt": NoEffect(_TEXT_ONLY, None),
    "mm-processor-kwargs": NoEffect(_TEXT_ONLY, None),
    "language-model-only": NoEffect(_TEXT_ONLY),
    "distributed-executor-backend": NoEffect(_PROCESSES, ("mp", "uni")),
    "pipeline-parallel-size": NoEffect("layers are not divided", ("1",)),
    "data-parallel-size": NoEffect("there is one replica", ("1",)),
    "load-format": NoEffect("the files say what they are", ("auto", "safetensors", "gguf")),
    "config-format": NoEffect("the files say what they are", ("auto", "hf")),
    "tokenizer-mode": NoEffect("there is one tokenizer", ("auto", "hf")),
    "chat-template-content-format": NoEffect("the template decides", ("auto",)),
    "response-role": NoEffect("answers are the assistant's", ("assistant",)),
    "quantization": NoEffect(
        "the files say what they are",
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "gguf", "mxfp4"),
    ),
}
SAME: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "enable-log-requests": {"": ("--no-disable-log-requests",)},
    "no-enable-log-requests": {"": ("--disable-log-requests",)},
    "disable-uvicorn-access-log": {"": ("--disable-log-requests",)},
    "task": {
        "auto": (),
        "generate": ("--runner", "generate"),
        **dict.fromkeys(
            ("embed", "embedding", "classify", "score", "reward", "token_embed"),
            ("--runner", "pooling"),
        ),
    },
    "convert": {"auto": (), "none": (), "embed": ("--runner", "pooling")},
    "uvicorn-log-level": {
        **{name: ("--log-level", name) for name in ("debug", "info", "warning", "error")},
        "critical": ("--log-level", "error"),
        "trace": ("--log-level", "debug"),
    },
}
"""Name → value, or "" of a flag without one → flags of tokend."""

_ADAPTERS: Final = "adapters are not served yet"
MISSING: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        [
            *("enable-lora", "lora-modules", "max-loras", "max-lora-rank", "max-cpu-loras"),
            *("lora-dtype", "lora-extra-vocab-size", "fully-sharded-loras", "default-mm-loras"),
            *("lora", "lora-scaled", "lora-init-without-apply", "lora-paths", "enable-lora-bias"),
        ],
        _ADAPTERS,
    ),
    "hf-overrides": "change config.json in a copy of the folder",
    "rope-scaling": "change config.json in a copy of the folder",
    "cpu-offload-gb": "weights are on the device as a whole",
    "mmproj": "models are served for text",
    "ray-address": "there are no nodes yet",
    "nnodes": "there are no nodes yet",
    "data-parallel-backend": "there are no replicas yet",
}
"""Flags that ask for what is not here → the reason."""

MEANT: Final[Mapping[str, str]] = {
    "ctx-size": "--max-model-len",
    "c": "--max-model-len",
    "num-ctx": "--max-model-len",
    "context-length": "--max-model-len",
    "parallel": "--max-num-seqs",
    "np": "--max-num-seqs",
    "num-parallel": "--max-num-seqs",
    "max-running-requests": "--max-num-seqs",
    "batch-size": "--max-num-batched-tokens",
    "b": "--max-num-batched-tokens",
    "ubatch-size": "--max-num-batched-tokens",
    "ub": "--max-num-batched-tokens",
    "num-batch": "--max-num-batched-tokens",
    "chunked-prefill-size": "--max-num-batched-tokens",
    "threads": "--cpu-threads",
    "t": "--cpu-threads",
    "num-thread": "--cpu-threads",
    "threads-http": "--api-server-count",
    "n-gpu-layers": "--device cuda",
    "gpu-layers": "--device cuda",
    "ngl": "--device cuda",
    "num-gpu": "--device cuda",
    "flash-attn": "--attention-backend",
    "fa": "--attention-backend",
    "cache-type-k": "--kv-cache-dtype",
    "ctk": "--kv-cache-dtype",
    "cache-type-v": "--kv-cache-dtype",
    "ctv": "--kv-cache-dtype",
    "kv-cache-type": "--kv-cache-dtype",
    "kv-cache-memory-bytes": "--kv-cache-memory",
    "mem-fraction-static": "--gpu-memory-utilization",
    "quantization": "--cpu-weights",
    "q": "--cpu-weights",
    "m": "--model",
    "model-path": "--model",
    "hft": "--hf-token",
    "hf": "--model",
    "hf-repo": "--model",
    "alias": "--served-model-name",
    "a": "--served-model-name",
    "chat-template-file": "--chat-template",
    "reasoning-format": "--reasoning-parser",
    "tp": "--tensor-parallel-size",
    "tp-size": "--tensor-parallel-size",
    "cache-prompt": "--enable-prefix-caching",
    "no-cache-prompt": "--no-enable-prefix-caching",
    "max-queue": "--max-num-queued-reqs",
    "verbose": "--log-level debug",
    "v": "--log-level debug",
    "log-disable": "--disable-log-requests",
    "no-webui": "--no-page",
    "ssl-key-file": "--ssl-keyfile",
    "ssl-cert-file": "--ssl-certfile",
    "timeout": "--queue-timeout",
    "s": "--seed",
    "n-predict": "max_tokens in each request",
    "n": "max_tokens in each request",
    "num-predict": "max_tokens in each request",
    "temp": "temperature in each request",
    "temperature": "temperature in each request",
    "top-k": "top_k in each request",
    "top-p": "top_p in each request",
    "min-p": "min_p in each request",
    "repeat-penalty": "repetition_penalty in each request",
    "run": "serve",
    "start": "serve",
    "fetch": "pull",
    "download": "pull",
    "ls": "list",
    "remove": "rm",
    "delete": "rm",
    "status": "ps",
    "kill": "stop",
}
"""Flags, commands and options with another name here → that name."""
