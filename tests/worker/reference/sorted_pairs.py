"""Pairs of a row and an expert, sorted and divided into blocks one by one."""

import torch

from worker.cuda.layers.triton_experts import PairBlocks


def sorted_pairs(
    chosen: torch.Tensor, first_expert: int, num_experts: int, block: int
) -> PairBlocks:
    """Return the blocks of experts [first_expert, first_expert + num_experts).

    chosen: int64 [T, top_k].
    """
    own = [each - first_expert for each in chosen.flatten().tolist()]
    experts = [each if 0 <= each < num_experts else num_experts for each in own]
    order = sorted(range(len(experts)), key=experts.__getitem__)
    blocks: list[tuple[int, int, int]] = []
    for expert in range(num_experts):
        first, count = sum(each < expert for each in experts), experts.count(expert)
        blocks += [
            (expert, first + at, first + min(at + block, count)) for at in range(0, count, block)
        ]
    pairs = PairBlocks.empty(chosen, num_experts, block)
    blocks += [(0, 0, 0)] * (len(pairs.experts) - len(blocks))
    for place, pair in enumerate(order):
        pairs.rows[place] = pair // chosen.shape[1]
        pairs.sorted_index[pair] = place if experts[pair] < num_experts else -1
    pairs.identity.copy_(torch.arange(len(order)))
    for index, each in enumerate((pairs.experts, pairs.first, pairs.end)):
        each.copy_(torch.tensor([one[index] for one in blocks], dtype=torch.int32))
    return pairs
