"""Move what autograd saves to another place in the forward, and bring it back in the backward.

`Offloader.forward` is a pair of saved-tensor hooks. What moves are whole storages, so that views of one share its
transfer; parameters, and whatever else is going to stay where it is anyway, do not.

To the host, from a CUDA device: transfers run on a stream of their own, through pinned memory. Memory is freed, and
used, on the stream that computes, after that stream was told to wait for the transfer; so it is right with any
allocator, and what is live does not depend on how far the host is ahead. A segment's first tensor that comes back
starts the transfer of the others. Where segments overlap, as for `Offload`, what a segment saved leaves only at the end
of the next one, which seldom has to wait; what the last one saved is still there when the backward begins, and is used
as it is; and each brings back the segment before, too. Where they do not, as in a plan, whose bytes must be known
beforehand, all of a segment has left at its end.

To the disk: each storage is a safetensors file of its own, mapped into memory when it is needed, and gone with the node
that saved it. The files of a process lie in one directory, which is locked as long as the process lives. A directory
whose lock is free was left by a process that was killed; the next one that offloads to the same place removes it. Where
there are no such locks (on Windows, on some network file systems), what was left behind stays.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from blockhooks import memory
from blockhooks.errors import OffloadError, import_extra
from blockhooks.saved import Kept, Value, hooks_around

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None

__all__ = ["Offloader", "To"]

To = Literal["cpu", "disk"]


class Offloader:
    """Decides which saved tensors move, and where to.

    Args:
        to: ``"cpu"`` or ``"disk"``.
        min_bytes: Storages smaller than this stay.
        max_bytes: The most bytes that may be away at once; what comes later stays.
        directory: Where to make the files.
        overlap: Whether the transfers of a segment go on while the next one is executed.

    Attributes:
        away: Bytes that are away now.
    """

    def __init__(
        self,
        to: To,
        min_bytes: int,
        max_bytes: int | None = None,
        directory: str | os.PathLike[str] | None = None,
        *,
        overlap: bool = False,
    ) -> None:
        self._options = (to, min_bytes, max_bytes, directory)
        self.overlap = overlap
        self.min_bytes = min_bytes
        self.max_bytes = max_bytes
        self.away = 0
        self._place: _Place = _Disk(directory) if to == "disk" else _Host()
        self._last = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without what is away: that belongs to graphs which are not copied."""
        return partial(Offloader, overlap=self.overlap), self._options

    @contextlib.contextmanager
    def forward(self, where: str, stay: Iterable[Tensor]) -> Iterator[None]:
        """Move what autograd saves within a ``with`` statement.

        Does nothing where other saved-tensor hooks are active: they decide (an enclosing region drops it).

        Args:
            where: Names what runs, in errors.
            stay: Tensors whose storages stay, since somebody else holds them.
        """
        if hooks_around() is not None:
            yield
            return
        before: _Batch | None = getattr(self._last, "batch", None)
        batch = _Batch(before)
        if self.overlap:
            self._last.batch = batch
        forward = _Forward(self, where, _identities(stay), batch)
        with saved_tensors_hooks(forward.pack, _unpack):
            try:
                yield
            finally:
                for away in (before if self.overlap else batch) or ():
                    away.leave()

    def move(self, data: Tensor, where: str) -> _Away | None:
        """Move the bytes of a storage, if there is a place for them."""
        if self.max_bytes is not None and self.away + data.nbytes > self.max_bytes:
            return None
        away = self._place.move(data, where)
        if away is not None:
            self.away += data.nbytes
            weakref.finalize(away, self._back, data.nbytes).atexit = False
        return away

    def _back(self, nbytes: int) -> None:
        self.away -= nbytes


class _Batch:
    """What has moved in the forward of one segment. Holds no tensor.

    Args:
        before: The batch of the segment before, if they overlap.
    """

    def __init__(self, before: _Batch | None = None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self._storages: list[weakref.ref[_Away]] = []
        self._asked = -1

    def add(self, away: _Away) -> None:
        """Add a storage."""
        away.batch = self
        self._storages.append(weakref.ref(away))

    def __iter__(self) -> Iterator[_Away]:
        """Yield the storages that are still needed, the last first: in the order of the backward."""
        for reference in reversed(self._storages):
            away = reference()
            if away is not None:
                yield away

    def ask(self) -> None:
        """Begin to bring back this segment, and the one before if they overlap, once in each backward."""
        task = torch._C._current_graph_task_id()
        if task == self._asked:
            return
        self._asked = task
        before = None if self._before is None else self._before()
        for batch in (self, before):
            for away in batch or ():
                away.ask()


class _Away(Value):
    """The bytes of a storage, in another place.

    Attributes:
        batch: What moves together with them.
    """

    __slots__ = ("batch",)
    batch: _Batch

    def leave(self) -> None:
        """Free what is still here of them."""

    def ask(self) -> None:
        """Begin to bring them back."""


class _Place(Protocol):
    """Where bytes can be."""

    def move(self, data: Tensor, where: str) -> _Away | None:
        """Move bytes here; None if these can't be."""


class _Forward:
    """The saved-tensor hooks of one forward."""

    def __init__(
        self, offloader: Offloader, where: str, stay: Collection[int], batch: _Batch
    ) -> None:
        self.offloader, self.where, self.stay, self.batch = offloader, where, stay, batch
        self.storages: dict[int, tuple[weakref.ref[Any], int, weakref.ref[_Away]]] = {}

    def pack(self, tensor: Tensor) -> Kept:
        away = self.away(tensor) if _movable(tensor) else None
        if away is None:
            return Kept(tensor, self.where)
        away.saved += 1
        return _Moved(away, tensor, self.where)

    def away(self, tensor: Tensor) -> _Away | None:
        storage = tensor.untyped_storage()
        key, version = storage._cdata, tensor._version
        if key in self.stay or storage.nbytes() < self.offloader.min_bytes:
            return None
        there = self.storages.get(key)
        if there is not None and there[0]() is storage and there[1] == version:
            away = there[2]()
            if away is not None:
                return away
        data = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        away = self.offloader.move(data, self.where)
        if away is not None:
            self.batch.add(away)
            self.storages[key] = weakref.ref(storage), version, weakref.ref(away)
        return away


def _movable(tensor: Tensor) -> bool:
    base = tensor._base if tensor._is_view() else tensor
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and not (base is not None and base.is_leaf and base.requires_grad)  # stays with its owner
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        and tensor.device.type in ("cpu", "cuda")
    )


def _identities(tensors: Iterable[Tensor]) -> set[int]:
    """Return what tells the storages of tensors apart while they live."""
    return {
        tensor.untyped_storage()._cdata
        for tensor in tensors
        if type(tensor) in (Tensor, Parameter) and tensor.layout is torch.strided
    }


class _Moved(Kept):
    """A saved tensor whose storage is away."""

    __slots__ = ("_away", "_dtype", "_offset", "_size", "_stride")

    def __init__(self, away: _Away, tensor: Tensor, where: str) -> None:
        super().__init__(tensor, where)
        self._away, self._dtype = away, tensor.dtype
        self._size, self._stride = tensor.size(), tensor.stride()
        self._offset = tensor.storage_offset()
        self.tensor = tensor.detach()
        self.tensor.data = tensor.new_empty(0)  # of the tensor, the version counter remains

    def _shape(self) -> list[int]:
        return list(self._size)

    def get(self) -> Tensor:
        super().get()
        self._away.batch.ask()
        data = self._away.take()
        offset = data.storage_offset() // self._dtype.itemsize + self._offset
        empty = torch.empty(0, dtype=self._dtype, device=data.device)
        return empty.set_(data.untyped_storage(), offset, self._size, self._stride)


def _unpack(saved: Kept) -> Tensor:
    return saved.get()


# ---- the host --------------------------------------------------------------------------------------------------------


class _Host:
    """The host's pinned memory."""

    def __init__(self) -> None:
        self._side: dict[torch.device, torch.cuda.Stream] = {}

    def move(self, data: Tensor, where: str) -> _Away | None:
        if data.device.type != "cuda":
            return None  # it is there already
        side = self._side.get(data.device)
        if side is None:
            side = self._side[data.device] = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        return _OnHost(data, side)


class _OnHost(_Away):
    """Bytes of a CUDA device in pinned memory.

    Args:
        data: The bytes, on the device.
        side: The stream for transfers.
    """

    __slots__ = ("_arrived", "_coming", "_copied", "_here", "_home", "_host", "_side")

    def __init__(self, data: Tensor, side: torch.cuda.Stream) -> None:
        super().__init__()
        self._here: Tensor | None = None
        self._coming: Tensor | None = None
        self._arrived: torch.cuda.Event | None = None
        self._side, self._home = side, torch.cuda.current_stream(data.device)
        self._host = torch.empty(data.nbytes, dtype=torch.uint8, pin_memory=True)
        side.wait_stream(self._home)
        with torch.cuda.stream(side):
            self._host.copy_(data, non_blocking=True)
            self._copied: torch.cuda.Event = side.record_event()
        self._here = data

    def leave(self) -> None:
        if self._here is not None:
            # The memory is used again by what this stream computes after the transfer.
            self._home.wait_event(self._copied)
            self._here = None

    def ask(self) -> None:
        if self._here is not None or self._coming is not None or self._held is not None:
            return
        device = self._side.device
        self._home = torch.cuda.current_stream(device)
        self._coming = torch.empty(self._host.nbytes, dtype=torch.uint8, device=device)
        # What the memory was used for before has to be over, and no more than that.
        self._side.wait_stream(self._home)
        with torch.cuda.stream(self._side):
            self._coming.copy_(self._host, non_blocking=True)
            self._arrived = self._side.record_event()

    def get(self) -> Tensor:
        if self._here is not None:
            return self._here
        self.ask()
        data = self._coming
        assert data is not None
        self._settle()
        return data

    def take(self) -> Tensor:
        data = super().take()
        stream = torch.cuda.current_stream(self._side.device)
        if self._arrived is not None and stream != self._home:
            stream.wait_event(self._arrived)
            data.record_stream(stream)
        return data

    def _settle(self) -> None:
        """Let the stream that the memory was allocated on wait until it is written: before its use and its end."""
        if self._coming is not None and self._arrived is not None:
            self._home.wait_event(self._arrived)
            self._coming = None

    def __del__(self) -> None:
        self.leave()
        self._settle()


# ---- the disk --------------------------------------------------------------------------------------------------------


class _Disk:
    """A directory of files.

    Args:
        parent: Where to make it; by default the system's directory for temporary files.
    """

    def __init__(self, parent: str | os.PathLike[str] | None) -> None:
        self._parent = Path(tempfile.gettempdir() if parent is None else parent)
        self._safetensors = import_extra("safetensors", "offload", "offloading to disk")
        self._directory: _Directory | None = None
        self._making = threading.Lock()

    def move(self, data: Tensor, where: str) -> _Away:
        with self._making:
            if self._directory is None or not self._directory.usable():
                self._directory = _Directory(self._parent)
            path = self._directory.new_file()
        return _OnDisk(data, path, self._safetensors, where)


class _OnDisk(_Away):
    """Bytes in a file of their own."""

    __slots__ = ("_device", "_nbytes", "_path", "_process", "_safetensors", "_where")

    def __init__(self, data: Tensor, path: Path, safetensors: Any, where: str) -> None:
        super().__init__()
        self._path, self._device, self._where = path, data.device, where
        self._nbytes = data.nbytes
        self._safetensors, self._process = safetensors, os.getpid()
        try:
            _write(path, data.cpu())
        except OSError as error:
            path.unlink(missing_ok=True)
            free = shutil.disk_usage(path.parent).free if path.parent.exists() else 0
            raise OffloadError(
                f"{where}: {data.nbytes} bytes could not be written to {path} ({error.strerror or error}); {free} "
                f"bytes are free there. Make room, choose another place by {_PLACES}, or move less by "
                "Offload(max_bytes=...)."
            ) from error

    def ask(self) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError), self._path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def get(self) -> Tensor:
        try:
            self._path.open(
                "rb"
            ).close()  # safetensors has one message for all that may be wrong here
            with self._safetensors.safe_open(self._path, framework="pt") as file:
                data: Tensor = file.get_tensor(_NAME)
            if data.nbytes != self._nbytes:
                raise OSError(f"it holds {data.nbytes} bytes instead of {self._nbytes}")
        except (OSError, self._safetensors.SafetensorError) as error:
            raise OffloadError(
                f"{self._where}: a saved tensor was moved to {self._path}, which cannot be read in the backward "
                f"({getattr(error, 'strerror', None) or error}). Expected the file to be there and unchanged until then; "
                f"keep others (a cleaner of temporary files) from it, or choose another place by {_PLACES}."
            ) from error
        memory.see(data)
        return data.to(self._device)

    def __del__(self) -> None:
        if getattr(self, "_process", None) == os.getpid():  # not in a fork
            self._path.unlink(missing_ok=True)


_NAME = "saved"
_PLACES = "Offload(directory=...) or Checkpoint(offload=Path(...))"


def _write(path: Path, data: Tensor) -> None:
    """Write bytes as a safetensors file, without a copy of them in memory."""
    told = {_NAME: {"dtype": "U8", "shape": [data.nbytes], "data_offsets": [0, data.nbytes]}}
    header = json.dumps(told).encode()
    header += b" " * (-(len(header) + 8) % 64)  # what is mapped is aligned as memory is
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(data.numpy().data)


class _Directory:
    """The directory of this process's files, beside its lock.

    The lock is the kernel's: it ends with the process, however that ends.

    Args:
        parent: Where to make it.
    """

    def __init__(self, parent: Path) -> None:
        self.process = os.getpid()
        self._numbers = count()
        try:
            parent.mkdir(parents=True, exist_ok=True)
            _remove_left_behind(parent)
            self._lock = _lock_new(parent)
            self.path = self._lock.path.with_suffix("")
            self.path.mkdir()
        except OSError as error:
            raise OffloadError(
                f"offloading to disk could not make a directory in {parent} ({error.strerror or error}). Choose "
                f"another place by {_PLACES}."
            ) from error
        atexit.register(self._remove)

    def new_file(self) -> Path:
        return self.path / f"{next(self._numbers)}.safetensors"

    def usable(self) -> bool:
        """Whether it is this process's and still there; if not, it is given up."""
        if self.process == os.getpid():
            if self.path.exists():
                return True
            atexit.unregister(self._remove)
            self._remove()
        return False

    def _remove(self) -> None:
        if self.process == os.getpid():  # not in a fork
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.release()


class _Lock:
    """A file that is locked by the kernel for this process."""

    def __init__(self, path: Path, file: int) -> None:
        self.path, self._file = path, file

    def release(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._file)


_PREFIX = "blockhooks-offload-"


def _lock_new(parent: Path) -> _Lock:
    while True:
        file, name = tempfile.mkstemp(".lock", f"{_PREFIX}{os.getpid()}-", parent)
        lock = _Lock(Path(name), file)
        # Another process may have taken a lock that is not yet held for one that was left behind.
        if _lock(file) is not False and lock.path.exists():
            return lock
        lock.release()


def _remove_left_behind(parent: Path) -> None:
    """Remove what processes have left here that were killed."""
    for path in parent.glob(f"{_PREFIX}*.lock"):
        try:
            file = os.open(path, os.O_RDWR)
        except OSError:  # another user's, or gone already
            continue
        if _lock(file):
            shutil.rmtree(path.with_suffix(""), ignore_errors=True)
            path.unlink(missing_ok=True)
        os.close(file)


def _lock(file: int) -> bool | None:
    """Lock a file: whether that succeeded, or None where there are no locks, as on some network file systems."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
