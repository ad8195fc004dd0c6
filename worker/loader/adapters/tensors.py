"""What each tensor of an adapter is, and which weights of the model it changes.

    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight      module, and part of it
    blk.0.attn_q.weight.lora_a                                          the same of llama.cpp

A module of the files may be part of a weight, or hold several: stacked projections, all experts of
a layer, or keys and values of latent attention. `sort_tensors` gives the parts of each module,
`ModulePlaces` the weights in it; every tensor is used, or named in an error.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

import torch

from proto.errors import ModelError, shown
from worker.loader.adapters.files import AdapterFile
from worker.loader.adapters.peft_config import PeftConfig
from worker.loader.vision import adapted_vision_weights
from worker.models.parts import StackPart, WeightSpec
from worker.models.spec import ModelSpec
from worker.models.vision import VISION_FAMILIES
from worker.models.vision.spec import VisionSpec

Part = Literal[
    "down", "up", "bias", "magnitude", "embedding_down", "embedding_up", "tokens", "saved", "base"
]
_PEFT_PARTS: Final[Mapping[str, Part]] = {
    r"lora_A(\.default)?\.weight": "down",
    r"lora_B(\.default)?\.weight": "up",
    r"lora_B(\.default)?\.bias": "bias",
    r"lora_magnitude_vector(\.default)?(\.weight)?": "magnitude",
    r"lora_embedding_A(\.default)?": "embedding_down",
    r"lora_embedding_B(\.default)?": "embedding_up",
    r"token_adapter\.trainable_tokens_delta(\.default)?": "tokens",
    r"base_layer\.weight": "base",
    r"(modules_to_save(\.default)?\.)?weight": "saved",
}
_PREFIXES: Final = ("base_model.model.", "base_model.")
_WRAPPERS: Final = ("language_model.", "text_model.")
"""Parts of the names of a language model inside another model."""
EMBEDDING_NAMES: Final = ("model.embed_tokens", "token_embd")
HEAD_NAMES: Final = ("lm_head", "output")
_EXPERT_NAMES: Final = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names of an expert's projections in adapters that stack them, and the usual ones."""
_FUSED: Final = re.compile(r"(.*\.experts)((?:\.base_layer)*)$")
_ONE_OF_MANY: Final = re.compile(r"(.*)\.(\d+)\.(\w+)$")


@dataclass(frozen=True, slots=True)
class ModuleTensors:
    """The parts of one module. module: its name in the file. names: of the tensors."""

    module: str
    parts: dict[Part, torch.Tensor]
    names: dict[Part, str]

    def name(self, *parts: Part) -> str:
        """Return the name of the first of these parts that is there, for errors."""
        return shown(next(self.names[part] for part in (*parts, *self.names) if part in self.names))


def sort_tensors(file: AdapterFile) -> list[ModuleTensors]:
    """Return the modules of a file; raises ModelError for a tensor that is no part of any."""
    modules: dict[str, ModuleTensors] = {}
    for name, tensor in file.tensors.items():
        module, part = _gguf_part(name) if file.format == "gguf" else _peft_part(name)
        found = modules.setdefault(module, ModuleTensors(module, {}, {}))
        if part in found.parts:
            raise ModelError(f"tensors {found.name(part)} and {shown(name)} are the same part")
        found.parts[part], found.names[part] = tensor, name
    return list(modules.values())


def _peft_part(name: str) -> tuple[str, Part]:
    rest = name
    for prefix in _PREFIXES:
        rest = rest.removeprefix(prefix)
    for pattern, part in _PEFT_PARTS.items():
        match = re.fullmatch(rf"(.+)\.{pattern}", rest)
        if match:
            return match[1], part
    raise ModelError(f"tensor {shown(name)} is no part of an adapter that is supported")


def _gguf_part(name: str) -> tuple[str, Part]:
    parts: dict[str, Part] = {"lora_a": "down", "lora_b": "up"}
    for suffix, part in parts.items():
        module = name.removesuffix(f".weight.{suffix}")
        if module != name:
            if module in EMBEDDING_NAMES:
                part = "embedding_down" if part == "down" else "embedding_up"
            return module, part
    raise ModelError(f"tensor {shown(name)} is no part of an adapter that is supported")


@dataclass(frozen=True, slots=True)
class Place:
    """A weight in a module of the files. stack: which part of the module's; None for all of it."""

    weight: WeightSpec
    stack: StackPart | None


class ModulePlaces:
    """The weights of a model by the modules of files of one format.

    vision: the part that encodes images; None without one.
    """

    def __init__(self, spec: ModelSpec, file_format: str, vision: VisionSpec | None = None) -> None:
        self._vision = vision if file_format == "safetensors" else None
        self._vision_weights = {} if vision is None else adapted_vision_weights(vision)
        self._places: dict[str, list[Place]] = {}
        for weight in spec.weights().values():
            if len(weight.shape) == 2 and weight.name.endswith(".weight"):
                for module, stack in _places_of(weight, file_format):
                    self._places.setdefault(module, []).append(Place(weight, stack))

    def vision_name(self, module: str) -> str | None:
        """Return what the weight of a module is called in the vision part; None outside of it."""
        if self._vision is None:
            return None
        return VISION_FAMILIES[self._vision.architecture].prepared_name(f"{module}.weight")

    def is_unused(self, module: str) -> bool:
        """Return whether a module is of the vision part, but behind what is read of it."""
        name = self.vision_name(module)
        return name is not None and self._vision is not None and self._vision.is_unused(name)

    def find(self, module: str) -> list[Place]:
        """Return the weights in a module of a file; empty if the model has none there."""
        if (name := self.vision_name(module)) is not None:
            weight = self._vision_weights.get(name)
            return [] if weight is None else [Place(weight, None)]
        for wrapper in _WRAPPERS:
            module = module.replace(wrapper, "")
        if found := self._places.get(module):
            return found
        # Models may be saved with or without the name of what is around them.
        same = [
            name
            for name in self._places
            if name.endswith(f".{module}") or module.endswith(f".{name}")
        ]
        return self._places[same[0]] if len(same) == 1 else []

    @property
    def modules(self) -> Iterator[tuple[str, list[Place]]]:
        yield from self._places.items()


def _places_of(weight: WeightSpec, file_format: str) -> Iterator[tuple[str, StackPart | None]]:
    """Yield the modules that a weight may be in."""
    if file_format == "gguf":
        own, stacks = weight.gguf, [weight.gguf_stack, weight.older_gguf_stack]
    else:
        own, stacks = weight.hugging_face, [weight.hugging_face_stack]
    tensors = [stack.tensor for stack in stacks if stack is not None]
    if own not in tensors:
        yield own.removesuffix(".weight"), None
    for stack in stacks:
        if stack is not None:
            yield stack.tensor.removesuffix(".weight"), stack
    one = _ONE_OF_MANY.fullmatch(own.removesuffix(".weight"))
    if file_format != "gguf" and weight.name.startswith("layers.") and ".experts." in weight.name:
        if one is None:
            return
        prefix, index, name = one.groups()
        whole = StackPart(tensor=own, shape=(0, *weight.shape), index=int(index))
        usual = weight.name.split(".")[-2] + "_proj"
        aliases = [short for short, means in _EXPERT_NAMES.items() if means == usual]
        for each in sorted({name, usual, *aliases}):
            if f"{prefix}.{each}" not in tensors:
                yield f"{prefix}.{each}", whole


def fused_module(
    tensors: ModuleTensors, config: PeftConfig, places: ModulePlaces, is_nested: bool
) -> str:
    """Return the name of the stacked weight that the tensors of `…experts` belong to.

    PEFT wraps the parameters of one module in each other: of two, gate_up_proj is the inner one,
    `…experts.base_layer`. is_nested: whether the file has an inner one.
    """
    match = _FUSED.match(tensors.module)
    if match is None:
        return tensors.module
    named = [
        name
        for name in ("gate_up_proj", "down_proj")
        if any(each == name or each.endswith(f".{name}") for each in config.target_parameters)
        and places.find(f"{match[1]}.{name}")
    ]
    if match[2]:
        return f"{match[1]}.gate_up_proj"
    if is_nested:
        return f"{match[1]}.down_proj"
    return f"{match[1]}.{named[0]}" if len(named) == 1 else tensors.module


# ---- Low-rank parts of single weights ----


@dataclass(frozen=True, slots=True)
class WeightDelta:
    """What an adapter adds to one weight: up @ down, with its scale in `up`; float32.

    name: of the weight in this program. down: [rank, in]. up: [out, rank]. bias: [out], or None.
    magnitude: of DoRA, [out], or None. shared: equal for weights with the same `down`.
    """

    name: str
    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    magnitude: torch.Tensor | None
    shared: tuple[object, ...]


def low_rank_deltas(
    tensors: ModuleTensors,
    places: list[Place],
    file_format: str,
    scale_of: "ScaleOf",
    max_rank: int,
) -> Iterator[WeightDelta]:
    """Yield what the tensors of a module add to each of the weights in it."""
    down, up = _pair(tensors)
    others = set(tensors.parts) - {"down", "up", "bias", "magnitude", "base"}
    if others:
        raise ModelError(f"tensor {tensors.name(*others)} does not belong beside lora_A and lora_B")
    if "base" in tensors.parts:
        raise ModelError(
            f"tensor {tensors.name('base')} is a weight of the model, not an adapter's"
        )
    bias, magnitude = (_vector(tensors, part, up) for part in ("bias", "magnitude"))
    stack = places[0].stack
    if stack is not None and len(stack.shape) == 3:
        yield from _expert_deltas(tensors, places, down, up, scale_of, max_rank)
        return
    rows, columns = places[0].weight.shape if stack is None else stack.shape
    if stack is not None and stack.transposed:
        rows, columns = columns, rows
    rank = check_rank(tensors, down.shape[0], max_rank)
    if down.shape != (rank, columns):
        raise wrong_shape(tensors, "down", (rank, columns))
    if up.shape != (rows, rank):
        raise wrong_shape(tensors, "up", (rows, rank))
    up = up.float() * scale_of(tensors, rank)
    if bias is not None:
        bias = bias.float() * scale_of(tensors, rank)
    for place in places:
        yield _part_of(tensors, place, down.float(), up, bias, magnitude, file_format)


def _part_of(
    tensors: ModuleTensors,
    place: Place,
    down: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    magnitude: torch.Tensor | None,
    file_format: str,
) -> WeightDelta:
    """Return what a module's low-rank parts, with its scale in `up`, add to one weight in it."""
    weight, stack = place.weight, place.stack
    vectors: dict[Part, torch.Tensor | None] = {"bias": bias, "magnitude": magnitude}
    if stack is not None and stack.transposed:
        # The weight is the transpose of some rows of the module: (up @ down).T = down.T @ up.T
        for part in vectors:
            if part in tensors.parts:
                raise ModelError(
                    f"tensor {tensors.name(part)}: latent attention has no such part of its keys"
                )
        own = up[stack.first_column : stack.first_column + weight.shape[1]]
        return WeightDelta(weight.name, own.t(), down.t(), None, None, (weight.name,))
    rows: slice | torch.Tensor = slice(None)
    if stack is not None:
        end = stack.first_row + weight.shape[0] * stack.row_step
        rows = slice(stack.first_row, end, stack.row_step)
    own = up[rows]
    parts = {name: None if it is None else it[rows] for name, it in vectors.items()}
    order = None if weight.head_rows is None else weight.head_rows.order(len(own), file_format)
    if order is not None:
        index = torch.from_numpy(order)
        own = own[index]
        parts = {name: None if it is None else it[index] for name, it in parts.items()}
    columns = weight.head_columns
    if columns is not None and (order := columns.order(down.shape[1], file_format)) is not None:
        down = down[:, torch.from_numpy(order)]
    return WeightDelta(weight.name, down, own, parts["bias"], parts["magnitude"], (tensors.module,))


def _expert_deltas(
    tensors: ModuleTensors,
    places: list[Place],
    down: torch.Tensor,
    up: torch.Tensor,
    scale_of: "ScaleOf",
    max_rank: int,
) -> Iterator[WeightDelta]:
    """Yield the parts of all experts: 3-D, one of them perhaps shared by all, or PEFT's 2-D.

    PEFT     A [experts * rank, in]      B [out, rank * experts], the experts of a rank together
    3-D      A [experts or 1, rank, in]  B [experts or 1, out, rank]; 2-D is shared, too
    """
    if {"bias", "magnitude"} & set(tensors.parts):
        raise ModelError(f"tensor {tensors.name('bias', 'magnitude')}: stacked experts have none")
    stack = places[0].stack
    assert stack is not None
    num_experts = 1 + max(place.stack.index for place in places if place.stack is not None)
    rows, columns = stack.shape[1:]
    if down.dim() == up.dim() == 2:
        if down.shape[0] % num_experts or up.shape[1] != down.shape[0]:
            raise wrong_shape(tensors, "up", (rows, down.shape[0]))
        rank = check_rank(tensors, down.shape[0] // num_experts, max_rank)
        downs = down.reshape(num_experts, rank, -1)
        ups = up.reshape(len(up), rank, num_experts).permute(2, 0, 1)
    else:
        downs = down if down.dim() == 3 else down[None]
        ups = up if up.dim() == 3 else up[None]
        rank = check_rank(tensors, downs.shape[-2], max_rank)
        of_experts: dict[Part, torch.Tensor] = {"down": downs, "up": ups}
        for part, each in of_experts.items():
            if len(each) not in (1, num_experts):
                raise wrong_shape(tensors, part, (num_experts, *each.shape[1:]))
    if downs.shape[1:] != (rank, columns):
        raise wrong_shape(tensors, "down", (num_experts, rank, columns))
    if ups.shape[1:] != (rows, rank):
        raise wrong_shape(tensors, "up", (num_experts, rows, rank))
    scale = scale_of(tensors, rank)
    for place in places:
        assert place.stack is not None
        index = place.stack.index
        own_up = ups[index if len(ups) > 1 else 0]
        own_down = downs[index if len(downs) > 1 else 0]
        end = place.stack.first_row + place.weight.shape[0] * place.stack.row_step
        own_up = own_up[place.stack.first_row : end : place.stack.row_step]
        key = (tensors.module, index)
        yield WeightDelta(
            place.weight.name, own_down.float(), own_up.float() * scale, None, None, key
        )


class ScaleOf:
    """The scale of B A in a module, by its rank; raises ModelError for another rank than said."""

    def __init__(self, file: AdapterFile) -> None:
        self._config = file.config
        self._alpha = file.alpha

    def __call__(self, tensors: ModuleTensors, rank: int) -> float:
        if self._config is None:
            return self._alpha / rank if self._alpha else 1.0
        module = re.sub(r"(\.base_layer)+$", "", tensors.module)
        if (wanted := self._config.rank(module)) != rank:
            raise ModelError(
                f"tensor {tensors.name('down', 'embedding_down')} has rank {rank}, "
                f"{self._config.path} says {wanted}"
            )
        return self._config.scale(module)


def _pair(tensors: ModuleTensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and B; raises ModelError if one is missing."""
    pair: dict[Part, str] = {"down": "lora_A", "up": "lora_B"}
    missing = [name for part, name in pair.items() if part not in tensors.parts]
    if missing:
        raise ModelError(
            f"tensor {tensors.name('down', 'up')} has no {' and no '.join(missing)} beside it"
        )
    return tensors.parts["down"], tensors.parts["up"]


def _vector(tensors: ModuleTensors, part: Part, up: torch.Tensor) -> torch.Tensor | None:
    found = tensors.parts.get(part)
    if found is None:
        return None
    if found.numel() != up.shape[0]:
        raise wrong_shape(tensors, part, (up.shape[0],))
    return found.float().view(-1)


def check_rank(tensors: ModuleTensors, rank: int, max_rank: int) -> int:
    """Return a rank; raises ModelError if it is more than --max-lora-rank, or 0."""
    name = tensors.name("down", "embedding_down")
    if rank > max_rank:
        raise ModelError(f"tensor {name} has rank {rank}: more than --max-lora-rank {max_rank}")
    if rank < 1:
        raise ModelError(f"tensor {name} has rank {rank}")
    return rank


def wrong_shape(tensors: ModuleTensors, part: Part, wanted: tuple[int, ...]) -> ModelError:
    """Return the error of a tensor that does not fit the model."""
    found = list(tensors.parts[part].shape)
    return ModelError(
        f"tensor {tensors.name(part)} has shape {found}, the model needs {list(wanted)}"
    )
