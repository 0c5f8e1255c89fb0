"""What may stand in autograd's graph in the place of a saved tensor: the parts that rebuilding and offloading share."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from blockhooks.errors import RecomputeError

__all__ = ["HookPair", "Kept", "Value", "hooks_around"]

HookPair: TypeAlias = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def hooks_around() -> HookPair | None:
    """Return the pair of saved-tensor hooks that is active, or None."""
    pair: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return pair


class Value:
    """A tensor of the forward that a backward can ask for.

    While a backward is going to need it again it is held, since it was expensive to get.

    Attributes:
        saved: How many times autograd has saved it.
    """

    __slots__ = ("__weakref__", "_held", "_task", "_used", "saved")

    def __init__(self) -> None:
        self.saved = self._used = 0
        self._held: Tensor | None = None
        self._task = -1

    def get(self) -> Tensor:
        """Return the tensor in the backward."""
        raise NotImplementedError

    def take(self) -> Tensor:
        """Return the tensor for a use that autograd has saved it for."""
        return self._fetch(1)

    def hold(self) -> Tensor:
        """Return the tensor for another use."""
        return self._fetch(0)

    def _fetch(self, uses: int) -> Tensor:
        task = torch._C._current_graph_task_id()
        if task == -1:  # a read of grad_fn._saved_*, outside of a backward
            return self.get()
        if task != self._task:
            self._task, self._used, self._held = task, 0, None
        self._used += uses
        tensor = self.get() if self._held is None else self._held
        if self._used >= self.saved:
            self._held = None
        elif self._held is None:
            self._held = tensor
            _at_end_of_backward(weakref.ref(self))
        return tensor

    def let_go(self) -> None:
        """End a backward: nothing is held."""
        self._held, self._task = None, -1


def _at_end_of_backward(value: weakref.ref[Value]) -> None:
    def let_go() -> None:
        alive = value()
        if alive is not None:
            alive.let_go()

    torch.autograd.Variable._execution_engine.queue_callback(let_go)


class Kept(Value):
    """A tensor that is kept, or the mere version of one that is elsewhere.

    Autograd itself checks no versions where a saved-tensor hook is.

    Args:
        tensor: The tensor as it is saved.
        where: Names what runs, in errors.

    Attributes:
        tensor: The tensor without its graph.
    """

    __slots__ = ("_maker", "_version", "_where", "tensor")

    def __init__(self, tensor: Tensor, where: str) -> None:
        self.saved = 0  # the rest of a Value's is for those that are expensive to get
        self._where, self._version = where, tensor._version
        node = tensor.grad_fn
        if node is None:
            self.tensor, self._maker = tensor, None
        else:
            # An output of the node that saves it would keep that node alive, and so itself.
            self.tensor, self._maker = tensor.detach(), type(node)

    @property
    def unchanged(self) -> bool:
        """Whether the tensor has not been changed in place since it was saved."""
        return self.tensor._version == self._version

    def get(self) -> Tensor:
        """Return the tensor, if it is unchanged.

        Raises:
            RecomputeError: If it was changed in place since it was saved.
        """
        if self.tensor._version != self._version:
            raise self._changed()
        return self.tensor

    take = hold = get

    def _changed(self) -> RecomputeError:
        maker = "" if self._maker is None else f", a result of {self._maker.__name__},"
        return RecomputeError(
            f"{self._where}: one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {self._shape()}{maker} is at version {self.tensor._version}, expected "
            f"version {self._version}. Change a copy of it, or run the backward first."
        )

    def _shape(self) -> list[int]:
        return list(self.tensor.shape)
