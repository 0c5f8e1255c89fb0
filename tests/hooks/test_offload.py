"""`Offload` moves what is kept, brings it back, and leaves nothing behind."""

import copy
import errno
import gc
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from blockhooks import (
    Checkpoint,
    HookError,
    RecomputeError,
    Segment,
    errors,
    memory,
    offloading,
    plan,
)
from blockhooks.errors import OffloadError
from blockhooks.hooks.offload import Offload
from blockhooks.hooks.profile import Profile
from blockhooks.hooks.selective import Selective
from tests.agree import differs, leaf, outcome, plain, through

WIDTH = 32


class Block(nn.Module):
    """Attention and a gated MLP, with views of one storage and tensors of several dtypes."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(b, t, d)), 0.1)
        gate, y = self.up(x).chunk(2, -1)
        y = (F.silu(gate) * y).to(torch.bfloat16).to(x.dtype)
        return x + self.down(y).double().sin().to(x.dtype)


def stack(n=4):
    return nn.ModuleList(Block() for _ in range(n))


@pytest.fixture
def disk(tmp_path):
    def make(**options):
        return Offload("disk", **{"min_bytes": 0, "directory": tmp_path, **options})

    return make


def files(directory):
    return sorted(path for path in directory.rglob("*.safetensors"))


CHAINS = {
    "alone": lambda offload: [offload],
    "checkpoint": lambda offload: [offload, Checkpoint()],
    "behind checkpoint": lambda offload: [Checkpoint(plan.first(2)), offload],
    "nested": lambda offload: [
        offload,
        Checkpoint(
            lambda n: [Segment(0, 2), Segment(2, n, (Segment(2, 3), Segment(3, n, mode="keep")))]
        ),
    ],
    "kept with children": lambda offload: [
        Checkpoint(
            lambda n: [Segment(0, n, (Segment(0, 2, mode="keep"), Segment(2, n)), mode="keep")]
        ),
        offload,
    ],
    "selective": lambda offload: [offload, Selective(min_bytes=0)],
    "behind selective": lambda offload: [
        Selective(min_bytes=0),
        Checkpoint(plan.first(1)),
        offload,
    ],
    "profile": lambda offload: [Profile(), offload, Checkpoint(plan.first(2))],
    "twice": lambda offload: [offload, Offload("cpu")],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_hook_run_segment(chain, disk, tmp_path):
    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        for _ in range(2):
            run(blocks, x).square().mean().backward()
        return blocks, x

    offload = disk()
    moved = []
    write = offloading._write

    def counted(path, data):
        moved.append(data.nbytes)
        write(path, data)

    expected = outcome(step, plain)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offloading, "_write", counted)
        found = outcome(step, through(CHAINS[chain](offload)))
    assert differs(found, expected) is None
    assert len(moved) >= 2
    assert offload.away == 0
    assert files(tmp_path) == []


def test_what_is_kept_is_away_between_forward_and_backward(disk):
    blocks, x = stack(), leaf(2, 8, WIDTH)
    offload = disk()
    figures = []
    for run in (plain, through(offload)):
        run(blocks, x).sum().backward()
        with memory.peak("cpu") as meter:
            y = run(blocks, x)
            kept = meter.now - y.nbytes
            y.sum().backward()
        figures.append((kept, meter.peak))
    (kept, peak), (offload_kept, offload_peak) = figures
    assert offload_kept < 0.05 * kept
    assert offload_peak < 0.5 * peak


def test_parameters_buffers_and_side_inputs_stay(disk, tmp_path):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(WIDTH, WIDTH))
            self.frozen = nn.Parameter(torch.rand(WIDTH, WIDTH), requires_grad=False)
            self.register_buffer("scale", torch.rand(WIDTH))

        def forward(self, x, mask, *, shift):
            return x @ self.weight.t() @ self.frozen * self.scale * mask[0] * shift

    x, mask, shift = leaf(WIDTH, WIDTH), leaf(2, WIDTH), leaf(WIDTH, number=1, grad=False)
    y = through(disk())([Scaled()], x, mask, shift=shift)
    sizes = [path.stat().st_size for path in files(tmp_path)]
    # x @ weight needs no result of the block; times mask and times shift need one for the mask's gradient.
    assert len(sizes) == 1
    y.sum().backward()


def test_views_share_one_transfer(disk, tmp_path):
    def block(x):
        y = x * 2
        a, b = y.chunk(2)
        return a.exp().log() + b.t().cosh().t() + y[::2].sin()

    y = through(disk())([block], leaf(4, 6))
    sizes = [path.stat().st_size - 128 for path in files(tmp_path)]
    assert sizes == [2 * 6 * 4, 4 * 6 * 4], "the result of exp, and y"
    y.sum().backward()


def test_small_tensors_and_what_is_beyond_max_bytes_stay(disk, tmp_path):
    blocks, x = stack(), leaf(2, 8, WIDTH)
    offload = disk(min_bytes=4096)
    y = through(offload)(blocks, x)
    assert files(tmp_path)
    assert all(path.stat().st_size >= 4096 for path in files(tmp_path))
    everything = offload.away
    del y
    offload = disk(max_bytes=everything // 2)
    y = through(offload)(blocks, x)
    assert 0 < offload.away <= everything // 2
    y.sum().backward()
    assert offload.away == 0


def test_second_backward_double_backward_and_partial_gradients(disk, tmp_path):
    def step(run):
        blocks, x = (
            nn.ModuleList(
                [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
            ),
            leaf(4, 8),
        )
        y = run(blocks, x)
        loss = y.square().mean()
        loss.backward(retain_graph=True)
        (partial,) = torch.autograd.grad(loss, blocks[0][0].weight, retain_graph=True)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        return blocks, x, partial, gradient

    assert differs(outcome(step, through(disk())), outcome(step, plain)) is None
    assert files(tmp_path) == []


def test_conjugate_and_other_negated_tensors_stay_right(disk):
    def step(run):
        x = leaf(4, 6, dtype=torch.complex64)

        def block(x):
            y = (x * 2).conj()
            z = (y * x).exp()
            return (z * y.imag).sum(0).resolve_neg().resolve_conj()

        y = run([block], x)
        torch.view_as_real(y).square().sum().backward()
        return x

    assert differs(outcome(step, through(disk())), outcome(step, plain)) is None


def test_tensors_on_the_cpu_are_at_home_there():
    blocks, x = stack(), leaf(2, 8, WIDTH)
    offload = Offload("cpu", min_bytes=0)
    y = through(offload)(blocks, x)
    assert offload.away == 0
    y.sum().backward()


def test_hooks_around_decide(disk, tmp_path):
    blocks, x = stack(), leaf(2, 8, WIDTH)
    with torch.autograd.graph.save_on_cpu():
        y = through(disk())(blocks, x)
    assert files(tmp_path) == []
    y.sum().backward()


def test_without_gradients_nothing_moves(disk, tmp_path):
    blocks, x = stack(1), leaf(2, 8, WIDTH)
    with torch.no_grad():
        through(disk())(blocks, x)
    assert files(tmp_path) == []


# ---- nothing is left behind ------------------------------------------------------------------------------------------


def test_files_are_gone_with_a_dropped_output(disk, tmp_path):
    blocks, x = stack(), leaf(2, 8, WIDTH)
    gc.collect()
    gc.disable()
    try:
        y = through(disk())(blocks, x)
        assert files(tmp_path)
        del y
        assert files(tmp_path) == []
    finally:
        gc.enable()


def test_files_are_gone_after_an_error_and_the_next_step_is_right(disk, tmp_path):
    fail = [True]

    def block(x):
        if fail[0]:
            raise ZeroDivisionError("in a block")
        return x

    def step(run):
        blocks, x = [*stack(), block], leaf(2, 8, WIDTH)
        if run is not plain:
            fail[0] = True
            with pytest.raises(ZeroDivisionError, match="in a block"):
                run(blocks, x)
            torch.manual_seed(1)
        fail[0] = False
        torch.manual_seed(1)
        run(blocks, x).sum().backward()
        return blocks, x

    assert differs(outcome(step, through(disk())), outcome(step, plain)) is None
    assert files(tmp_path) == []


TRAINING = """
import sys, time, torch
from torch import nn
from blockhooks import apply_blocks
from blockhooks.hooks.offload import Offload

blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
offload = Offload("disk", min_bytes=0, directory=sys.argv[1])
y = apply_blocks(blocks, torch.randn(4, 8, requires_grad=True), hooks=offload)
print("ready", flush=True)
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def start(directory, then):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(directory), then],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.skipif(sys.platform == "win32", reason="no lock that ends with a process")
def test_files_of_a_killed_process_are_removed_by_the_next_one_and_others_are_left_alone(
    disk, tmp_path
):
    with start(tmp_path, "wait") as killed, start(tmp_path, "wait") as alive:
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        there = {path.parent for path in files(tmp_path)}
        assert len(there) == 2
        y = through(disk())(stack(1), leaf(2, 8, WIDTH))
        left = {path.parent.name.split("-")[2] for path in files(tmp_path)}
        assert left == {str(alive.pid), str(os.getpid())}
        locks = {path.name.split("-")[2] for path in tmp_path.glob("*.lock")}
        assert locks == left
        y.sum().backward()
        alive.kill()


def test_nothing_is_left_when_a_process_ends(tmp_path):
    with start(tmp_path, "end") as process:
        assert process.wait() == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_does_not_remove_its_parents_files(disk, tmp_path):
    y = through(disk())(stack(1), leaf(2, 8, WIDTH))
    before = files(tmp_path)
    child = os.fork()
    if child == 0:
        del y
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert files(tmp_path) == before
    y.sum().backward()


# ---- faults ----------------------------------------------------------------------------------------------------------


def fill_the_disk(patch, room):
    """Let there be room for so many files more, and for half of the next one."""
    write, left = offloading._write, itertools.count(room, -1)

    def full(path, data):
        if next(left) <= 0:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, data)

    patch.setattr(offloading, "_write", full)


def test_a_full_disk_is_told_where_it_happens_and_the_next_step_is_right(
    disk, tmp_path, monkeypatch
):
    blocks, x = stack(), leaf(2, 8, WIDTH)
    offload = disk()
    with monkeypatch.context() as patch:
        fill_the_disk(patch, room=3)
        message = r"block 0 \(Block\): \d+ bytes could not be written to .*safetensors \(No space left on device\); \d+"
        with pytest.raises(OffloadError, match=message):
            through(offload)(blocks, x)
    gc.collect()
    assert files(tmp_path) == []
    assert offload.away == 0

    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        run(blocks, x).sum().backward()
        return blocks, x

    assert differs(outcome(step, through(offload)), outcome(step, plain)) is None


def test_a_vanished_file_is_named(disk, tmp_path):
    y = through(disk())(stack(), leaf(2, 8, WIDTH))
    for path in files(tmp_path):
        path.unlink()
    message = r"block 3 \(Block\): a saved tensor was moved to .*safetensors, which cannot be read in the backward"
    with pytest.raises(OffloadError, match=message):
        y.sum().backward()


def test_a_directory_that_somebody_removed_is_an_error_once_and_made_anew(disk, tmp_path):
    def step(run):
        blocks, x = stack(), leaf(2, 8, WIDTH)
        run(blocks, x).sum().backward()
        return blocks, x

    expected, offload = outcome(step, plain), disk()
    y = through(offload)(stack(), leaf(2, 8, WIDTH))
    (removed,) = {path.parent for path in files(tmp_path)}
    shutil.rmtree(removed)
    with pytest.raises(OffloadError, match=r"cannot be read in the backward \(No such file"):
        y.sum().backward()
    del y
    assert differs(outcome(step, through(offload)), expected) is None
    assert {path.suffix for path in tmp_path.iterdir()} == {"", ".lock"}
    assert len(list(tmp_path.iterdir())) == 2
    assert not removed.exists()


@pytest.mark.skipif(offloading.fcntl is None, reason="no locks here at all")
def test_a_file_system_without_locks_serves_too(disk, tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(offloading.fcntl, "flock", no_locks)
    (tmp_path / "blockhooks-offload-1-other").mkdir()
    (tmp_path / "blockhooks-offload-1-other.lock").touch()
    through(disk())(stack(1), leaf(2, 8, WIDTH)).sum().backward()
    assert (tmp_path / "blockhooks-offload-1-other").exists()  # perhaps somebody's who is alive


def test_a_file_that_was_replaced_is_named(disk, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    y = through(disk())(stack(), leaf(2, 8, WIDTH))
    for path in files(tmp_path):
        safetensors.save_file({"saved": torch.zeros(3, dtype=torch.uint8)}, path)
    with pytest.raises(OffloadError, match=r"it holds 3 bytes instead of \d+"):
        y.sum().backward()


def test_a_file_that_was_cut_is_named(disk, tmp_path):
    y = through(disk())(stack(), leaf(2, 8, WIDTH))
    for path in files(tmp_path):
        os.truncate(path, 100)
    with pytest.raises(OffloadError, match=r"which cannot be read in the backward"):
        y.sum().backward()


def test_a_place_where_nothing_can_be_made_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    offload = Offload("disk", min_bytes=0, directory=file / "directory")
    with pytest.raises(OffloadError, match=r"could not make a directory in .*Choose another place"):
        through(offload)(stack(1), leaf(2, 8, WIDTH))


@pytest.mark.parametrize("alive", [True, False])
def test_a_tensor_changed_between_forward_and_backward_is_named(disk, alive):
    held = []

    def block(x):
        y = x * 2
        held.append(y)
        return y.exp().sin() + y.cosh()

    z = through(disk())([block], leaf(4, 6))
    with torch.no_grad():
        held[0].add_(1)
    if not alive:
        held.clear()
    message = r"block 0 \(block\): one of the variables .*a result of MulBackward0, is at version 1, expected version 0"
    with pytest.raises(RecomputeError, match=message):
        z.sum().backward()


def test_a_storage_changed_between_two_savings_moves_twice(disk):
    def step(run):
        x = leaf(4, 6)

        def block(x):
            y = x.exp().detach() * 1
            a = x * y
            with torch.no_grad():
                y = y.clone()
                b = x * y
            return a + b

        run([block], x).sum().backward()
        return x

    assert differs(outcome(step, through(disk())), outcome(step, plain)) is None


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(
        errors.MissingExtraError,
        match=r"offloading to disk needs safetensors.*blockhooks\[offload\]",
    ):
        Offload("disk")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "gpu"}, r"Offload\(to='gpu'\): expected 'cpu' or 'disk'"),
        (
            {"min_bytes": -1},
            r"Offload\(min_bytes=...\) expected an integer of at least 0, found -1",
        ),
        (
            {"min_bytes": None},
            r"Offload\(min_bytes=...\) expected an integer of at least 0, found None",
        ),
        ({"to": "disk", "directory": 3}, r"Offload\(directory=...\) expected a path, found 3"),
        (
            {"max_bytes": "1GB"},
            r"Offload\(max_bytes=...\) expected an integer of at least 0, found",
        ),
        (
            {"directory": "/x"},
            r"Offload\(directory='/x'\): expected to='disk' with it, found to='cpu'",
        ),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(HookError, match=message):
        Offload(**options)


def test_a_plugin_can_be_copied_and_pickled():
    for twin in (
        copy.deepcopy(Offload("cpu")),
        pickle.loads(pickle.dumps(Offload("cpu", min_bytes=5))),
    ):
        assert repr(twin) == "Offload('cpu')"
        assert twin.away == 0
