"""Flags of vLLM, llama.cpp, SGLang and Ollama: what `tokend serve` makes of each, as data.

    --enable-auto-tool-choice    NO_EFFECT   taken; a notice says why it changes nothing
    --task embed                 SAME        taken as --runner pooling
    --rope-scaling JSON          MISSING     refused; the reason names what is missing
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


_ATTENTION: Final = "attention never stores its scores as a whole"
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
    "metrics": NoEffect("/metrics is always served"),
    "slots": NoEffect("there are no slots; /metrics and the page show what runs"),
    "jinja": NoEffect("chat templates are always Jinja"),
    "mlock": NoEffect("weights are in memory, but are not locked there"),
    "no-mmap": NoEffect("weights are read into memory; an embedding may stay in the mapped file"),
    **dict.fromkeys(("cb", "cont-batching"), NoEffect("batching is always continuous")),
    **dict.fromkeys(("fa", "flash-attn"), NoEffect(_ATTENTION, ("on", "auto"))),
    **dict.fromkeys(
        ("ngl", "n-gpu-layers", "gpu-layers", "num-gpu"),
        NoEffect("all layers are on a GPU if there is one; --device cpu or cuda chooses", None),
    ),
    "disable-frontend-multiprocessing": NoEffect(_PROCESSES),
    "use-v2-block-manager": NoEffect("there is one block manager"),
    "disable-custom-all-reduce": NoEffect("there is no other all-reduce"),
    "disable-hybrid-kv-cache-manager": NoEffect("KV groups of a model are always managed apart"),
    "calculate-kv-scales": NoEffect("scales of an fp8 KV cache are the model's or 1"),
    "swap-space": NoEffect(
        "KV beyond the pool is in host memory, on disk or in Redis by --kv-transfer-config", None
    ),
    "enable-lora-bias": NoEffect("biases of adapters are always computed"),
    "fully-sharded-loras": NoEffect("adapters are divided among ranks as their weights are"),
    "lora-init-without-apply": NoEffect("a request names its adapter"),
    "lora-extra-vocab-size": NoEffect("adapters have no tokens of their own", None),
    "lora-dtype": NoEffect("adapters have the data type of the model", ("auto",)),
    "download-dir": NoEffect("models of the hub are kept in HF_HOME", None),
    "max-logprobs": NoEffect("the most is 20", None),
    "max-seq-len-to-capture": NoEffect(_GRAPHS, None),
    "compilation-config": NoEffect(_GRAPHS, None),
    "O": NoEffect(_GRAPHS, None),
    "cuda-graph-sizes": NoEffect(_GRAPHS, None),
    "guided-decoding-backend": NoEffect("grammars have one backend, llguidance", None),
    "structured-outputs-config": NoEffect("grammars have one backend, llguidance", None),
    "distributed-executor-backend": NoEffect(_PROCESSES, ("mp", "uni")),
    "pipeline-parallel-size": NoEffect("layers are not divided", ("1",)),
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
_POOLING: Final = ("--runner", "pooling")
SAME: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "enable-log-requests": {"": ("--no-disable-log-requests",)},
    "no-enable-log-requests": {"": ("--disable-log-requests",)},
    "disable-uvicorn-access-log": {"": ("--disable-log-requests",)},
    "language-model-only": {"": ("--limit-mm-per-prompt", '{"image": 0}')},
    "no-mmproj": {"": ("--no-mmproj-auto",)},
    "disable-fastapi-docs": {"": ("--no-page",)},
    **{name: {"": _POOLING} for name in ("embedding", "embeddings", "reranking", "rerank")},
    "pooling": {
        **{
            name: (*_POOLING, "--pooler-config", f'{{"pooling_type": "{name}"}}')
            for name in ("mean", "cls", "last")
        },
        "rank": _POOLING,
    },
    "task": {
        "auto": (),
        "generate": ("--runner", "generate"),
        **dict.fromkeys(
            ("embed", "embedding", "classify", "score", "reward", "token_embed"),
            _POOLING,
        ),
    },
    "scheduler-cls": {
        "vllm.v1.core.sched.scheduler.Scheduler": ("--no-async-scheduling",),
        "vllm.v1.core.sched.async_scheduler.AsyncScheduler": ("--async-scheduling",),
    },
    "convert": {"auto": (), "none": (), "embed": _POOLING},
    "uvicorn-log-level": {
        **{name: ("--log-level", name) for name in ("debug", "info", "warning", "error")},
        "critical": ("--log-level", "error"),
        "trace": ("--log-level", "debug"),
    },
}
"""Name → value, or "" of a flag without one → flags of tokend."""

SYNONYMS: Final[Mapping[str, Mapping[str, str]]] = {
    "--dtype": {"half": "float16", "float": "float32"},
}
"""Flag of tokend → word that vLLM takes for a value → that value."""

MISSING: Final[Mapping[str, str]] = {
    "default-mm-loras": "a request names its adapter",
    "mm-processor-kwargs": "images are scaled as the model's preprocessor_config.json says",
    "lora-scaled": "a request has the factor of its adapter, in the field lora",
    "hf-overrides": "change config.json in a copy of the folder",
    "rope-scaling": "change config.json in a copy of the folder",
    "cpu-offload-gb": "weights are on the device as a whole",
    "load-format dummy": "weights are those of the model's files",
    "ray-address": "there are no nodes yet",
    "nnodes": "there are no nodes yet",
    **dict.fromkeys(
        (
            *("data-parallel-size-local", "dpl", "data-parallel-rank", "dpn"),
            *("data-parallel-start-rank", "dpr", "data-parallel-address", "dpa"),
            *("data-parallel-rpc-port", "dpp", "data-parallel-backend", "dpb"),
            *("data-parallel-hybrid-lb", "dph", "data-parallel-external-lb", "dpe"),
        ),
        "all engines of --data-parallel-size run on this machine, behind the same front ends",
    ),
}
"""Flags, also with a value, that ask for what is not here → the reason."""

MEANT: Final[Mapping[str, str]] = {
    "scheduler-cls": "--scheduling-policy",
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
    "lora": "--lora-modules",
    "lora-paths": "--lora-modules",
    "model-path": "--model",
    **dict.fromkeys(
        ("md", "model-draft", "draft-model"), '--speculative-config \'{"model": "NAME"}\''
    ),
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
    "reasoning-budget": "thinking_token_budget in each request",
    "n-predict": "max_tokens in each request",
    "n": "max_tokens in each request",
    "num-predict": "max_tokens in each request",
    "temp": "temperature in each request",
    "temperature": "temperature in each request",
    "top-k": "top_k in each request",
    "top-p": "top_p in each request",
    "min-p": "min_p in each request",
    "repeat-penalty": "repetition_penalty in each request",
    "run": "chat",
    "show": "plan",
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
