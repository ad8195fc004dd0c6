"""Philox-4x32-10 in plain Python integers, after the paper's figure."""

MASK = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, ...]:
    """The four output words of one counter under one key."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(c0 * 0xD2511F53, 1 << 32)
        high1, low1 = divmod(c2 * 0xCD9E8D57, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def token_word(seed: int, choice: int, position: int, token_id: int) -> int:
    """The random word of one token by the definition of the draw."""
    counter = (token_id // 4, position, choice, 0)
    return philox(counter, (seed & MASK, seed >> 32))[token_id % 4]
