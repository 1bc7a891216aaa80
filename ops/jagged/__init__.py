"""Packed (jagged) rows: the token order of a batch, computed once a step, and moves along it.

`build_token_layout` does the index arithmetic, without gradients; `embed_tokens` makes the tokens
of the first layer from embedding and position rows, `interleave_rows` only their order; `take_rows`
picks rows. backend = "pytorch" runs anywhere, "triton" on a CUDA device.
"""

from ops.jagged.layout import TokenLayout, build_token_layout
from ops.jagged.offsets import int32_offsets, lengths_to_offsets, require_32bit_indexing
from ops.jagged.rows import interleave_rows, take_rows
from ops.jagged.tokens import embed_tokens

__all__ = [
    "TokenLayout",
    "build_token_layout",
    "embed_tokens",
    "int32_offsets",
    "interleave_rows",
    "lengths_to_offsets",
    "require_32bit_indexing",
    "take_rows",
]
