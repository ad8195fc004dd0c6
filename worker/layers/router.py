"""The router of a mixture of experts: which experts compute a token, and with which weights.

Logits, scores and weights are float32. RouterSpec describes the arithmetic; Router computes it in
torch, on any device and without waiting for it; csrc/layers/moe.cpp computes the same in C++.
"""

from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F

Scoring = Literal["softmax", "sigmoid"]
_LEAST_SUM: Final = 1e-20


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """The choice of `top_k` of `num_experts` experts for each token.

    scoring: what makes scores of logits; a softmax is taken over all experts.
    normalised: the weights of the chosen experts are divided by their sum.
    scale: factor of the weights.
    num_groups, top_groups: experts are chosen from the `top_groups` best of `num_groups` groups of
        neighbours; a group ranks by the sum of its `best_of_group` best scores: two in DeepSeek-V3
        (section 2.1.2), one in DeepSeek-V2 (section 2.2.2).
    bias: the logits have a bias.
    selection_bias: scores have a bias for the choice, which weights do not have (the same section).
    """

    num_experts: int
    top_k: int
    scoring: Scoring = "softmax"
    normalised: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    best_of_group: Literal[1, 2] = 2
    bias: bool = False
    selection_bias: bool = False


class Router:
    """A router with its weights: float32 [num_experts, hidden] and [num_experts]."""

    def __init__(
        self,
        spec: RouterSpec,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        selection_bias: torch.Tensor | None = None,
    ) -> None:
        self.spec = spec
        self.weight = weight
        self.bias = bias
        self.selection_bias = selection_bias

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weights, float32 [T, top_k], and experts, int64 [T, top_k], for x [T, hidden]."""
        spec = self.spec
        logits = F.linear(x.float(), self.weight, self.bias)
        scores = logits.softmax(-1) if spec.scoring == "softmax" else logits.sigmoid()
        choice = scores if self.selection_bias is None else scores + self.selection_bias
        if spec.num_groups > 1:
            choice = self._within_best_groups(choice)
        chosen = choice.topk(spec.top_k).indices
        weights = scores.gather(1, chosen)
        if spec.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(_LEAST_SUM)
        return weights * spec.scale, chosen

    def _within_best_groups(self, choice: torch.Tensor) -> torch.Tensor:
        """Return the scores with those outside of the best groups below all others."""
        groups = choice.view(len(choice), self.spec.num_groups, -1)
        ranks = groups.topk(self.spec.best_of_group).values.sum(-1)
        best = ranks.topk(self.spec.top_groups).indices
        outside = torch.ones_like(ranks, dtype=torch.bool).scatter(1, best, value=False)
        return groups.masked_fill(outside[:, :, None], -torch.inf).flatten(1)
