"""Token counts of text that comes without any: estimates, and scaling them to known totals."""

from __future__ import annotations

from collections.abc import Sequence

BYTES_PER_TOKEN = 4.0
"""English and code are near 4 UTF-8 bytes a token in the vocabularies in use; other text may be off by 2."""


def estimate_tokens(text: str) -> int:
    """About how many tokens a text is: its UTF-8 bytes over 4, rounded up."""
    return -int(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def scale_to_total(weights: Sequence[int], total: int) -> list[int]:
    """Whole numbers in proportion to `weights` whose sum is `total`; running sums are never off by 1 or more.

    With no weight at all, equal shares.
    """
    whole = sum(weights)
    if not whole:
        weights, whole = [1] * len(weights), len(weights)
    shares: list[int] = []
    running = given = 0
    for weight in weights:
        running += weight
        upto = running * total // whole
        shares.append(upto - given)
        given = upto
    return shares
