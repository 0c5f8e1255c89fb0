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
from typing import Any, Literal, NoReturn

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._C._autograd import _make_saved_tensor
from torch._C._autograd import _pop_saved_tensors_default_hooks as _pop_hooks
from torch._C._autograd import _push_saved_tensors_default_hooks as _push_hooks
from torch._C._autograd import _top_saved_tensors_default_hooks as _top_hooks

from blockhooks.ambient import Ambient
from blockhooks.errors import HookError, RecomputeError
from blockhooks.structure import capture, parts_of, versions_of

__all__ = [
    "Check",
    "EarlyStop",
    "Frame",
    "PackHook",
    "as_recompute",
    "can_recompute",
    "checkpointed",
    "forward_done",
    "is_recomputing",
    "just_one",
    "keep_aside",
    "open_frame",
    "packed_elsewhere",
    "taking",
    "without_hooks",
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


class _Holder:
    """What stands in autograd's graph for one saved tensor: its place in a frame, or the tensor, where it is kept."""

    __slots__ = ("__weakref__", "index", "source")

    index: int
    source: Frame | _Kept


class _Kept:
    """A saved tensor that is kept."""

    __slots__ = ("_describe", "_tensor", "_version")

    def __init__(self, tensor: Tensor, version: int, describe: Callable[[], str]) -> None:
        # Without its graph: an output would hold itself alive.
        self._tensor = tensor.detach() if tensor.requires_grad else tensor
        self._version, self._describe = version, describe

    def unpack(self, holder: _Holder) -> Tensor:
        if self._tensor._version != self._version:
            raise RecomputeError(_overwritten(self._describe(), self._tensor, self._version))
        return self._tensor


def _overwritten(where: str, tensor: Tensor, version: int) -> str:
    return (
        f"{where}: one of the variables needed for gradient computation has been modified by an inplace operation: a "
        f"tensor of shape {list(tensor.shape)} is at version {tensor._version}, expected version {version}. Change a "
        "copy of it, or run the backward first."
    )


class _Constant:
    """An argument of inference mode, which autograd does not save and counts no versions of."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def unpack(self) -> Tensor:
        return self._tensor


class PackHook:
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
        """Install the hook, and an unpack hook with it."""
        self._below = _top_hooks(False)
        _push_hooks(self, unpack)

    def pop(self) -> None:
        """Take the two away again."""
        self._below = None  # no longer than that: autograd's graph holds us
        _pop_hooks()

    def __call__(self, tensor: Tensor) -> Any:
        """Pack a tensor that autograd saves."""
        raise NotImplementedError


@contextlib.contextmanager
def without_hooks(kind: type) -> Iterator[None]:
    """Take away the saved-tensor hooks on top whose pack hooks are of a kind, until the context is left."""
    taken: list[Any] = []
    top: Any = _top_hooks(True)
    while top is not None and isinstance(top[0], kind):
        _pop_hooks()
        taken.append(top)
        top = _top_hooks(True)
    try:
        yield
    finally:
        for pack, unpack in reversed(taken):
            _push_hooks(pack, unpack)


_refuse_hooks = torch.autograd.graph.disable_saved_tensors_hooks


@contextlib.contextmanager
def _refuse_hooks_but_ours(error_message: str) -> Iterator[None]:
    """Let a block use torch.func's transforms, which refuse to run under saved-tensor hooks (torch 2.14).

    Takes the place of the context in which torch refuses: ours are taken away first and given back at its end. What
    autograd saves in a transform is kept, then, and not expected from a recompute, where it is alike.
    """
    with without_hooks(PackHook), _refuse_hooks(error_message):
        yield


torch.autograd.graph.disable_saved_tensors_hooks = _refuse_hooks_but_ours


_NONE: frozenset[int] = frozenset()


class Frame(PackHook):
    """One execution of a region in a forward, and what is needed to execute it again.

    The hook that packs what autograd saves: see `taking`.

    Args:
        function: What the region executes; called again in a recompute.
        tensors: The tensors among its arguments.
        rebuild: Gives the arguments again, from tensors in place of those.
        contexts: Factories of what is entered around each recompute.
        early_stop: End a recompute once all saved tensors are back.
        check: What to compare between forward and recompute.
        describe: Names the region in errors.
    """

    __slots__ = (
        "__weakref__",
        "_attributes",
        "_check",
        "_context",
        "_contexts",
        "_describe",
        "_early_stop",
        "_function",
        "_holders",
        "_late",
        "_lock",
        "_overwritten",
        "_prints",
        "_rebuild",
        "_recomputed",
        "_saved",
        "_tensors",
        "_versions",
        "ambient",
        "taken",
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
        self._function, self._rebuild, self._contexts = function, rebuild, contexts
        self._early_stop, self._check, self._describe = early_stop, check, describe
        self.taken: list[Tensor] | None = []  # until the forward is over
        self._versions: list[int] = []
        self._tensors: list[weakref.ref[Tensor]] = []
        self._holders: list[weakref.ref[_Holder]] = []
        self._prints: list[Any] = []
        self._late: list[int] = []  # of those that may get their values after they were saved
        self._overwritten = _NONE
        self._recomputed: dict[Any, dict[int, Tensor]] = {}
        # Before our own hooks are installed: an enclosing region packs the arguments.
        try:
            self._saved: list[Any] = [_make_saved_tensor(tensor, False) for tensor in tensors]
        except RuntimeError:
            if not any(tensor.is_inference() for tensor in tensors):
                raise
            self._saved = [
                _Constant(tensor) if tensor.is_inference() else _make_saved_tensor(tensor, False)
                for tensor in tensors
            ]
        # Of the user's: an unpacked or detached tensor has none of them.
        self._attributes = [tensor.__dict__.copy() for tensor in tensors]
        self.ambient = Ambient.now()
        self._context = contextvars.copy_context()
        self._lock = threading.RLock()

    # ---- forward -----------------------------------------------------------------------------------------------

    def __call__(self, tensor: Tensor) -> _Holder:
        """Pack a tensor."""
        taken, holders = self.taken, self._holders
        holder = _Holder()
        if taken is None:  # saved in another thread, when the forward is over
            holder.source = _Kept(tensor, tensor._version, self._describe)
            return holder
        holder.source, holder.index = self, len(holders)
        holders.append(weakref.ref(holder))
        taken.append(tensor)
        self._versions.append(tensor._version)
        self._tensors.append(weakref.ref(tensor))
        check = self._check
        if check == "shapes":
            self._prints.append((tensor.shape, tensor.dtype, tensor.device))
        elif check == "values":
            if _settled(tensor):
                self._prints.append(_fingerprint(tensor))
            else:
                self._prints.append(None)
                self._late.append(holder.index)
        return holder

    @property
    def count(self) -> int:
        """How many tensors were saved."""
        return len(self._holders)

    def close(self, keep: bool) -> None:
        """Let go of what was saved, or keep it."""
        taken, versions = self.taken or [], self._versions
        late = self._late
        for index in range(max(0, len(taken) - _SAVED_TOGETHER), len(taken)):
            if not versions[index] and not _settled(taken[index]) and index not in late:
                late.append(index)
        now = [tensor._version for tensor in taken]
        if now != versions:
            self._overwritten = frozenset(
                index for index, version in enumerate(versions) if version != now[index]
            )
        if self._check == "values":
            for index in late:
                self._prints[index] = _fingerprint(taken[index])
        if keep:
            self.keep_from(0)
            self._saved = []  # never executed again
        self.taken = None

    def keep_from(self, start: int) -> None:
        """Keep what was saved from index `start` on, and do not expect it from a recompute."""
        assert self.taken is not None
        for reference, tensor, version in zip(
            self._holders[start:], self.taken[start:], self._versions[start:], strict=True
        ):
            holder = reference()
            if holder is not None:
                holder.source = _Kept(tensor, version, self._describe)
        del self._holders[start:], self.taken[start:], self._versions[start:]
        del self._tensors[start:], self._prints[start:]
        self._late = [index for index in self._late if index < start]

    # ---- backward ----------------------------------------------------------------------------------------------

    def unpack(self, holder: _Holder) -> Tensor:
        """Give the tensor back that a holder stands for; execute the function again if it has to be."""
        index, taken = holder.index, self.taken
        if taken is not None:  # a backward inside of the region
            tensor, version = taken[index], self._versions[index]
            if tensor._version != version:
                raise RecomputeError(_overwritten(self._describe(), tensor, version))
            return tensor.detach() if tensor.requires_grad else tensor
        if torch.compiler.is_dynamo_compiling():
            # Compiled autograd traces the hooks; a region whose forward was eager is recomputed eagerly.
            return _eagerly(self, index)
        return self._recomputed_at(index)

    def _recomputed_at(self, index: int) -> Tensor:
        if index in self._overwritten:  # plain autograd raises as well
            raise RecomputeError(
                f"{self._describe()}: one of the variables needed for gradient computation has been modified by an inplace "
                "operation inside of the region, after it was saved. Use the operation that is not in place."
            )
        group = torch._C._get_graph_exec_group()
        task = group if group is not None else torch._C._current_graph_task_id()
        with self._lock:  # on several devices, several threads of autograd's ask
            values = self._recomputed.get(task)
            if values is None or index not in values:
                if values is not None and group is not None:
                    raise RecomputeError(
                        f"{self._describe()}: a saved tensor is needed twice in one GraphExecGroup. Performing two "
                        "backward calls that overlap (that need the same saved tensor) is not allowed in a group; "
                        "leave the group for the second backward."
                    )
                values = self._recompute(task)
            value = values.pop(index)
            if task == -1:  # a read of grad_fn._saved_*, outside of a backward
                del self._recomputed[task]
            return value

    def _recompute(self, task: Any) -> dict[int, Tensor]:
        """Execute the function again and return the tensors that are needed, by index."""
        overrides = self.ambient.overrides
        if torch._C._is_torch_function_enabled() != overrides:
            # The backward of a tensor subclass runs without its overrides.
            switch = (
                torch._C._EnableTorchFunction
                if overrides
                else torch._C.DisableTorchFunctionSubclass
            )
            with switch():
                return self._recompute(task)
        args, kwargs = self._rebuild(self._arguments())
        replay = _Replay(
            self._describe,
            self._holders,
            self._tensors,
            self._versions,
            self._prints,
            self._check,
            self._early_stop,
            self._late,
        )
        try:
            self._context.copy().run(self._execute, args, kwargs, replay)
        except EarlyStop as stop:
            if stop.args[0] is not replay:
                raise
            _clear(stop)
        except RecomputeError:
            raise
        except Exception as error:
            _note(error, f"while recomputing {self._describe()} for the backward pass")
            raise
        replay.verify()
        values = self._recomputed[task] = replay.values
        if task != -1 and isinstance(task, int):
            _forget_after(task, self)
        return values

    def forget(self, task: int) -> None:
        """Let go of what was recomputed for a backward."""
        self._recomputed.pop(task, None)

    def _arguments(self) -> list[Tensor]:
        try:
            tensors = [saved.unpack() for saved in self._saved]
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            raise RecomputeError(
                f"{self._describe()}: an input was modified in place between its forward and its backward, so the "
                "recompute would see other values. Expected the tensor to be unchanged; clone it before changing it, "
                f"or run the backward first. ({error})"
            ) from error
        # A graph of its own: what the function does to its inputs' graph (hooks, a backward) stays in the recompute.
        alone = [t.detach().requires_grad_() if t.requires_grad else t for t in tensors]
        for tensor, found, attributes in zip(alone, tensors, self._attributes, strict=True):
            if attributes and (tensor is not found or not tensor.__dict__):
                tensor.__dict__.update(attributes)
        return alone

    def _execute(self, args: tuple[Any, ...], kwargs: dict[str, Any], replay: _Replay) -> None:
        _RECOMPUTING.set(True)
        ambient, grad = self.ambient, torch.is_grad_enabled()
        torch._C._set_grad_enabled(True)
        levels = _batched(0)
        before = ambient.enter()
        if ambient.autocast:
            torch.autocast_increment_nesting()
        entered: list[contextlib.AbstractContextManager[Any]] = []
        failed: tuple[Any, Any, Any] = (None, None, None)
        try:
            for factory in self._contexts:
                context = factory()
                context.__enter__()
                entered.append(context)
            replay.push(_identity)
            try:
                self._function(*args, **kwargs)
            except Exception as error:
                if not replay.stopped or isinstance(error, torch.jit.Error):
                    raise
                _clear(error)  # what the function has made of the signal
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
                if ambient.autocast and torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()
                torch._C._set_grad_enabled(True)
                ambient.leave(before)
                _batched(levels)
                torch._C._set_grad_enabled(grad)


def _batched(levels: int) -> int:
    """Set how many batched backwards (`is_grads_batched`) run around, and return how many there were.

    What they compute with is batched; what was saved is not, and must be free to draw random numbers.
    """
    present = _more_batched() - 1
    for _ in range(present + 1 - levels):
        _less_batched()
    for _ in range(levels - present - 1):
        _more_batched()
    return present


_more_batched = torch._C._vmapmode_increment_nesting
_less_batched = torch._C._vmapmode_decrement_nesting


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


class _Replay(PackHook):
    """The saved-tensor hooks of one recompute.

    Attributes:
        values: What is needed of what was saved, by index.
        stopped: Whether all was there, and the function was told so; what it does then does not matter.
    """

    __slots__ = (
        "_check",
        "_count",
        "_describe",
        "_differs",
        "_due",
        "_holders",
        "_last",
        "_late",
        "_overwritten",
        "_postponed",
        "_prints",
        "_tensors",
        "_versions",
        "stopped",
        "values",
    )

    def __init__(
        self,
        describe: Callable[[], str],
        holders: Sequence[weakref.ref[_Holder]],
        tensors: Sequence[weakref.ref[Tensor]],
        versions: Sequence[int],
        prints: Sequence[Any],
        check: Check,
        early_stop: bool,
        late: Sequence[int],
    ) -> None:
        self._describe, self._holders, self._prints = describe, holders, prints
        self._tensors, self._versions = tensors, versions
        self._check, self._late = check, late
        self.values: dict[int, Tensor] = {}
        self._count = 0
        self._last = -1
        if early_stop and check != "values":
            self._last = len(holders) - 1
            while self._last >= 0 and holders[self._last]() is None:
                self._last -= 1
        self._due = False  # all is there once the operation that is running has ended
        self._postponed: list[int] = []  # to be compared then
        self._differs: list[str] = []
        self._overwritten: str | None = None
        self.stopped = False

    def __call__(self, tensor: Tensor) -> Tensor:
        """Pack a tensor: it is one of those that are needed, or one that nobody needs any more."""
        index = self._count
        self._count = index + 1
        if self._due:
            self._stop()
        needed = index < len(self._holders) and self._holders[index]() is not None
        if (
            needed
            and self._tensors[index]() is tensor  # that the forward saved: none of the region's own
            and tensor._version != self._versions[index]
        ):
            self._overwritten = _overwritten(self._describe(), tensor, self._versions[index])
        if tensor.requires_grad and tensor.grad_fn is not None:  # a leaf has no graph to hold
            tensor = tensor.detach()
        if needed:
            self.values[index] = tensor
            if index in self._late:
                self._postponed.append(index)
            else:
                self._compare(index, tensor)
            if index == self._last:
                if not self._postponed:
                    self._stop()
                self._due = True
        return tensor

    def _stop(self) -> NoReturn:
        self.stopped = True
        raise EarlyStop(self)

    def _compare(self, index: int, tensor: Tensor) -> None:
        check = self._check
        if check == "none":
            return
        before = self._prints[index]
        after = (
            (tensor.shape, tensor.dtype, tensor.device)
            if check == "shapes"
            else _fingerprint(tensor)
        )
        if before != after:
            self._differs.append(
                f"  saved tensor {index}: {_tell(before)}, recomputed {_tell(after)}"
            )

    def verify(self) -> None:
        """See whether the recompute was the forward.

        Raises:
            RecomputeError: If it was not.
        """
        expected, count = len(self._holders), self._count
        for index in self._postponed:
            self._compare(index, self.values[index])
        if self._overwritten is not None:
            raise RecomputeError(self._overwritten)
        if self._differs:
            what = "values" if self._check == "values" else "metadata"
            raise RecomputeError(
                f"{self._describe()}: the recompute is not the forward. Recomputed values for the following tensors have "
                f"different {what} than in the forward ({len(self._differs)} of {expected}):\n"
                + "\n".join(self._differs[:8])
                + "\nSomething that the block reads changed between forward and recompute, or the block is "
                "nondeterministic; carry it in a recompute_context, or keep this block."
            )
        if self.stopped:
            return
        if count < expected:
            raise RecomputeError(
                f"{self._describe()}: A different number of tensors was saved during the forward ({expected}) and the "
                f"recompute ({count}): the block took another path. Something that it reads changed in between; "
                "carry it in a recompute_context, or keep this block."
            )
        if count > expected:
            raise RecomputeError(
                f"{self._describe()}: trying to save more tensors during recomputation ({count}) than during the "
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
    return holder.source.unpack(holder)


@torch._disable_dynamo  # type: ignore[attr-defined]
def _eagerly(frame: Frame, index: int) -> Tensor:
    return frame._recomputed_at(index)


def _clear(error: BaseException) -> None:
    """Clear the frames that an exception has left (R8), so that nothing waits for the garbage collector."""
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = None


def _note(error: Exception, note: str) -> None:
    """Say where an exception happened, once."""
    if not any(known.startswith("while re") for known in getattr(error, "__notes__", ())):
        error.add_note(note)


_pending: dict[int, list[weakref.ref[Frame]]] = {}


def _forget_after(task: int, frame: Frame) -> None:
    """Let a frame forget what it has recomputed for a backward when that backward is over."""
    frames = _pending.get(task)
    if frames is None:
        frames = _pending[task] = []

        def forget() -> None:
            for reference in _pending.pop(task, ()):
                alive = reference()
                if alive is not None:
                    alive.forget(task)

        torch.autograd.Variable._execution_engine.queue_callback(forget)
    frames.append(weakref.ref(frame))


def _fingerprint(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, dtype, device, and two position-dependent sums over the bits."""
    parts = parts_of(tensor)
    if parts is not None:
        return tensor.shape, tensor.dtype, tensor.device, tuple(_fingerprint(p)[-1] for p in parts)
    with torch.no_grad():
        data = tensor.detach()
        if data.layout is not torch.strided or data.numel() == 0 or data.is_meta:
            return data.shape, data.dtype, data.device, 0
        data = torch.view_as_real(data) if data.is_complex() else data
        bits = data.reshape(-1).contiguous().view(torch.uint8).to(torch.int64)
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        total = (bits * places).sum() * 1_000_003 + (bits * (places * places % 65_521)).sum()
        return tensor.shape, tensor.dtype, tensor.device, int(total)


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


def just_one(tensors: list[Tensor]) -> Arguments:
    """The arguments of a call with tensors alone."""
    return tuple(tensors), {}


def _refuse_iterator(describe: Callable[[], str]) -> Callable[[object], None]:
    def refuse(value: object) -> None:
        raise HookError(
            f"{describe()}: an argument is a {type(value).__name__}, an iterator, which the forward would use up so that "
            "the recompute finds it empty. Expected values that can be read again; pass a list or a tuple."
        )

    return refuse


_OPEN: contextvars.ContextVar[Frame | None] = contextvars.ContextVar(
    "blockhooks.open_frame", default=None
)


def open_frame() -> Frame | None:
    """The frame of the innermost region whose forward is running, in this thread."""
    frame = _OPEN.get()
    return None if frame is None or frame.taken is None else frame


@contextlib.contextmanager
def taking(frame: Frame) -> Iterator[None]:
    """Let a frame take what autograd saves, until the context is left."""
    token = _OPEN.set(frame)
    try:
        frame.push(_unpack)
        try:
            yield
        finally:
            frame.pop()
    finally:
        _OPEN.reset(token)


@contextlib.contextmanager
def as_recompute() -> Iterator[None]:
    """Let what is executed know itself in a recompute, and in no region's forward."""
    recomputing, within = _RECOMPUTING.set(True), _OPEN.set(None)
    try:
        yield
    finally:
        _RECOMPUTING.reset(recomputing)
        _OPEN.reset(within)


class _Aside:
    def __init__(self, frame: Frame | None) -> None:
        self._frame = frame
        self._start = 0 if frame is None else frame.count

    def keep(self) -> None:
        if self._frame is not None:
            self._frame.keep_from(self._start)


@contextlib.contextmanager
def keep_aside() -> Iterator[_Aside]:
    """Let a part of a region's forward be left out of its recompute.

    After ``keep()`` on what the context gives, what autograd has saved since it was entered stays, and the recompute is
    not expected to save it again.
    """
    yield _Aside(open_frame())


def packed_elsewhere() -> Callable[[], bool] | None:
    """Tell whether another saved-tensor hook lies over that of the region whose forward is running.

    Returns:
        None if the region's own is on top; else a function that tells, later, whether nothing has come through to it, so
        that the region keeps what it should drop.
    """
    frame = open_frame()
    if frame is None:
        return None
    top: Any = _top_hooks(True)
    if top is None or top[0] is frame:
        return None
    count = frame.count
    return lambda: frame.count == count


def forward_done(factory: ContextFactory, failed: bool) -> str | None:
    """Tell a factory that the forward is over; return its reason why there can be no recompute."""
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
        inputs, rebuild = args, just_one
    else:
        captured = capture((args, kwargs), take_tensors=True, refuse=_refuse_iterator(describe))
        inputs, rebuild = captured.tensors, captured.rebuild
        captured.tensors = []
    versions = versions_of(inputs)
    frame = Frame(function, inputs, rebuild, contexts, early_stop, check, describe)
    token = _OPEN.set(frame)  # as `taking` does; a context costs as much as all of this
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
            forward_done(factory, failed=True)
        frame.close(keep=False)
        raise
    finally:
        _OPEN.reset(token)
    reason = None
    if versions != versions_of(inputs):
        reason = "it changes an input in place"
    for factory in contexts:
        reason = forward_done(factory, failed=False) or reason
    frame.close(keep=reason is not None)
    if reason is not None and on_keep is not None:
        on_keep(reason)
    return result
