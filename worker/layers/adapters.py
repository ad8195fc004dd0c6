"""Adapters (LoRA) of the rows of a step: what they add to products, embedding and logits.

    y = W x + B (A x)      A [rank, in], B [out, rank], with the adapter's scale (Hu et al., LoRA)

Rows of a step name their adapters; a row without one has the bits that it has without adapters. A
product of several weights (query ‖ key ‖ value) has the adapter's parts of all of them:

    A   | A of q |        B   | B of q |        |        |
        | A of k |            |        | B of k |        |
        | A of v |            |        |        | B of v |

DoRA (Liu et al.) also multiplies each output: y = W x + gain W x + shift + B (A x), where gain is
the factor minus 1.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch

from worker.layers.embedding import Embedding
from worker.layers.linear import Linear


@dataclass(frozen=True, slots=True)
class LowRankPart:
    """The B of some outputs of a product: up [len(ranks), len(outputs)], its transpose.

    ranks: rows of A whose results it multiplies.
    """

    outputs: range
    ranks: range
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """What an adapter adds to one product.

    down: A [rank, in]. gain, shift: float32 [out], or None.
    """

    down: torch.Tensor
    parts: tuple[LowRankPart, ...]
    gain: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        others = [each for each in (self.gain, self.shift) if each is not None]
        return sum(each.nbytes for each in (self.down, *(part.up for part in self.parts), *others))


@dataclass(frozen=True, slots=True)
class EmbeddingUpdate:
    """What an adapter changes in the embedding of tokens; rows have no scale.

    saved: all rows [vocab, hidden] in place of the model's. token_ids, token_rows: int64 [n],
    ascending, and [n, hidden], rows of some tokens in place of these. down [vocab, rank] and up
    [rank, hidden]: added to the row of each token.
    """

    saved: torch.Tensor | None = None
    token_ids: torch.Tensor | None = None
    token_rows: torch.Tensor | None = None
    down: torch.Tensor | None = None
    up: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.saved, self.token_ids, self.token_rows, self.down, self.up)
        return sum(each.nbytes for each in tensors if each is not None)

    def rows(self, token_ids: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """Return the rows [n, hidden] in float32 of int64 [n]. base: those of the model."""
        found = base if self.saved is None else self.saved.index_select(0, token_ids)
        found = found.to(torch.float32, copy=True)
        if self.token_ids is not None and self.token_rows is not None:
            places = torch.searchsorted(self.token_ids, token_ids).clamp_max_(
                len(self.token_ids) - 1
            )
            is_changed = self.token_ids[places] == token_ids
            found[is_changed] = self.token_rows[places[is_changed]].float()
        if self.down is not None and self.up is not None:
            factors = self.down.index_select(0, token_ids).float()
            for rank, row in enumerate(self.up.float()):  # one order for any number of rows
                found.addcmul_(factors[:, rank, None], row)
        return found


class SlicedLinear(Linear):
    """A product whose outputs are computed slice by slice, by one layer for each."""

    def __init__(self, slices: Sequence[Linear]) -> None:
        self._slices = slices

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([each(x) for each in self._slices], dim=1)


@dataclass(frozen=True, slots=True)
class HeadUpdate:
    """What an adapter changes in the logits.

    saved: the product in place of the head. token_ids, tokens: int64 [n], and the product that
    gives the logits of these tokens. low_rank: added to the logits.
    """

    saved: Linear | None = None
    token_ids: torch.Tensor | None = None
    tokens: Linear | None = None
    low_rank: LowRankUpdate | None = None
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter in the memory of a device.

    products: by the number of the product. digest: SHA-256 of its content. rank: the largest of
    its parts. effect: the largest change of a product's output, for a probe of normally distributed
    numbers; 0 if it changes nothing. changes_images: whether it changes the part that encodes
    images.
    """

    products: Mapping[int, LowRankUpdate]
    embedding: EmbeddingUpdate | None = None
    head: HeadUpdate | None = None
    digest: bytes = b""
    rank: int = 0
    effect: float = 0.0
    changes_images: bool = False

    @property
    def num_bytes(self) -> int:
        ends = [each for each in (self.embedding, self.head) if each is not None]
        return sum(each.num_bytes for each in (*self.products.values(), *ends))

    @property
    def multiplies_outputs(self) -> bool:
        """Whether it changes outputs by factors (DoRA), which needs them by themselves."""
        return any(update.gain is not None for update in self.products.values())


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a step that have one adapter.

    rows: int64 [n], ascending. scales: float32 [n], factors of the adapter's effect.
    """

    adapter: Adapter
    rows: torch.Tensor
    scales: torch.Tensor

    def select(self, chosen: torch.Tensor) -> "AdapterRows | None":
        """Return the rows among `chosen`, int64 ascending, by their places there; None if none."""
        if not len(chosen):
            return None
        places = torch.searchsorted(chosen, self.rows).clamp_max_(len(chosen) - 1)
        is_there = chosen[places] == self.rows
        if not is_there.any():
            return None
        return AdapterRows(self.adapter, places[is_there], self.scales[is_there])


class ImageAdapter:
    """The adapter with which an image is encoded: every row of a product has it.

    step: what the products ask. scale: factor of its effect.
    """

    def __init__(self, step: "StepAdapters", adapter: Adapter, scale: float) -> None:
        self._step, self._adapter, self._scale = step, adapter, scale
        self._rows: dict[int, tuple[AdapterRows, ...]] = {}

    @contextmanager
    def encoding(self) -> Iterator[None]:
        """Let the products of the encoder add it until the end of the block."""
        self._step.image = self
        try:
            yield
        finally:
            self._step.image = None

    def rows(self, count: int) -> tuple[AdapterRows, ...]:
        """Return it for a product of `count` rows."""
        if count not in self._rows:
            rows, scales = torch.arange(count), torch.full((count,), self._scale)
            self._rows[count] = (AdapterRows(self._adapter, rows, scales),)
        return self._rows[count]


@dataclass(frozen=True, slots=True)
class AdaptedWeight:
    """A weight of a product that adapters may change.

    outputs: its rows among those of the product. num_inputs: its columns.
    """

    outputs: range
    num_inputs: int


@dataclass(frozen=True, slots=True)
class AdaptedProduct:
    """A product that adapters may change. num_outputs: of all its weights, changed or not."""

    num_outputs: int
    weights: Sequence[AdaptedWeight]


class StepAdapters:
    """The adapters of the rows that are being computed; all products of a model ask it.

    groups: the rows of each adapter; empty between steps, and in a step without adapters.
    num_products: of the model. image: while an image is encoded, its adapter, if it has one. A
    device with a kernel overrides `add`.
    """

    changes_layers_only = False
    """Whether adapters can change neither embedding and head, nor experts, nor single heads, nor
    the part that encodes images."""

    def __init__(self) -> None:
        self.groups: tuple[AdapterRows, ...] = ()
        self.image: ImageAdapter | None = None
        self.num_products = 0

    @contextmanager
    def running(self, groups: Iterable[AdapterRows]) -> Iterator[None]:
        """Let products add these adapters until the end of the block."""
        before, self.groups = self.groups, groups if isinstance(groups, tuple) else tuple(groups)
        try:
            yield
        finally:
            self.groups = before

    @contextmanager
    def selecting(self, rows: torch.Tensor) -> Iterator[None]:
        """Let products compute these rows of the step alone, int64 [n], ascending."""
        chosen = (group.select(rows) for group in self.groups)
        with self.running(group for group in chosen if group is not None):
            yield

    def rows_of(self, products: Sequence[int]) -> torch.Tensor:
        """Return the rows, int64 ascending, whose adapters change one of these products."""
        rows = [
            group.rows
            for group in self.groups
            if any(number in group.adapter.products for number in products)
        ]
        return torch.cat(rows).sort().values if rows else torch.zeros(0, dtype=torch.int64)

    def scaled_rows(self, product: int) -> torch.Tensor:
        """Return the rows, int64 ascending, whose adapters multiply this product's outputs."""
        rows = [
            group.rows
            for group in self.groups
            if (update := group.adapter.products.get(product)) is not None
            and update.gain is not None
        ]
        return torch.cat(rows).sort().values if rows else torch.zeros(0, dtype=torch.int64)

    def forget(self) -> None:
        """Keep nothing of a step that has ended: an adapter is freed."""

    def reserve(
        self,
        products: Sequence[AdaptedProduct],
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """Take the memory that steps with adapters need on a device with memory of its own.

        products: of the model, by their numbers. max_adapters: in a step.
        """

    def packed(self, adapter: Adapter) -> Generator[str | None, None, Adapter]:
        """Return a loaded adapter as steps read it; yields as `AdapterLoader.load` does."""
        yield from ()
        return adapter

    def update_bytes(
        self, rank: int, changed: Sequence[tuple[int, int]], num_outputs: int, dtype: torch.dtype
    ) -> int:
        """Return the largest `num_bytes` of an update of a product as `laid_out` returns it.

        changed: [out, in] of the product's weights that the adapter changes, each by this rank.
        num_outputs: of the product; with DoRA and biases each has a gain and a shift.
        """
        down = self._matrix_bytes(rank * len(changed), changed[0][1], dtype)
        up = sum(self._matrix_bytes(outputs, rank, dtype) for outputs, _ in changed)
        return down + up + 2 * num_outputs * torch.float32.itemsize

    def _matrix_bytes(self, lanes: int, length: int, dtype: torch.dtype) -> int:
        return lanes * length * dtype.itemsize

    def laid_out(self, update: LowRankUpdate) -> LowRankUpdate:
        """Return an update as `add` reads it fastest."""
        return update

    def add(self, product: int, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add the adapters' parts to the output y [T, out] of a product of x [T, in]."""
        for group in self.groups:
            update = group.adapter.products.get(product)
            if update is not None:
                self.add_update(update, group, x, y)

    def add_update(
        self, update: LowRankUpdate, group: AdapterRows, x: torch.Tensor, y: torch.Tensor
    ) -> None:
        """Add one adapter's part; rows of x and y may be a stride apart."""
        rows, scales = group.rows, group.scales[:, None]
        before = y.index_select(0, rows).float()
        reduced = x.index_select(0, rows).float() @ update.down.float().t() * scales
        after = before.clone()
        for part in update.parts:
            columns, ranks = part.outputs, part.ranks
            after[:, columns.start : columns.stop] += (
                reduced[:, ranks.start : ranks.stop] @ part.up.float()
            )
        if update.gain is not None:
            after += before * update.gain * scales
        if update.shift is not None:
            after += update.shift * scales
        y[rows] = after.to(y.dtype)

    def add_to(
        self, linear: "AdaptedLinear", residual: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        """Return residual plus a product of x and what the adapters add to it."""
        # Where an adapter multiplies outputs, they are computed by themselves.
        scaled = self.scaled_rows(linear.product)
        before = residual.index_select(0, scaled)
        residual = linear.base.add_to(residual, x)
        self.add(linear.product, x, residual)
        if len(scaled):
            with self.selecting(scaled):
                residual[scaled] = before + linear(x.index_select(0, scaled))
        return residual

    def embed(self, token_ids: torch.Tensor, hidden: torch.Tensor, embedding: Embedding) -> None:
        """Replace embedded tokens [T, hidden] where adapters change the rows of int64 [T]."""
        for group in self.groups:
            update, rows = group.adapter.embedding, group.rows
            if update is None:
                continue
            own = token_ids.index_select(0, rows)
            base = embedding.rows(own).float()
            new = base.lerp(update.rows(own, base), group.scales[:, None])
            hidden[rows] = embedding.scaled(new.to(hidden.dtype))

    def change_logits(self, x: torch.Tensor, logits: torch.Tensor) -> None:
        """Replace logits [N, vocab] of the rows x [N, hidden] where adapters change the head."""
        for group in self.groups:
            update, rows = group.adapter.head, group.rows
            if update is None:
                continue
            own = x.index_select(0, rows)
            before = logits.index_select(0, rows)
            after = before.clone() if update.saved is None else update.saved(own)
            if update.tokens is not None and update.token_ids is not None:
                after[:, update.token_ids] = update.tokens(own).to(after.dtype)
            if update.low_rank is not None:
                all_rows = AdapterRows(
                    group.adapter, torch.arange(len(rows)), torch.ones(len(rows))
                )
                self.add_update(update.low_rank, all_rows, own, after)
            new = before.float().lerp_(after.float(), group.scales[:, None])
            logits[rows] = new.to(logits.dtype)


class AdaptedLinear(Linear):
    """A linear layer to whose output the adapters of a step add their parts.

    base: the layer itself. product: its number.
    """

    def __init__(self, base: Linear, adapters: StepAdapters, product: int) -> None:
        self.base = base
        self.product = product
        self.adapters = adapters

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        if self.adapters.groups:
            self.adapters.add(self.product, x, y)
        return y

    def into(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.base.into(x, out)
        if self.adapters.groups:
            self.adapters.add(self.product, x, out)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.adapters.groups:
            return self.base.add_to(residual, x)
        return self.adapters.add_to(self, residual, x)


class EncoderLinear(AdaptedLinear):
    """A product of an encoder of images, all of whose rows have the adapter of the image."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        with self._adapting(len(x)):
            return super().__call__(x)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with self._adapting(len(x)):
            return super().add_to(residual, x)

    def _adapting(self, num_rows: int) -> AbstractContextManager[None]:
        image = self.adapters.image
        return self.adapters.running(() if image is None else image.rows(num_rows))


def plain(linear: Linear) -> Linear:
    """Return a linear layer without adapters."""
    return linear.base if isinstance(linear, AdaptedLinear) else linear


def product_number(linear: Linear) -> int:
    """Return the number of a product that adapters may change; -1 for another one."""
    return linear.product if isinstance(linear, AdaptedLinear) else -1


@dataclass
class AdapterTargets:
    """The products of a rank's model that adapters may change, by their numbers.

    step: what the products ask. weights: names of the weights of each product, one below the other.
    """

    step: StepAdapters
    weights: list[tuple[str, ...]] = field(default_factory=list)
    _numbers: dict[tuple[str, ...], int] = field(default_factory=dict)

    def add_products(self, products: Iterable[tuple[str, ...]]) -> None:
        """Give products their numbers."""
        for weights in products:
            self._numbers[weights] = len(self.weights)
            self.weights.append(weights)
        self.step.num_products = len(self.weights)

    def adapted(self, linear: Linear, weights: tuple[str, ...]) -> AdaptedLinear:
        """Return the layer of a product with the adapters of each step."""
        return AdaptedLinear(linear, self.step, self._numbers[weights])

    def has_product(self, weights: tuple[str, ...]) -> bool:
        """Return whether adapters may change the product of these weights."""
        return weights in self._numbers

    def number(self, weights: tuple[str, ...]) -> int:
        return self._numbers[weights]
