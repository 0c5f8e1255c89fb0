"""What was asked of the blocks of an attached model, and what was really done in the last step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from blockhooks.plan import Segment
from blockhooks.recompute import PackHook, open_frame
from blockhooks.report.table import size
from blockhooks.run import Run
from blockhooks.saved import hooks_around
from blockhooks.structure import tensors_in
from blockhooks.timeline import storages

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["AttachReport", "BlockRecord", "Measure", "StackRecord"]

_TAKERS = {"blockhooks.rebuild": "selective", "blockhooks.offloading": "offloaded"}
"""What is done to saved tensors, by the file of the hook that takes them."""
_HEADER = ("blocks", "class", "asked", "done", "calls", "saved", "dropped")
_NUMBERS = 4
"""Columns before those of numbers."""


class Measure:
    """See what becomes of what autograd saves in one forward of a block.

    Holds no tensor. A context around the block's call, inside of whatever the hooks have put around it.

    Args:
        outside: The saved-tensor hooks outside of the block's hooks, from `hooks_around`.
        count: Whether to count bytes; a call to Python per saved tensor.

    Attributes:
        gradients: Whether gradients were enabled.
        taken: What is done by a hook that takes what autograd saves; None if none does.
        saved: Bytes of what was saved, without parameters, inputs and results; None if not counted.
        dropped: Those of them that nobody held any more after the call; None if not counted.
    """

    def __init__(self, outside: tuple[Any, Any] | None, *, count: bool) -> None:
        self.done = self.gradients = False
        self.taken: str | None = None
        self.saved: int | None = None
        self.dropped: int | None = None
        self._outside, self._count = outside, count
        self._open = open_frame()
        self._seen: dict[StorageWeakRef, int] = {}
        self._counting: _Counting | None = None

    def __enter__(self) -> None:
        self.done = True
        self.gradients = torch.is_grad_enabled()
        pair = hooks_around() if self.gradients else None
        if pair is None or pair == self._outside:
            return
        pack, unpack = pair
        if open_frame() is not self._open:
            self.taken = "recomputed"
        else:
            owner = getattr(pack, "__self__", pack)
            self.taken = _TAKERS.get(getattr(owner, "__module__", ""), "saved elsewhere")
        if not self._count:
            return

        self._counting = _Counting(pack, self._seen)
        self._counting.push(unpack)

    def __exit__(self, *error: object) -> None:
        if self._counting is not None:
            self._counting.pop()
            self._counting = None

    def finish(self, block: nn.Module, *others: Any) -> None:
        """Count the bytes after the call.

        Those of the block's parameters and buffers, and of the call's inputs and results, do not count.
        """
        if self.taken is None or not self._count:
            return
        others = (*others, *block.parameters(), *block.buffers())
        aside = {
            _weakly(storage).cdata for tensor in tensors_in(others) for storage in storages(tensor)
        }
        self._seen = {ref: nbytes for ref, nbytes in self._seen.items() if ref.cdata not in aside}
        self.saved = sum(self._seen.values())

    def settle(self) -> None:
        """See which storages are still there."""
        if self.saved is not None:
            self.dropped = self.saved - sum(n for ref, n in self._seen.items() if not _gone(ref))
        self._seen.clear()


class _Counting(PackHook):
    """Counts what is saved, and hands it on; it is one of ours, which torch.func's transforms can be taken past."""

    __slots__ = ("_pack", "_seen")

    def __init__(self, pack: Callable[[Tensor], Any], seen: dict[StorageWeakRef, int]) -> None:
        self._pack, self._seen = pack, seen

    def __call__(self, tensor: Tensor) -> Any:
        if not (tensor.is_leaf and tensor.requires_grad):
            for storage in storages(tensor):
                self._seen.setdefault(_weakly(storage), storage.nbytes())
        return self._pack(tensor)


def _weakly(storage: torch.UntypedStorage) -> StorageWeakRef:
    """A reference that keeps the storage's identity, not its memory."""
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _gone(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


class BlockRecord:
    """What is known of one block of an attached model."""

    def __init__(self, name: str, kind: str) -> None:
        self.name, self.kind = name, kind
        self.asked = self.done = ""
        self.reason: str | None = None
        self.segment: Segment | None = None
        self.calls = 0
        self.compiled: tuple[str, str] | None = None
        self.saved: int | None = None
        self.dropped: int | None = None

    def note_compiled(self, asked: bool, dropping: bool) -> None:
        """Note how the block was compiled; what its compiled code does, nobody sees."""
        self.compiled = (
            "recompute" if asked else "keep",
            "compiled: recomputed" if dropping else "compiled: kept",
        )

    def begin_step(self) -> None:
        """Forget the step before; the bytes stay until they are measured again."""
        self.asked = self.done = ""
        self.reason, self.segment, self.calls = None, None, 0

    def note_call(self, segment: Segment, asked: str, run: Run, measure: Measure) -> None:
        """Note one call: what was planned, and what the run and the measure tell."""
        self.calls += 1
        self.segment, self.asked = segment, asked
        self.reason = next(iter(run.kept.values()), None)
        if not measure.done:
            self.done = "skipped"
        elif not measure.gradients:
            self.done = "no gradients"
        elif self.reason is not None or measure.taken is None:
            self.done = "kept"
        else:
            self.done = measure.taken

    def note_end(self, measure: Measure, reason: str | None) -> None:
        """Note what was dropped when the region of the block had ended, or why nothing was."""
        measure.settle()
        if reason is not None:
            self.reason, self.done = reason, "kept"
        if measure.saved is not None or measure.taken is None:
            self.saved, self.dropped = measure.saved, measure.dropped

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        asked, done = self.asked, self.done
        if self.compiled is not None and not self.calls:
            asked, done = self.compiled
        return {
            "name": self.name,
            "class": self.kind,
            "asked": asked,
            "done": done,
            "reason": self.reason,
            "segment": None if self.segment is None else [self.segment.start, self.segment.stop],
            "calls": self.calls,
            "saved_bytes": self.saved,
            "dropped_bytes": self.dropped,
        }


class StackRecord:
    """What is known of one stack of an attached model."""

    def __init__(self, name: str, blocks: list[BlockRecord]) -> None:
        self.name, self.blocks = name, blocks
        self.reversible = self.spans = False
        self.divided: list[str] = []

    @property
    def kind(self) -> str:
        """The classes of the blocks."""
        return ", ".join(dict.fromkeys(block.kind for block in self.blocks))

    @property
    def called(self) -> bool:
        """Whether any block was called in the last step."""
        return any(block.calls or block.compiled for block in self.blocks)

    @property
    def trained(self) -> bool:
        """Whether any block was called with gradients in the last step."""
        return any(block.done not in ("", "skipped", "no gradients") for block in self.blocks)

    def begin_step(self) -> None:
        """Forget the step before."""
        self.divided.clear()
        for block in self.blocks:
            block.begin_step()

    def warnings(self, ran: bool) -> Iterator[str]:
        """What the user should know."""
        where = self.name or "the model itself"
        if self.reversible:
            yield f"{where}: a reversible stack, which keeps nothing between its blocks; it is left alone."
        elif ran and not self.called:
            yield f"{where}: none of its {len(self.blocks)} blocks was called in the last step."
        if any(block.compiled and not block.calls for block in self.blocks):
            yield f"{where}: calls of compiled blocks cannot be seen; what is told is how they were compiled."
        long = {str(b.segment) for b in self.blocks if b.segment is not None and len(b.segment) > 1}
        if long and not self.spans:
            yield f"{where}: planned in segments of several blocks, executed block by block, as the hooks want it."
        if self.divided:
            at = ", ".join(dict.fromkeys(self.divided))
            yield f"{where}: segments are divided where x was not handed on as one untouched tensor: before {at}."
        reasons: dict[str, list[str]] = {}
        for block in self.blocks:
            if block.reason is not None:
                reasons.setdefault(block.reason, []).append(block.name)
        for reason, names in reasons.items():
            yield f"{_shortened(names)}: kept what autograd saved: {reason}."

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings."""
        return {
            "name": self.name,
            "class": self.kind,
            "reversible": self.reversible,
            "blocks": [block.to_dict() for block in self.blocks],
        }


class AttachReport:
    """A table of stacks and blocks: ``str(report)``, `to_dict`, or printed by rich.

    Attributes:
        model: The model's class.
        stacks: For each stack its name, classes and blocks, as in `to_dict`.
        warnings: What the user should know, one sentence each.
        ran: Whether there was a step.
    """

    def __init__(self, model: str, records: Iterable[StackRecord], called: bool = False) -> None:
        records = list(records)
        self.ran = called or any(record.called for record in records)
        self.model = model
        self.stacks: list[dict[str, Any]] = [record.to_dict() for record in records]
        self.warnings = [line for record in records for line in record.warnings(self.ran)]

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd saved in all blocks, each once, without parameters, inputs and results."""
        return sum(block["saved_bytes"] or 0 for stack in self.stacks for block in stack["blocks"])

    @property
    def dropped_bytes(self) -> int:
        """Bytes of them that were dropped until the backward."""
        return sum(
            block["dropped_bytes"] or 0 for stack in self.stacks for block in stack["blocks"]
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        return {
            "model": self.model,
            "stacks": self.stacks,
            "warnings": self.warnings,
            "saved_bytes": self.saved_bytes,
            "dropped_bytes": self.dropped_bytes,
        }

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the lines of the table; neighbours that differ in nothing but their names are one."""
        for stack in self.stacks:
            group: list[dict[str, Any]] = []
            for block in stack["blocks"]:
                if group and not _alike(group[-1], block):
                    yield _row(group)
                    group = []
                group.append(block)
            if group:
                yield _row(group)

    @property
    def title(self) -> str:
        """The line above the table."""
        when = "in the last step" if self.ran else "no step yet"
        return f"{self.model}: {len(self.stacks)} stack{'s' * (len(self.stacks) != 1)} of blocks, {when}"

    @property
    def total(self) -> tuple[str, ...]:
        """The last line of the table."""
        return ("all", "", "", "", "", size(self.saved_bytes), size(self.dropped_bytes))

    def __str__(self) -> str:
        lines = [_HEADER, *self.rows(), self.total]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = [
            "  ".join(
                cell.ljust(width) if place < _NUMBERS else cell.rjust(width)
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        rule = "-" * max(map(len, text))
        notes = [f"note: {warning}" for warning in self.warnings]
        return "\n".join([self.title, "", text[0], rule, *text[1:-1], rule, text[-1], *notes])

    def __rich__(self) -> Table:
        from rich.table import Table

        table = Table(
            title=self.title, caption="\n".join(self.warnings) or None, caption_justify="left"
        )
        for place, name in enumerate(_HEADER):
            table.add_column(name, justify="left" if place < _NUMBERS else "right")
        for row in self.rows():
            table.add_row(*row)
        table.add_section()
        table.add_row(*self.total)
        return table


def _alike(one: dict[str, Any], other: dict[str, Any]) -> bool:
    parts = ("class", "asked", "done", "reason", "calls", "saved_bytes", "dropped_bytes")
    return all(one[part] == other[part] for part in parts)


def _row(group: list[dict[str, Any]]) -> tuple[str, ...]:
    one = group[0]
    saved = None if one["saved_bytes"] is None else sum(block["saved_bytes"] for block in group)
    dropped = (
        None if one["dropped_bytes"] is None else sum(block["dropped_bytes"] for block in group)
    )
    return (
        _shortened([block["name"] for block in group]),
        one["class"],
        one["asked"] or "-",
        one["done"] or "no call seen",
        str(sum(block["calls"] for block in group)),
        size(saved),
        size(dropped),
    )


def _shortened(names: list[str]) -> str:
    """Name neighbours together: ``layers.0 .. layers.11 (12)``."""
    return (
        names[0]
        if len(names) == 1
        else f"{names[0]} .. {names[-1].rpartition('.')[2]} ({len(names)})"
    )
