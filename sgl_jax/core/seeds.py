"""Seeds of a request's choices, derived from its seed as `jax.random.fold_in` does."""

RANDOM_SEED = -1  # in a request: draw a seed, as other engines do

_MASK = 0xFFFFFFFF
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def choice_seed(seed: int, choice: int) -> int:
    """Return the int64 seed of choice number `choice` of a request with this int64 seed.

    The first choice has the request's seed. Any other choice has the two words of `fold_in` of the
    key (high word, low word) and the number, so different seeds have no choices in common.
    """
    if choice == 0:
        return seed
    high, low = _threefry2x32((seed >> 32) & _MASK, seed & _MASK, choice)
    value = high << 32 | low
    return value - (1 << 64) if value >> 63 else value


def _threefry2x32(high: int, low: int, count: int) -> tuple[int, int]:
    """Return the block (0, count) under the key (high, low), all uint32. Threefry with 20 rounds:
    Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011)."""
    keys = (high, low, high ^ low ^ 0x1BD11BDA)
    x, y = keys[0], (count + keys[1]) & _MASK
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x = (x + y) & _MASK
            y = ((y << distance | y >> (32 - distance)) & _MASK) ^ x
        x = (x + keys[(group + 1) % 3]) & _MASK
        y = (y + keys[(group + 2) % 3] + group + 1) & _MASK
    return x, y
