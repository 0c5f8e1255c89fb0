"""The meter: the exact peak of live bytes over a stretch of code.

::

    with memory.peak() as meter:
        loss = model(x).square().mean()
        loss.backward()
    print(meter.peak, meter.now)

On an accelerator the allocator's own statistics are read. The CPU has none, so each new storage is counted when the
operation that made it returns, and discounted when its last tensor is gone. What operations need inside themselves
(convolutions repack their weights) is looked at when each is first executed on tensors of given shapes and dtypes. That
agrees with `torch.profiler`'s memory events, and unlike those it is known at once, nests, and goes together with a
profiler.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from itertools import accumulate, chain
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch._C import (
    _get_dispatch_mode,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch._C._autograd import (
    _disable_profiler_legacy,
    _enable_profiler_legacy,
    _profiler_enabled,
)
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._pytree import tree_leaves

__all__ = ["Meter", "forget", "inside", "peak", "see"]


class Meter:
    """Live bytes above those at the beginning; a context manager, made by `peak`.

    Attributes:
        peak: The most bytes that were live at once so far, above those live at the beginning.
        now: Bytes live now above the beginning, negative if more was freed than made; after the end, those at the end.
        timeline: Pairs of ``time.perf_counter_ns()`` and live bytes, one for each change; empty unless asked for.
    """

    peak: int
    now: int
    timeline: list[tuple[int, int]]

    def __enter__(self) -> Self:
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        raise NotImplementedError


def peak(device: torch.device | str | None = None, *, timeline: bool = False) -> Meter:
    """Measure the peak of live bytes over a ``with`` statement.

    Meters nest, in each thread for itself; all that are open in a thread together cost what one costs. What was
    allocated before the outermost one and is freed inside it is not discounted on the CPU, as with `torch.profiler`.

    Args:
        device: Where to measure. By default the current accelerator, or the CPU where there is none. For ``"meta"``
            bytes are those that the meta tensors would take.
        timeline: Also keep ``meter.timeline``, for a picture.

    Note:
        On the CPU this is a dispatch mode (some 10 us an operation) of the thread that enters it. Not seen is what
        compiled code allocates, and what operations allocate inside themselves if they work in place, or were only met
        while a profiler or another dispatch mode was around. Under any dispatch mode torch computes some derivatives in
        another way: out of place instead of in place, and a few (of products, of what is filled into a mask) with other
        rounding. On an accelerator the peak statistics that ``torch.accelerator.max_memory_allocated`` reads are reset
        at the beginning; nothing else is changed.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    where = torch.device(device) if device is not None else (accelerator or torch.device("cpu"))
    if where.type in ("cpu", "meta"):
        return _HostMeter(timeline, where.type)
    return _DeviceMeter(where, timeline)


class _Mark(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage that knows its size."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the live storages of one thread, of the host or of meta tensors, for all its open meters."""

    supports_higher_order_operators = True

    def __init__(self, device: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device
        # Not the fake tensors of torch's own, as when a DTensor works out how to shard a result.
        fakes = _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None
        self.counts_meta = fakes or device == "meta"
        self.live = 0
        self.meters: list[_HostMeter] = []
        self.marks: dict[int, _Mark] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: what is measured must be what runs without the meter."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what it does to its parts comes here in turn
        if not _makes_storages(func):
            return func(*args, **kwargs)
        # On meta tensors nothing is executed.
        key = None if types or self.device == "meta" else _key(func, args, kwargs)
        inside = 0 if key is None else _insides.get(key)
        if inside is None:
            result, inside = _look_inside(func, args, kwargs, key)
        else:
            result = func(*args, **kwargs)
        if inside:
            for meter in self.meters:
                meter._note(self.live + inside)
        self._made(result)
        return result

    def _made(self, result: Any) -> None:
        if isinstance(result, torch.Tensor):
            if _has_storage(result, self.device):
                self._count(result.untyped_storage())
        elif isinstance(result, tuple | list):
            for part in result:
                self._made(part)

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.marks or (storage.device.type == "meta" and not self.counts_meta):
            return
        mark = self.marks[key] = _Mark(storage, self._freed)
        mark.key, mark.nbytes = key, storage.nbytes()
        self.live += mark.nbytes
        for meter in self.meters:
            meter._note(self.live)

    def _freed(self, mark: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(mark, _Mark)
        del self.marks[mark.key]
        self.live -= mark.nbytes
        for meter in self.meters:
            meter._note(self.live)


@cache
def _makes_storages(func: Any) -> bool:
    """Whether an operation has a result that is no view of, and not itself, one of its arguments."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(value.alias_info is None for value in schema.returns)


def _has_storage(tensor: torch.Tensor, device: str = "cpu") -> bool:
    return tensor.device.type == device and tensor.layout is torch.strided


_insides: dict[Any, int] = {}
"""By operation and what it is given: the most bytes that it allocates at a time inside itself, if its results are fewer."""

_MOST_REMEMBERED: Final = 1 << 16
_EVENTS: Final = ProfilerConfig(
    ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig()
)
_TOLD: Final = {bool, int, str, type(None), torch.dtype, torch.layout, torch.memory_format}


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """What `_insides` knows an operation by; None if it is not one to look into."""
    if not _is_torchs_own(func):
        return None
    try:
        key = (func, *[_about(value) for value in (*args, *kwargs.values())])
        hash(key)
    except (RuntimeError, TypeError):  # sparse and nested tensors have no strides; symbols no hash
        return None
    return key


def _about(value: Any) -> Any:
    kind = type(value)
    if kind in _TOLD:
        return value
    if kind is list:
        return tuple(map(_about, value))
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return kind


def _look_inside(func: Any, args: Any, kwargs: Any, key: Any) -> tuple[Any, int]:
    """Execute an operation while torch records what its allocator does; return the bytes for `_insides` too."""
    if _len_torch_dispatch_stack():  # modes of the user's, which may do anything meanwhile
        return func(*args, **kwargs), 0
    meter = _Allocations()
    with meter:
        result = func(*args, **kwargs)
    if not meter.looks:
        return result, 0
    forget(result)
    if len(_insides) >= _MOST_REMEMBERED:
        _insides.clear()
    inside = _insides[key] = meter.peak if meter.peak > meter.now else 0
    return result, inside


@cache
def _is_torchs_own(func: Any) -> bool:
    """Whether an operation is one of torch's own that is given tensors and makes all of its results anew."""
    schema = getattr(func, "_schema", None)
    return (
        getattr(func, "namespace", "") == "aten"
        and schema is not None
        and any("Tensor" in str(value.type) for value in schema.arguments)
        and not any(value.alias_info for value in (*schema.arguments, *schema.returns))
    )


class _Allocations(Meter):
    """Reads what torch's allocator records for profilers, without a dispatch mode.

    Attributes:
        looks: Whether it does; not while somebody's profiler is running, as there is but one.
    """

    looks: bool

    def __enter__(self) -> Self:
        self.peak, self.now, self.timeline = 0, 0, []
        self.looks = not _profiler_enabled()
        if self.looks:
            _enable_profiler_legacy(_EVENTS)
        return self

    def __exit__(self, *_: object) -> None:
        if self.looks and _profiler_enabled():  # autograd takes it away at an error in a derivative
            events = chain.from_iterable(_disable_profiler_legacy())
            levels = list(accumulate((event.cpu_memory_usage() for event in events), initial=0))
            self.peak, self.now = max(levels), levels[-1]


def inside(device: torch.device) -> Meter:
    """Meter a stretch of torch's own code, such as the derivative of an operation.

    On the CPU this is no dispatch mode, under which some derivatives give other bits. What was made by then and lives on
    is to be given to `forget`. Nothing is seen while a profiler is running, and none may be started meanwhile.
    """
    return _Allocations() if device.type == "cpu" else peak(device)


def forget(result: Any) -> None:
    """Give what was made while torch recorded it other storages, so that torch has no record of what lives on.

    Torch adds up what its profilers record over the life of the process: memory whose end none of them sees would stay
    in the sum, which the next profiler tells. A storage that somebody else holds, too, stays as it is.

    Args:
        result: The results; their tensors are changed in place.
    """
    if _profiler_enabled():
        return
    originals: list[torch.UntypedStorage] = []
    with _disable_current_modes(), torch.no_grad():
        results: dict[int, dict[int, torch.Tensor]] = {}
        made = [tensor for tensor in tree_leaves(result) if type(tensor) is torch.Tensor]
        bases = [tensor._base for tensor in made if tensor._is_view()]  # which a view holds
        for tensor in (*made, *bases):
            if type(tensor) is torch.Tensor and _has_storage(tensor) and not _is_strange(tensor):
                key = tensor.untyped_storage()._cdata
                results.setdefault(key, {})[id(tensor)] = tensor
        for key, tensors in results.items():
            originals.append(next(iter(tensors.values())).untyped_storage())
            if torch._C._storage_Use_Count(key) > len(tensors) + 1:
                originals.pop()
                continue
            other = originals[-1].clone()  # type: ignore[no-untyped-call]
            for tensor in tensors.values():
                layout = tensor.storage_offset(), tensor.size(), tensor.stride()
                tensor.data = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(other, *layout)
    _enable_profiler_legacy(_EVENTS)
    originals.clear()
    _disable_profiler_legacy()


def _is_strange(tensor: torch.Tensor) -> bool:
    """Whether a storage does not tell all that a tensor is, or was not made by torch's own allocator."""
    return (
        not torch._C._has_storage(tensor)
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._is_zerotensor()
        or tensor.is_pinned()
    )


class _Threads(threading.local):
    def __init__(self) -> None:
        self.recorders: dict[str, _Recorder] = {}  # by kind of device


_threads = _Threads()


class _HostMeter(Meter):
    def __init__(self, timeline: bool, device: str) -> None:
        self.peak, self.timeline = 0, []
        self._keeps_timeline, self._device = timeline, device
        self._begin = 0
        self._end: int | None = 0

    @property
    def now(self) -> int:  # type: ignore[override]
        return self._recorder.live - self._begin if self._end is None else self._end

    def __enter__(self) -> Self:
        begun = _threads.recorders.get(self._device)
        self._recorder = begun or _Recorder(self._device)
        self._begin, self._end = self._recorder.live, None
        self.peak, self.timeline = 0, []
        if begun is None:
            self._recorder.__enter__()  # type: ignore[no-untyped-call]
            _threads.recorders[self._device] = self._recorder
        self._recorder.meters.append(self)
        self._note(self._begin)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        recorder = self._recorder
        self._end = self.now
        recorder.meters.remove(self)
        if not recorder.meters:
            del _threads.recorders[self._device]
            recorder.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
            recorder.marks.clear()

    def _note(self, live: int) -> None:
        above = live - self._begin
        if above > self.peak:
            self.peak = above
        if self._keeps_timeline:
            self.timeline.append((time.perf_counter_ns(), above))


def see(tensor: torch.Tensor) -> None:
    """Let this thread's meters count a host storage that no operation of torch's has made, such as a mapped file."""
    recorder = _threads.recorders.get("cpu")
    if recorder is not None:
        recorder._made(tensor)


_device_meters: list[_DeviceMeter] = []


class _DeviceMeter(Meter):
    def __init__(self, device: torch.device, timeline: bool) -> None:
        self.timeline = []
        self._device = device
        self._sampler = _Sampler(self._sample) if timeline else None
        self._begin = self._most = 0
        self._end: int | None = 0

    @property
    def now(self) -> int:  # type: ignore[override]
        if self._end is not None:
            return self._end
        return torch.accelerator.memory_allocated(self._device) - self._begin

    @property
    def peak(self) -> int:  # type: ignore[override]
        if self._end is None:
            self._update()
        return self._most

    def __enter__(self) -> Self:
        # The statistics have one peak for all: those around this meter read it before it is reset.
        for meter in _device_meters:
            meter._update()
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._begin = torch.accelerator.memory_allocated(self._device)
        self._end, self._most, self.timeline = None, 0, []
        _device_meters.append(self)
        if self._sampler is not None:
            self._sampler.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._sampler is not None:
            self._sampler.__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._update()
        self._end = self.now
        _device_meters.remove(self)

    def _update(self) -> None:
        most = torch.accelerator.max_memory_allocated(self._device) - self._begin
        self._most = max(self._most, most)

    def _sample(self) -> None:
        self.timeline.append((time.perf_counter_ns(), self.now))


class _Sampler(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function after each operation."""

    supports_higher_order_operators = True

    def __init__(self, sample: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sample = sample

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.sample()
        return result
