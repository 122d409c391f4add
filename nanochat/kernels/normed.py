"""RMS-normed rows whose division by their root mean square may still be to come. Knows nothing of devices."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Normed:
    """Rows ``x / sqrt(mean(x ** 2) + eps) * weight``, as the linear map that comes next takes them.

    A kernel that makes ``x`` piece by piece can't divide by the norm of the whole, but it can multiply by the
    weight and leave sums of squares behind. The division then falls to whoever multiplies the rows by a matrix.
    """

    values: torch.Tensor
    """``[T, hidden]``: the normed rows, or ``x * weight`` where ``squares`` is given."""
    squares: torch.Tensor | None = None
    """``[P, T]`` float32: sums over ``P`` parts of ``x ** 2``; None where the division is done."""
    eps: float = 0.0

    @property
    def num_parts(self) -> int:
        """Of how many sums of squares the norm is made; 0 where the division is done."""
        return 0 if self.squares is None else self.squares.shape[0]

    def finished(self) -> torch.Tensor:
        """The normed rows ``[T, hidden]``."""
        if self.squares is None:
            return self.values
        mean = self.squares.sum(0) / self.values.shape[1]
        return (self.values.float() * torch.rsqrt(mean + self.eps).unsqueeze(1)).to(self.values.dtype)
