"""Prove a plugin: that it changes nothing, or that it does the same in every execution.

::

    from blockhooks import testing

    def test_my_observer_changes_nothing():
        testing.assert_transparent(blocks, x, MyObserver())

    def test_my_value_hook_does_the_same_in_every_execution():
        testing.assert_repeatable(MyValueHook())

`blocks`, `inputs`, `plans` and `chains` are Hypothesis strategies (``pip install 'blockhooks[test]'``), for tests of
one's own over all kinds of blocks. The pytest plugin offers the two functions as fixtures.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import random
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from blockhooks import memory
from blockhooks.apply import apply_blocks
from blockhooks.chain import HookChain, Hooks
from blockhooks.errors import AttachError, HookError, PlanError, check_count, import_extra
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hookspecs import hookimpl
from blockhooks.models import attach
from blockhooks.plan import PlanFunction, Segment, every
from blockhooks.structure import MODULE_INTERNALS, tensors_in
from blockhooks.survey import survey

try:
    import numpy.random as _numpy_random
except ModuleNotFoundError:  # NumPy is no requirement
    _numpy_random = None  # type: ignore[assignment]

__all__ = ["assert_repeatable", "assert_transparent", "blocks", "chains", "inputs", "plans"]

STEPS = 2
"""Steps in a row: the second begins with what the first has left (statistics, what a chain has learned)."""

WIDTH = 8
"""Width of the hidden states that the strategies' blocks take: tensors of shape (2, 3, 8)."""


def assert_transparent(
    blocks: Any,
    inputs: Any,
    hooks: Hooks,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    trials: int = 4,
    seed: int = 0,
) -> None:
    """Assert that hooks change nothing but time and memory.

    Runs training steps without and with the hooks from the same start, and compares bit for bit: outputs, loss, every
    gradient (of inputs too), buffers, attributes of modules, and all random generators. The hooks are tried alone and
    inside and outside of a `Checkpoint` with several plans, nested ones too, with and without early stop, with one and
    two backwards; unless they make a plan themselves, then as they are. Hooks must also let a block's exception pass,
    and keep no tensor alive (R8).

    Args:
        blocks: Blocks (a list, `nn.ModuleList` or `nn.Sequential`), run by `apply_blocks`; or any other module, whose
            own loop is left in place and whose blocks `attach` finds. Copied for each run.
        inputs: What they are called with: x, or a tuple of x and positional side inputs; for a model also a dict of
            keywords. Copied for each run.
        hooks: A plugin, a sequence of plugins, or a `HookChain`. The plugins are used over and over, as in training.
        loss: Makes a scalar of the output. By default its ``loss``, or a weighted sum of all its tensors.
        trials: Number of random plans.
        seed: For torch's, Python's and NumPy's generators, and the plans.

    Raises:
        AssertionError: If something differs. Tells in which chain, what, where, and the first values.
        AttachError, HookError, PlanError: If the model has no blocks, or the hooks make no chain.
    """
    bench = _Bench(blocks, inputs, loss, seed)
    with _generators_kept():
        bench.check_that_blocks_repeat(())
        for way in _ways(_plugins(hooks), trials, seed):
            bench.compare((), "the plain loop", way)
        bench.check_exceptions(hooks)
        bench.check_bytes(hooks)


def assert_repeatable(
    hooks: Hooks,
    blocks: Any = None,
    inputs: Any = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    trials: int = 4,
    seed: int = 0,
) -> None:
    """Assert that value hooks do the same in a recompute as in the forward (R3).

    Compares steps with the hooks alone to steps with the hooks inside and outside of a `Checkpoint`, in all that
    `assert_transparent` compares. Hooks must also let a block's exception pass.

    Args:
        hooks: A plugin or a sequence of plugins that make no plan of their own.
        blocks: As for `assert_transparent`. By default a stack of four unlike blocks.
        inputs: As for `assert_transparent`; given together with `blocks`.
        loss: As for `assert_transparent`.
        trials: Number of random plans.
        seed: For torch's, Python's and NumPy's generators, and the plans.

    Raises:
        AssertionError: If something differs. Tells in which chain, what, where, and the first values.
        HookError: If the hooks make no chain, there is no block, or blocks are given without inputs.
    """
    given = _plugins(hooks)
    if blocks is None:
        blocks, inputs = _example(seed)
    elif inputs is None:
        raise HookError(
            "assert_repeatable(hooks, blocks) has no inputs for the blocks; expected both, as in "
            "assert_repeatable(hooks, blocks, x), or neither."
        )
    bench = _Bench(blocks, inputs, loss, seed)
    with _generators_kept():
        alone = _Way(given, 1)
        bench.check_that_blocks_repeat(given)
        for way in _ways(given, trials, seed):
            if way.hooks != given:
                bench.compare(given, str(alone), way)
        bench.check_exceptions(hooks, state=False)


# ---- ways to run hooks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Way:
    """A chain, and how often a backward is run through each step."""

    hooks: Any
    backwards: int

    def __str__(self) -> str:
        plugins = self.hooks.plugins if isinstance(self.hooks, HookChain) else self.hooks
        more = "" if self.backwards == 1 else f" with {self.backwards} backwards"
        return f"hooks=[{', '.join(map(_show, plugins))}]{more}"


def _show(plugin: object) -> str:
    return repr(plugin) if isinstance(plugin, Checkpoint) else type(plugin).__name__


def _plugins(hooks: Hooks) -> Any:
    if isinstance(hooks, HookChain):
        return hooks
    return tuple(hooks) if isinstance(hooks, tuple | list) else (hooks,)


def _plans_itself(hooks: Any) -> bool:
    plugins = hooks.plugins if isinstance(hooks, HookChain) else hooks
    return any(hasattr(plugin, "plan_segments") for plugin in plugins)


def _ways(given: Any, trials: int, seed: int) -> Iterator[_Way]:
    check_count(trials, "trials")
    yield _Way(given, 1)
    if isinstance(given, HookChain) or _plans_itself(given):
        yield _Way(given, 2)
        return
    plans: list[PlanFunction] = [every(1), every(1_000_000)]
    plans += [_RandomPlan(seed + trial) for trial in range(trials)]
    for number, plan in enumerate(plans):
        checkpoint = Checkpoint(plan, early_stop=number % 3 != 2)
        yield _Way((*given, checkpoint), 1 + number % 2)
        yield _Way((checkpoint, *given), 1 + (number + 1) % 2)


def _random_plan(
    start: int, stop: int, integer: Callable[[int, int], int], depth: int = 3
) -> tuple[Segment, ...]:
    """Divide blocks into segments, some with children; `integer(low, high)` chooses, both ends included."""
    segments = []
    while start < stop:
        end = integer(start + 1, stop)
        inside: tuple[Segment, ...] = ()
        if depth > 1 and integer(0, 1):
            inside = _random_plan(start, end, integer, depth - 1)
        segments.append(Segment(start, end, inside, mode="recompute" if integer(0, 3) else "keep"))
        start = end
    return tuple(segments)


@dataclass(frozen=True)
class _RandomPlan:
    """A plan function that draws segments, the same ones each time for a number of blocks."""

    seed: int

    def __call__(self, n: int) -> tuple[Segment, ...]:
        return _random_plan(0, n, random.Random(self.seed).randint)

    def __repr__(self) -> str:
        return f"random plan {self.seed}"


# ---- running ---------------------------------------------------------------------------------------------------------


class _BlockError(Exception):
    """Raised by a block, to see whether hooks let it pass."""


class _Bench:
    """Runs steps of copies of blocks, and compares what they give."""

    def __init__(
        self, blocks: Any, inputs: Any, loss: Callable[[Any], Tensor] | None, seed: int
    ) -> None:
        self.is_model = isinstance(blocks, nn.Module) and not isinstance(
            blocks, nn.ModuleList | nn.Sequential
        )
        if not self.is_model:
            blocks = list(blocks) if isinstance(blocks, Iterable) else blocks
            if not isinstance(blocks, list) or not blocks:
                raise HookError(
                    f"expected a model, or a sequence of at least one block; found {blocks!r}."
                )
        self.blocks = blocks
        self.inputs, self.loss, self.seed = inputs, loss or _default_loss, seed
        self.references: dict[tuple[Any, int], _Record] = {}

    def run(self, hooks: Any, backwards: int = 1, fail: int | None = None) -> _Record:
        """Do the steps on a fresh copy, and record what they give."""
        blocks, inputs = self.copies()
        _seed(self.seed)
        record = _Record()
        with contextlib.ExitStack() as stack:
            forward = self.forward(blocks, hooks, stack, fail)
            for step in range(STEPS):
                where = f" in step {step + 1}"
                try:
                    output = forward(inputs)
                    value = self.loss(output)
                    record.add(f"the output{where}", output)
                    record.add(f"the loss{where}", value)
                    for number in range(backwards):
                        value.backward(retain_graph=number < backwards - 1)  # type: ignore[no-untyped-call]
                        record.gradients(blocks, inputs, f" after backward {number + 1}{where}")
                except _BlockError as error:
                    record.add(f"{_EXCEPTION}{where}", f"{type(error).__name__}: {error}")
                record.state(blocks, inputs, where)
        return record

    def forward(
        self, blocks: Any, hooks: Any, stack: contextlib.ExitStack, fail: int | None = None
    ) -> Callable[[Any], Any]:
        if fail is not None:
            stack.enter_context(_failing(blocks, fail))
        if not self.is_model:
            return lambda inputs: apply_blocks(blocks, *_arguments(inputs)[0], hooks=hooks)
        if hooks:
            stack.enter_context(attach(blocks, hooks))
        return lambda inputs: _call(blocks, inputs)

    def copies(self) -> tuple[Any, Any]:
        # Together: what blocks and inputs share stays shared.
        memo: dict[int, Any] = {}
        for tensor in tensors_in(self.inputs):
            if not tensor.is_leaf:
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copy.deepcopy((self.blocks, self.inputs), memo)

    def attempt(self, way: _Way, called: str, fail: int | None = None) -> _Record:
        """Do the steps with hooks, in which nothing raises that does not raise in what is `called`, too."""
        try:
            return self.run(way.hooks, way.backwards, fail)
        except (AttachError, HookError, PlanError):
            raise
        except Exception as error:
            raise AssertionError(
                f"{way}: the step raised {type(error).__name__}: {error}\n{called} did not."
            ) from error

    def compare(self, reference: Any, called: str, way: _Way) -> None:
        found = self.attempt(way, called)
        if (reference, way.backwards) not in self.references:
            self.references[reference, way.backwards] = self.run(reference, way.backwards)
        difference = self.references[reference, way.backwards].difference(found)
        if difference is not None:
            raise AssertionError(f"{way}: {difference}. Expected what {called} gives, bit for bit.")

    def check_that_blocks_repeat(self, hooks: Any) -> None:
        difference = self.run(hooks).difference(self.run(hooks))
        if difference is not None:
            what = f"{_Way(hooks, 1)}" if hooks else "the plain loop"
            raise AssertionError(
                f"{what}: two runs from the same seeds differ: {difference}. Nothing can be told by comparison; blocks "
                "and value hooks must depend on their inputs, their state and the random generators alone."
            )

    def check_exceptions(self, hooks: Any, *, state: bool = True) -> None:
        """Let a module or block raise, at the first call and at a later one; compare it, and all state too."""
        way = _Way(_plugins(hooks), 1)
        for fail in (0, 1):
            plain = self.run((), fail=fail)
            hooked = self.attempt(way, "Where a block raises, the plain loop", fail)
            if not state:
                plain, hooked = plain.exceptions(), hooked.exceptions()
            difference = plain.difference(hooked)
            if difference is not None:
                raise AssertionError(
                    f"{way}: where a block raises, {difference}. Expected the block's own "
                    "exception to pass, and what the plain loop leaves behind: clean up in `finally` (R5)."
                )

    def check_bytes(self, hooks: Any) -> None:
        """Compare what is alive after the forward and after the step, without and with hooks, under a checkpoint."""
        checkpoint = () if _plans_itself(_plugins(hooks)) else (Checkpoint(every(1_000_000)),)
        if isinstance(hooks, HookChain) or not checkpoint:
            return
        given = _plugins(hooks)
        forward, after, collected = self.live_bytes(checkpoint)
        more_forward, more_after, more_collected = self.live_bytes((*given, *checkpoint))
        way = _Way((*given, *checkpoint), 1)
        for moment, more, cause in (
            ("after the forward", more_forward - forward, "Keep no tensors"),
            ("after the step", more_collected - collected, "Keep no tensors"),
            (
                "after the step, until the garbage collector runs",
                more_after - after,
                "Leave no reference cycle",
            ),
        ):
            if more > 0:
                raise AssertionError(
                    f"{way}: the hooks keep {more} bytes of tensors alive {moment}. {cause}, only what is computed "
                    "from them (R8)."
                )

    def live_bytes(self, hooks: Any) -> tuple[int, int, int]:
        """Bytes made by a step that are alive after its forward, after it, and after a garbage collection."""
        blocks, inputs = self.copies()
        _seed(self.seed)
        tensors = [*tensors_in(inputs), *_parameters(blocks)]
        gc.collect()
        with contextlib.ExitStack() as stack, _collector_off():
            forward = self.forward(blocks, hooks, stack)
            meter = stack.enter_context(memory.peak(tensors[0].device if tensors else None))
            value = self.loss(forward(inputs))
            after_forward = meter.now
            value.backward()  # type: ignore[no-untyped-call]
            del value
            after = meter.now
            gc.collect()
            return after_forward, after, meter.now


@contextlib.contextmanager
def _collector_off() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _failing(blocks: Any, at: int) -> Iterator[None]:
    """Let a block (or, of a model, the n-th module that is called) raise."""
    if isinstance(blocks, list):
        at = min(at, len(blocks) - 1)
        blocks[at] = _Failing(blocks[at])
        yield
        return
    calls = itertools.count()

    def count(module: nn.Module, args: Any) -> None:
        if next(calls) == 4 * at + 1:
            raise _BlockError(f"raised by {type(module).__name__}")

    handle = nn.modules.module.register_module_forward_pre_hook(count)
    try:
        yield
    finally:
        handle.remove()


class _Failing:
    """A block that executes another one and then raises."""

    def __init__(self, block: Any) -> None:
        self.block = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.block(*args, **kwargs)
        raise _BlockError("raised by a block")


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (inputs if type(inputs) is tuple else (inputs,)), {}


def _call(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = _arguments(inputs)
    return model(*args, **kwargs)


def _parameters(blocks: Any) -> list[nn.Parameter]:
    roots = [blocks] if isinstance(blocks, nn.Module) else blocks
    return [p for root in roots if isinstance(root, nn.Module) for p in root.parameters()]


def _default_loss(output: Any) -> Tensor:
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, Tensor):
        return given.sum()
    parts = [_weighted(tensor) for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts:
        raise ValueError(
            "the output holds no tensor with a gradient; give loss=, a function of the output."
        )
    return torch.stack(parts).sum()


def _weighted(tensor: Tensor) -> Tensor:
    """A mean in which each element counts differently, so that nothing cancels by symmetry."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    weights = torch.linspace(-1.0, 1.5, flat.numel(), dtype=torch.float32, device=flat.device)
    return (flat.float().square() + flat.float()).mul(weights).mean().cpu()


# ---- random generators -----------------------------------------------------------------------------------------------


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if _numpy_random is not None:
        _numpy_random.seed(seed)


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    """Leave the global random generators as they were."""
    of_numpy = None if _numpy_random is None else _numpy_random.get_state()
    of_python = random.getstate()
    devices = list(range(torch.cuda.device_count()))
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(of_python)
        if _numpy_random is not None:
            _numpy_random.set_state(of_numpy)


def _generator_states(blocks: Any, inputs: Any) -> Iterator[tuple[str, Any]]:
    yield "torch's CPU generator", torch.get_rng_state()
    for device in range(torch.cuda.device_count()):
        yield f"the generator of cuda:{device}", torch.cuda.get_rng_state(device)
    yield "Python's random generator", repr(random.getstate())
    if _numpy_random is not None:
        yield "NumPy's random generator", _numpy_state(_numpy_random.get_state())
    roots = [blocks] if isinstance(blocks, nn.Module) else blocks
    for number, rng in enumerate(survey(roots, (inputs,)).rngs):
        name = f"random generator {number} ({type(rng).__name__}) of the blocks"
        if isinstance(rng, torch.Generator):
            yield name, rng.get_state()
        elif isinstance(rng, random.Random):
            yield name, repr(rng.getstate())
        elif hasattr(rng, "bit_generator"):
            yield name, _numpy_state(rng.bit_generator.state)
        else:
            yield name, _numpy_state(rng.get_state())


def _numpy_state(state: Any) -> str:
    """Write a state with its arrays in full, which their own repr does not."""
    if isinstance(state, dict):
        return repr({name: _numpy_state(part) for name, part in state.items()})
    if isinstance(state, tuple):
        return repr([_numpy_state(part) for part in state])
    return repr(state.tolist()) if hasattr(state, "tolist") else repr(state)


# ---- records ---------------------------------------------------------------------------------------------------------


_EXCEPTION = "the exception of a block"


class _Record:
    """What steps give, in order, by name: copies of tensors, and plain values."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        for path, leaf in _leaves(value):
            self.values[f"{name}{f' at {path}' if path else ''}"] = (
                leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            )

    def gradients(self, blocks: Any, inputs: Any, where: str) -> None:
        for path, module in _modules(blocks):
            for name, parameter in module.named_parameters(recurse=False):
                self.add(f"the gradient of {path}{name}{where}", parameter.grad)
        for number, tensor in enumerate(tensors_in(inputs)):
            if tensor.requires_grad:
                self.add(f"the gradient of input {number}{where}", tensor.grad)

    def state(self, blocks: Any, inputs: Any, where: str) -> None:
        for path, module in _modules(blocks):
            for name, parameter in module.named_parameters(recurse=False):
                self.add(f"parameter {path}{name}{where}", parameter)
            for name, buffer in module.named_buffers(recurse=False):
                self.add(f"buffer {path}{name}{where}", buffer)
            for name, value in vars(module).items():
                if name not in MODULE_INTERNALS or name == "training":
                    self.add(f"attribute {path}{name}{where}", value)
                elif name.endswith("_hooks"):
                    self.add(f"the number of {path}{name}{where}", len(value))
        for number, block in enumerate(blocks if isinstance(blocks, list) else ()):
            if not isinstance(block, nn.Module | types.FunctionType):
                self.add(f"block {number}{where}", block)
        self.add(f"the inputs{where}", inputs)
        for name, state in _generator_states(blocks, inputs):
            self.add(f"the state of {name}{where}", state)

    def exceptions(self) -> _Record:
        """The exceptions of blocks alone."""
        record = _Record()
        record.values = {
            name: value for name, value in self.values.items() if name.startswith(_EXCEPTION)
        }
        return record

    def difference(self, other: _Record) -> str | None:
        """The first thing that differs, in words; `self` is what was expected."""
        for name, expected in self.values.items():
            if name not in other.values:
                return f"{name} is missing"
            told = _tell_difference(expected, other.values[name])
            if told is not None:
                return f"{name} differs: {told}"
        extra = [name for name in other.values if name not in self.values]
        return f"there is {extra[0]}, too ({_short(other.values[extra[0]])})" if extra else None


def _modules(blocks: Any) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each with the path that stands before the names of what it owns."""
    if isinstance(blocks, nn.Module):
        for path, module in blocks.named_modules():
            yield f"{path}." if path else "", module
        return
    seen: set[nn.Module] = set()
    for number, block in enumerate(blocks):
        inner = block.block if isinstance(block, _Failing) else block
        if isinstance(inner, nn.Module):
            for path, module in inner.named_modules(memo=seen):
                yield f"blocks[{number}].{f'{path}.' if path else ''}", module


def _leaves(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in containers and plain objects, by path; functions and modules are left out."""
    if isinstance(value, Tensor | bool | int | float | complex | str | bytes | type(None)):
        yield path, value
    elif depth > 8 or isinstance(value, nn.Module | type | types.ModuleType):
        return
    elif isinstance(value, Mapping):
        yield f"{path}.keys", repr(list(value))
        for name, part in value.items():
            yield from _leaves(part, f"{path}[{name!r}]", depth + 1)
    elif isinstance(value, set | frozenset):
        yield path, repr(sorted(map(repr, value)))
    elif isinstance(value, Sequence):
        yield f"{path}.len", len(value)
        for place, part in enumerate(value):
            yield from _leaves(part, f"{path}[{place}]", depth + 1)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield path, value.tobytes()
    elif hasattr(value, "__dict__") and not callable(value):
        for name, part in vars(value).items():
            yield from _leaves(part, f"{path}.{name}", depth + 1)


def _tell_difference(expected: Any, found: Any) -> str | None:
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        same = type(expected) is type(found) and not isinstance(found, Tensor)
        if same and (expected == found or repr(expected) == repr(found) == "nan"):
            return None
        return f"expected {_short(expected)}, found {_short(found)}"
    for what in ("dtype", "shape", "device", "layout", "requires_grad"):
        one, two = getattr(expected, what), getattr(found, what)
        if one != two:
            return f"expected {what} {one}, found {two}"
    one, two = _bits(expected), _bits(found)
    different = (one != two).any(dim=-1).nonzero().flatten()
    if not len(different):
        return None
    first = int(different[0])
    place = ", ".join(str(int(i)) for i in torch.unravel_index(different[0], expected.shape))
    values = (t.detach().to_dense().reshape(-1)[first].item() for t in (expected, found))
    return f"expected {next(values)!r}, found {next(values)!r} at [{place}] ({len(different)} of {len(one)} elements)"


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of each element, of shape (elements, bytes)."""
    dense = tensor.detach().resolve_conj().resolve_neg().to_dense().contiguous().reshape(-1)
    return dense.view(torch.uint8).reshape(dense.numel(), dense.element_size())


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    told = repr(value)
    return told if len(told) <= 80 else f"{told[:77]}..."


# ---- blocks of many kinds --------------------------------------------------------------------------------------------


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + F.scaled_dot_product_attention(q, k, v)


class _Dropping(nn.Module):
    """A feed-forward block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


class _Normalizing(nn.Module):
    """A block whose forward changes buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        out: Tensor = self.linear(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return out


class _Spectral(nn.Module):
    """A block whose weight is computed by a power iteration, kept in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        out: Tensor = x + torch.tanh(self.linear(x))
        return out


class _Routing(nn.Module):
    """A mixture of two experts, with counters in a buffer, an attribute and a list."""

    counts: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.register_buffer("counts", torch.zeros(2))
        self.calls, self.history = 0, list[int]()

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        scores = self.router(x).softmax(-1)
        self.counts += scores.detach().argmax(-1).flatten().bincount(minlength=2)
        self.calls += 1
        self.history.append(self.calls)
        parts = [expert(x) * scores[..., i, None] for i, expert in enumerate(self.experts)]
        return x + torch.stack(parts).sum(0) * (1 + self.calls % 3)


class _Drawing(nn.Module):
    """A block that draws from a generator of its own and from Python's."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(seed)

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return x + torch.sigmoid(self.linear(x)) * (noise + random.random())


class _InPlace(nn.Module):
    """A block that works in place on what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *side: Any, **more: Any) -> Tensor:
        return x + F.relu(self.linear(x).add_(0.5), inplace=True)


def _function(x: Tensor, *side: Any, **more: Any) -> Tensor:
    """A block without parameters, which is no module."""
    return torch.sin(x) * 1.5


_KINDS: dict[str, Callable[[], Any]] = {
    "attention": _Attention,
    "dropout": _Dropping,
    "batch norm": _Normalizing,
    "spectral norm": _Spectral,
    "router": _Routing,
    "own generator": _Drawing,
    "in place": _InPlace,
    "function": lambda: _function,
}


def _example(seed: int) -> tuple[list[Any], Tensor]:
    with _generators_kept():
        _seed(seed)
        kinds = ("attention", "batch norm", "dropout", "router")
        return [_KINDS[kind]() for kind in kinds], torch.randn(2, 3, WIDTH, requires_grad=True)


# ---- strategies ------------------------------------------------------------------------------------------------------


def _strategies() -> Any:
    return import_extra("hypothesis.strategies", "test", "drawing blocks, plans and chains")


def blocks(min_size: int = 1, max_size: int = 5) -> Any:
    """Strategy of stacks of blocks: attention, dropout, batch norm, spectral norm, router, own generators, in place.

    Each takes and returns a tensor of shape (B, T, 8), such as `inputs` draws, and ignores side inputs.

    Args:
        min_size: Least number of blocks.
        max_size: Most blocks.
    """
    st = _strategies()

    def build(kinds: list[str], seed: int) -> list[Any]:
        with _generators_kept():
            _seed(seed)
            return [_KINDS[kind]() for kind in kinds]

    kinds = st.lists(st.sampled_from(sorted(_KINDS)), min_size=min_size, max_size=max_size)
    return st.builds(build, kinds, st.integers(0, 3))


def inputs() -> Any:
    """Strategy of hidden states for `blocks`: tensors of shape (B, T, 8) that require a gradient."""
    st = _strategies()

    def build(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(2, 3, WIDTH, generator=generator).requires_grad_()

    return st.builds(build, st.integers(0, 3))


def plans(n: int) -> Any:
    """Strategy of plans for `n` blocks: any segments, nested up to three levels, recomputed or kept."""

    def draw(draw: Callable[[Any], Any]) -> tuple[Segment, ...]:
        return _random_plan(0, n, lambda low, high: int(draw(_strategies().integers(low, high))))

    return _strategies().composite(draw)()


class _Passive:
    """An observer that wraps everything and does nothing."""

    @hookimpl(wrapper=True)
    def run_blocks(self) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def run_segment(self) -> Any:
        return (yield)

    @hookimpl(wrapper=True)
    def run_block(self) -> Any:
        return (yield)


def chains(n: int, *plugins: Any) -> Any:
    """Strategy of lists of hooks for runs of `n` blocks: a `Checkpoint` with any plan, observers, and given plugins.

    Args:
        n: Number of blocks.
        *plugins: In each list, at any place.
    """
    st = _strategies()

    def chain(plan: tuple[Segment, ...], early_stop: bool, passive: int) -> Any:
        checkpoint = Checkpoint(_Fixed(plan), early_stop=early_stop)
        return st.permutations([checkpoint, *plugins, *(_Passive() for _ in range(passive))])

    return st.builds(chain, plans(n), st.booleans(), st.integers(0, 2)).flatmap(lambda order: order)


@dataclass(frozen=True)
class _Fixed:
    """A plan function that has only one plan."""

    plan: tuple[Segment, ...]

    def __call__(self, n: int) -> tuple[Segment, ...]:
        return self.plan

    def __repr__(self) -> str:
        return f"lambda n: {self.plan}"
