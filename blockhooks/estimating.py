"""What meta tensors do not tell, since nothing is executed on them.

How long operations take, what values there are, and which kernel is chosen: each is stood in for here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["Estimate", "FusedAttention", "KnownValues"]

aten = torch.ops.aten

FLOPS_PER_SECOND: Final = 312e12
BYTES_PER_SECOND: Final = 2.0e12
"""Those of an A100 in half precision. A plan depends on the ratio of blocks' times alone."""

MOST_KNOWN: Final = 1 << 20
"""Elements of a tensor whose values are known."""

_COUNTED_AS: Final[dict[Any, Any]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        aten._scaled_dot_product_flash_attention_backward
    ),
}


class Estimate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A clock for what is not executed: it goes on by the time that an operation would take.

    That is the longer of what its floating-point operations take at the rate of a device, and what the bytes that it
    reads and writes take at the bandwidth of the device's memory.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _is_view(func):
            operation = getattr(func, "_overloadpacket", func)
            formula = flop_registry.get(_COUNTED_AS.get(operation, operation))
            flops = 0 if formula is None else formula(*args, **kwargs, out_val=result)
            moved = sum(tensor.nbytes for tensor in _tensors((args, kwargs, result)))
            self._seconds += max(flops / FLOPS_PER_SECOND, moved / BYTES_PER_SECOND)
        return result

    def running(self) -> AbstractContextManager[Any]:
        """What is entered around what it times."""
        return self

    def now(self) -> float:
        """Seconds so far."""
        return self._seconds

    def between(self, begin: float, end: float) -> float:
        """Seconds from one reading to another."""
        return end - begin


@cache
def _is_view(func: Any) -> bool:
    return getattr(func, "is_view", False) or func is aten._unsafe_view.default


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class KnownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Knows the values of small meta tensors that come from no data, such as positions, should somebody ask for one.

    Many a model asks whether a mask masks anything at all.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        given = _tensors((args, kwargs))
        known = func.namespace == "aten" and all(t in self._values for t in given if t.is_meta)
        if known and func is aten._local_scalar_dense.default:
            return func(self._on_cpu(args[0]))
        result = func(*args, **kwargs)
        made = _tensors(result)
        known = known and torch.Tag.nondeterministic_seeded not in func.tags
        if known and all(t.is_meta and t.numel() <= MOST_KNOWN for t in made or given):
            values = func(*tree_map(self._on_cpu, args), **tree_map(self._on_cpu, kwargs))
            self._values.update(zip(made, _tensors(values), strict=True))
        elif func._schema.is_mutable:
            self._forget(given)
        return result

    def _on_cpu(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values[value] if value.is_meta else value
        return torch.device("cpu") if isinstance(value, torch.device) else value

    def _forget(self, tensors: Iterable[Tensor]) -> None:
        """Forget values, and those of all that shares their memory."""
        values = [self._values[tensor] for tensor in tensors if tensor in self._values]
        storages = {value.untyped_storage()._cdata for value in values}
        if storages:
            for tensor, value in list(self._values.items()):
                if value.untyped_storage()._cdata in storages:
                    del self._values[tensor]


class FusedAttention(TorchFunctionMode):
    """Lets attention on meta tensors be the operation that it is on a CPU.

    CPUs and GPUs have kernels that never hold the square of a sequence's length; torch takes none of them on meta
    tensors (2.14), so that a block would seem to keep many times what it keeps.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = None
        if func is F.scaled_dot_product_attention:
            result = _fused_attention(*args, **kwargs)
        return func(*args, **kwargs) if result is None else result


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Call the CPU's kernel on meta tensors, if torch would take it there."""
    if not query.is_meta:
        return None
    with _disable_current_modes():
        alike = map(_on_cpu, (query, key, value, attn_mask))
        options = {"scale": scale, "enable_gqa": enable_gqa}
        choice = aten._fused_sdp_choice(*alike, dropout_p, is_causal, **options)
    if choice != SDPBackend.FLASH_ATTENTION.value:
        return None
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        number = partial(torch.scalar_tensor, dtype=query.dtype, device=query.device)
        attn_mask = torch.where(attn_mask, number(0.0), number(-math.inf))
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = kernel(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return result


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    """A tensor of the same kind on the CPU. Nobody touches its memory, so that it takes none."""
    if tensor is None:
        return None
    layout = tensor.shape, tensor.stride()
    alike = torch.empty_strided(*layout, dtype=tensor.dtype, device="cpu")
    return alike.requires_grad_(tensor.requires_grad)
