"""`checkpoint`, the drop-in: everything that code written for torch's non-reentrant checkpoint relies on."""

import contextlib
import dataclasses
import functools
import gc
import logging
import re
import threading
import warnings
import weakref

import pytest
import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from blockhooks import HookError, RecomputeError, checkpoint
from tests.agree import leaf

OPTIONS = (
    "use_reentrant",
    "early_stop",
    "context_fn",
    "debug",
    "preserve_rng_state",
    "determinism_check",
)


def plain(function, *args, **kwargs):
    """What `checkpoint` has to agree with: the call alone."""
    return function(*args, **{k: v for k, v in kwargs.items() if k not in OPTIONS})


def double(*shape, number=7, grad=True):
    return leaf(*shape, dtype=torch.float64, number=number, grad=grad)


def counted(function):
    """The function, and a list that grows at each execution."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(None)
        return function(*args, **kwargs)

    return counting, calls


def wave(x):
    return x.sin().exp()


class Operators(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))

    def of(self, *names):
        return tuple(self.counts.get(name, 0) for name in names)


# What torch imports for its log and for a transform, it scripts (torch 2.13).
scripted_by_torch = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")


@pytest.fixture(params=[True, False], ids=["early stop", "to the end"])
def early_stop(request):
    return request.param


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def keep_products():
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default])


# ---- when the function is executed --------------------------------------------------------------------------------


def test_one_recompute_per_backward_at_the_first_unpack():
    function, calls = counted(lambda x: wave(x).cos())
    x = double(3)
    y = checkpoint(function, x)
    assert len(calls) == 1
    y.sum().backward()
    assert len(calls) == 2


def test_nothing_saved_means_no_recompute():
    function, calls = counted(lambda x: x + 1)
    x = double(3)
    checkpoint(function, x).sum().backward()
    assert len(calls) == 1


def test_a_backward_that_needs_nothing_of_the_region_does_not_recompute():
    function, calls = counted(lambda x, y: (x.sin(), y + 1))
    x, y = double(3), double(3, number=1)
    _, shifted = checkpoint(function, x, y)
    shifted.sum().backward()
    assert len(calls) == 1


def test_each_backward_with_retain_graph_recomputes_again():
    function, calls = counted(wave)
    x = double(3)
    y = checkpoint(function, x)
    for backwards in (1, 2):
        y.sum().backward(retain_graph=True)
        assert len(calls) == 1 + backwards
    expected = double(3)
    for _ in range(2):
        wave(expected).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_a_second_backward_without_retain_graph_is_autograds_error():
    y = checkpoint(wave, double(3))
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


def test_each_read_of_a_saved_tensor_outside_of_a_backward_recomputes():
    function, calls = counted(wave)
    x = double(3)
    y = checkpoint(function, x)
    assert torch.equal(y.grad_fn._saved_result, wave(x.detach()))
    assert len(calls) == 2
    assert torch.equal(y.grad_fn._saved_result, wave(x.detach()))
    assert len(calls) == 3
    y.sum().backward()
    assert len(calls) == 4


def test_backwards_for_some_inputs_only():
    x, weight = double(3), double(3, number=2)
    y = checkpoint(lambda x: (x * weight).sin(), x)
    y.sum().backward(inputs=[weight], retain_graph=True)
    assert x.grad is None
    y.sum().backward(inputs=[x])
    other, scale = double(3), double(3, number=2)
    (other * scale).sin().sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert torch.equal(weight.grad, scale.grad)


def test_the_end_of_the_function_is_not_recomputed_unless_early_stop_is_off(early_stop):
    log = []

    def function(x):
        y = x.sin()
        log.append("sin")
        y = y.exp()
        log.append("exp")
        return y

    checkpoint(function, double(3), early_stop=early_stop).sum().backward()
    assert log == ["sin", "exp", "sin"] + ([] if early_stop else ["exp"])


def test_without_gradients_the_function_is_called_once():
    function, calls = counted(wave)
    x = double(3)
    with torch.no_grad():
        assert not checkpoint(function, x).requires_grad
    with torch.inference_mode():
        assert checkpoint(function, double(3, grad=False)).is_inference()
    assert len(calls) == 2


def test_in_the_recompute_gradients_are_enabled_also_where_the_backward_runs_without():
    enabled = []

    def function(x):
        enabled.append(torch.is_grad_enabled())
        return wave(x)

    y = checkpoint(function, double(3)).sum()
    with torch.no_grad():
        y.backward()
    assert enabled == [True, True]


@pytest.mark.parametrize("switch", [True, False])
def test_torchs_switch_of_early_stop_goes_before_the_argument(switch):
    ended = []

    def function(x):
        y = wave(x)
        ended.append(None)
        return y

    x = double(3)
    with torch_checkpoint.set_checkpoint_early_stop(switch):
        y = checkpoint(function, x, early_stop=not switch)
    y.sum().backward()
    assert len(ended) == (1 if switch else 2)


# ---- groups of backwards ------------------------------------------------------------------------------------------


def test_a_group_of_backwards_recomputes_once():
    function, calls = counted(lambda x, y: (x.sin(), y.exp()))
    x, y = double(3), double(3, number=1)
    one, other = checkpoint(function, x, y)
    with torch_checkpoint.GraphExecGroup():
        one.sum().backward()
        other.sum().backward()
    assert len(calls) == 2
    a, b = double(3), double(3, number=1)
    (a.sin().sum() + b.exp().sum()).backward()
    assert torch.equal(x.grad, a.grad)
    assert torch.equal(y.grad, b.grad)


def test_overlapping_backwards_in_a_group_are_refused_and_possible_outside():
    x = double(3)
    y = checkpoint(wave, x)
    one, other = y * 1, y * 2
    with torch_checkpoint.GraphExecGroup():
        one.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="Performing two backward calls that overlap"):
            other.sum().backward(retain_graph=True)
    other.sum().backward()
    assert torch.isfinite(x.grad).all()


# ---- arguments and outputs ----------------------------------------------------------------------------------------


def test_immutable_arguments_are_the_same_objects_in_the_recompute():
    @dataclasses.dataclass(frozen=True, slots=True)
    class Config:
        width: int = 3

    thing, pair, name, seen = Config(), (1, 2), "name", []

    def function(x, *args, **kwargs):
        seen.append((args[0] is thing, args[1] is pair, args[2] is name, kwargs["thing"] is thing))
        return x.sin()

    checkpoint(function, double(3), thing, pair, name, thing=thing).sum().backward()
    assert seen == [(True,) * 4] * 2


def test_tensors_without_gradient_keep_their_identity():
    scale, shift, seen = double(3, grad=False), double(3, number=1, grad=False), []

    def function(x, given, *, by_name):
        seen.append((given is scale, by_name is shift))
        return x * given + x * by_name

    checkpoint(function, double(3), scale, by_name=shift).sum().backward()
    assert seen == [(True, True)] * 2


def test_what_a_backward_unpacks_is_the_very_tensor_that_was_saved():
    scale, unpacked = double(3, grad=False), []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, scale):
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx, grad):
            unpacked.append(ctx.saved_tensors[0] is scale)
            return grad * ctx.saved_tensors[0], None

    checkpoint(Scaled.apply, double(3), scale).sum().backward()
    assert unpacked == [True]


def test_a_custom_function_may_read_its_saved_tensors_twice():
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (first,), (second,) = ctx.saved_tensors, ctx.saved_tensors
            return grad * (first + second)

    x = double(3)
    checkpoint(lambda x: Squared.apply(x).sin(), x).sum().backward()
    other = double(3)
    Squared.apply(other).sin().sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_containers_objects_keywords_and_outputs_of_any_kind():
    class Bag:
        def __init__(self, tensor):
            self.tensor = tensor

    marker = object()

    def function(a, bag, *, deep, number):
        y = a["x"].sin() * bag.tensor * deep[0]["z"].exp()
        return {"bag": Bag(y), "list": [y * number, None, marker]}, number, a["x"] > 0

    def step(call):
        x, weight, z = (double(3, number=n) for n in range(3))
        out, number, mask = call(function, {"x": x}, Bag(weight), deep=[{"z": z}], number=3)
        assert out["list"][2] is marker
        assert number == 3
        (out["bag"].tensor.sum() + out["list"][0].sum()).backward()
        return mask, x.grad, weight.grad, z.grad

    for found, expected in zip(step(checkpoint), step(plain), strict=True):
        assert torch.equal(found, expected)


def test_an_output_that_is_an_input_or_a_parameter_is_that_object():
    x, weight = double(3), double(3, number=1)
    y, same, parameter = checkpoint(lambda x: (x * weight, x, weight), x)
    assert same is x
    assert parameter is weight
    y.sum().backward()
    assert torch.equal(weight.grad, x)


def test_a_function_without_any_tensor_argument():
    weight = double(3)
    checkpoint(lambda: wave(weight)).sum().backward()
    other = double(3)
    wave(other).sum().backward()
    assert torch.equal(weight.grad, other.grad)


@pytest.mark.parametrize(
    "kind", ["function", "lambda", "partial", "bound method", "callable object", "module"]
)
def test_any_callable(kind):
    class Thing:
        def __init__(self, layer):
            self.layer = layer

        def method(self, x):
            return wave(self.layer(x))

        __call__ = method

    def step(call):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        thing = Thing(layer)

        def function(x):
            return thing.method(x)

        kinds = {
            "function": function,
            "lambda": lambda x: wave(layer(x)),
            "partial": functools.partial(Thing.method, thing),
            "bound method": thing.method,
            "callable object": thing,
            "module": layer,
        }
        x = leaf(2, 4)
        call(kinds[kind], x).sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    assert all(map(torch.equal, step(checkpoint), step(plain)))


def test_other_keywords_go_to_the_function():
    x = double(3)
    y = checkpoint(lambda x, *, scale, name: x.sin() * scale + len(name), x, scale=2.0, name="ab")
    assert torch.equal(y, x.sin() * 2.0 + 2)


# ---- options ------------------------------------------------------------------------------------------------------


def test_the_reentrant_way_is_refused_with_a_reason():
    for value in (True, "no"):
        with pytest.raises(HookError, match=rf"use_reentrant={value!r}.*expected False"):
            checkpoint(wave, double(3), use_reentrant=value)


@pytest.mark.parametrize("function", [None, 3, "wave"])
def test_what_is_checkpointed_can_be_called(function):
    with pytest.raises(HookError, match=rf"expected a callable, found {function!r}"):
        checkpoint(function, double(3))


@pytest.mark.parametrize("value", [False, None])
def test_the_other_values_of_use_reentrant_are_taken(value):
    assert checkpoint(wave, double(3), use_reentrant=value).requires_grad


def test_an_unknown_determinism_check_is_an_error():
    for check in ("values", [], None):
        with pytest.raises(
            ValueError, match="determinism_check should be one of .* got " + re.escape(repr(check))
        ):
            checkpoint(wave, double(3), determinism_check=check)


@scripted_by_torch
def test_debug_excludes_a_context_fn_but_for_torchs_empty_one():
    with pytest.raises(ValueError, match="incompatible with non-default context_fn"):
        checkpoint(wave, double(3), debug=True, context_fn=lambda: (None, None))
    y = checkpoint(wave, double(3), debug=True, context_fn=torch_checkpoint.noop_context_fn)
    assert y.requires_grad


def test_random_numbers_are_those_of_the_forward_unless_turned_off():
    def drop(x):
        return nn.functional.dropout(x, 0.5).sin()

    x = leaf(64)
    y = checkpoint(drop, x)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)
    x = leaf(64)
    y = checkpoint(drop, x, preserve_rng_state=False)
    y.sum().backward()
    assert not torch.equal(x.grad != 0, y != 0)


def test_as_a_decorator_of_functions_and_methods():
    @checkpoint(early_stop=False)
    def function(x, debug):
        calls.append(debug)
        return wave(x)

    class Model:
        @checkpoint(use_reentrant=False)
        def method(self, x):
            calls.append(type(self).__name__)
            return wave(x)

    calls = []
    assert function.__name__ == "function"
    function(double(3), debug=1).sum().backward()  # the name of an option, but the function's
    Model().method(double(3)).sum().backward()
    assert calls == [1, 1, "Model", "Model"]
    with pytest.raises(ValueError, match="Unexpected keyword arguments: scale"):
        checkpoint(scale=2)


# ---- contexts -----------------------------------------------------------------------------------------------------


def logged(log, name):
    @contextlib.contextmanager
    def context():
        log.append(f"enter {name}")
        try:
            yield
        finally:
            log.append(f"leave {name}")

    return context()


class Again(contextlib.AbstractContextManager):
    """A context that can be entered more than once."""

    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")

    def __exit__(self, *exception):
        self.log.append(exception[0] and exception[0].__name__)


def test_context_fn_is_called_once_and_its_contexts_are_entered_around_forward_and_recompute():
    log = []

    def contexts():
        log.append("called")
        return logged(log, "forward"), logged(log, "recompute")

    checkpoint(wave, double(3), context_fn=contexts).sum().backward()
    expected = ["called", "enter forward", "leave forward", "enter recompute", "leave recompute"]
    assert log == expected


def test_the_recompute_context_is_entered_again_for_each_backward():
    log = []
    y = checkpoint(wave, double(3), context_fn=lambda: (contextlib.nullcontext(), Again(log)))
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert log.count("enter") == 2


def test_the_forward_context_sees_an_exception_of_the_function():
    log = []

    def broken(x):
        raise LookupError("gone")

    with pytest.raises(LookupError, match="gone"):
        checkpoint(broken, double(3), context_fn=lambda: (Again(log), contextlib.nullcontext()))
    assert log == ["enter", "LookupError"]


def test_a_suppressed_exception_is_an_error():
    def broken(x):
        raise LookupError

    def contexts():
        return contextlib.suppress(LookupError), contextlib.nullcontext()

    with pytest.raises(RuntimeError, match="suppressed an exception"):
        checkpoint(broken, double(3), context_fn=contexts)


def test_dispatch_modes_of_context_fn_see_the_functions_operators_and_no_others():
    forward, recompute = Operators(), Operators()
    checkpoint(wave, double(3), context_fn=lambda: (forward, recompute)).sum().backward()
    assert {k: n for k, n in forward.counts.items() if k != "detach"} == {"sin": 1, "exp": 1}
    assert {k: n for k, n in recompute.counts.items() if k != "detach"} == {"sin": 1, "exp": 1}


# ---- what is noticed ----------------------------------------------------------------------------------------------


def twofold(first, then):
    """A function that is `first` at its first execution and `then` afterwards."""
    calls = []

    def function(x):
        calls.append(None)
        return first(x) if len(calls) == 1 else then(x)

    return function


@pytest.mark.parametrize("check", ["default", "none"])
def test_fewer_saved_tensors_are_an_error(check, early_stop):
    function = twofold(lambda x: wave(x).cos(), torch.sin)
    y = checkpoint(function, double(3), determinism_check=check, early_stop=early_stop)
    with pytest.raises(RuntimeError, match="A different number of tensors was saved"):
        y.sum().backward()


@pytest.mark.parametrize("check", ["default", "none"])
def test_more_saved_tensors_are_an_error_where_the_recompute_runs_to_the_end(check):
    function = twofold(torch.sin, lambda x: wave(x).cos())
    y = checkpoint(function, double(3), determinism_check=check, early_stop=False)
    with pytest.raises(RuntimeError, match="trying to save more tensors during recomputation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "other", [lambda x: wave(x.float()), lambda x: wave(torch.cat([x, x]))], ids=["dtype", "shape"]
)
def test_other_metadata_are_an_error(other, early_stop):
    y = checkpoint(twofold(wave, other), double(3), early_stop=early_stop)
    with pytest.raises(
        RecomputeError,
        match="Recomputed values for the following tensors have different metadata than in the forward",
    ):
        y.sum().backward()


def test_other_metadata_pass_unchecked():
    x = double(3)
    function = twofold(wave, lambda x: wave(x.float()).double())
    checkpoint(function, x, determinism_check="none").sum().backward()
    assert x.grad.dtype == torch.float64


def test_the_error_is_what_code_for_torchs_checkpoint_catches():
    y = checkpoint(twofold(wave, torch.sin), double(3))
    with pytest.raises(torch_checkpoint.CheckpointError, match="checkpoint of function"):
        y.sum().backward()


@pytest.fixture
def torchs_log(monkeypatch):
    """Keep torch's log of operators away from pytest, which would listen to it and cannot format its records."""
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", True)


@pytest.mark.usefixtures("torchs_log")
@scripted_by_torch
def test_debug_shows_the_operators_of_both_executions():
    y = checkpoint(twofold(wave, torch.cos), double(3), debug=True)
    with pytest.raises(RecomputeError, match="debug=True") as raised:
        y.sum().backward()
    for part in (
        "aten.sin.default",
        "aten.exp.default",
        "aten.cos.default",
        "different number of tensors",
    ):
        assert part in str(raised.value)


@pytest.mark.usefixtures("torchs_log")
@scripted_by_torch
def test_torchs_switch_of_debug_is_honoured():
    with torch_checkpoint.set_checkpoint_debug_enabled(True):
        y = checkpoint(twofold(wave, torch.cos), double(3))
    with pytest.raises(RecomputeError, match=r"aten\.exp\.default"):
        y.sum().backward()


def test_an_input_changed_in_place_before_the_backward_is_noticed():
    x = double(3) * 1
    y = checkpoint(wave, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RecomputeError, match="modified in place"):
        y.sum().backward()


def test_disabled_saved_tensor_hooks_are_torchs_error():
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none of them here"),
        pytest.raises(RuntimeError, match="none of them here"),
    ):
        checkpoint(wave, double(3))


# ---- hooks and backwards inside -----------------------------------------------------------------------------------


LAYERS: list[nn.Module] = []


def layer_of_a_global_list(x, index):
    return LAYERS[index](x).sin()


def test_modules_in_a_global_list():
    def gradients(call):
        LAYERS[:] = [nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))]
        torch.manual_seed(0)
        nn.init.normal_(LAYERS[1][0].weight)
        nn.init.normal_(LAYERS[1][0].bias)
        x = leaf(4, 3)
        y = call(layer_of_a_global_list, call(layer_of_a_global_list, x, 0), 1)
        y.square().sum().backward()
        return [x.grad, *(b for layer in LAYERS for b in layer.buffers())]

    assert all(map(torch.equal, gradients(checkpoint), gradients(plain)))


def test_variables_of_a_loop_that_has_gone_on():
    def gradients(call):
        torch.manual_seed(0)
        layers, x = [nn.Linear(3, 3) for _ in range(4)], leaf(2, 3)
        y = x
        for layer in layers:
            scale = layer.weight.detach().sum()
            y = call(lambda y: layer(y).sin() * scale, y)  # noqa: B023
        y.sum().backward()
        return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]

    assert all(map(torch.equal, gradients(checkpoint), gradients(plain)))


def test_variables_are_put_back_and_those_that_the_function_sets_are_the_users():
    executions, level, gone = 0, 2.0, 3.0

    def count():
        nonlocal executions
        executions += 1

    def function(x):
        count()
        assert executions > 0
        return (x * level * gone).sin()  # noqa: F821

    x = leaf(3)
    y = checkpoint(function, x)
    level = 5.0
    del gone
    y.sum().backward()
    assert torch.equal(x.grad, (x * 2.0 * 3.0).cos() * 3.0 * 2.0)
    assert (executions, level) == (2, 5.0)
    with pytest.raises(NameError, match="gone"):
        function(x)


def test_gradient_hooks_fire_once():
    fired = []

    def function(x):
        x.register_hook(lambda g: fired.append("input, inside"))
        y = x.sin()
        y.register_hook(lambda g: fired.append("inner"))
        z = y.exp()
        torch.autograd.graph.register_multi_grad_hook((y, z), lambda grads: fired.append("both"))
        return z.cos()

    x = double(3)
    x.register_hook(lambda g: fired.append("input"))
    checkpoint(function, x * 1).sum().backward()
    assert sorted(fired) == ["both", "inner", "input", "input, inside"]


def test_module_backward_hooks_and_accumulation_hooks_fire_once():
    fired, layer = [], nn.Linear(3, 3)
    layer.register_full_backward_pre_hook(lambda *_: fired.append("before"))
    layer.register_full_backward_hook(lambda *_: fired.append("after"))
    layer.weight.register_post_accumulate_grad_hook(lambda _: fired.append("weight"))
    checkpoint(layer, leaf(2, 3)).sin().sum().backward()
    assert sorted(fired) == ["after", "before", "weight"]


def test_a_backward_inside_of_the_function(early_stop):
    weight = double(3, number=5)

    def function(x):
        y = (x * weight).sin()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * slope).exp()

    def step(call):
        weight.grad = None
        x = double(3)
        call(function, x * 1, early_stop=early_stop).sum().backward()
        return x.grad, weight.grad

    assert all(map(torch.equal, step(checkpoint), step(plain)))


def test_a_backward_inside_reaches_the_inputs_once(early_stop):
    def function(x):
        y = wave(x)
        y.sum().backward(retain_graph=True)
        return y.cos()

    def step(call):
        x = double(3)
        call(function, x, early_stop=early_stop).sum().backward()
        return x.grad

    assert torch.equal(step(checkpoint), step(plain))


def test_a_backward_from_a_hook_of_another_region_and_of_the_same_graph(early_stop):
    def nest(call, x):
        return call(lambda x: call(wave, x, early_stop=early_stop).cos(), x, early_stop=early_stop)

    def step(call):
        x, z, inner = double(3), double(3, number=1), []
        y, other = nest(call, x), nest(call, z)

        def hook(grad):
            if not inner:
                inner.append(None)  # the inner backward comes by here as well
                with torch.enable_grad():
                    inner[0] = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
                    other.sum().backward()

        y.register_hook(hook)
        y.sum().backward()
        return x.grad, z.grad, inner[0]

    assert all(map(torch.equal, step(checkpoint), step(plain)))


# ---- nesting and higher order -------------------------------------------------------------------------------------


def levels(depth):
    def function(x, call):
        if depth == 0:
            return wave(x) * x
        return call(levels(depth - 1), x, call).cos()

    return function


def children(x, call):
    return (call(lambda x: wave(x) * x, x) * call(lambda x: x.cos() * x, x)).sin()


def mixed(x, call):
    weight = double(3, number=9, grad=False)
    deep = call(lambda d, *, scale: {"y": [wave(d["x"][0]) * scale]}, {"x": [x]}, scale=weight)
    return call(lambda y, n: (y * n, "text"), deep["y"][0], 2)[0].sin()


@pytest.mark.parametrize(
    "function", [levels(0), levels(1), levels(2), children, mixed],
    ids=["alone", "two levels", "three levels", "two children", "keywords and containers"],
)  # fmt: skip
def test_derivatives_of_first_to_third_order(function, early_stop):
    def derivatives(call):
        call = functools.partial(call, early_stop=early_stop)
        x, found = double(3), []
        y = call(function, x, call)
        for _ in range(3):
            (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            found.append(y)
        return found

    assert all(map(torch.equal, derivatives(checkpoint), derivatives(plain)))


def test_a_region_three_levels_deep_runs_no_more_often_than_with_torch():
    def executions(call):
        function, calls = counted(wave)
        x = double(3)

        def level(inner):
            return lambda x: call(inner, x, use_reentrant=False).sin()

        level(level(level(function)))(x).sum().backward()
        return len(calls)

    assert executions(checkpoint) <= executions(torch_checkpoint.checkpoint)


def test_gradcheck_of_first_and_second_order():
    x = double(3)
    assert torch.autograd.gradcheck(lambda x: checkpoint(wave, x), x)
    assert torch.autograd.gradgradcheck(lambda x: checkpoint(wave, x), x)


def test_many_regions_one_after_another():
    x = h = double(3)
    for _ in range(500):
        h = checkpoint(torch.sin, h)
    h.sum().backward()
    other = h = double(3)
    for _ in range(500):
        h = h.sin()
    h.sum().backward()
    assert torch.equal(x.grad, other.grad)


# ---- torch's selective policies -----------------------------------------------------------------------------------


def selective(policy, **options):
    return functools.partial(create_selective_checkpoint_contexts, policy, **options)


def save(*names):
    def policy(context, operator, *args, **kwargs):
        saved = operator.__name__.split(".")[0] in names
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def products(x):
    return ((x @ x).sin() @ x).exp() * x


@pytest.mark.parametrize(
    "policy", [save("mm"), [torch.ops.aten.mm.default], lambda c, op, *a, **k: "mm" in op.__name__],
    ids=["function", "list", "bool"],
)  # fmt: skip
def test_what_a_policy_saves_is_not_executed_again(policy, early_stop):
    x, operators = double(4, 4), Operators()
    with operators:
        y = checkpoint(products, x, context_fn=selective(policy), early_stop=early_stop)
        assert operators.of("mm", "sin", "exp") == (2, 1, 1)
        y.sum().backward()
    # Four more products belong to the backward.
    assert operators.of("mm", "sin", "exp") == (6, 2, 2)
    other = double(4, 4)
    products(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_a_policy_is_asked_in_the_forward_only():
    asked = []

    def policy(context, operator, *args, **kwargs):
        asked.append((context.is_recompute, operator.__name__))
        return CheckpointPolicy.PREFER_RECOMPUTE

    y = checkpoint(wave, double(3), context_fn=selective(policy))
    y.sum().backward()
    assert asked == [(False, "sin.default"), (False, "exp.default")]


def test_flops_of_a_backward_are_those_of_torchs_checkpoint(early_stop):
    def flops(call, policy):
        x, weight = double(8, 8), double(8, 8, number=1)
        y = call(
            lambda x: ((x @ weight).relu() @ weight).relu() @ weight,
            x,
            use_reentrant=False,
            context_fn=selective(policy),
            early_stop=early_stop,
        )
        with FlopCounterMode(display=False) as counter:
            y.sum().backward()
        return counter.get_total_flops()

    for policy in (save("mm"), save(), save("mm", "relu")):
        assert flops(checkpoint, policy) == flops(torch_checkpoint.checkpoint, policy)


def test_views_in_place_operations_several_outputs_and_random_numbers_under_a_policy(early_stop):
    def function(x):
        y = (x @ x).view(-1)[:8]
        y = y.sin().mul_(3).view(2, 4)
        variance, mean = torch.var_mean(y, 1)
        top, places = torch.topk(x.cos(), 2)
        noise = torch.rand_like(x)
        return (variance * mean).sum() + top.exp().sum() + (x[places[:, 0]] * noise).sum()

    def step(call):
        torch.manual_seed(3)
        x = double(4, 4)
        names = ("mm", "view", "var_mean", "topk", "rand_like")
        call(function, x, context_fn=selective(save(*names)), early_stop=early_stop).backward()
        return x.grad

    assert torch.equal(step(checkpoint), step(plain))


def test_a_region_under_a_policy_goes_backward_once():
    y = checkpoint(products, double(4, 4), context_fn=selective(save("mm")))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward an extra time"):
        y.sum().backward()


def test_a_kept_tensor_that_was_mutated_is_noticed_unless_allowed():
    def function(x):
        y = x @ x
        z = y.sin()
        with torch.no_grad():
            y.detach().add_(1)  # behind autograd's back, so that only the policy's store can tell
        return z.exp()

    y = checkpoint(function, double(4, 4), context_fn=selective(save("mm")))
    with pytest.raises(RuntimeError, match=r"has been mutated|modified by an inplace operation"):
        y.sum().backward()


def test_nested_regions_under_policies():
    def step(call):
        x = double(4, 4)
        inner = functools.partial(call, products, context_fn=selective(save("mm")))
        call(lambda x: inner(x).cos() @ x, x).sum().backward()
        return x.grad

    assert torch.equal(step(checkpoint), step(plain))


def test_a_policy_is_not_told_of_our_own_saved_tensor_hooks():
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch 2.14 warns where a user's hooks are passed by
        inner = functools.partial(checkpoint, products, context_fn=selective(save("mm")))
        x = double(4, 4)
        checkpoint(lambda x: inner(x).cos(), x).sum().backward()
    assert torch.isfinite(x.grad).all()


def test_kept_tensors_go_through_the_users_hooks_where_torch_can_do_that():
    if not hasattr(create_selective_checkpoint_contexts([])[0], "respect_saved_tensors_hooks"):
        pytest.skip("torch before 2.14 never passes them through")
    packed = {True: [], False: []}
    for respect in packed:
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, seen=packed[respect]: seen.append(t.shape) or t, lambda t: t
        ):
            y = checkpoint(
                products,
                double(4, 4),
                context_fn=selective(save("mm")),
                respect_saved_tensors_hooks=respect,
            )
        y.sum().backward()
    assert len(packed[True]) == len(packed[False]) + 2  # the two products


# ---- memory -------------------------------------------------------------------------------------------------------


def test_nothing_waits_for_the_garbage_collector(no_collection, early_stop):
    class Thing:
        def __init__(self, layer):
            self.layer = layer

        def method(self, x):
            return wave(self.layer(x))

    for kind in range(4):
        layer = nn.Linear(3, 3, dtype=torch.float64)
        thing = Thing(layer)
        functions = (
            layer,
            thing.method,
            lambda x, layer=layer: wave(layer(x)),
            functools.partial(Thing.method, thing),
        )
        for backward in (True, False):
            x = double(2, 3)
            y = checkpoint(functions[kind], x, early_stop=early_stop)
            if backward:
                y.sum().backward()
            references = [weakref.ref(x), weakref.ref(y)]
            del x, y
            assert [reference() for reference in references] == [None, None]
        references = [weakref.ref(layer), weakref.ref(thing)]
        del layer, thing, functions
        assert [reference() for reference in references] == [None, None]


def test_the_tensors_of_nested_regions_die_with_their_graph(no_collection):
    inside = []

    def function(x):
        y = x.sin()
        inside.append(weakref.ref(y))
        return y.exp()

    x = double(3)
    y = checkpoint(lambda x: checkpoint(function, x).cos(), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    inside += [weakref.ref(t) for t in (x, y, first, second)]
    del x, y, first, second
    assert all(reference() is None for reference in inside)
    assert len(inside) > 5


@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_an_exception_leaves_nothing_behind(no_collection, when):
    inside = []

    def function(x):
        y = wave(x)
        inside.append(weakref.ref(y))
        if len(inside) == (1 if when == "forward" else 2):
            raise LookupError("gone")
        return y.cos()

    x = double(3)
    state = torch.get_rng_state()
    with contextlib.suppress(LookupError):
        checkpoint(function, x).sum().backward()
    inside.append(weakref.ref(x))
    del x
    assert all(reference() is None for reference in inside)
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert torch.equal(state, torch.get_rng_state())


class Interrupted(Exception):
    """What a function makes of whatever reaches it."""


def swallowing(x):
    y = x.sin()
    try:
        y = y.exp().cos()
    except:  # noqa: E722
        y = x
    return y * 2


def converting(x):
    try:
        return x.sin().exp()
    except BaseException as error:
        raise Interrupted from error


def failing_to_clean_up(x):
    try:
        y = x.sin()
        z = y.exp()
    finally:
        assert z.shape == y.shape  # unbound, where the signal came before
    return z


@pytest.mark.parametrize("function", [swallowing, converting, failing_to_clean_up])
def test_what_a_function_makes_of_the_signal_does_not_matter(function):
    x, other = double(3), double(3)
    checkpoint(function, x).sum().backward()
    function(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


def test_a_backward_can_be_tried_again_after_an_exception_in_the_recompute():
    executions = []

    def function(x):
        executions.append(None)
        y = x.sin()
        if len(executions) == 2:
            raise LookupError("gone")
        return y.exp()

    x = double(3)
    y = checkpoint(function, x)
    with pytest.raises(LookupError, match="gone") as raised:
        y.sum().backward(retain_graph=True)
    assert any("while recomputing" in note for note in raised.value.__notes__)
    y.sum().backward()
    other = double(3)
    wave(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


# ---- the world around ---------------------------------------------------------------------------------------------


def test_autocast_of_the_forward_also_where_the_backward_has_another():
    layer, kinds, x = nn.Linear(4, 4), [], leaf(2, 4)

    def function(x):
        y = layer(x)
        kinds.append(y.dtype)
        return y.sin()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = checkpoint(function, x)
    with torch.autocast("cpu", dtype=torch.float16):
        y.float().sum().backward()
    assert kinds == [torch.bfloat16] * 2


def test_default_device_and_function_modes_of_the_forward():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sin:
                seen.append("mode")
            return func(*args, **(kwargs or {}))

    def function(x):
        seen.append(torch.ones(1).device.type)
        return wave(x)

    x = double(3)
    with torch.device("meta"), Mode():
        y = checkpoint(function, x)
    y.sum().backward()
    assert seen == ["meta", "mode"] * 2
    assert torch.ones(1).device.type == "cpu"


def test_saved_tensor_hooks_around_see_the_inputs_only():
    packed = []
    x = double(3)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: packed.append(t.shape) or t, lambda t: t
    ):
        y = checkpoint(lambda x: wave(x).cos().exp(), x)
    y.sum().backward()
    assert packed == [x.shape]


def test_threads_with_regions_of_shared_weights():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4, dtype=torch.float64)
    found = {}

    def work(number):
        x = double(4, 4, number=number)
        for _ in range(5):
            y = checkpoint(lambda x: checkpoint(lambda x: wave(layer(x)), x).cos(), x)
            found[number] = torch.autograd.grad(y.sum(), [x, layer.weight])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        x = double(4, 4, number=number)
        expected = torch.autograd.grad(wave(layer(x)).cos().sum(), [x, layer.weight])
        assert all(map(torch.equal, found[number], expected))


def test_threads_that_go_backward_through_the_same_graph():
    x = double(4, 4)
    y = checkpoint(lambda x: checkpoint(wave, x).cos(), x).sum()
    (expected,) = torch.autograd.grad(wave(x).cos().sum(), x)
    found = []
    threads = [
        threading.Thread(target=lambda: found.extend(torch.autograd.grad(y, x, retain_graph=True)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(torch.equal(gradient, expected) for gradient in found)


@scripted_by_torch
def test_transforms_of_torch_func_and_forward_mode():
    x = double(2, 3, grad=False)

    def loss(call):
        return lambda x: call(wave, x).sum()

    for transform in (torch.func.grad, torch.func.hessian, torch.func.jacfwd):
        assert torch.equal(transform(loss(checkpoint))(x), transform(loss(plain))(x))
    per_sample = torch.func.vmap(torch.func.grad(loss(checkpoint)))(x)
    assert torch.equal(per_sample, torch.func.vmap(torch.func.grad(loss(plain)))(x))
    _, tangent = torch.func.jvp(loss(checkpoint), (x,), (x,))
    assert torch.equal(tangent, torch.func.jvp(loss(plain), (x,), (x,))[1])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_batched_gradients(dropout):
    def function(x):
        return wave(nn.functional.dropout(x, dropout))

    def gradient(call):
        torch.manual_seed(0)
        x, rows = double(3), torch.eye(3, dtype=torch.float64)
        return torch.autograd.grad(call(function, x), x, rows, is_grads_batched=True)[0]

    assert torch.equal(gradient(checkpoint), gradient(plain))


def test_arguments_of_inference_mode():
    with torch.inference_mode():
        positions = torch.arange(3.0)

    def gradient(call):
        x = leaf(3)
        call(lambda x, positions: wave(x + positions), x, positions).sum().backward()
        return x.grad

    assert torch.equal(gradient(checkpoint), gradient(plain))


# ---- code that takes a checkpoint function ------------------------------------------------------------------------


def network(dropout=0.3):
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(dropout)) for _ in range(5))
    )


def step_of(model, run=None):
    torch.manual_seed(1)
    x = leaf(2, 4)
    y = model(x) if run is None else run(model, x)
    y.sum().backward()
    return [y, x.grad, *(p.grad for p in model.parameters())]


def test_checkpoint_sequential(monkeypatch):
    monkeypatch.setattr(torch_checkpoint, "checkpoint", checkpoint)

    def run(model, x):
        return torch_checkpoint.checkpoint_sequential(model, 3, x, use_reentrant=False)

    assert all(map(torch.equal, step_of(network(), run), step_of(network())))


def test_state_and_generators_of_modules_in_checkpoint_sequential(monkeypatch):
    monkeypatch.setattr(torch_checkpoint, "checkpoint", checkpoint)

    class Noise(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.generator = torch.Generator().manual_seed(seed)
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x * torch.rand(4, generator=self.generator)).tanh()

    def step(run):
        model, x = nn.Sequential(*map(Noise, range(5))), leaf(3, 4)
        run(model, x).square().sum().backward()
        draws = [torch.rand(2, generator=noise.generator) for noise in model]
        return [x.grad, *(p.grad for p in model.parameters()), *model.buffers(), *draws]

    def run(model, x):
        return torch_checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False)

    assert all(map(torch.equal, step(run), step(lambda model, x: model(x))))


@scripted_by_torch
@pytest.mark.parametrize("where", ["the function", "in a closure", "a module"])
def test_torchscript_keeps_what_it_saved(where):
    """Its executor saves other tensors at its second execution than at its first."""

    def gradient(call):
        # Made anew, for torch keeps what it has compiled.
        def compute(x):
            return torch.sin(x) * torch.exp(x) + torch.tanh(x)

        class Module(nn.Module):
            def forward(self, x):
                return torch.sin(x) * torch.exp(x) + torch.tanh(x)

        scripted = torch.jit.script(Module() if where == "a module" else compute)
        x = leaf(3)
        call(
            (lambda x: scripted(x).cos()) if where == "in a closure" else scripted, x
        ).sum().backward()
        return x.grad

    assert torch.equal(gradient(checkpoint), gradient(plain))


def test_checkpoint_wrapper_and_apply_activation_checkpointing():
    wrapper = pytest.importorskip("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    model = network()
    names = list(model.state_dict())
    wrapper.apply_activation_checkpointing(
        model,
        checkpoint_wrapper_fn=functools.partial(
            wrapper.checkpoint_wrapper, checkpoint_fn=checkpoint, use_reentrant=False
        ),
        check_fn=lambda module: isinstance(module, nn.Sequential),
    )
    assert all(isinstance(block, wrapper.CheckpointWrapper) for block in model)
    assert list(model.state_dict()) == names
    assert all(map(torch.equal, step_of(model), step_of(network())))


def test_as_the_checkpoint_function_that_model_libraries_keep():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = network()
            self.checkpoint_function = None

        def forward(self, x):
            for block in self.blocks:
                keep = self.checkpoint_function is None
                x = block(x) if keep else self.checkpoint_function(block.__call__, x)
            return x

    model = Model()
    model.checkpoint_function = functools.partial(checkpoint, use_reentrant=False)
    assert all(map(torch.equal, step_of(model), step_of(Model())))


# ---- torch.compile ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_one_graph_with_torchs_checkpoint_in_it(backend):
    graphs = []

    def keeping(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def inner(self, x, *, scale):
            return wave(self.layer(x)) * scale

        def forward(self, x):
            x = checkpoint(self.inner, x, scale=2.0, preserve_rng_state=False, early_stop=False)
            return checkpoint(self.layer, x).exp()

    def step(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Model()
        run = torch.compile(model, backend=keeping, fullgraph=True) if compiled else model
        x = leaf(2, 4)
        run(x).sum().backward()
        return [x.grad, *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, step(True), step(False)))
    (graph,) = graphs
    assert sum("checkpoint" in str(node.target) for node in graph.graph.nodes) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_call_draws_the_same_random_numbers_again(backend):
    torch._dynamo.reset()
    x = leaf(64)
    run = torch.compile(
        lambda x: checkpoint(lambda x: nn.functional.dropout(x, 0.5).sin(), x), backend=backend
    )
    y = run(x)
    torch.rand(3)  # the generator has moved on when the backward comes
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


@pytest.mark.slow
@scripted_by_torch
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("options", [{}, {"context_fn": keep_products}], ids=["", "with a policy"])
def test_compiled_where_torchs_name_is_replaced(monkeypatch, backend, options):
    """What Dynamo takes for torch's checkpoint, and what its back ends look up, is then ours."""
    monkeypatch.setattr(torch_checkpoint, "checkpoint", checkpoint)

    def step(compiled):
        torch._dynamo.reset()
        torch.manual_seed(0)
        layer = nn.Linear(4, 4)

        def inside(x):
            return layer(x).sin() @ x

        def function(x):
            return torch_checkpoint.checkpoint(inside, x, use_reentrant=False, **options).exp()

        run = torch.compile(function, backend=backend, fullgraph=True) if compiled else function
        x = leaf(4, 4)
        run(x).sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    assert all(map(torch.equal, step(True), step(False)))


@pytest.mark.slow
def test_export_without_dynamo():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.layer, x)

    model, x = Model(), leaf(2, 4, grad=False)
    exported = torch.export.export(model, (x,), strict=False)
    assert torch.equal(exported.module()(x), model(x))


@pytest.mark.slow
def test_a_compiled_function_inside():
    torch._dynamo.reset()
    layer = nn.Linear(4, 4)
    function = torch.compile(lambda x: wave(layer(x)), backend="aot_eager", fullgraph=True)
    x, other = leaf(2, 4), leaf(2, 4)
    checkpoint(function, x).sum().backward()
    wave(layer(other)).sum().backward()
    assert torch.equal(x.grad, other.grad)


@pytest.mark.slow
def test_compiled_autograd_recomputes_eagerly():
    torch._dynamo.reset()
    function, calls = counted(wave)
    x, other = leaf(3), leaf(3)
    y = checkpoint(function, x).sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward()
    wave(other).sum().backward()
    assert torch.equal(x.grad, other.grad)
    assert len(calls) == 2
