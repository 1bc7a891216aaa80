"""The packed token sequences that travel through the stack."""

from dataclasses import dataclass, replace

from torch import Tensor

from ops.jagged.offsets import check_counts, check_offsets


@dataclass(frozen=True, kw_only=True)
class JaggedSequence:
    """Token rows of B users, packed, with what attention must know about them. Immutable.

    Padding for a kernel's alignment never lives here: the last offset is the number of rows.
    """

    values_TD: Tensor
    """(T, D), any floating dtype."""
    seq_offsets_B1: Tensor
    """(B + 1,) int64 or int32."""
    num_contextuals_B: Tensor
    """(B,) integers: the leading tokens of each user."""
    num_candidates_B: Tensor
    """(B,) integers: the trailing tokens of each user."""
    max_seq_len: int
    """No sequence is longer, in tokens."""
    scaling_seqlen: float | Tensor
    """Divisor of the attention weights; one for all batches unless the user asked otherwise."""
    timestamps_T: Tensor | None = None
    """(T,) int64, for the time bias."""

    def __post_init__(self) -> None:
        num_users = self.seq_offsets_B1.numel() - 1
        check_offsets(self.seq_offsets_B1, num_rows=self.num_tokens, name="seq_offsets_B1")
        check_counts(self.num_contextuals_B, name="num_contextuals_B", num_users=num_users)
        check_counts(self.num_candidates_B, name="num_candidates_B", num_users=num_users)
        if self.timestamps_T is not None and self.timestamps_T.shape[0] != self.num_tokens:
            raise ValueError(
                f"timestamps_T must have {self.num_tokens} entries, one a token, "
                f"got {self.timestamps_T.shape[0]}"
            )
        on_cpu = self.seq_offsets_B1.device.type == "cpu"
        if on_cpu and int(self.seq_offsets_B1[-1]) != self.num_tokens:
            raise ValueError(
                f"seq_offsets_B1 ends at {int(self.seq_offsets_B1[-1])}, but values_TD has "
                f"{self.num_tokens} rows; padding rows must not enter a sequence"
            )

    @property
    def num_tokens(self) -> int:
        """Return T, the rows of values_TD."""
        return self.values_TD.shape[0]

    @property
    def batch_size(self) -> int:
        """Return B, padding users included."""
        return self.seq_offsets_B1.numel() - 1

    @property
    def seq_lengths(self) -> Tensor:
        """Return the tokens of each user, (B,)."""
        return self.seq_offsets_B1.diff()

    def with_values(self, values_TD: Tensor) -> "JaggedSequence":
        """Return the same sequences with other row values, (T, any width)."""
        return replace(self, values_TD=values_TD)
