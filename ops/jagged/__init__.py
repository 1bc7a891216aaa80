"""Packed (jagged) rows: the token order of a batch, computed once a step, and moves along it.

`build_token_layout` does the index arithmetic, without gradients; `interleave_rows` and
`take_rows` move rows with one gather each, forward and backward.
"""

from ops.jagged.layout import TokenLayout, build_token_layout
from ops.jagged.offsets import int32_offsets, lengths_to_offsets, require_32bit_indexing
from ops.jagged.rows import interleave_rows, take_rows

__all__ = [
    "TokenLayout",
    "build_token_layout",
    "int32_offsets",
    "interleave_rows",
    "lengths_to_offsets",
    "require_32bit_indexing",
    "take_rows",
]
