"""`Selective`: keep less, and recompute almost nothing."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from blockhooks.errors import check_count
from blockhooks.hookspecs import hookimpl
from blockhooks.plan import Segment
from blockhooks.rebuild import Rebuilder
from blockhooks.recompute import can_recompute
from blockhooks.run import Run

__all__ = ["Selective"]


class Selective:
    """Drop what autograd would keep of cheap operations, and rebuild it from tensors that are kept anyway.

    Results of activations, norms, casts, dropout and other pointwise operations are dropped where a recipe
    (`blockhooks.recipes`) knows how to compute them again, bit for bit, from what else is kept. No block is executed
    again and no matrix is multiplied again.

    Acts on all segments, in whatever blocks. Where `Checkpoint` recomputes a segment, nothing is left to drop in it but
    its input.

    Args:
        min_bytes: Tensors smaller than this are kept: dropping them would gain nothing.

    Raises:
        HookError: If `min_bytes` is no integer of at least 0.

    Note:
        Side: outside. Changing an activation through ``.data`` before it is saved goes unnoticed by autograd, and here.

    References:
        Korthikanti et al.: Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198.
    """

    def __init__(self, *, min_bytes: int = 16384) -> None:
        self._rebuilder = Rebuilder(check_count(min_bytes, "Selective(min_bytes=...)"))

    @hookimpl(wrapper=True)
    def run_segment(self, run: Run, segment: Segment) -> Generator[None, Any, Any]:
        """Drop what can be rebuilt of what autograd saves in a segment's forward."""
        if not can_recompute():
            return (yield)
        with self._rebuilder.forward(run.describe(segment.start, segment.stop)):
            return (yield)

    def __repr__(self) -> str:
        return f"Selective(min_bytes={self._rebuilder.min_bytes})"
