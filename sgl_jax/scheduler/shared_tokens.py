"""Divides the prompt tokens of a step among prompts of one priority that need more of them.

By age, one long prompt would delay all younger prompts until it is complete. So the short part, a
quarter of the tokens, goes to the prompts with the fewest tokens left, and the rest to the oldest.
A prompt gets tokens of the short part only if the older prompts leave none for it in this step and
the next, and if that completes it sooner than its turn by age would come. So prompts of about the
same length are still computed one after another: sharing a step would delay the first and gain
nothing for the rest. Both sides of that condition shrink equally as the prompts are computed, so it
remains true.

If tenants have shares, each tenant's prompts get its share of the tokens, the oldest first, less
what its images took beyond its shares of earlier steps.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from sgl_jax.core.step_plan import BoolArray

# The short part is one in this many prompt tokens, on average over steps.
SHORT_PART = 4
# Limit of tenants with prompts computed at the same time; further tenants wait without memory.
MAX_TENANTS_AT_ONCE = 4


class SharedTokens:
    """The division of `num_tokens` prompt tokens of a step.

    Args:
        priority: the priority of the rows.
        needs: tokens to compute by row, oldest first; together `num_tokens` or more.
        num_tokens: tokens of the step for these rows.
        num_short: tokens of the short part.
        tenants: int32, tenant numbers by row.
        weights: float64[n], weights of the tenants by number; None if they have no shares.
        debts: tokens by which tenants, by number, exceeded their shares of earlier steps.
    """

    def __init__(
        self,
        priority: int,
        needs: dict[int, int],
        num_tokens: int,
        num_short: int,
        tenants: NDArray[np.int32],
        weights: NDArray[np.float64] | None,
        debts: Mapping[int, int],
    ) -> None:
        self.priority = priority
        self.num_tokens, self.num_short = num_tokens, num_short
        self._needs = needs
        # The rows of the short part by ascending number of tokens left, and these numbers.
        self.short_rows: list[int] = []
        self._short_lens: list[int] = []
        self._weights, self._debts = weights, debts
        self._by_tenant: dict[int, list[int]] = {}  # rows, oldest first
        if weights is not None:
            for row in needs:
                self._by_tenant.setdefault(int(tenants[row]), []).append(row)
        num_older = num_shorter = 0
        delayed = []  # rows that older ones delay
        for row, need in needs.items():
            if need <= _most_after(0, num_older, num_tokens):
                delayed.append((need, num_older, row))
            num_older += need
        self._total = num_older
        for need, num_older, row in sorted(delayed):
            if num_shorter >= num_short:
                break
            if need <= _most_after(num_shorter, num_older, num_tokens):
                self.short_rows.append(row)
                self._short_lens.append(need)
                num_shorter += need

    def add(self, row: int, num_tokens: int, tenant: int) -> None:
        """Add the youngest row, which gets some of the tokens."""
        if num_tokens <= self.most_tokens():
            index = bisect_right(self._short_lens, num_tokens)
            self.short_rows.insert(index, row)
            self._short_lens.insert(index, num_tokens)
        if self._weights is not None:
            self._by_tenant.setdefault(tenant, []).append(row)
        self._needs[row] = num_tokens
        self._total += num_tokens

    # -- further prompts ----------------------------------------------------------------------

    def most_tokens(self) -> int:
        """Return the length in tokens of the longest further prompt that gets any of the short
        part; 0 if none does. Each shorter prompt also gets some."""
        most = num_shorter = 0
        for left in self._short_lens:
            if num_shorter >= self.num_short:
                return most
            longest = _most_after(num_shorter, self._total, self.num_tokens)
            most = max(most, min(longest, left - 1))
            num_shorter += left
        if num_shorter >= self.num_short:
            return most
        return max(most, _most_after(num_shorter, self._total, self.num_tokens))

    def open_tenants(self) -> BoolArray | None:
        """Return, by number, the tenants with a next prompt that gets tokens at any length, as
        bool[n]; None if there is none."""
        if self._weights is None or len(self._by_tenant) >= MAX_TENANTS_AT_ONCE:
            return None
        present = list(self._by_tenant)
        part = self._weights / (self._weights[present].sum() + self._weights)
        is_open: BoolArray = self.num_tokens * part >= 1
        is_open[present] = False
        return is_open

    def num_left(self, num_tokens: int, tenant: int) -> int:
        """Return the tokens left for another prompt of `num_tokens`: of the short part, or of the
        share of its tenant if that is more."""
        taken = sum(self._short_lens[: bisect_right(self._short_lens, num_tokens)])
        num_left = max(self.num_short - taken, 0)
        if self._weights is not None and tenant not in self._by_tenant:
            part = self._weights[tenant] / self._weights[[*self._by_tenant, tenant]].sum()
            num_left = max(num_left, int(self.num_tokens * part))
        return num_left

    # -- the division -------------------------------------------------------------------------

    def parts(self) -> list[tuple[Sequence[int], int]]:
        """Return the parts in the order in which they take tokens: rows in their order, and the
        most tokens of the step that these get together, including tokens from earlier parts. The
        oldest rows get the rest."""
        parts: list[tuple[Sequence[int], int]] = []
        if self.short_rows:
            parts.append((self.short_rows, self.num_short))
        if self._weights is not None and len(self._by_tenant) > 1:
            weights = self._weights[list(self._by_tenant)]
            shares = (self.num_tokens * weights / weights.sum()).astype(int).tolist()
            for (tenant, rows), share in zip(self._by_tenant.items(), shares, strict=True):
                parts.append((rows, share - self._debts.get(tenant, 0)))
        return parts

    def serves(self, row: int) -> bool:
        """Return whether `row` gets any tokens."""
        counts = dict.fromkeys(self._needs, 0)
        for rows, most in [*self.parts(), (list(self._needs), self.num_tokens)]:
            num_left = self.num_tokens - sum(counts.values())
            num_left = min(num_left, most - sum(map(counts.__getitem__, rows)))
            for other in rows:
                count = max(min(self._needs[other] - counts[other], num_left), 0)
                counts[other] += count
                num_left -= count
        return counts[row] > 0


def _most_after(num_shorter: int, num_older: int, num_tokens: int) -> int:
    """Return the most tokens of a prompt that gets any of the short part: completed there, after
    `num_shorter` tokens of shorter prompts, before steps of `num_tokens` would complete both
    `num_older` tokens of older prompts and the prompt."""
    if SHORT_PART * num_older <= (2 * SHORT_PART - 1) * num_tokens:
        return 0  # the next step completes one of up to a quarter of its tokens
    return max(num_older - SHORT_PART * num_shorter - 1, 0) // (SHORT_PART - 1)
