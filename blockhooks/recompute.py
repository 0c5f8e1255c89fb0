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
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks

from blockhooks.errors import HookError, RecomputeError
from blockhooks.structure import capture

__all__ = [
    "Check",
    "can_recompute",
    "checkpointed",
    "is_recomputing",
    "keep_aside",
    "packed_elsewhere",
]

Check = Literal["shapes", "values", "none"]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
ContextFactory = Callable[[], contextlib.AbstractContextManager[Any]]

_RECOMPUTING: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "blockhooks.recomputing", default=False
)


def is_recomputing() -> bool:
    """Whether the code that asks is being executed again, for a backward."""
    return _RECOMPUTING.get()


class EarlyStop(BaseException):
    """Ends a recompute: all that is needed is back. Let it pass; clean up in ``finally``."""


_OVERWRITTEN = -1


class _Holder:
    """What stands in autograd's graph for one saved tensor."""

    __slots__ = ("__weakref__", "frame", "index", "value", "version")

    frame: _Frame
    index: int
    value: Tensor | None
    version: int


class _PackHook:
    """A pack hook of ours, while it is installed.

    torch's selective contexts (2.14) look past the hooks of checkpoints, which they know by the two names below, for
    those of the user; ours would be taken for the user's.
    """

    __slots__ = ("_below",)
    _checkpoint_internal = True
    _below: Any

    @property
    def _user_hooks(self) -> Any:
        hooks = self._below
        while hooks is not None and getattr(hooks[0], "_checkpoint_internal", False):
            hooks = hooks[0]._user_hooks
        return hooks

    def push(self, unpack: Callable[[Any], Any]) -> None:
        self._below = _top_hooks(False)
        _push_hooks(self, unpack)

    def pop(self) -> None:
        self._below = None  # no longer than that: autograd's graph holds us
        _pop_hooks()

    def __call__(self, tensor: Tensor) -> Any:
        raise NotImplementedError


_refuse_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _refuse_hooks_but_ours(error_message: str) -> Iterator[None]:
    """Let a block use torch.func's transforms, which refuse to run under saved-tensor hooks (torch 2.14).

    Takes the place of the context in which torch refuses: ours are taken away first and given back at its end. What
    autograd saves in a transform is kept, then, and not expected from a recompute, where it is alike.
    """
    taken: list[Any] = []
    top: Any = _top_hooks(True)
    while top is not None and isinstance(top[0], _PackHook):
        _pop_hooks()
        taken.append(top)
        top = _top_hooks(True)
    try:
        with _refuse_hooks(error_message):
            yield
    finally:
        for pack, unpack in reversed(taken):
            _push_hooks(pack, unpack)


torch.autograd.graph.disable_saved_tensors_hooks = _refuse_hooks_but_ours


class _Frame(_PackHook):
    """One execution of a region in a forward, and what is needed to execute it again."""

    __slots__ = (
        "__weakref__",
        "_lock",
        "ambient",
        "attributes",
        "check",
        "context",
        "contexts",
        "describe",
        "early_stop",
        "function",
        "holders",
        "late",
        "open",
        "overrides",
        "prints",
        "rebuild",
        "recomputed",
        "saved",
    )

    def __init__(
        self,
        function: Callable[..., Any],
        tensors: Sequence[Tensor],
        rebuild: Callable[[list[Tensor]], Arguments],
        contexts: Sequence[ContextFactory],
        early_stop: bool,
        check: Check,
        describe: Callable[[], str],
    ) -> None:
        self.function, self.rebuild = function, rebuild
        self.contexts, self.early_stop, self.check = contexts, early_stop, check
        self.describe = describe
        self.holders: list[weakref.ref[_Holder]] = []
        self.prints: list[Any] = []
        self.open: list[_Holder] | None = []
        self.late: list[
            int
        ] = []  # of saved tensors that may get their values after they were saved
        self.recomputed: dict[Any, dict[int, Tensor]] = {}
        # Before our own hooks are installed: an enclosing region packs the arguments.
        self.saved = [_make_saved_tensor(tensor, is_output=False) for tensor in tensors]
        # Of the user's: an unpacked or detached tensor has none of them.
        self.attributes = {i: dict(t.__dict__) for i, t in enumerate(tensors) if t.__dict__}
        self.ambient = _ambient()
        self.overrides = torch._C._is_torch_function_enabled()
        self.context = contextvars.copy_context()
        self._lock = threading.RLock()

    # ---- forward -----------------------------------------------------------------------------------------------

    def __call__(self, tensor: Tensor) -> _Holder:
        """Pack a tensor."""
        holder = _Holder()
        holder.frame, holder.index = self, len(self.holders)
        holder.value, holder.version = tensor, tensor._version
        self.holders.append(weakref.ref(holder))
        if self.open is not None:
            self.open.append(holder)
        if self.check == "shapes":
            self.prints.append((tensor.shape, tensor.dtype, tensor.device))
        elif self.check == "values":
            if _settled(tensor):
                self.prints.append(_fingerprint(tensor))
            else:
                self.prints.append(None)
                self.late.append(holder.index)
        return holder

    def close(self, keep: bool) -> None:
        """Let go of what was saved; or keep it, without its graph (an output would hold itself alive)."""
        for holder in (self.open or ())[-_SAVED_TOGETHER:]:
            value = holder.value
            if value is not None and not holder.version and not _settled(value):
                self.late.append(holder.index)
        for holder in self.open or ():
            value = holder.value
            if value is None:
                continue
            if value._version != holder.version:
                holder.version = _OVERWRITTEN
            if self.check == "values" and self.prints[holder.index] is None:
                self.prints[holder.index] = _fingerprint(value)
            holder.value = value.detach() if keep else None
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
        if holder.version == _OVERWRITTEN:  # plain autograd raises as well
            raise RecomputeError(
                f"{self.describe()}: one of the variables needed for gradient computation has been modified by an inplace "
                "operation inside of the region, after it was saved. Use the operation that is not in place."
            )
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
        if torch._C._is_torch_function_enabled() != self.overrides:
            # The backward of a tensor subclass runs without its overrides.
            switch = (
                torch._C._EnableTorchFunction
                if self.overrides
                else torch._C.DisableTorchFunctionSubclass
            )
            with switch():
                return self.recompute(task)
        arguments = self.rebuild(self._arguments())
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
            _note(error, f"while recomputing {self.describe()} for the backward pass")
            raise
        replay.verify()
        self.recomputed[task] = values
        if task != -1 and isinstance(task, int):
            _forget_after(task, self)
        return values

    def _arguments(self) -> list[Tensor]:
        try:
            tensors = [saved.unpack() for saved in self.saved]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RecomputeError(
                f"{self.describe()}: an input was modified in place between its forward and its backward, so the "
                "recompute would see other values. Expected the tensor to be unchanged; clone it before changing it, "
                f"or run the backward first. ({error})"
            ) from error
        # A graph of its own: what the function does to its inputs' graph (hooks, a backward) stays in the recompute.
        alone = [t.detach().requires_grad_() if t.requires_grad else t for t in tensors]
        for index, attributes in self.attributes.items():
            if alone[index] is not tensors[index] or not alone[index].__dict__:
                alone[index].__dict__.update(attributes)
        return alone

    def _execute(self, arguments: Arguments, replay: _Replay) -> None:
        _RECOMPUTING.set(True)
        modes, flags, grad = _modes(), _flags(), torch.is_grad_enabled()
        forward_modes, forward_flags = self.ambient
        entered: list[contextlib.AbstractContextManager[Any]] = []
        failed: tuple[Any, Any, Any] = (None, None, None)
        torch.autocast_increment_nesting()
        try:
            if modes != forward_modes:
                _switch(_MODE_SETTERS, modes, forward_modes)
            if flags != forward_flags:
                _switch(_FLAG_SETTERS, flags, forward_flags)
            for factory in self.contexts:
                context = factory()
                context.__enter__()
                entered.append(context)
            torch._C._set_grad_enabled(True)
            replay.push(_identity)
            try:
                args, kwargs = arguments
                self.function(*args, **kwargs)
            finally:
                replay.pop()
        except BaseException as error:
            failed = (type(error), error, error.__traceback__)
            raise
        finally:
            try:
                _leave(entered, failed)
            finally:
                failed = (None, None, None)  # no cycle of this frame and the exception
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
                torch._C._set_grad_enabled(grad)
                left = _modes()
                if left != modes:
                    _switch(_MODE_SETTERS, left, modes)
                if flags != forward_flags:
                    _switch(_FLAG_SETTERS, _flags(), flags)
        replay.returned = True


def _leave(
    entered: list[contextlib.AbstractContextManager[Any]], failed: tuple[Any, Any, Any]
) -> None:
    """Leave contexts in reverse, all of them, whatever one of them raises. None can swallow an exception."""
    while entered:
        try:
            entered.pop().__exit__(*failed)
        except BaseException:
            _leave(entered, failed)
            raise


class _Replay(_PackHook):
    """The saved-tensor hooks of one recompute."""

    def __init__(self, frame: _Frame, values: dict[int, Tensor]) -> None:
        self.frame, self.values = frame, values
        self.alive = [holder() is not None for holder in frame.holders]
        self.last = -1
        if frame.early_stop and frame.check != "values" and True in self.alive:
            self.last = len(self.alive) - 1 - self.alive[::-1].index(True)
        self.expected = len(self.alive)
        self.count = 0
        self.due = False  # all is there once the operation that is running has ended
        self.late: list[int] = []  # to be compared then
        self.returned = False
        self.differs: list[str] = []

    def __call__(self, tensor: Tensor) -> Tensor:
        """Pack a tensor: it is one of those that are needed, or one that nobody needs any more."""
        index = self.count
        self.count += 1
        if self.due:
            raise EarlyStop(self)
        if index < self.expected and self.alive[index]:
            late = index in self.frame.late
            if tensor.requires_grad:
                tensor = tensor.detach()
            self.values[index] = tensor
            if late:
                self.late.append(index)
            else:
                self.compare(index, tensor)
            if index == self.last:
                if not self.late:
                    raise EarlyStop(self)
                self.due = True
        elif tensor.requires_grad:
            tensor = tensor.detach()
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
            self.differs.append(
                f"  saved tensor {index}: {_tell(before)}, recomputed {_tell(after)}"
            )

    def verify(self) -> None:
        frame, expected = self.frame, self.expected
        for index in self.late:
            self.compare(index, self.values[index])
        if self.differs:
            what = "values" if frame.check == "values" else "metadata"
            raise RecomputeError(
                f"{frame.describe()}: the recompute is not the forward: saved tensors have different {what} "
                f"({len(self.differs)} of {expected}).\n"
                + "\n".join(self.differs[:8])
                + "\nSomething that the block reads changed between forward and recompute, or the block is "
                "nondeterministic; carry it in a recompute_context, or keep this block."
            )
        complete = len(self.values) == sum(self.alive)
        if not complete or (self.returned and self.count < expected):
            raise RecomputeError(
                f"{frame.describe()}: A different number of tensors was saved during the forward ({expected}) and the "
                f"recompute ({self.count}): the block took another path. Something that it reads changed in between; "
                "carry it in a recompute_context, or keep this block."
            )
        if self.returned and self.count > expected:
            raise RecomputeError(
                f"{frame.describe()}: trying to save more tensors during recomputation ({self.count}) than during the "
                f"forward ({expected}): the block took another path. Something that it reads changed in between; carry "
                "it in a recompute_context, or keep this block."
            )


_SAVED_TOGETHER = 2
"""How many of the last saved tensors are looked at for one that is filled only when its operation has ended."""


def _settled(tensor: Tensor) -> bool:
    """Whether a saved tensor of a forward surely has its values, and is none that its operation fills later (rrelu)."""
    return (
        tensor.requires_grad
        or tensor._version > 0
        or isinstance(tensor, torch.nn.Parameter)
        or tensor._is_view()
        or not tensor.is_floating_point()
    )


def _tell(fingerprint: Any) -> str:
    shape, dtype, device, *rest = fingerprint
    return f"{list(shape)} {dtype} on {device}" + (f" with hash {rest[0]}" if rest else "")


def _identity(value: Any) -> Any:
    return value


def _unpack(holder: _Holder) -> Tensor:
    value = holder.value
    if value is None:
        if torch.compiler.is_dynamo_compiling():
            # Compiled autograd traces the hooks; a region whose forward was eager is recomputed eagerly.
            return _eagerly(holder)
        return holder.frame.unpack(holder)
    if value._version != holder.version:
        raise RecomputeError(
            f"{holder.frame.describe()}: one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: a tensor of shape {list(value.shape)} is at version {value._version}, expected "
            f"version {holder.version}. Change a copy of it, or run the backward first."
        )
    return value.detach() if value.requires_grad else value


@torch._disable_dynamo  # type: ignore[attr-defined]
def _eagerly(holder: _Holder) -> Tensor:
    return holder.frame.unpack(holder)


def _clear(error: BaseException) -> None:
    """Clear the frames that an exception has left (R8), so that nothing waits for the garbage collector."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _note(error: Exception, note: str) -> None:
    """Say where an exception happened, once."""
    if not any(known.startswith("while re") for known in getattr(error, "__notes__", ())):
        error.add_note(note)


_pending: dict[int, list[weakref.ref[_Frame]]] = {}


def _forget_after(task: int, frame: _Frame) -> None:
    """Let a frame forget what it has recomputed for a backward when that backward is over."""
    frames = _pending.get(task)
    if frames is None:
        frames = _pending[task] = []

        def forget() -> None:
            for reference in _pending.pop(task, ()):
                alive = reference()
                if alive is not None:
                    alive.recomputed.pop(task, None)

        torch.autograd.Variable._execution_engine.queue_callback(forget)
    frames.append(weakref.ref(frame))


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


def _modes() -> tuple[Any, ...]:
    """What a block may enter and leave: autocast, default dtype, and torch-function modes (default device)."""
    global _devices
    if not _devices:
        _devices = _autocast_devices()
    depth = torch._C._len_torch_function_stack()
    return (
        (
            torch.is_autocast_cache_enabled(),
            tuple(map(torch.is_autocast_enabled, _devices)),
            tuple(map(torch.get_autocast_dtype, _devices)),
        ),
        torch.get_default_dtype(),
        tuple(map(torch._C._get_function_stack_at, range(depth))) if depth else (),
    )


def _flags() -> tuple[Any, ...]:
    """What selects the kernels of operators."""
    return (
        (
            torch._C._get_flash_sdp_enabled(),
            torch._C._get_mem_efficient_sdp_enabled(),
            torch._C._get_math_sdp_enabled(),
            torch._C._get_cudnn_sdp_enabled(),
            torch._C._get_math_sdp_allow_fp16_bf16_reduction(),
            torch._C._get_sdp_priority_order(),
        ),
        (
            torch._C._get_cudnn_enabled(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_cudnn_deterministic(),
            torch._C._get_mkldnn_enabled(),
            torch._C._get_float32_matmul_precision(),
            torch._C._get_deterministic_algorithms(),
            torch._C._get_deterministic_algorithms_warn_only(),
        ),
    )


def _set_autocast(state: tuple[Any, ...]) -> None:
    cache, switches, dtypes = state
    torch.set_autocast_cache_enabled(cache)
    for device, enabled, dtype in zip(_devices, switches, dtypes, strict=True):
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _set_function_modes(modes: tuple[Any, ...]) -> None:
    for _ in range(torch._C._len_torch_function_stack()):
        torch._C._pop_torch_function_stack()
    for mode in modes:
        torch._C._push_on_torch_function_stack(mode)


def _set_sdpa(state: tuple[Any, ...]) -> None:
    flash, efficient, math, cudnn, reduction, order = state
    torch._C._set_sdp_use_flash(flash)
    torch._C._set_sdp_use_mem_efficient(efficient)
    torch._C._set_sdp_use_math(math)
    torch._C._set_sdp_use_cudnn(cudnn)
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(reduction)
    torch._C._set_sdp_priority_order(order)


def _set_backends(state: tuple[Any, ...]) -> None:
    enabled, benchmark, deterministic, mkldnn, precision, algorithms, warn_only = state
    torch._C._set_cudnn_enabled(enabled)
    torch._C._set_cudnn_benchmark(benchmark)
    torch._C._set_cudnn_deterministic(deterministic)
    torch._C._set_mkldnn_enabled(mkldnn)
    torch._C._set_float32_matmul_precision(precision)
    torch._C._set_deterministic_algorithms(algorithms, warn_only=warn_only)


def _ambient() -> tuple[Any, Any]:
    """What torch's operators depend on beside their arguments."""
    return _modes(), _flags()


_Setters = tuple[Callable[[Any], Any], ...]
_MODE_SETTERS: _Setters = (_set_autocast, torch.set_default_dtype, _set_function_modes)
_FLAG_SETTERS: _Setters = (_set_sdpa, _set_backends)


def _switch(setters: _Setters, before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for put, old, new in zip(setters, before, after, strict=True):
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


def _just_one(tensors: list[Tensor]) -> Arguments:
    return tuple(tensors), {}


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


def packed_elsewhere() -> Callable[[], bool] | None:
    """Tell whether another saved-tensor hook lies over that of the region whose forward is running.

    Returns:
        None if the region's own is on top; else a function that tells, later, whether nothing has come through to it, so
        that the region keeps what it should drop.
    """
    frame = _OPEN.get()
    if frame is None or frame.open is None:
        return None
    top: Any = _top_hooks(True)
    if top is None or top[0] is frame:
        return None
    count = len(frame.holders)
    return lambda: len(frame.holders) == count


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
    inputs: Sequence[Tensor]
    if (
        not kwargs and len(args) == 1 and isinstance(args[0], Tensor)
    ):  # most regions: spare the walk
        inputs, rebuild = args, _just_one
    else:
        captured = capture((args, kwargs), take_tensors=True, refuse=_refuse_iterator(describe))
        inputs, rebuild = captured.tensors, captured.rebuild
        captured.tensors = []
    versions = [0 if t.is_inference() else t._version for t in inputs]
    frame = _Frame(function, inputs, rebuild, contexts, early_stop, check, describe)
    token = _OPEN.set(frame)
    try:
        frame.push(_unpack)
        try:
            if forward_context is None:
                result = function(*args, **kwargs)
            else:
                with forward_context:
                    result = function(*args, **kwargs)
        finally:
            frame.pop()
    except BaseException:
        for factory in contexts:
            _forward_done(factory, failed=True)
        frame.close(keep=False)
        raise
    finally:
        _OPEN.reset(token)
    reason = None
    if any(
        not t.is_inference() and t._version != version
        for t, version in zip(inputs, versions, strict=True)
    ):
        reason = "it changes an input in place"
    for factory in contexts:
        reason = _forward_done(factory, failed=False) or reason
    frame.close(keep=reason is not None)
    if reason is not None and on_keep is not None:
        on_keep(reason)
    return result
