"""FlashInfer's kernels for norms, gates, rotations and experts on a FakeDevice, strict.

The library casts pointers to the dtype of its first argument and reads vectors of 16 bytes, without
checks; a violation is a ContractError here. num_calls: by name. modules: if given, a kernel whose
module was not loaded at the start is a ContractError, too, because the library would compile it in
the middle of a step.
"""

from collections import Counter
from collections.abc import Callable

import torch
import torch.nn.functional as F

from tests.fakes.fake_device import FakeDevice, on_host
from tests.fakes.fake_flashinfer_modules import FakeModules
from tests.fakes.fake_fp8 import FakeGemm
from tests.fakes.fake_paged_wrapper import SIXTEEN_BITS, demand


class FakeRowKernels:
    """A part of the module `flashinfer`, for one device."""

    def __init__(self, device: FakeDevice, modules: FakeModules | None = None) -> None:
        self._device = self.device = device
        self._modules = modules
        self.gemm = FakeGemm(device, modules)
        self.num_calls: Counter[str] = Counter()

    def rmsnorm(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        eps: float = 1e-6,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        demand(input.dim() in (2, 3), "a norm is of rows, or of heads in rows")
        return self._norm("rmsnorm", input, weight, eps, out)

    def silu_and_mul(self, input: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._gate("silu_and_mul", input, out, F.silu)

    def gelu_tanh_and_mul(
        self, input: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._gate(
            "gelu_tanh_and_mul", input, out, lambda gate: F.gelu(gate, approximate="tanh")
        )

    def apply_rope_with_cos_sin_cache_inplace(
        self,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        head_size: int,
        cos_sin_cache: torch.Tensor,
        is_neox: bool = True,
    ) -> None:
        self.num_calls["rope"] += 1
        self._need("rope")
        for name, each in (("query", query), ("key", key)):
            self._check(name, each)
            demand(each.dim() == 2 and each.shape[1] % head_size == 0, f"{name} has whole heads")
        self._on_device("positions", positions)
        self._on_device("the table", cos_sin_cache)
        demand(positions.dtype in (torch.int32, torch.int64), "positions are integers")
        demand(positions.shape == query.shape[:1] == key.shape[:1], "each token has a position")
        demand(query.dtype == key.dtype, "query and key have one dtype")
        demand(cos_sin_cache.dtype == torch.float32, "the table is float32")
        demand(cos_sin_cache.is_contiguous() and positions.is_contiguous(), "no gaps")
        demand(cos_sin_cache.shape[1] == head_size, "all of a head is turned")
        demand(is_neox, "halves are turned, not neighbours")

        def run() -> None:
            table = on_host(cos_sin_cache)
            rows = on_host(positions).long()
            demand(int(rows.max()) < len(table), "positions are in the table")
            cosines, sines = table[rows][:, None].chunk(2, dim=-1)
            for each in (on_host(query), on_host(key)):
                heads = each.view(len(each), -1, head_size)
                first, second = heads.float().chunk(2, dim=-1)
                turned = (
                    (first * cosines).addcmul(second, sines, value=-1.0),
                    (second * cosines).addcmul(first, sines),
                )
                heads.copy_(torch.cat(turned, dim=-1))

        self._device.kernel(run)

    def cutlass_fused_moe(
        self,
        input: torch.Tensor,
        token_selected_experts: torch.Tensor,
        token_final_scales: torch.Tensor,
        fc1_expert_weights: torch.Tensor,
        fc2_expert_weights: torch.Tensor,
        output_dtype: torch.dtype,
        quant_scales: list[torch.Tensor],
        fc1_expert_biases: torch.Tensor | None = None,
        fc2_expert_biases: torch.Tensor | None = None,
        tp_size: int = 1,
        tp_rank: int = 0,
        ep_size: int = 1,
        ep_rank: int = 0,
        output: torch.Tensor | None = None,
        *,
        use_fused_finalize: bool,
    ) -> list[torch.Tensor]:
        self.num_calls["cutlass_fused_moe"] += 1
        self._need("fused_moe_90")
        demand(output is not None, "the result has its place")
        assert output is not None
        demand(not use_fused_finalize, "sums of experts have an order")
        demand(quant_scales == [], "16-bit weights have no scales")
        first, second, chosen = fc1_expert_weights, fc2_expert_weights, token_selected_experts
        for name, each in (("input", input), ("fc1", first), ("fc2", second), ("output", output)):
            self._check(name, each)
            demand(each.is_contiguous(), f"{name} is contiguous")
            demand(each.dtype == output_dtype, f"{name} has the dtype of the output")
        for name, each, dtype in (
            ("experts", chosen, torch.int32),
            ("scales", token_final_scales, torch.float32),
        ):
            self._on_device(name, each)
            demand(each.dtype == dtype, f"{name} are {dtype}")
            demand(each.dim() == 2 and each.is_contiguous(), f"{name} are rows without gaps")
            demand(len(each) == len(input), f"each token has {name}")
        demand(chosen.shape == token_final_scales.shape, "each expert has a scale")
        demand(first.dim() == second.dim() == 3, "weights are stacked")
        num_experts, hidden, inner = second.shape
        demand(first.shape == (num_experts, 2 * inner, hidden), "up and gate are in one weight")
        demand(input.shape == output.shape == (len(input), hidden), "rows are of the hidden size")
        demand(hidden % 8 == 0 and inner % 8 == 0, "rows are whole vectors of 16 bytes")
        demand((fc1_expert_biases is None) == (fc2_expert_biases is None), "both have biases")
        if fc1_expert_biases is not None and fc2_expert_biases is not None:
            for bias, weight in ((fc1_expert_biases, first), (fc2_expert_biases, second)):
                self._check("bias", bias)
                demand(bias.shape == weight.shape[:2], "a bias for each output")
                demand(bias.is_contiguous() and bias.dtype == output_dtype, "a bias like outputs")
        for rank, size in ((tp_rank, tp_size), (ep_rank, ep_size)):
            demand(0 <= rank < size, "a rank is one of all")

        def run() -> None:
            experts = on_host(chosen).long() - ep_rank * num_experts
            demand(int(experts.max()) < (ep_size - ep_rank) * num_experts, "experts exist")
            demand(int(experts.min()) >= -ep_rank * num_experts, "experts exist")
            total = torch.zeros(output.shape)
            for row, slot in ((experts >= 0) & (experts < num_experts)).nonzero().tolist():
                expert = int(experts[row, slot])
                up_gate = on_host(first)[expert].float() @ on_host(input)[row].float()
                if fc1_expert_biases is not None:
                    up_gate += on_host(fc1_expert_biases)[expert].float()
                up, gate = up_gate.to(output_dtype).float().chunk(2)
                product = (
                    on_host(second)[expert].float() @ (F.silu(gate) * up).to(output_dtype).float()
                )
                # The library leaves the bias of the sum to the first rank.
                if fc2_expert_biases is not None and tp_rank == 0:
                    product += on_host(fc2_expert_biases)[expert].float()
                total[row] += on_host(token_final_scales)[row, slot] * product
            on_host(output).copy_(total)

        self._device.kernel(run)
        return [output]

    def _norm(
        self,
        name: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        self.num_calls[name] += 1
        self._need("norm")
        demand(out is not None, "the result has its place")
        assert out is not None
        for what, each in (("input", x), ("out", out), ("weight", weight)):
            self._check(what, each)
        demand(weight.dtype == x.dtype == out.dtype, "weight, input and out have one dtype")
        demand(weight.dim() == 1 and len(weight) == x.shape[-1], "a weight for each element")
        demand(out.shape == x.shape, "the result has the input's shape")

        def run() -> None:
            wide, factor = on_host(x).float(), on_host(weight).float()
            on_host(out).copy_(F.rms_norm(wide, [len(factor)], factor, eps))

        self._device.kernel(run)
        return out

    def _gate(
        self,
        name: str,
        x: torch.Tensor,
        out: torch.Tensor | None,
        function: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        self.num_calls[name] += 1
        self._need(name)
        demand(out is not None, "the result has its place")
        assert out is not None
        for what, each in (("input", x), ("out", out)):
            self._check(what, each)
            demand(each.is_contiguous(), f"{what} is contiguous")
        demand(out.dtype == x.dtype, "input and out have one dtype")
        demand(x.shape == (len(out), 2 * out.shape[1]), "gate and up are side by side")
        demand(out.shape[1] * x.element_size() % 16 == 0, "both halves begin at 16 bytes")

        def run() -> None:
            gate, up = on_host(x).float().chunk(2, dim=-1)
            on_host(out).copy_(function(gate) * up)

        self._device.kernel(run)
        return out

    def _need(self, module: str) -> None:
        if self._modules is not None:
            self._modules.need(module)

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        self._on_device(name, tensor)
        demand(tensor.dtype in SIXTEEN_BITS, f"{name} has 16 bits")
        demand(tensor.stride(-1) == 1, f"the elements of {name} follow one another")

    def _on_device(self, name: str, tensor: torch.Tensor) -> None:
        demand(self._device.holds(tensor), f"{name} is on the device")
