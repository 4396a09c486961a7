"""Token counts of text that comes without any: estimates, and scaling them to known totals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BYTES_PER_TOKEN = 4
"""English and code are near 4 UTF-8 bytes a token in the vocabularies in use; other text may be off by 2."""


def estimate_tokens(text: str) -> int:
    """About how many tokens a text is: its UTF-8 bytes over 4, rounded up."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


_NO_TEXT = frozenset(
    {
        "type",
        "role",
        "id",
        "call_id",
        "tool_use_id",
        "image_url",
        "encrypted_content",
        "status",
        "signature",
        "data",
    }
)


def text_tokens(value: Any) -> int:
    """Estimated tokens of all text in a JSON value: what is under keys for ids, kinds and bytes left out."""
    tokens = 0
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            tokens += estimate_tokens(item)
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, dict):
            pending.extend(below for key, below in item.items() if key not in _NO_TEXT)
    return tokens


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
