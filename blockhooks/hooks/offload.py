"""`Offload`: keep elsewhere what is kept."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, get_args

from blockhooks.errors import HookError, check_count
from blockhooks.hookspecs import hookimpl
from blockhooks.offloading import Offloader, To
from blockhooks.plan import Segment
from blockhooks.recompute import can_recompute
from blockhooks.run import Run

__all__ = ["Offload"]


class Offload:
    """Move what is kept between forward and backward to another place, and bring it back ahead of the backward.

    What is kept are the saved tensors of blocks that are not recomputed, and the inputs of segments that are (see
    `Checkpoint`). Parameters, buffers and side inputs stay: somebody else holds them anyway.

    Stands outside of all other plugins, wherever it is in the list, so that what `Selective` drops need not be moved.

    Args:
        to: ``"cpu"`` moves from a CUDA device to the host's memory, in a stream of its own, and leaves tensors on a CPU
            where they are. ``"disk"`` moves from any device to files, which are gone with what they stand for; it
            needs the extra ``offload``.
        min_bytes: Tensors whose storage is smaller than this stay.
        max_bytes: The most bytes that may be away at once; what comes later stays. By default all.
        directory: Where to make the directory of files. By default in the system's one for temporary files, which on
            some machines is memory.

    Raises:
        HookError: If an argument is none of these.
        MissingExtraError: If the extra is not installed.
        OffloadError: In the forward or backward, if a file cannot be written or read.

    Note:
        Side: outside. Inside of a region that is recomputed, and under saved-tensor hooks of others, nothing moves.
    """

    def __init__(
        self,
        to: To = "cpu",
        *,
        min_bytes: int = 1 << 16,
        max_bytes: int | None = None,
        directory: str | Path | None = None,
    ) -> None:
        if to not in get_args(To):
            raise HookError(f"Offload(to={to!r}): expected 'cpu' or 'disk'.")
        min_bytes = check_count(min_bytes, "Offload(min_bytes=...)")
        if max_bytes is not None:
            max_bytes = check_count(max_bytes, "Offload(max_bytes=...)")
        if directory is not None and not isinstance(directory, (str, os.PathLike)):
            raise HookError(f"Offload(directory=...) expected a path, found {directory!r}.")
        if directory is not None and to != "disk":
            raise HookError(
                f"Offload(directory={directory!r}): expected to='disk' with it, found to={to!r}."
            )
        self._to = to
        self._offloader = Offloader(to, min_bytes, max_bytes, directory, overlap=True)

    @property
    def away(self) -> int:
        """Bytes that are away now."""
        return self._offloader.away

    @hookimpl(wrapper=True, tryfirst=True)
    def run_segment(
        self, run: Run, segment: Segment, recomputing: bool
    ) -> Generator[None, Any, Any]:
        """Move what autograd saves in a segment's forward."""
        if recomputing or not can_recompute():
            return (yield)
        where = run.describe(segment.start, segment.stop)
        with self._offloader.forward(where, run.held_elsewhere(segment)):
            return (yield)

    def __repr__(self) -> str:
        return f"Offload({self._to!r})"
