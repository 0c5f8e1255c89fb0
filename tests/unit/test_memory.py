"""The meter counts exactly what lives, and leaves no trace."""

import gc
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from blockhooks import memory

KIB = 1024


def kibibytes(n):
    return torch.empty(n * 256)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, t, 3, 4, d // 4).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(heads.transpose(1, 2).reshape(b, t, d)), 0.1)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


def test_meta_tensors_are_counted_apart_from_those_of_the_host():
    with memory.peak("meta") as meter, memory.peak("cpu") as host:
        kept = kibibytes(1).to("meta")
        gone = torch.empty(2048 * KIB, device="meta", dtype=torch.uint8) + 1
        del gone
    assert (meter.peak, meter.now) == (4097 * KIB, KIB)
    assert (host.peak, host.now) == (KIB, 0)
    assert kept.is_meta


def step(blocks, x):
    for block in blocks:
        x = block(x)
    loss = x.square().mean()
    loss.backward()
    return loss.detach()


def allocations(function):
    """The allocator's events in `torch.profiler`: time, bytes, and what torch says is allocated by then."""
    from torch._C._profiler import _EventType

    activities = [torch.profiler.ProfilerActivity.CPU]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
            function()
    events, todo = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while todo:
        event = todo.pop()
        todo.extend(event.children)
        if event.tag == _EventType.Allocation:
            fields = event.extra_fields
            events.append((event.start_time_ns, fields.alloc_size, fields.total_allocated))
    return sorted(events)


def profiled_peak(function):
    """The peak by these events."""
    live = most = 0
    for _, nbytes, _ in allocations(function):
        live += nbytes
        most = max(most, live)
    return most


def test_peak_and_now_are_exact():
    with memory.peak("cpu") as meter:
        assert (meter.peak, meter.now) == (0, 0)
        a = kibibytes(8)
        b = kibibytes(4)
        assert (meter.peak, meter.now) == (12 * KIB, 12 * KIB)
        del a
        assert (meter.peak, meter.now) == (12 * KIB, 4 * KIB)
        c = kibibytes(2)
        assert (meter.peak, meter.now) == (12 * KIB, 6 * KIB)
    del b, c
    assert (meter.peak, meter.now) == (12 * KIB, 6 * KIB)


def test_views_and_results_in_place_are_not_counted():
    a, b = kibibytes(8), kibibytes(8)
    with memory.peak("cpu") as meter:
        kept = [a.view(-1, 2), a.add_(b), a[3:], a.detach(), torch.add(a, b, out=a)]
        parts = a.chunk(4)
        assert meter.peak == 0
        copy = a.clone()
        more = [copy.t(), *copy.chunk(2)]
        assert meter.now == 8 * KIB
        del copy
        assert meter.now == 8 * KIB
        del more
        assert meter.now == 0
    assert len(kept) + len(parts) == 9


def test_sparse_tensors_do_no_harm():
    with memory.peak("cpu"):
        x = torch.eye(6).to_sparse()
        assert torch.equal((x + x).to_dense(), 2 * torch.eye(6))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_nested_tensors_do_no_harm():
    def run():
        leaves = [torch.ones(n, 3, requires_grad=True) for n in (2, 4)]
        nested = torch.nested.as_nested_tensor(leaves)
        padded = F.linear(nested, torch.ones(5, 3)).sin().to_padded_tensor(0.0)
        padded.sum().backward()
        return [padded.detach(), *[leaf.grad for leaf in leaves]]

    expected = run()
    with memory.peak("cpu"):
        assert all(map(torch.equal, run(), expected))


def test_symbolic_sizes_do_no_harm():
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(5, 3)
    with memory.peak("cpu"):
        traced = make_fx(lambda x: (x * 2).sum() + x.shape[0], tracing_mode="symbolic")(x)
    assert traced(x) == 35


def test_results_in_tuples_are_counted():
    x = torch.randn(256)
    with memory.peak("cpu") as meter:
        values, indices = x.sort()
        assert meter.now == 256 * 4 + 256 * 8
        del values, indices
    assert meter.now == 0


def test_peak_of_a_step_is_that_of_the_profiler():
    blocks = nn.ModuleList(Block(64) for _ in range(4))
    x = torch.randn(2, 128, 64, requires_grad=True)
    step(blocks, x)  # so that gradients are there
    with memory.peak("cpu") as meter:
        step(blocks, x)
    expected = profiled_peak(lambda: step(blocks, x))
    assert abs(meter.peak - expected) <= 0.01 * expected
    assert meter.now == 0


class Last(nn.Module):
    def forward(self, x):
        return x[0]


# What these have in common: operations that need more inside themselves than their results take.
WORKSPACES = {
    "strided convolutions": (lambda: nn.Conv2d(16, 16, 3, 2), (2, 16, 32, 32)),
    "dilated convolution": (lambda: nn.Conv1d(32, 32, 5, dilation=2), (4, 32, 200)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(16, 16, 4, 2, 1), (2, 16, 16, 16)),
    "recurrent": (lambda: nn.Sequential(nn.LSTM(32, 32, 2), Last()), (20, 4, 32)),
}


@pytest.mark.parametrize("name", WORKSPACES)
def test_what_operations_need_inside_themselves_is_seen(name):
    make, shape = WORKSPACES[name]
    torch.manual_seed(0)
    blocks, x = nn.ModuleList([make()]), torch.randn(shape, requires_grad=True)
    step(blocks, x)  # so that gradients are there
    meters = []
    for _ in range(3):
        with memory.peak("cpu") as meter:
            step(blocks, x)
        meters.append(meter)
    expected = profiled_peak(lambda: step(blocks, x))
    assert [meter.peak for meter in meters] == pytest.approx([expected] * 3, rel=0.01)
    assert [meter.now for meter in meters] == [0] * 3


def test_what_an_operation_needs_inside_itself_is_not_forgotten_for_a_profiler():
    convolution, x = nn.Conv2d(16, 16, 3, 2), torch.randn(3, 16, 32, 32)
    peaks = []
    for profiled in (True, False):
        with memory.peak("cpu") as meter:
            if profiled:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    with torch.profiler.profile(
                        activities=[torch.profiler.ProfilerActivity.CPU]
                    ) as profile:
                        convolution(x)
                assert any(event.key == "aten::conv2d" for event in profile.key_averages())
            else:
                convolution(x)
        peaks.append(meter.peak)
    assert peaks[0] <= peaks[1] == profiled_peak(lambda: convolution(x))


def test_what_the_same_shapes_need_inside_depends_on_all_that_an_operation_is_given():
    x, weight, square = torch.randn(4, 32, 200), torch.randn(32, 32, 5), torch.randn(64, 64)
    for operation in (
        lambda: F.conv1d(x, weight, padding=2, dilation=1),
        lambda: F.conv1d(x, weight, padding=4, dilation=2),
        lambda: square.softmax(1),
        lambda: square.t().softmax(1),
        lambda: square.sum(0),
        lambda: square.sum(0, dtype=torch.float64),
    ):
        for _ in range(2):
            with memory.peak("cpu") as meter:
                operation()
            assert meter.peak == profiled_peak(operation)


def test_what_was_only_met_as_fake_tensors_is_looked_at():
    from torch._subclasses import FakeTensorMode

    x, weight = torch.randn(2, 16, 34, 34), torch.randn(16, 16, 3, 3)
    with FakeTensorMode() as fake, memory.peak("cpu"):
        F.conv2d(fake.from_tensor(x), fake.from_tensor(weight), stride=2)
    with memory.peak("cpu") as meter:
        F.conv2d(x, weight, stride=2)
    assert meter.peak == profiled_peak(lambda: F.conv2d(x, weight, stride=2))


def test_what_torch_says_is_allocated_is_as_before():
    def totals():
        return [total for _, _, total in allocations(lambda: convolution(x).relu().sum())]

    convolution, x = nn.Conv2d(16, 16, 3, 2), torch.randn(5, 16, 32, 32)
    before = totals()
    with memory.peak("cpu"):
        convolution(x).relu().sum()
    assert totals() == before


def test_an_operation_that_changes_its_arguments_unsaid_is_executed_once():
    def run():
        norm = nn.BatchNorm2d(7)
        norm(torch.linspace(0, 3, 3 * 7 * 5 * 5).reshape(3, 7, 5, 5))
        return list(norm.buffers())

    expected = run()
    with memory.peak("cpu"):
        assert all(map(torch.equal, run(), expected))


def test_an_operation_that_draws_is_looked_at_without_a_trace():
    def draw():
        torch.manual_seed(0)
        noise = nn.functional.dropout(torch.ones(37, 11), 0.5) + torch.rand(37, 11)
        return noise + torch.rand(37, 11, generator=torch.Generator().manual_seed(3))

    expected, state = draw(), torch.get_rng_state()
    with memory.peak("cpu"):
        assert torch.equal(draw(), expected)
        assert torch.equal(torch.get_rng_state(), state)


def test_what_somebody_else_holds_of_a_result_is_the_result():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Keeps(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            kept.append(result.detach())
            return result

    kept, x = [], torch.ones(3, 43)
    with Keeps(), memory.peak("cpu"):
        y = x.erfinv()
    assert kept[0].data_ptr() == y.data_ptr()
    kept.clear()
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it replaces torch's own
        library.impl("erfinv", lambda x: [kept.append(x + 1), kept[0].detach()][1], "CPU")
    try:
        with memory.peak("cpu"):
            y = torch.ones(4, 43).erfinv()
    finally:
        library._destroy()
    assert kept[0].data_ptr() == y.data_ptr()


def test_a_mode_around_the_meter_may_profile_each_operation():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Profiles(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            results = []
            allocations(lambda: results.append(func(*args, **(kwargs or {}))))
            return results[0]

    x = torch.ones(3, 47)
    with Profiles(), memory.peak("cpu"):
        y = x.cumsum(0)
    assert torch.equal(y, x.cumsum(0))


def test_a_measured_step_is_the_plain_step():
    results = []
    for measured in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(64) for _ in range(2))
        x = torch.randn(2, 32, 64, requires_grad=True)
        if measured:
            with memory.peak("cpu", timeline=True):
                loss = step(blocks, x)
        else:
            loss = step(blocks, x)
        grads = [parameter.grad for parameter in blocks.parameters()]
        results.append([loss, x.grad, *grads, torch.get_rng_state()])
    assert all(map(torch.equal, *results))


def test_nested_meters_count_each_from_its_own_beginning():
    with memory.peak("cpu") as outer:
        a = kibibytes(8)
        with memory.peak("cpu") as first:
            b = kibibytes(4)
            del b
            del a
        assert (first.peak, first.now) == (4 * KIB, -8 * KIB)
        with memory.peak("cpu") as second:
            c = kibibytes(2)
        assert (second.peak, second.now) == (2 * KIB, 2 * KIB)
        assert (outer.peak, outer.now) == (12 * KIB, 2 * KIB)
        del c
    assert (outer.peak, outer.now) == (12 * KIB, 0)


def test_meters_that_overlap_may_end_in_any_order():
    outer, inner = memory.peak("cpu"), memory.peak("cpu")
    outer.__enter__()
    inner.__enter__()
    a = kibibytes(8)
    outer.__exit__(None, None, None)
    b = kibibytes(4)
    inner.__exit__(None, None, None)
    assert (outer.peak, inner.peak) == (8 * KIB, 12 * KIB)
    assert _get_current_dispatch_mode() is None
    del a, b


def test_nothing_is_left_behind_also_after_an_error():
    storages, meter = [], memory.peak("cpu")

    def fail():
        with meter:
            storages.append(kibibytes(8).untyped_storage())
            raise ZeroDivisionError("by zero")

    with pytest.raises(ZeroDivisionError, match="by zero"):
        fail()
    assert _get_current_dispatch_mode() is None
    assert meter.now == 8 * KIB
    gc.collect()
    assert gc.get_referrers(storages[0]) == [storages]
    with memory.peak("cpu") as again:
        assert again.now == 0


def test_each_thread_has_its_own_meters():
    seen = []

    def work():
        with memory.peak("cpu") as inner:
            a = kibibytes(4)
            seen.append((inner.peak, inner.now))
            del a

    with memory.peak("cpu") as outer:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert outer.peak == 0
    assert seen == [(4 * KIB, 4 * KIB)]


def test_a_tensor_freed_by_another_thread_is_discounted():
    box = []
    with memory.peak("cpu") as meter:
        box.append(kibibytes(4))
        thread = threading.Thread(target=box.clear)
        thread.start()
        thread.join()
        assert meter.now == 0


def test_timeline_tells_each_change_with_its_time():
    with memory.peak("cpu", timeline=True) as meter:
        a = kibibytes(8)
        b = kibibytes(4)
        del a
        del b
    times = [time for time, _ in meter.timeline]
    assert times == sorted(times)
    assert [live for _, live in meter.timeline] == [0, 8 * KIB, 12 * KIB, 4 * KIB, 0]
    with memory.peak("cpu") as plain:
        kibibytes(8)
    assert plain.timeline == []


def test_a_meter_may_be_used_again():
    meter = memory.peak("cpu", timeline=True)
    for kib in (8, 4):
        with meter:
            kibibytes(kib)
        assert (meter.peak, meter.now, len(meter.timeline)) == (kib * KIB, 0, 3)


@pytest.mark.parametrize("width", [16, 17])
def test_goes_together_with_other_dispatch_modes(width):
    from torch.utils.flop_counter import FlopCounterMode

    a = torch.randn(width, width)
    with memory.peak("cpu") as meter, FlopCounterMode(display=False) as inner:
        b = a @ a
    a = torch.randn(width + 2, width + 2)  # not met before
    with FlopCounterMode(display=False) as outer, memory.peak("cpu"):
        a @ a
    assert inner.get_total_flops() == 2 * width**3
    assert outer.get_total_flops() == 2 * (width + 2) ** 3
    assert meter.now == b.nbytes


def test_fake_tensors_are_counted_and_nothing_is_allocated_for_them():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), memory.peak("cpu") as meter:
        x = torch.empty(1 << 20, 1 << 10)
        y = x.sin()
    assert meter.now == x.nbytes + y.nbytes == 2 << 32


@pytest.mark.cuda
def test_device_meters_nest():
    with memory.peak() as outer:
        a = torch.empty(1 << 20, device="cuda", dtype=torch.uint8)
        with memory.peak("cuda", timeline=True) as inner:
            torch.empty(1 << 21, device="cuda", dtype=torch.uint8)
        assert (inner.peak, inner.now) == (1 << 21, 0)
        assert max(live for _, live in inner.timeline) == 1 << 21
        assert outer.peak == 3 << 20
        assert outer.now == 1 << 20
        del a
    assert (outer.peak, outer.now) == (3 << 20, 0)


def test_a_mapped_file_is_counted_while_it_lives(tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    with memory.peak("cpu") as meter:
        mapped = torch.empty(0, dtype=torch.uint8).set_(
            torch.UntypedStorage.from_file(str(tmp_path / "file"), shared=False, nbytes=4096)
        )
        assert meter.now == 0
        memory.see(mapped)
        memory.see(mapped[:8])
        assert meter.now == 4096
        del mapped
        assert meter.now == 0
    memory.see(torch.zeros(8))
    assert (meter.peak, meter.now) == (4096, 0)


def record():
    """What torch says is allocated already, before a profiler has seen anything."""
    _, nbytes, total = allocations(lambda: torch.empty(64).sum())[0]
    return total - nbytes


@pytest.mark.parametrize(
    "make",
    [lambda x: x.t().mm(x).t(), lambda x: x.square().sum(0, keepdim=True).view(-1), torch.sin],
    ids=["transposed", "viewed", "plain"],
)
def test_torch_has_no_record_of_what_is_made_under_a_profiler_and_forgotten(make):
    x = torch.randn(64, 32)
    before = record()
    with torch.no_grad(), memory.inside(x.device):
        made = make(x)
    expected, version = made.clone(), made._version
    memory.forget((made,))
    assert torch.equal(made, expected)
    assert made._version == version
    del made
    assert record() == before
