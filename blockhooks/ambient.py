"""The state of torch around a region, which its operators depend on beside their arguments.

Autocast, default dtype, torch-function modes (the default device is one), and the switches of the back ends. A recompute
runs under those of its forward. Nearly always they are still the same, which has to be found out fast: torch.compile's
own guard compares most of it in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard

__all__ = ["Ambient"]


class Ambient:
    """The state around a region at one moment, with gradients enabled.

    Attributes:
        overrides: Whether torch functions can be overridden (the backward of a tensor subclass runs without that).
        autocast: Whether autocast was on for a device.
    """

    __slots__ = ("_check", "_dtypes", "_flags", "_modes", "_stack", "autocast", "overrides")

    _last: Ambient | None = None

    def __init__(self) -> None:
        self._check: Callable[[], bool] = GlobalStateGuard().check
        self._modes, self._flags = _modes(), _flags()
        (_, switches, self._dtypes), _, self._stack = self._modes
        self.autocast = any(switches)
        self.overrides: bool = torch._C._is_torch_function_enabled()

    @classmethod
    def now(cls) -> Ambient:
        """The present state."""
        last = cls._last
        if last is not None and last.holds():
            return last
        present = cls()
        if not present._stack:  # modes are the user's, and not to be held longer than a region is
            cls._last = present
        return present

    def holds(self) -> bool:
        """Whether this is the present state (False where it takes longer to tell)."""
        return (
            self._check()
            and _stack() == self._stack
            and _dtypes() == self._dtypes
            and _flags() == self._flags
        )

    def enter(self) -> Ambient | None:
        """Make this the present state; return what has to be given to `leave`."""
        if self.holds():
            return None
        before = Ambient()
        _switch(_MODE_SETTERS, before._modes, self._modes)
        _switch(_FLAG_SETTERS, before._flags, self._flags)
        return before

    def leave(self, before: Ambient | None) -> None:
        """Make the state the present one that was it before `enter`, also where modes were entered and not left since.

        A switch of a back end that was made in between stays, unless `enter` has changed some.
        """
        if before is None:
            if not self._check() or _stack() != self._stack or _dtypes() != self._dtypes:
                _switch(_MODE_SETTERS, _modes(), self._modes)
        else:
            _switch(_MODE_SETTERS, _modes(), before._modes)
            if before._flags != self._flags:
                _switch(_FLAG_SETTERS, _flags(), before._flags)


_accelerator: str | None = None
_looked = False


def _devices() -> tuple[str, ...]:
    """The devices that autocast is carried for."""
    global _accelerator, _looked
    if not _looked:  # not at import
        present = torch.accelerator.current_accelerator()
        _accelerator, _looked = None if present is None else present.type, True
    return ("cpu",) if _accelerator is None else ("cpu", _accelerator)


def _dtypes() -> tuple[Any, ...]:
    if _accelerator is None:
        return (_autocast_dtype("cpu"),)
    return _autocast_dtype("cpu"), _autocast_dtype(_accelerator)


_autocast_dtype = torch.get_autocast_dtype


def _stack() -> tuple[Any, ...]:
    depth = _depth()
    return tuple(map(torch._C._get_function_stack_at, range(depth))) if depth else ()


_depth = torch._C._len_torch_function_stack


def _modes() -> tuple[Any, ...]:
    """What a block may enter and leave: autocast, default dtype, and torch-function modes (default device)."""
    switches = tuple(map(torch.is_autocast_enabled, _devices()))
    autocast = (torch.is_autocast_cache_enabled(), switches, _dtypes())
    return autocast, torch.get_default_dtype(), _stack()


def _flags() -> tuple[Any, ...]:
    """What selects the kernels of operators."""
    # Each call written out: a loop over functions takes four times as long.
    return (
        _flash(),
        _efficient(),
        _math(),
        _cudnn_sdpa(),
        _reduction(),
        _sdpa_order(),
        _cudnn(),
        _benchmark(),
        _deterministic_cudnn(),
        _mkldnn(),
        _precision(),
        (_deterministic(), _warn_only()),
    )


_flash = torch._C._get_flash_sdp_enabled
_efficient = torch._C._get_mem_efficient_sdp_enabled
_math = torch._C._get_math_sdp_enabled
_cudnn_sdpa = torch._C._get_cudnn_sdp_enabled
_reduction = torch._C._get_math_sdp_allow_fp16_bf16_reduction
_sdpa_order = torch._C._get_sdp_priority_order
_cudnn = torch._C._get_cudnn_enabled
_benchmark = torch._C._get_cudnn_benchmark
_deterministic_cudnn = torch._C._get_cudnn_deterministic
_mkldnn = torch._C._get_mkldnn_enabled
_precision = torch._C._get_float32_matmul_precision
_deterministic = torch._C._get_deterministic_algorithms
_warn_only = torch._C._get_deterministic_algorithms_warn_only


def _set_autocast(state: tuple[Any, ...]) -> None:
    cache, switches, dtypes = state
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in zip(_devices(), switches, dtypes, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _set_deterministic(state: tuple[bool, bool]) -> None:
    torch._C._set_deterministic_algorithms(state[0], warn_only=state[1])


_Setters = tuple[Callable[[Any], Any], ...]
_MODE_SETTERS: _Setters = (_set_autocast, torch.set_default_dtype, _set_function_modes)
_FLAG_SETTERS: _Setters = (
    torch._C._set_sdp_use_flash,
    torch._C._set_sdp_use_mem_efficient,
    torch._C._set_sdp_use_math,
    torch._C._set_sdp_use_cudnn,
    torch._C._set_math_sdp_allow_fp16_bf16_reduction,
    torch._C._set_sdp_priority_order,
    torch._C._set_cudnn_enabled,
    torch._C._set_cudnn_benchmark,
    torch._C._set_cudnn_deterministic,
    torch._C._set_mkldnn_enabled,
    torch._C._set_float32_matmul_precision,
    _set_deterministic,
)


def _switch(setters: _Setters, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for put, old, new in zip(setters, before, after, strict=True):
        if old != new:
            put(new)
