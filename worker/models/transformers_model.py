"""Models without a family of their own: transformers' modelling code over tokend's KV pages.

The modelling code calls an attention function for each layer; ours is registered there under the
name "tokend". A step is one packed batch [1, T] of the tokens of all sequences, without padding,
whose positions transformers gets as `position_ids`. Queries and keys come rotated, so the attention
backend gets a rotation that changes nothing.

Before a weight is read, `spec_of_transformers` builds the model with zeros that take no memory and
runs a step of two tokens, without the products. The calls of the attention function in that step
show the heads, scale and window of each layer. A model is refused if a layer makes no such call, or
passes something that attention backends cannot compute.

    forward   tokens, positions ─▶ transformers' body ──▶ hidden states [T, hidden]
                                     └─ each layer ─▶ paged attention ─▶ AttentionBackend
    logits    rows ─▶ transformers' head, with its scales and caps ─▶ [N, vocab]
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from proto.errors import ModelError
from proto.messages.lifecycle import ComputeShape
from proto.messages.prepared_model import TEXT_BODIES
from worker.attention.backend import AttentionBackend, AttentionShape, Rotation
from worker.layers.layer_progress import LayerProgress
from worker.layers.linear import Linear
from worker.models.decoder import Decoder
from worker.models.parts import WeightSpec
from worker.models.rope import Rope
from worker.models.spec import ModelSpec

ATTENTION_NAME: Final = "tokend"
"""Our attention function in transformers' registry."""
_HEAD_MULTIPLE: Final = 8
"""Numbers: zeros pad heads to a multiple of it, which the C++ kernels need."""
_PROBE_TOKENS: Final = 2
_CHUNKED: Final = "chunked_attention"
_KINDS_OF_LAYERS: Final = (
    *("full_attention", "sliding_attention", _CHUNKED, "moe", "dense", "sparse"),
)
_IGNORED_ARGUMENTS: Final = frozenset(
    {
        "cache_position",
        "dropout",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""Arguments of an attention function that do not change the result of causal attention."""
_MIXES_TOKENS: Final = (nn.Conv1d, nn.RNNBase)
"""Modules that look at neighbouring tokens, and would look across sequences of a packed batch."""


@dataclass(frozen=True, slots=True)
class AttentionArguments:
    """What one layer passes to the attention function.

    key_dim is the size of a query head too. window: in tokens, the query's own included.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    soft_cap: float
    window: int | None


@dataclass(frozen=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model that runs on transformers' code. It has no `layers`; `calls` describes them.

    linear_shapes: [out, in] of each linear layer that a step calls, by name, the head included.
    row_linears: those that get one row for each token, so that adapters can change them.
    other_size: numbers in all other weights. head_dims: sizes of heads that the device has kernels
    for, ascending; empty for any multiple of 8.
    """

    calls: tuple[AttentionArguments, ...]
    linear_shapes: dict[str, tuple[int, int]]
    other_size: int
    row_linears: frozenset[str] = frozenset()
    head_dims: tuple[int, ...] = ()

    def weights(self) -> dict[str, WeightSpec]:
        """Return the weights that adapters can change, by their names in transformers."""
        names = {f"{name}.weight": self.linear_shapes[name] for name in sorted(self.row_linears)}
        return {
            name: WeightSpec(name=name, shape=shape, hugging_face=name, gguf="")
            for name, shape in names.items()
        }

    @property
    def num_weights(self) -> int:
        """Numbers in all weights; a tied head counts beside the embedding."""
        return self.other_size + sum(
            rows * columns for rows, columns in self.linear_shapes.values()
        )

    @property
    def outputs_per_layer(self) -> int:
        """Numbers that the linear layers of one token give, in a layer of mean size."""
        return sum(rows for rows, _ in self.linear_shapes.values()) // self.num_layers

    @property
    def num_layers(self) -> int:
        return len(self.calls)

    @cached_property
    def attention_shape(self) -> AttentionShape:
        """Heads of the KV cache: the largest and most of any layer."""
        first = self.calls[0]
        largest = max(max(call.key_dim, call.value_dim) for call in self.calls)
        rounded = -(-largest // _HEAD_MULTIPLE) * _HEAD_MULTIPLE
        head_dim = next((each for each in self.head_dims if each >= largest), rounded)
        num_kv_heads = max(call.num_kv_heads for call in self.calls)
        return AttentionShape(first.num_heads, num_kv_heads, head_dim, first.scale, first.soft_cap)

    @property
    def windows(self) -> tuple[int | None, ...]:
        narrow = self.max_position
        return tuple(
            call.window if call.window is not None and call.window < narrow else None
            for call in self.calls
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """None: transformers rotates queries and keys."""
        return ()

    @property
    def compute_shape(self) -> ComputeShape:
        """The FLOPs of a forward pass, as if every expert were used."""
        head = 2 * self.vocab_size * self.hidden_size
        linear = sum(2 * rows * columns for rows, columns in self.linear_shapes.values())
        by_window: dict[int | None, int] = {}
        for call, window in zip(self.calls, self.windows, strict=True):
            flops = 2 * call.num_heads * (call.key_dim + call.value_dim)
            by_window[window] = by_window.get(window, 0) + flops
        return ComputeShape(max(0, linear - head), head, tuple(by_window.items()))


class TransformersDecoder(Decoder):
    """A Decoder whose layers, norms and head are transformers' modules.

    model: a causal language model of transformers with its weights, whose attention function is
    ours. Its body is taken out of it: what is left computes logits of given hidden states.
    """

    can_be_captured = False

    def __init__(self, spec: TransformersSpec, model: nn.Module) -> None:
        self.spec: TransformersSpec = spec
        self.implementation = f"transformers {_import().__version__}"
        self._head_model = model
        self._body: nn.Module = body_of(model)
        self._given = _GivenHiddenStates()
        self._progress: LayerProgress | None = None
        (name,) = (name for name, module in model.named_modules() if module is self._body)
        model.set_submodule(name, self._given)

    def track_layers(self, progress: LayerProgress | None) -> None:
        self._progress = progress

    @torch.inference_mode()
    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: AttentionBackend,
        token_types: torch.Tensor | None = None,
        embeddings: Sequence[tuple[int, torch.Tensor]] = (),
    ) -> torch.Tensor:
        given = {"input_ids": token_ids[None]}
        if embeddings:
            embed: nn.Module = self._body.get_input_embeddings()  # type: ignore[operator]
            embedded = embed(token_ids[None])
            for first, rows in embeddings:
                embedded[0, first : first + len(rows)] = rows
            given = {"inputs_embeds": embedded}
        calls = _PagedAttention(self.spec, attention, len(token_ids), self._progress)
        with _attention_function(calls):
            output = self._body(**given, position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = output[0][0]
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, vocab] for rows of `forward`'s result, which are normed already."""
        self._given.hidden = hidden[None]
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        logits: torch.Tensor = self._head_model(input_ids=token_ids, use_cache=False).logits[0]
        return logits


class _GivenHiddenStates(nn.Module):
    """Stands in for the body of a model: its result is `hidden`."""

    hidden: torch.Tensor

    def forward(self, *args: Any, **kwargs: Any) -> "_BodyOutput":
        return _BodyOutput(self.hidden)


class _BodyOutput(tuple[torch.Tensor]):
    """The output of a body: hidden states, and None for everything else that a head may pass on."""

    def __new__(cls, hidden: torch.Tensor) -> "_BodyOutput":
        return super().__new__(cls, (hidden,))

    @property
    def last_hidden_state(self) -> torch.Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


class LinearModule(nn.Module):
    """One of tokend's linear layers in the place of an nn.Linear."""

    def __init__(self, linear: Linear, replaced: nn.Linear) -> None:
        super().__init__()
        self.in_features = replaced.in_features
        self.out_features = replaced.out_features
        # Some models ask for the dtype of a weight.
        self.weight = replaced.weight.detach().to("meta")
        self._linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


# ---- The attention function ----

AttentionFunction = Callable[..., tuple[torch.Tensor, None]]
_current: ContextVar[AttentionFunction] = ContextVar("attention_function")


@contextmanager
def _attention_function(function: AttentionFunction) -> Iterator[None]:
    """Let the layers of transformers' models call this attention function."""
    token = _current.set(function)
    try:
        yield
    finally:
        _current.reset(token)


def attend(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The attention function in transformers' registry: calls that of the step."""
    return _current.get()(*args, **kwargs)


class _PagedAttention:
    """The attention function of one step: layers call it in their order.

    Narrow heads are padded with zeros to those of the KV cache, which changes no product. A layer
    with fewer KV heads has each of them several times, and a layer whose scale is not the backend's
    has its queries scaled.
    """

    def __init__(
        self,
        spec: TransformersSpec,
        attention: AttentionBackend,
        num_tokens: int,
        progress: LayerProgress | None,
    ) -> None:
        self._progress = progress
        self._spec = spec
        self._attention = attention
        self._num_tokens = num_tokens
        self._next_layer = 0
        self._rotation: Rotation | None = None

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *others: Any,
        s_aux: torch.Tensor | None = None,
        **arguments: Any,
    ) -> tuple[torch.Tensor, None]:
        layer, self._next_layer = self._next_layer, self._next_layer + 1
        if self._progress is not None:
            self._progress.begin_layer(layer)
        call, shape = self._spec.calls[layer], self._spec.attention_shape
        if call.scale != shape.scale:
            query = query * (call.scale / shape.scale)
        if (copies := shape.num_kv_heads // call.num_kv_heads) > 1:
            key, value = (
                heads[:, :, None].expand(-1, -1, copies, -1, -1).flatten(1, 2)
                for heads in (key, value)
            )
        sinks = None if s_aux is None else s_aux.reshape(-1).float().contiguous()
        attended = self._attention.run(
            layer,
            _packed(query, shape.head_dim),
            _packed(key, shape.head_dim).to(query.dtype),
            _packed(value, shape.head_dim).to(query.dtype),
            self._no_rotation(query.device),
            sinks,
        )
        if self._progress is not None:
            self._progress.end_layer(layer)
        return attended[None, :, :, : call.value_dim], None

    def _no_rotation(self, device: torch.device) -> Rotation:
        if self._rotation is None:
            half = self._spec.attention_shape.head_dim // 2
            self._rotation = torch.zeros(self._num_tokens, 2, half, device=device)
            self._rotation[:, 0] = 1.0
        return self._rotation


def _packed(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Turn heads [1, n, T, d] into [T, n, head_dim], contiguous, with zeros behind."""
    packed = heads[0].transpose(0, 1)
    if packed.shape[2] < head_dim:
        packed = F.pad(packed, (0, head_dim - packed.shape[2]))
    return packed.contiguous()


class _CallRecorder:
    """The attention function of the examined step; notes what layers pass.

    Raises ModelError for what attention backends cannot compute.
    """

    def __init__(self, refuse: Callable[[str], ModelError]) -> None:
        self.calls: list[AttentionArguments] = []
        self._refuse = refuse

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        tokens, key_dim = query.shape[2], query.shape[3]
        if s_aux is not None and s_aux.numel() != query.shape[1]:
            raise self._refuse(f"s_aux has {s_aux.numel()} numbers for {query.shape[1]} heads")
        if attention_mask is not None:
            raise self._refuse("its attention has a mask or a bias of its own")
        if is_causal is False or getattr(module, "is_causal", True) is False:
            raise self._refuse("its attention is not causal")
        if key.shape[2] != tokens or value.shape[2] != tokens or key.shape[3] != key_dim:
            raise self._refuse("its attention reads keys that are not those of the same tokens")
        for name, argument in others.items():
            if argument is not None and argument is not False and name not in _IGNORED_ARGUMENTS:
                raise self._refuse(f"its attention needs {name}, which no attention backend has")
        self.calls.append(
            AttentionArguments(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_dim=key_dim,
                value_dim=value.shape[3],
                scale=float(key_dim**-0.5 if scaling is None else scaling),
                soft_cap=float(softcap or 0.0),
                window=sliding_window,
            )
        )
        return query.new_zeros(1, tokens, query.shape[1], value.shape[3]), None


# ---- From a configuration to a spec ----


def spec_of_transformers(
    config: Mapping[str, Any],
    max_model_len: int | None = None,
    head_dims: tuple[int, ...] = (),
) -> TransformersSpec:
    """Return the spec of a model for transformers' code; no weight is read.

    max_model_len: tokens of the longest request; None for the model's length. head_dims: as in
    TransformersSpec. Raises ModelError naming the architecture and what in it cannot be run.
    """
    architecture = config["architectures"][0]

    def refuse(reason: str) -> ModelError:
        return ModelError(f"{architecture} cannot run through transformers: {reason}")

    if config.get("auto_map"):
        raise refuse("auto_map names code of the model, and code of a model is never run")
    settings = transformers_config(config)
    if _has_several_models(settings):
        raise refuse("it is made of several models, of which the language model is one")
    kinds = sorted(_layer_kinds(settings) - set(_KINDS_OF_LAYERS))
    if kinds:
        raise refuse(f"layer_types has {', '.join(kinds)}, whose state is not that of KV pages")
    model = _build_of_zeros(config)
    _check_modules(model, refuse)
    recorder, linears = _CallRecorder(refuse), _LinearRecorder(model)
    token_ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.int64)
    try:
        with torch.inference_mode(), _WithoutProducts(), _attention_function(recorder):
            output = model(
                input_ids=token_ids, position_ids=token_ids, use_cache=False, return_dict=True
            )
            body = body_of(model)(input_ids=token_ids, position_ids=token_ids, use_cache=False)
    except ModelError:
        raise
    except Exception as error:
        raise refuse(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    calls = tuple(recorder.calls[: len(recorder.calls) // 2])
    _check_calls(calls, getattr(settings, "num_hidden_layers", 0), refuse)
    max_position = _longest_position(settings, max_model_len, refuse)
    numbers = sum(
        parameter.numel() for _, parameter in model.named_parameters(remove_duplicate=False)
    )
    return TransformersSpec(
        architecture=architecture,
        vocab_size=output.logits.shape[-1],
        hidden_size=body[0].shape[-1],
        max_position=max_position,
        norm_eps=0.0,
        layers=(),
        calls=calls,
        linear_shapes=linears.shapes,
        row_linears=frozenset(linears.shapes) - linears.of_some_rows,
        other_size=numbers - sum(rows * columns for rows, columns in linears.shapes.values()),
        head_dims=head_dims,
    )


def _check_modules(model: Any, refuse: Callable[[str], ModelError]) -> None:
    """Raise the error for parts of a model that cannot compute a packed batch from KV pages."""
    if any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules()):
        raise refuse("its positions depend on which tokens are padding")
    if any("alibi" in name for name in dir(body_of(model))):
        raise refuse("its attention adds ALiBi to products, which no attention backend does")
    if "position_ids" not in inspect.signature(body_of(model).forward).parameters:
        raise refuse("it takes no position_ids, so it cannot compute a packed batch")
    if any(isinstance(module, _MIXES_TOKENS) for module in model.modules()):
        raise refuse("it has convolutions over tokens, whose state is not that of KV pages")


def _check_calls(
    calls: Sequence[AttentionArguments], num_layers: int, refuse: Callable[[str], ModelError]
) -> None:
    """Raise the error for calls of attention that no backend computes."""
    if len(calls) < max(1, num_layers):
        raise refuse(
            f"{num_layers - len(calls)} of {num_layers} layers do not call transformers' attention "
            "interface, so they would keep state of their own"
        )
    for what, values in (
        ("query heads", {call.num_heads for call in calls}),
        ("soft cap", {call.soft_cap for call in calls}),
    ):
        if len(values) > 1:
            raise refuse(f"layers differ in {what}: {sorted(values)}")
    most = max(call.num_kv_heads for call in calls)
    if any(most % call.num_kv_heads for call in calls):
        raise refuse(f"{most} KV heads are no multiple of those of each layer")


def _longest_position(
    settings: Any, max_model_len: int | None, refuse: Callable[[str], ModelError]
) -> int:
    """Return the model's longest position; raise the error if it differs for long requests."""
    max_position = getattr(settings, "max_position_embeddings", None)
    if type(max_position) is not int or max_position < 1:
        raise refuse("max_position_embeddings is missing")
    for longest, reason in (
        (
            _unchanged_rope(settings),
            "its longrope gives a step with a request of more than {} tokens another rotation than "
            "others",
        ),
        (
            _longest_of_llama4(settings),
            "its layers have chunked attention, or queries that grow, in a request of more than {} "
            "tokens",
        ),
    ):
        if longest < min(max_model_len or max_position, max_position):
            reason = reason.format(longest)
            raise refuse(f"{reason}; use --max-model-len {longest}")
    return max_position


def _has_several_models(settings: Any) -> bool:
    """Return whether a configuration is that of a language model beside others."""
    if {"vision_config", "audio_config", "decoder"} & set(settings.sub_configs):
        return True
    return settings.get_text_config() is not settings


class _LinearRecorder:
    """Notes the linear layers of a model that the examined step calls.

    shapes: their [out, in] by name. of_some_rows: names of those that do not get one row for each
    token, or not in each step, as single experts.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shapes: dict[str, tuple[int, int]] = {}
        self.of_some_rows: set[str] = set()
        for name, module in model.named_modules():
            if type(module) is nn.Linear:
                module.register_forward_pre_hook(
                    lambda linear, given, name=name: self._record(linear, name, given[0].numel())
                )

    def _record(self, linear: nn.Linear, name: str, num_inputs: int) -> None:
        self.shapes[name] = linear.out_features, linear.in_features
        if num_inputs != _PROBE_TOKENS * linear.in_features or ".experts." in name:
            self.of_some_rows.add(name)


def _unchanged_rope(settings: Any) -> float:
    """Return the length up to which transformers rotates every step alike.

    LongRoPE's factors are those of the longest request in a step.
    """
    parameters = getattr(settings, "rope_parameters", None) or {}
    longest = math.inf
    for rope in (parameters, *(each for each in parameters.values() if isinstance(each, dict))):
        differs = any(
            rope.get(f"short_{of}") != rope.get(f"long_{of}") for of in ("factor", "mscale")
        )
        if rope.get("rope_type") == "longrope" and differs:
            original = rope.get("original_max_position_embeddings")
            longest = min(longest, original or settings.max_position_embeddings)
    return longest


def _longest_of_llama4(settings: Any) -> float:
    """Return the length up to which the layers of Llama 4 attend to all tokens, and all alike.

    Beyond it layers with chunked attention do not, and queries of the others grow.
    """
    chunk = settings.attention_chunk_size if _CHUNKED in _layer_kinds(settings) else math.inf
    return min(chunk, getattr(settings, "floor_scale", math.inf) - 1)


def _layer_kinds(settings: Any) -> set[str]:
    return set(getattr(settings, "layer_types", None) or ())


def body_of(model: Any) -> nn.Module:
    """Return the part of a causal language model that gives hidden states."""
    body: nn.Module = model.get_decoder()
    if body is model:  # Llama 4 calls its body otherwise than it says
        body = next(child for child in model.children() if hasattr(child, "config"))
    return body if hasattr(body, "config") else model.base_model


def transformers_config(config: Mapping[str, Any]) -> Any:
    """Return transformers' object for a configuration; raises ModelError naming what is wrong."""
    _import()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        raise ModelError(f"model_type {model_type!r} is unknown to transformers")
    try:
        cls = CONFIG_MAPPING[model_type]
        settings = cls.from_dict(cls._decode_special_floats(dict(config)))
    except Exception as error:
        raise ModelError(f"config.json: {error}".splitlines()[0]) from error
    settings.use_cache = False
    if getattr(settings, "attn_temperature_tuning", False):
        # Llama 4 would count positions within the step; see _longest_of_llama4.
        settings.attn_temperature_tuning = False
    return settings


def model_class(config: Mapping[str, Any]) -> Any:
    """Return transformers' class of a causal language model; raises ModelError for another one."""
    transformers = _import()
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    if config.get("model_type") in TEXT_BODIES:
        body = str(MODEL_MAPPING_NAMES[config["model_type"]])
        return _with_head(getattr(transformers, body))
    architecture = config["architectures"][0]
    if architecture not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ModelError(
            f"{architecture} is not supported: neither tokend nor transformers "
            f"{transformers.__version__} has it as a causal language model"
        )
    return getattr(transformers, architecture)


def _with_head(body: Any) -> Any:
    """Return the class of a body in transformers with a head, as a causal language model."""
    from transformers.modeling_outputs import CausalLMOutput

    class TextModel(body.__base__):  # type: ignore[misc]
        base_model_prefix = "model"
        config_class = body.config_class
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def forward(self, **arguments: Any) -> CausalLMOutput:
            return CausalLMOutput(logits=self.lm_head(self.model(**arguments)[0]))

    return TextModel


def _build_of_zeros(config: Mapping[str, Any]) -> Any:
    """Return the model with weights and buffers of zeros; raises ModelError if that fails."""
    cls, settings = model_class(config), transformers_config(config)
    try:
        from transformers.initialization import no_init_weights

        with torch.device("meta"), no_init_weights():
            model = cls._from_config(
                settings, attn_implementation=ATTENTION_NAME, dtype=torch.float32
            )
    except Exception as error:
        reason = "it has no attention interface" if error.args == (ATTENTION_NAME,) else str(error)
        raise ModelError(
            f"{config['architectures'][0]} cannot run through transformers: {reason}".splitlines()[
                0
            ]
        ) from error
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(_zeros_like(weight), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                # LongRoPE writes its buffer.
                module._buffers[name] = torch.zeros(buffer.shape, dtype=buffer.dtype)
    # Other implementations copy the weights of experts.
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return without_padding_check(model.eval())


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of this shape in the memory of one number."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


class _WithoutProducts(TorchFunctionMode):
    """Products with weights give zeros, without the time to compute them."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[0])
        if func in (torch.matmul, torch.Tensor.matmul) and args[1].dim() == 2:
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[1])
        if func in (torch.bmm, torch.Tensor.bmm) and isinstance(args[1], nn.Parameter):
            return args[0].new_zeros(*args[0].shape[:-1], args[1].shape[2])
        return func(*args, **kwargs or {})


def without_padding_check(model: Any) -> Any:
    """Keep a model from searching its input for padding, to warn; a packed batch has none."""
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None
    return model


def _import() -> Any:
    """Import transformers, silent and offline, and register our attention function."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.AttentionInterface.register(ATTENTION_NAME, attend)
    return transformers
