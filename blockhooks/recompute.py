"""Drop what autograd saves inside a region, and bring it back by executing the region again.

This is the one hard file of the library. `checkpointed` runs a function under a pair of saved-tensor hooks. What
autograd saves is packed into holders; when the function has returned, the holders let go of it. The first unpack in a
backward executes the function again under another pair of hooks, which fills the holders' places, in the order of
saving. Rules R1 to R9 (``docs/explanation/regions.md``) are kept here, in particular:

* What was saved is dropped only after the function has returned: a backward inside the function needs no recompute, and
  a function that changed its input in place keeps what autograd saved, since it cannot be executed again.
* A recompute packs detached tensors, each is freed as it is unpacked, and all are freed when that backward is over.
* The function's tensor arguments are saved tensors in autograd's sense: their versions are checked, and an enclosing
  region drops and recomputes them in turn (this is what makes regions nest).
* A recompute ends by an exception as soon as all that is needed is back (early stop). The signal is no `Exception`, so
  that the function's own ``except Exception`` does not see it; the frames it leaves behind are cleared, so that no
  tensor waits for the garbage collector.
* The state of the interpreter and of torch is that of the forward: context variables, autocast, default dtype and
  device, torch-function modes, backend flags.

References: torch.utils.checkpoint's notes on nested checkpoints (torch 2.13) for the nesting rules.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._autograd import _make_saved_tensor
from torch.autograd.graph import saved_tensors_hooks

from blockhooks.errors import HookError, RecomputeError
from blockhooks.structure import Captured, capture

__all__ = ["Check", "checkpointed", "is_recomputing", "keep_aside"]

Check = Literal["shapes", "values", "none"]
ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]

_RECOMPUTING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "blockhooks.recomputing", default=False
)


def is_recomputing() -> bool:
    """Whether the code that asks is being executed again, for a backward."""
    return _RECOMPUTING.get()


class EarlyStop(BaseException):
    """Ends a recompute: all that is needed is back. Let it pass; clean up in ``finally``."""


class _Holder:
    """What stands in autograd's graph for one saved tensor."""

    __slots__ = ("__weakref__", "frame", "index", "value", "version")

    def __init__(self, frame: _Frame, index: int, value: Tensor) -> None:
        self.frame, self.index = frame, index
        self.value: Tensor | None = value
        self.version = value._version


class _Frame:
    """One execution of a region in a forward, and what is needed to execute it again."""

    __slots__ = (
        "__weakref__",
        "_lock",
        "ambient",
        "arguments",
        "check",
        "context",
        "contexts",
        "describe",
        "early_stop",
        "function",
        "holders",
        "open",
        "prints",
        "recomputed",
        "saved",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Captured,
        contexts: Sequence[ContextFactory],
        early_stop: bool,
        check: Check,
        describe: Callable[[], str],
    ) -> None:
        self.function, self.arguments = function, arguments
        self.contexts, self.early_stop, self.check = contexts, early_stop, check
        self.describe = describe
        self.holders: list[weakref.ref[_Holder]] = []
        self.prints: list[Any] = []
        self.open: list[_Holder] | None = []
        self.recomputed: dict[Any, dict[int, Tensor]] = {}
        # Before our own hooks are installed: an enclosing region packs the arguments.
        self.saved = [_make_saved_tensor(t, is_output=False) for t in arguments.tensors]
        arguments.tensors = []
        self.ambient = _ambient()
        self.context = contextvars.copy_context()
        self._lock = threading.RLock()

    # ---- forward -----------------------------------------------------------------------------------------------

    def pack(self, tensor: Tensor) -> _Holder:
        holder = _Holder(self, len(self.holders), tensor)
        self.holders.append(weakref.ref(holder))
        if self.open is not None:
            self.open.append(holder)
        if self.check == "shapes":
            self.prints.append((tensor.shape, tensor.dtype, tensor.device))
        elif self.check == "values":
            self.prints.append(_fingerprint(tensor))
        return holder

    def close(self, keep: bool) -> None:
        """Let go of what was saved; or keep it, without its graph (an output would hold itself alive)."""
        for holder in self.open or ():
            value = holder.value
            holder.value = value.detach() if keep and value is not None else None
        self.open = None
        if keep:  # never executed again: what it would take for that is not needed
            self.saved = []

    def take_out(self, start: int) -> None:
        """Keep what was saved from index `start` on, and do not expect it from a recompute."""
        assert self.open is not None
        for holder in self.open[start - len(self.holders) :] if start < len(self.holders) else ():
            value = holder.value
            holder.value = None if value is None else value.detach()
        taken = len(self.holders) - start
        if taken:
            del self.holders[start:], self.prints[start:], self.open[-taken:]

    # ---- backward ----------------------------------------------------------------------------------------------

    def unpack(self, holder: _Holder) -> Tensor:
        group = torch._C._get_graph_exec_group()
        task = group if group is not None else torch._C._current_graph_task_id()
        with self._lock:  # on several devices, several threads of autograd's ask
            values = self.recomputed.get(task)
            if values is None or holder.index not in values:
                if values is not None and group is not None:
                    raise RecomputeError(
                        f"{self.describe()}: a saved tensor is needed twice in one GraphExecGroup. Performing two "
                        "backward calls that overlap (that need the same saved tensor) is not allowed in a group; "
                        "leave the group for the second backward."
                    )
                values = self.recompute(task)
            value = values.pop(holder.index)
            if task == -1:  # a read of grad_fn._saved_*, outside of a backward
                del self.recomputed[task]
            return value

    def recompute(self, task: Any) -> dict[int, Tensor]:
        """Execute the function again and return the tensors that are needed, by index."""
        arguments = self.arguments.rebuild(self._arguments())
        values: dict[int, Tensor] = {}
        replay = _Replay(self, values)
        try:
            self.context.copy().run(self._execute, arguments, replay)
        except EarlyStop as stop:
            if stop.args[0] is not replay:
                raise
            _clear(stop)
        except RecomputeError:
            raise
        except Exception as error:
            if not any(n.startswith("while recomputing") for n in getattr(error, "__notes__", ())):
                error.add_note(f"while recomputing {self.describe()} for the backward pass")
            raise
        replay.verify()
        self.recomputed[task] = values
        if task != -1 and isinstance(task, int):
            _at_end_of_backward(weakref.ref(self), task)
        return values

    def _arguments(self) -> Iterator[Tensor]:
        for saved in self.saved:
            try:
                tensor = saved.unpack()
            except RuntimeError as error:
                if "modified by an inplace operation" not in str(error):
                    raise
                raise RecomputeError(
                    f"{self.describe()}: an input was modified in place between its forward and its backward, so the "
                    "recompute would see other values. Expected the tensor to be unchanged; clone it before "
                    f"changing it, or run the backward first. ({error})"
                ) from error
            # A graph of its own: what the function does to its inputs' graph (hooks, a backward) stays in the recompute.
            yield tensor.detach().requires_grad_() if tensor.requires_grad else tensor

    def _execute(self, arguments: tuple[tuple[Any, ...], dict[str, Any]], replay: _Replay) -> None:
        _RECOMPUTING.set(True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(_restored(self.ambient))
            for factory in self.contexts:
                stack.enter_context(factory())
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(replay.pack, _identity))
            args, kwargs = arguments
            self.function(*args, **kwargs)
        replay.returned = True


class _Replay:
    """The saved-tensor hooks of one recompute."""

    def __init__(self, frame: _Frame, values: dict[int, Tensor]) -> None:
        alive = [index for index, holder in enumerate(frame.holders) if holder() is not None]
        self.frame, self.values = frame, values
        self.alive = set(alive)
        self.last = alive[-1] if frame.early_stop and frame.check != "values" else -1
        self.count = 0
        self.returned = False
        self.differs: list[str] = []

    def pack(self, tensor: Tensor) -> Tensor:
        index = self.count
        self.count += 1
        tensor = tensor.detach() if tensor.requires_grad else tensor
        if index in self.alive:
            self.values[index] = tensor
            self.compare(index, tensor)
            if index == self.last:
                raise EarlyStop(self)
        return tensor

    def compare(self, index: int, tensor: Tensor) -> None:
        check = self.frame.check
        if check == "none":
            return
        before = self.frame.prints[index]
        after = (
            (tensor.shape, tensor.dtype, tensor.device)
            if check == "shapes"
            else _fingerprint(tensor)
        )
        if before != after:
            self.differs.append(f"  saved tensor {index}: {_tell(before)}, recomputed {_tell(after)}")

    def verify(self) -> None:
        frame, expected = self.frame, len(self.frame.holders)
        if self.differs:
            what = "values" if frame.check == "values" else "metadata"
            raise RecomputeError(
                f"{frame.describe()}: the recompute is not the forward: saved tensors have different {what} "
                f"({len(self.differs)} of {expected}).\n"
                + "\n".join(self.differs[:8])
                + "\nSomething that the block reads changed between forward and recompute, or the block is "
                "nondeterministic; carry it in a recompute_context, or keep this block."
            )
        complete = self.alive <= self.values.keys()
        if not complete or (self.returned and self.count < expected):
            raise RecomputeError(
                f"{frame.describe()}: A different number of tensors was saved during the forward ({expected}) and the "
                f"recompute ({self.count}): the block took another path. Something that it reads changed in between; "
                "carry it in a recompute_context, or keep this block."
            )
        if self.returned and self.count > expected and frame.check != "none":
            raise RecomputeError(
                f"{frame.describe()}: trying to save more tensors during recomputation ({self.count}) than during the "
                f"forward ({expected}): the block took another path. Something that it reads changed in between; carry it in "
                "a recompute_context, or keep this block."
            )


def _tell(fingerprint: Any) -> str:
    shape, dtype, device, *rest = fingerprint
    return f"{list(shape)} {dtype} on {device}" + (f" with hash {rest[0]}" if rest else "")


def _identity(value: Any) -> Any:
    return value


def _unpack(holder: _Holder) -> Tensor:
    value = holder.value
    if value is None:
        return holder.frame.unpack(holder)
    if value._version != holder.version:
        raise RecomputeError(
            f"{holder.frame.describe()}: one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {list(value.shape)} is at version {value._version}, expected "
            f"version {holder.version}. Change a copy of it, or run the backward first."
        )
    return value.detach() if value.requires_grad else value


def _clear(error: BaseException) -> None:
    """Clear the frames that an exception has left (R8), so that nothing waits for the garbage collector."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _at_end_of_backward(frame: weakref.ref[_Frame], task: int) -> None:
    def forget() -> None:
        alive = frame()
        if alive is not None:
            alive.recomputed.pop(task, None)

    torch.autograd.Variable._execution_engine.queue_callback(forget)  # type: ignore[attr-defined]


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device, and two position-dependent sums over the bits."""
    with torch.no_grad():
        data = tensor.detach()
        if data.layout is not torch.strided or data.numel() == 0:
            return data.shape, data.dtype, data.device, 0
        data = torch.view_as_real(data) if data.is_complex() else data
        bits = data.reshape(-1).contiguous().view(torch.uint8).to(torch.int64)
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        total = (bits * places).sum() * 1_000_003 + (bits * (places * places % 65_521)).sum()
        return tensor.shape, tensor.dtype, tensor.device, int(total)


# ---- the state around a region ---------------------------------------------------------------------------------------

def _autocast_devices() -> tuple[str, ...]:
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


_devices: tuple[str, ...] = ()


def _autocast() -> tuple[Any, ...]:
    global _devices
    _devices = _devices or _autocast_devices()
    return (
        torch.is_autocast_cache_enabled(),
        *((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _devices),
    )


def _set_autocast(state: tuple[Any, ...]) -> None:
    cache, *devices = state
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in devices:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _function_modes() -> tuple[Any, ...]:
    return tuple(
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    )


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _sdpa() -> tuple[Any, ...]:
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
        tuple(torch._C._get_sdp_priority_order()),
    )


def _set_sdpa(state: tuple[Any, ...]) -> None:
    flash, efficient, math, cudnn, reduction, order = state
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn)
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(reduction)
    torch._C._set_sdp_priority_order(list(order))


def _backends() -> tuple[Any, ...]:
    return (
        torch._C._get_cudnn_enabled(),
        torch._C._get_cudnn_benchmark(),
        torch._C._get_cudnn_deterministic(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_float32_matmul_precision(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_deterministic_algorithms_warn_only(),
    )


def _set_backends(state: tuple[Any, ...]) -> None:
    enabled, benchmark, deterministic, mkldnn, precision, algorithms, warn_only = state
    torch._C._set_cudnn_enabled(enabled)
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_float32_matmul_precision(precision)
    torch._C._set_deterministic_algorithms(algorithms, warn_only=warn_only)


_STATES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (_autocast, _set_autocast),
    (torch.get_default_dtype, torch.set_default_dtype),
    (_function_modes, _set_function_modes),
    (_sdpa, _set_sdpa),
    (_backends, _set_backends),
)


def _ambient() -> tuple[Any, ...]:
    return tuple([get() for get, _ in _STATES])


@contextlib.contextmanager
def _restored(state: tuple[Any, ...]) -> Iterator[None]:
    """Give the ambient state of the forward, and put back the present one on every way out."""
    now = _ambient()
    torch.autocast_increment_nesting()
    try:
        _switch(now, state)
        yield
    finally:
        if torch.autocast_decrement_nesting() == 0:
            torch.clear_autocast_cache()
        _switch(state, now)


def _switch(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for (_, put), old, new in zip(_STATES, before, after, strict=True):
        if old != new:
            put(new)


# ---- the entrance ----------------------------------------------------------------------------------------------------


def can_recompute() -> bool:
    """Whether a region that runs now can be recomputed at all.

    Without gradients nothing is saved; torch.func's transforms and forward-mode derivatives have no saved-tensor hooks
    (torch 2.14), so a region is executed plainly there.
    """
    return (
        torch.is_grad_enabled()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
    )


def _refuse_iterator(describe: Callable[[], str]) -> Callable[[object], None]:
    def refuse(value: object) -> None:
        raise HookError(
            f"{describe()}: an argument is a {type(value).__name__}, an iterator, which the forward would use up so that "
            "the recompute finds it empty. Expected values that can be read again; pass a list or a tuple."
        )

    return refuse


_OPEN: contextvars.ContextVar[_Frame | None] = contextvars.ContextVar(
    "blockhooks.open_frame", default=None
)


class _Aside:
    def __init__(self, frame: _Frame | None) -> None:
        self._frame = frame if frame is not None and frame.open is not None else None
        self._start = 0 if self._frame is None else len(self._frame.holders)

    def keep(self) -> None:
        if self._frame is not None:
            self._frame.take_out(self._start)


@contextlib.contextmanager
def keep_aside() -> Iterator[_Aside]:
    """Let a part of a region's forward be left out of its recompute.

    After ``keep()`` on what the context gives, what autograd has saved since it was entered stays, and the recompute is
    not expected to save it again.
    """
    yield _Aside(_OPEN.get())


def _forward_done(factory: ContextFactory, failed: bool) -> str | None:
    done = getattr(factory, "forward_done", None)
    return None if done is None else done(failed)


def checkpointed(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    contexts: Sequence[ContextFactory] = (),
    early_stop: bool = True,
    check: Check = "shapes",
    describe: Callable[[], str] = lambda: "the checkpointed function",
    on_keep: Callable[[str], None] | None = None,
    forward_context: contextlib.AbstractContextManager[Any] | None = None,
) -> Any:
    """Call a function; what autograd saves inside is dropped, and recomputed when the backward needs it.

    Args:
        function: What to call, now and again for each backward.
        args: Its arguments. Tensors in them, at any depth, are kept as saved tensors; containers are copied by
            structure; everything else is passed again as it is.
        kwargs: Its keyword arguments, treated alike.
        contexts: Factories of context managers, entered around each recompute (see `recompute_context`). A factory
            may have a method ``forward_done(failed) -> str | None``, called when the function has returned or raised;
            a string is a reason why the function cannot be executed again, and what autograd saved is kept.
        early_stop: End a recompute once all saved tensors are back.
        check: What to compare between forward and recompute: ``"shapes"`` (shape, dtype, device of each saved tensor),
            ``"values"`` (the same and every bit; runs to the end, and reads each saved tensor once more), ``"none"``.
        describe: Names the function in errors.
        on_keep: Told the reason where what autograd saved was kept instead.
        forward_context: Entered around the call, inside of our own saved-tensor hooks; not around a recompute.

    Raises:
        HookError: If an argument is an iterator.
        RecomputeError: In the backward, if the function cannot be, or was not, executed as in the forward.
    """
    kwargs = kwargs or {}
    if not can_recompute():
        return function(*args, **kwargs)
    captured = capture((args, kwargs), take_tensors=True, refuse=_refuse_iterator(describe))
    inputs = captured.tensors
    versions = [t._version for t in inputs]
    frame = _Frame(function, captured, contexts, early_stop, check, describe)
    token = _OPEN.set(frame)
    try:
        with saved_tensors_hooks(frame.pack, _unpack):
            if forward_context is None:
                result = function(*args, **kwargs)
            else:
                with forward_context:
                    result = function(*args, **kwargs)
    except BaseException:
        for factory in contexts:
            _forward_done(factory, failed=True)
        frame.close(keep=False)
        raise
    finally:
        _OPEN.reset(token)
    reason = None
    if any(t._version != version for t, version in zip(inputs, versions, strict=True)):
        reason = "it changes an input in place"
    for factory in contexts:
        reason = _forward_done(factory, failed=False) or reason
    frame.close(keep=reason is not None)
    if reason is not None and on_keep is not None:
        on_keep(reason)
    return result
