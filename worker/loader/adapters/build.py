"""Makes an adapter of its files ready for one rank's products: start at AdapterLoader.load.

    files ─▶ tensors of modules ─▶ a delta of each weight ─▶ an update of each product

Products join the deltas of their weights; a rank keeps the rows and columns that it computes.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final

import torch

from proto.errors import ModelError, shown
from proto.messages.prepared_model import VISION_PREFIX, PreparedModel
from worker.layers.adapters import (
    AdaptedProduct,
    AdaptedWeight,
    Adapter,
    AdapterTargets,
    EmbeddingUpdate,
    HeadUpdate,
    LowRankPart,
    LowRankUpdate,
    SlicedLinear,
)
from worker.layers.linear import Linear
from worker.loader.adapters.files import AdapterFile, Slices, all_finite, read_adapter_file
from worker.loader.adapters.peft_config import PeftConfig
from worker.loader.adapters.tensors import (
    EMBEDDING_NAMES,
    HEAD_NAMES,
    ModulePlaces,
    ModuleTensors,
    Part,
    Place,
    ScaleOf,
    WeightDelta,
    check_rank,
    fused_module,
    low_rank_deltas,
    sort_tensors,
    wrong_shape,
)
from worker.loader.files import read_index
from worker.loader.formats import EMBEDDING, HEAD
from worker.loader.source import WeightSource
from worker.loader.vision import adapted_vision_weights
from worker.models.layer_device import LayerDevice
from worker.models.parts import Shard, WeightSpec
from worker.models.spec import ModelSpec
from worker.models.vision.spec import VisionSpec

_NUMBERS_AT_ONCE: Final = 1 << 18
"""Of a table or weight that are converted or compared in one piece of work, well below 2 ms."""
_NESTED: Final = ".experts.base_layer"
_LAYER: Final = re.compile(r"(?<=\.)\d+(?=\.)")
"""In names of modules, the number of a layer."""
_IN_PART: Final = re.compile(r"\.(experts|[kv]_b\.\d+)\.")
"""In names of weights of an expert, or of one head of latent attention."""


@dataclass(frozen=True, kw_only=True)
class AdapterLimits:
    """What adapters may be. max_rank: of a module. modules: last parts of the names of modules that
    they may change; empty for all.
    """

    max_rank: int
    modules: tuple[str, ...] = ()


def is_adapted(weight: WeightSpec, modules: Sequence[str]) -> bool:
    """Return whether adapters may change a weight. modules: --lora-target-modules, or empty."""
    stacks = (weight.hugging_face_stack, weight.gguf_stack, weight.older_gguf_stack)
    names = [weight.hugging_face, weight.gguf, *(each.tensor for each in stacks if each)]
    lasts = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    return not modules or not lasts.isdisjoint(modules)


def adapted_weights(
    targets: AdapterTargets,
    weights: Mapping[str, WeightSpec],
    shards: Mapping[str, Shard],
    modules: Sequence[str],
) -> list[AdaptedProduct]:
    """Return the weights of each product that adapters may change, as this rank has them."""
    products = []
    for names in targets.weights:
        found, first = [], 0
        for name in names:
            rows, columns = shards.get(name, Shard()).shape_of(weights[name].shape)
            if is_adapted(weights[name], modules):
                found.append(AdaptedWeight(range(first, first + rows), columns))
            first += rows
        products.append(AdaptedProduct(first, found))
    return products


@dataclass
class _Ends:
    """The tensors of embedding and head."""

    embedding: ModuleTensors | None = None
    head: ModuleTensors | None = None


@dataclass
class _Parts:
    """What was read so far. deltas: by the name of the weight. effect: see Adapter."""

    file: AdapterFile
    deltas: dict[str, WeightDelta] = field(default_factory=dict)
    ends: _Ends = field(default_factory=_Ends)
    rank: int = 0
    effect: float = 0.0


class AdapterLoader:
    """Loads adapters for one rank of a model.

    spec: of the whole model. targets: the products of the rank. shards: its part of each divided
    weight. rank: its number. dtype: of the activations, and of adapters in memory. vision: the
    part that encodes images; None without one.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        spec: ModelSpec,
        targets: AdapterTargets,
        shards: Mapping[str, Shard],
        rank: int,
        device: LayerDevice,
        dtype: torch.dtype,
        limits: AdapterLimits,
        vision: VisionSpec | None = None,
    ) -> None:
        self._prepared = prepared
        self._spec = spec
        self._vision = vision
        of_vision = {} if vision is None else adapted_vision_weights(vision)
        self._weights = spec.weights() | of_vision
        self._targets = targets
        self._products = {name for weights in targets.weights for name in weights}
        self._shards = shards
        self._rank = rank
        self._device = device
        self._dtype = dtype
        self._limits = limits
        self._places: dict[str, ModulePlaces] = {}
        self._source: WeightSource | None = None

    def load(self, path: str, digest: bytes = b"") -> Slices[Adapter]:
        """Read an adapter; yields after each small piece of work.

        digest: what its content must be; empty for any. Raises ModelError naming the tensor or the
        key that is wrong.
        """
        file = yield from read_adapter_file(path)
        if digest and file.digest != digest:
            raise ModelError(f"{path} has other content than when the adapter was loaded first")
        if file.format not in self._places:
            self._places[file.format] = ModulePlaces(self._spec, file.format, self._vision)
        parts = _Parts(file)
        yield from self._sort(parts)
        yield from self._measure(parts)
        products = {}
        for number, weights in enumerate(self._targets.weights):
            if any(name in parts.deltas for name in weights):
                update = yield from self._update(weights, parts.deltas)
                products[number] = self._targets.step.laid_out(update)
                yield
        for update in products.values():
            if update.gain is not None:
                parts.effect = max(parts.effect, float(update.gain.abs().max()))
        embedding = yield from self._embedding_update(parts)
        head = yield from self._head_update(parts)
        adapter = Adapter(
            products=products,
            embedding=embedding,
            head=head,
            digest=file.digest,
            rank=parts.rank,
            effect=parts.effect,
            changes_images=any(name.startswith(VISION_PREFIX) for name in parts.deltas),
        )
        return (yield from self._targets.step.packed(adapter))

    def _sort(self, parts: _Parts) -> Slices[None]:
        """Find the weight of each tensor."""
        file, scale_of = parts.file, ScaleOf(parts.file)
        places, config = self._places[file.format], file.config
        modules = sort_tensors(file)
        nested = {each.module.split(_NESTED)[0] for each in modules if _NESTED in each.module}
        changed: set[str] = set()
        of_vision: set[str] = set()
        for tensors in modules:
            module = tensors.module
            if config is not None and ".experts" in module:
                module = fused_module(
                    tensors, config, places, module.removesuffix(".experts") in nested
                )
                tensors = ModuleTensors(module, tensors.parts, tensors.names)
            found = places.find(module)
            self._check_allowed(tensors)
            if places.vision_name(module) is not None:
                _check_vision_parts(tensors)
                if places.is_unused(module):
                    continue  # of a layer behind the last one that is read
                of_vision.add(module)
            is_in_part = any(_IN_PART.search(place.weight.name) for place in found)
            if is_in_part and self._targets.step.changes_layers_only:
                raise ModelError(
                    f"tensor {tensors.name()}: on a GPU adapters change neither experts nor "
                    "kv_b_proj; --device cpu is needed"
                )
            if self._add_end(parts, tensors, found):
                continue
            self._check_place(tensors, found, config)
            changed.update(place.weight.name for place in found)
            max_rank = self._limits.max_rank
            for delta in low_rank_deltas(tensors, found, file.format, scale_of, max_rank):
                if delta.name in parts.deltas:
                    raise ModelError(f"tensor {tensors.name()}: another tensor is of this weight")
                parts.deltas[delta.name] = delta
                parts.rank = max(parts.rank, len(delta.down))
                yield
        if config is not None:
            self._check_complete(config, places, changed)
            self._check_vision_layers(config, places, of_vision)

    def _check_allowed(self, tensors: ModuleTensors) -> None:
        allowed, last = self._limits.modules, tensors.module.rpartition(".")[2]
        if allowed and last not in allowed:
            raise ModelError(
                f"tensor {tensors.name()}: --lora-target-modules {', '.join(allowed)} leave out "
                f"{shown(last)}"
            )

    def _add_end(self, parts: _Parts, tensors: ModuleTensors, found: list[Place]) -> bool:
        """Keep the tensors of embedding and head; return whether they are."""
        names = {place.weight.name for place in found}
        is_head = names == {HEAD} or tensors.module.endswith(HEAD_NAMES[0])
        if parts.file.format == "gguf":
            is_head = tensors.module == HEAD_NAMES[1]
        is_embedding = names == {EMBEDDING} or tensors.module in EMBEDDING_NAMES
        if (is_embedding or is_head) and EMBEDDING not in self._weights:
            raise ModelError(
                f"tensor {tensors.name()}: embedding and head of a model on transformers' code "
                "have no adapters"
            )
        if (is_embedding or is_head) and self._targets.step.changes_layers_only:
            raise ModelError(
                f"tensor {tensors.name()}: on a GPU adapters change neither embedding nor head; "
                "--device cpu is needed"
            )
        if is_embedding and self._spec.inputs is not None:
            raise ModelError(f"tensor {tensors.name()}: an encoder's embedding has no adapters")
        if is_head and not self._spec.has_head:
            raise ModelError(f"tensor {tensors.name()}: the model has no head")
        if is_embedding:
            parts.ends.embedding = tensors
        elif is_head:
            parts.ends.head = tensors
        return is_embedding or is_head

    def _check_place(
        self, tensors: ModuleTensors, found: list[Place], config: PeftConfig | None
    ) -> None:
        """Raise ModelError if a module is not one that adapters change, or not of this adapter."""
        name = tensors.name("down", "up")
        if any(place.weight.name.endswith(".router.weight") for place in found):
            raise ModelError(f"tensor {name}: adapters of a mixture's router are not supported")
        if not any(map(self._is_product, found)):
            raise ModelError(
                f"tensor {name} is of no weight of {self._spec.architecture} that an adapter can "
                "change"
            )
        is_fused = ".experts." in found[0].weight.name
        if config is not None and not is_fused and not config.targets(tensors.module):
            raise ModelError(
                f"tensor {name}: {config.path} leaves the module out (target_modules, "
                "exclude_modules, layers_to_transform)"
            )

    def _check_complete(self, config: PeftConfig, places: ModulePlaces, changed: set[str]) -> None:
        """Raise ModelError if a weight has no tensors though the config names its module."""
        for module, weights in places.modules:
            names = {place.weight.name for place in weights}
            is_single = not any(
                re.search(r"\.(experts|router|shared_gate)\.", name) for name in names
            )
            is_missing = is_single and names & self._products and not names & changed
            if is_missing and config.targets(module):
                raise _missing(module, config)

    def _check_vision_layers(
        self, config: PeftConfig, places: ModulePlaces, modules: set[str]
    ) -> None:
        """Raise ModelError if a layer has no tensors of a kind that another layer has, though the
        config names its module.

        modules: of the vision part, by their names in the file.
        """
        kinds = {tuple(_LAYER.split(each, maxsplit=1)) for each in modules if _LAYER.search(each)}
        for before, after in sorted(kinds):
            for number in count():
                module = f"{before}{number}{after}"
                if places.vision_name(module) not in self._products:
                    break
                if module not in modules and config.targets(module):
                    raise _missing(module, config)

    def _is_product(self, place: Place) -> bool:
        """Return whether a weight is multiplied as a product, by this rank or another one."""
        return place.weight.name in self._products or ".experts." in place.weight.name

    # ---- Products ----

    def _measure(self, parts: _Parts) -> Slices[None]:
        """Find the largest change for a probe."""
        generator = torch.Generator().manual_seed(0)
        probes: dict[int, torch.Tensor] = {}
        for delta in parts.deltas.values():
            size = delta.down.shape[1]
            if size not in probes:
                probes[size] = torch.randn(size, generator=generator)
            change = delta.up @ (delta.down @ probes[size])
            if delta.bias is not None:
                change = change + delta.bias
            if not all_finite(change):
                raise ModelError(
                    f"the adapter of {delta.name} changes a probe of ordinary numbers by NaN or "
                    "infinity"
                )
            parts.effect = max(parts.effect, float(change.abs().max()))
            yield

    def _update(
        self, weights: tuple[str, ...], deltas: Mapping[str, WeightDelta]
    ) -> Slices[LowRankUpdate]:
        """Return what an adapter adds to a product of these weights, one below the other."""
        downs: dict[tuple[object, ...], torch.Tensor] = {}
        low_rank: list[LowRankPart] = []
        starts: dict[tuple[object, ...], int] = {}
        gains, shifts, first = [], [], 0
        for name in weights:
            shard = self._shards.get(name, Shard())
            rows, _ = shard.shape_of(self._weights[name].shape)
            outputs, first = range(first, first + rows), first + rows
            gain, shift = torch.zeros(rows), torch.zeros(rows)
            delta = deltas.get(name)
            if delta is not None:
                up, bias = shard.rows_of(delta.up), delta.bias
                is_summed = self._rank > 0 and shard.columns != slice(None)
                if bias is not None:
                    shift += shard.rows_of(bias)
                if delta.magnitude is not None:
                    factors = shard.rows_of((yield from self._dora_factors(name, delta)))
                    up, gain, shift = up * factors[:, None], factors - 1, shift * factors
                    own_bias = name.removesuffix("weight") + "bias"
                    if own_bias in self._weights:
                        shift -= gain * shard.rows_of(self._base().read(own_bias))
                if is_summed:  # the first rank adds it for all
                    shift = torch.zeros(rows)
                if delta.shared not in starts:
                    starts[delta.shared] = sum(map(len, downs.values()))
                    downs[delta.shared] = shard.columns_of(delta.down)
                start = starts[delta.shared]
                ranks = range(start, start + len(delta.down))
                low_rank.append(LowRankPart(outputs, ranks, self._converted(name, up.t())))
                yield
            gains.append(gain)
            shifts.append(shift)
        gain, shift = torch.cat(gains), torch.cat(shifts)
        return LowRankUpdate(
            self._converted(weights[0], torch.cat(list(downs.values()))),
            tuple(low_rank),
            gain if gain.any() else None,
            shift if shift.any() else None,
        )

    def _converted(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor as the products of activations read it."""
        converted = tensor.to(self._dtype)
        if not all_finite(converted):
            raise ModelError(f"the adapter of {name} is not finite as {self._dtype}")
        return converted

    def _dora_factors(self, name: str, delta: WeightDelta) -> Slices[torch.Tensor]:
        """Return magnitude / norm of each row of W + B A, float32 [out]."""
        assert delta.magnitude is not None
        source = self._base()
        yield
        norms = torch.empty(len(delta.up))
        for part in _row_slices(*self._weights[name].shape):
            rows, order = source.read_rows(name, rows=part)
            own = torch.arange(part.start, part.stop)  # the rows of the weight
            if order is not None:
                own = torch.from_numpy(order).argsort()[own]
            whole = rows.to(torch.float32, copy=True).addmm_(delta.up[own], delta.down)
            norms[own] = whole.norm(dim=1)
            yield
        factors = delta.magnitude / norms
        if not factors.isfinite().all():
            raise ModelError(f"DoRA's magnitudes of {name} belong to rows of zeros")
        return factors

    def _base(self) -> WeightSource:
        """Return the weights of the whole model in its files, read into the host's memory."""
        if EMBEDDING not in self._weights:
            raise ModelError("use_dora: the weights of a model on transformers' code are not known")
        if self._source is None:
            index = read_index(self._prepared)
            self._source = WeightSource(
                index,
                self._spec,
                torch.float32,
                self._device,
                torch_device=torch.get_default_device(),
            )
        return self._source

    # ---- Embedding and head ----

    def _embedding_update(self, parts: _Parts) -> Slices[EmbeddingUpdate | None]:
        tensors = parts.ends.embedding
        if tensors is None:
            return None
        found, vocab_size = tensors.parts, self._spec.vocab_size
        _check_parts(tensors, "saved", "base", "tokens", "embedding_down", "embedding_up")
        saved = yield from self._saved(tensors, parts)
        if saved is not None:
            saved = yield from self._converted_table(tensors, saved)
        ids, token_rows = yield from self._token_rows(tensors, parts)
        down = up = None
        if "embedding_down" in found or "embedding_up" in found:
            down, up = self._embedding_pair(tensors, parts, vocab_size)
            largest = (down.abs().amax(0)[:, None] * up.abs()).sum(0).max()
            parts.effect = max(parts.effect, float(largest))
            down, up = self._converted(EMBEDDING, down), self._converted(EMBEDDING, up)
        return EmbeddingUpdate(saved, ids, token_rows, down, up)

    def _embedding_pair(
        self, tensors: ModuleTensors, parts: _Parts, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return [vocab, rank] and [rank, hidden], with the scale in the second one."""
        for part in ("embedding_down", "embedding_up"):
            if part not in tensors.parts:
                raise ModelError(f"tensor {tensors.name()} has no other half beside it")
        down, up = (tensors.parts[part].float() for part in ("embedding_down", "embedding_up"))
        if parts.file.format != "gguf":
            down = down.t()  # PEFT has [rank, vocab]
        rank = check_rank(tensors, up.shape[1] if up.dim() == 2 else 0, self._limits.max_rank)
        if down.shape != (vocab_size, rank):
            raise wrong_shape(tensors, "embedding_down", (rank, vocab_size))
        if up.shape != (self._spec.hidden_size, rank):
            raise wrong_shape(tensors, "embedding_up", (self._spec.hidden_size, rank))
        parts.rank = max(parts.rank, rank)
        return down, up.t() * ScaleOf(parts.file)(tensors, rank)

    def _saved(self, tensors: ModuleTensors, parts: _Parts) -> Slices[torch.Tensor | None]:
        """Return the whole table of a module in place of the model's; None if it is the same.

        It is as the file has it, not yet converted.
        """
        part: Part = "saved" if "saved" in tensors.parts else "base"
        if part not in tensors.parts:
            return None
        table = (self._spec.vocab_size, self._spec.hidden_size)
        saved = tensors.parts[part]
        if saved.shape != table:
            raise wrong_shape(tensors, part, table)
        config = parts.file.config
        if part == "saved" and config is not None and not config.modules_to_save:
            raise ModelError(
                f"tensor {tensors.name('saved')}: modules_to_save of {config.path} is empty"
            )
        source, change = self._base(), 0.0
        yield
        for rows in _row_slices(*table):
            other, _ = source.read_rows(self._end_name(tensors), rows=rows)
            change = max(change, float((saved[rows].float() - other.float()).abs().max()))
            yield
        parts.effect = max(parts.effect, change)
        return saved if change else None

    def _converted_table(self, tensors: ModuleTensors, rows: torch.Tensor) -> Slices[torch.Tensor]:
        table = torch.empty(rows.shape, dtype=self._dtype)
        for part in _row_slices(*rows.shape):
            table[part] = self._converted(self._end_name(tensors), rows[part])
            yield
        return table

    def _end_name(self, tensors: ModuleTensors) -> str:
        is_head = tensors.module.endswith(HEAD_NAMES)
        return HEAD if is_head and not self._spec.tied_embeddings else EMBEDDING

    def _token_rows(
        self, tensors: ModuleTensors, parts: _Parts
    ) -> Slices[tuple[torch.Tensor | None, torch.Tensor | None]]:
        """Return ids, ascending, and rows of trained tokens; None without any."""
        rows = tensors.parts.get("tokens")
        if rows is None:
            return None, None
        config = parts.file.config
        assert config is not None, "GGUF files have none"
        last = tensors.module.rpartition(".")[2]
        named = [
            indices
            for name, indices in config.token_indices.items()
            if not name or name == last or name.endswith(f".{last}") or tensors.module == name
        ]
        if not named and config.token_indices:
            named = list(config.token_indices.values())[:1]  # of tied weights
        ids = torch.tensor(named[0] if named else [], dtype=torch.int64)
        wanted = (len(ids), self._spec.hidden_size)
        if rows.shape != wanted:
            raise wrong_shape(tensors, "tokens", wanted)
        if len(ids) and int(ids.max()) >= self._spec.vocab_size:
            raise ModelError(
                f"{config.path}: trainable_token_indices {int(ids.max())}: the model has "
                f"{self._spec.vocab_size} tokens"
            )
        if len(set(ids.tolist())) < len(ids):
            raise ModelError(f"{config.path}: trainable_token_indices names a token twice")
        source = self._base()
        yield
        for number, row in zip(ids.tolist(), rows, strict=True):
            base, _ = source.read_rows(self._end_name(tensors), rows=slice(number, number + 1))
            parts.effect = max(parts.effect, float((base[0].float() - row.float()).abs().max()))
            yield
        order = ids.argsort()
        table = yield from self._converted_table(tensors, rows[order])
        return ids[order], table

    def _head_update(self, parts: _Parts) -> Slices[HeadUpdate | None]:
        tensors, config = parts.ends.head, parts.file.config
        embedding = parts.ends.embedding
        if embedding is not None and self._spec.tied_embeddings and config is not None:
            # PEFT ties trained tokens of tied weights always, and other parts if it is asked to.
            tied: tuple[Part, ...] = ("tokens",)
            if config.ensure_weight_tying:
                tied = ("tokens", "saved", "embedding_down", "embedding_up")
            if tensors is None and set(tied) & set(embedding.parts):
                tensors = ModuleTensors(
                    embedding.module,
                    {part: it for part, it in embedding.parts.items() if part in tied},
                    embedding.names,
                )
        if tensors is None:
            return None
        _check_parts(
            tensors, "saved", "base", "tokens", "down", "up", "embedding_down", "embedding_up"
        )
        saved = yield from self._saved(tensors, parts)
        ids, token_rows = yield from self._token_rows(tensors, parts)
        low_rank = yield from self._head_low_rank(tensors, parts)
        heads: list[Linear | None] = []
        num_bytes = 0 if low_rank is None else low_rank.num_bytes
        for table in (saved, token_rows):
            if table is None:
                heads.append(None)
                continue
            num_bytes += table.numel() * self._dtype.itemsize
            slices = []
            for rows in _row_slices(*table.shape):
                slices.append(self._device.adapter_head(self._converted(HEAD, table[rows])))
                yield
            heads.append(slices[0] if len(slices) == 1 else SlicedLinear(slices))
        return HeadUpdate(heads[0], ids, heads[1], low_rank, num_bytes)

    def _head_low_rank(self, tensors: ModuleTensors, parts: _Parts) -> Slices[LowRankUpdate | None]:
        vocab_size, hidden = self._spec.vocab_size, self._spec.hidden_size
        if {"embedding_down", "embedding_up"} & set(tensors.parts):
            up, down = self._embedding_pair(tensors, parts, vocab_size)
        elif {"down", "up"} & set(tensors.parts):
            place = Place(self._weights.get(HEAD, self._weights[EMBEDDING]), None)
            parts_of_pair: tuple[Part, ...] = ("down", "up")
            own = {part: it for part, it in tensors.parts.items() if part in parts_of_pair}
            tensors = ModuleTensors(tensors.module, own, tensors.names)
            scale_of, max_rank = ScaleOf(parts.file), self._limits.max_rank
            (delta,) = low_rank_deltas(tensors, [place], parts.file.format, scale_of, max_rank)
            down, up = delta.down, delta.up
            parts.rank = max(parts.rank, len(down))
        else:
            return None
        yield
        largest = (up.abs().amax(0)[:, None] * down.abs()).sum(0).max()
        parts.effect = max(parts.effect, float(largest))
        assert down.shape[1] == hidden
        yield
        part = LowRankPart(range(vocab_size), range(len(down)), self._converted(HEAD, up.t()))
        yield
        return self._targets.step.laid_out(LowRankUpdate(self._converted(HEAD, down), (part,)))


def _missing(module: str, config: PeftConfig) -> ModelError:
    return ModelError(
        f"tensor base_model.model.{module}.lora_A.weight is missing: {config.path} names its module"
    )


def _row_slices(rows: int, columns: int) -> Iterator[slice]:
    """Yield the rows of a matrix in slices that are small pieces of work."""
    size = max(1, _NUMBERS_AT_ONCE // columns)
    for first in range(0, rows, size):
        yield slice(first, min(rows, first + size))


def _check_parts(tensors: ModuleTensors, *allowed: Part) -> None:
    """Raise ModelError for a part that embedding or head cannot have."""
    for part in tensors.parts:
        if part not in allowed:
            raise ModelError(f"tensor {tensors.name(part)} is not supported in this module")


def _check_vision_parts(tensors: ModuleTensors) -> None:
    """Raise ModelError for a part that a module of the vision part cannot have."""
    for part in tensors.parts:
        if part not in ("down", "up", "bias"):
            name = tensors.name(part)
            raise ModelError(
                f"tensor {name}: a vision part has adapters of lora_A and lora_B alone"
            )
