"""`verify`: run a model plain and hooked from the same seeds, and compare everything bit for bit."""

from __future__ import annotations

import copy
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from blockhooks import memory
from blockhooks.chain import Hooks
from blockhooks.errors import HookError, check_count
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.models import AttachReport, attach
from blockhooks.models.find import Blocks, check_model, rngs_kept
from blockhooks.recompute import is_recomputing
from blockhooks.report.table import size
from blockhooks.structure import MODULE_INTERNALS
from blockhooks.survey import survey

__all__ = ["Cost", "Difference", "Verification", "verify"]

STEPS = 2
"""Steps in each way: the second one begins with the state that the first one left."""

Record = dict[str, Any]
"""What a step gives, by kind and name: digests of tensors, and plain values."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        kind: ``"loss"``, ``"output"``, ``"gradient"``, ``"input gradient"``, ``"buffer"``, ``"attribute"``, ``"rng"``.
        name: Its name, such as a parameter's or a path in the output.
        module: The path of the module it belongs to, where there is one.
        step: The step in which it first differs, from 0.
        plain: What it was in the plain run.
        hooked: What it was in the hooked run.
    """

    kind: str
    name: str
    module: str
    step: int
    plain: str
    hooked: str

    def __str__(self) -> str:
        where = f" of module {self.module}" if self.module else ""
        return f"{self.kind} {self.name}{where} in step {self.step}: {self.plain}, hooked {self.hooked}"


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs.

    Attributes:
        seconds: Wall time of the forward and backward of the last step.
        peak_bytes: The most bytes that were live at once in the first step, above those at its beginning.
    """

    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Verification:
    """What `verify` found. True in a condition if everything is the same.

    Attributes:
        differences: All that differs between plain and hooked, first by where it arises in the forward.
        unstable: What differs between two plain runs, and is therefore not compared.
        first: The module and tensor in whose forward the first difference arises, if it arises there.
        compared: Number of tensors and values compared in each step.
        plain: What a plain step costs.
        hooked: What a hooked step costs.
        report: What was really done to the blocks.
    """

    differences: tuple[Difference, ...]
    unstable: tuple[Difference, ...]
    first: str | None
    compared: int
    plain: Cost
    hooked: Cost
    report: AttachReport = field(repr=False)

    @property
    def deterministic(self) -> bool:
        """Whether the plain model gives the same twice."""
        return not self.unstable

    @property
    def exact(self) -> bool:
        """Whether the model is deterministic and the hooked run is the plain one, bit for bit."""
        return self.deterministic and not self.differences

    def __bool__(self) -> bool:
        return self.exact

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, for JSON."""
        return {
            "exact": self.exact,
            "deterministic": self.deterministic,
            "compared": self.compared,
            "first": self.first,
            "differences": [asdict(difference) for difference in self.differences],
            "unstable": [asdict(difference) for difference in self.unstable],
            "plain": asdict(self.plain),
            "hooked": asdict(self.hooked),
            "report": self.report.to_dict(),
        }

    def __str__(self) -> str:
        lines = [self._verdict()]
        lines += [f"  {difference}" for difference in self.differences[:8]]
        if len(self.differences) > 8:
            lines.append(f"  and {len(self.differences) - 8} more")
        before, after = self.plain, self.hooked
        lines.append(
            f"peak {size(before.peak_bytes)} plain, {size(after.peak_bytes)} hooked; "
            f"step {before.seconds * 1e3:.1f} ms plain, {after.seconds * 1e3:.1f} ms hooked"
        )
        return "\n".join([*lines, "", str(self.report)])

    def _verdict(self) -> str:
        if self.exact:
            return f"the same, bit for bit: {self.compared} tensors and values in each of {STEPS} steps"
        if self.differences:
            where = f"; the first arises in {self.first}" if self.first else ""
            verdict = f"not the same: {len(self.differences)} of {self.compared} differ{where}"
        else:
            verdict = "the same as far as can be told"
        if self.deterministic:
            return verdict
        return (
            f"the model itself is not deterministic: {len(self.unstable)} of {self.compared} differ between two plain "
            f"runs, first {self.unstable[0]}; the rest is {verdict}"
        )


def verify(
    model: nn.Module,
    inputs: Any,
    hooks: Hooks | None = None,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    blocks: Blocks | Iterable[Blocks] | None = None,
    seed: int = 0,
) -> Verification:
    """Run a model plain and hooked from the same seeds, and compare bit for bit.

    Loss, outputs (caches in them too), gradients of parameters and inputs, buffers, the modules' attributes, and the
    random generators of torch, Python and NumPy, over two steps. Everything runs on copies: the model, its gradients
    and the random generators are afterwards what they were.

    Args:
        model: Any module that can be copied, in train or eval mode as it is.
        inputs: What it is called with: a tuple or list of arguments, a dict of keywords, or one argument.
        hooks: As for `attach`. By default ``[Checkpoint()]``.
        loss: Makes a scalar of the output. By default the output's ``loss``, or a weighted sum of all its tensors that
            have a gradient.
        blocks: As for `attach`.
        seed: For all random generators, at the beginning of each step.

    Raises:
        AttachError: If `model` is none, or no blocks are found.
        HookError: If something in `hooks` is no plugin, `loss` is no function, or `seed` no integer of at least 0.
        ValueError: If there is nothing to differentiate, or `loss` makes something else than a scalar.
    """
    check_model(model, "verify")
    if loss is not None and not callable(loss):
        raise HookError(f"verify(loss=...) expected a function of the output, found {loss!r}.")
    check_count(seed, "verify(seed=...)")
    chain = [Checkpoint()] if hooks is None else hooks
    bench = _Bench(model, inputs, loss or _default_loss, seed)
    with _rngs_kept(bench.rngs):
        plain, plain_cost, _ = bench.run(lambda copied: nullcontext())
        again, again_cost, _ = bench.run(lambda copied: nullcontext())
        hooked, hooked_cost, report = bench.run(lambda copied: attach(copied, chain, blocks=blocks))
        unstable = _differences(plain, again, ())
        differences = _differences(plain, hooked, {(d.kind, d.name) for d in unstable})
        first = None
        if differences:
            traces = [
                bench.trace(lambda copied: nullcontext()),
                bench.trace(lambda c: attach(c, chain, blocks=blocks)),
            ]
            first = _first_in_forward(*traces) or _first_in_backward(differences, traces[0])
    assert report is not None
    cost = Cost(min(plain_cost.seconds, again_cost.seconds), plain_cost.peak_bytes)
    compared = sum(map(len, plain[0].values()))
    return Verification(
        tuple(differences), tuple(unstable), first, compared, cost, hooked_cost, report
    )


class _Bench:
    """Runs steps of copies of a model."""

    def __init__(
        self, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor], seed: int
    ) -> None:
        self.model, self.loss, self.seed = model, loss, seed
        self.inputs = inputs
        rngs = survey([model], [inputs]).rngs
        self.rngs = [(rng, _rng_state(rng)) for rng in rngs]

    def run(
        self, hooked: Callable[[nn.Module], Any]
    ) -> tuple[list[dict[str, Record]], Cost, AttachReport | None]:
        """Do the steps on a fresh copy; the first is metered, the last is timed."""
        _restore(self.rngs)
        model = self.copied()
        records: list[dict[str, Record]] = []
        peak = 0
        seconds = 0.0
        with hooked(model) as handle:
            for number in range(STEPS):
                meter = memory.peak(_device(model)) if number == 0 else nullcontext()
                with meter:
                    record, seconds = self.step(model)
                peak = peak if not isinstance(meter, memory.Meter) else meter.peak
                records.append(record)
            report = None if handle is None else handle.report()
        return records, Cost(seconds, peak), report

    def step(self, model: nn.Module) -> tuple[dict[str, Record], float]:
        args, kwargs = self.arguments()
        model.zero_grad(set_to_none=True)
        _seed(self.seed)
        began = _now(model)
        output = model(*args, **kwargs)
        value = self.loss(output)
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError(
                f"verify(loss=...) expected a function that makes a scalar tensor of the output; it gave {value!r}."
            )
        value.backward()  # type: ignore[no-untyped-call]
        seconds = _now(model) - began
        return _record(model, output, value, (args, kwargs)), seconds

    def trace(self, hooked: Callable[[nn.Module], Any]) -> list[tuple[str, Record]]:
        """The outputs of all modules in all forwards, in the order of their calls."""
        _restore(self.rngs)
        model = self.copied()
        names = {id(module): name for name, module in model.named_modules()}
        calls: list[tuple[str, Record]] = []

        def note(module: nn.Module, args: Any, output: Any) -> None:
            if id(module) in names and not is_recomputing():
                calls.append((names[id(module)], _leaves(output)))

        with hooked(model):
            for _ in range(STEPS):
                watching = register_module_forward_hook(note, always_call=False)
                try:
                    self.step(model)
                finally:
                    watching.remove()
        return calls

    def copied(self) -> nn.Module:
        try:
            return copy.deepcopy(self.model)
        except Exception as error:
            error.add_note(
                f"verify compares copies of the model; {type(self.model).__name__} cannot be copied."
            )
            raise

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = _cloned(self.inputs)
        if isinstance(given, Mapping):
            return (), dict(given)
        return (tuple(given), {}) if isinstance(given, tuple | list) else ((given,), {})


def _default_loss(output: Any) -> Tensor:
    given = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(given, Tensor) and given.requires_grad:
        return given.sum()
    tensors = [t for _, t in _tensors(output) if t.requires_grad]
    if not tensors:
        raise ValueError(
            "the model's output has no tensor with a gradient; give loss=, a function of the output."
        )
    return torch.stack([_weighted(tensor) for tensor in tensors]).sum()


def _weighted(tensor: Tensor) -> Tensor:
    """A sum in which each element counts differently, so that no gradient cancels by symmetry."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    weights = torch.linspace(-1.0, 1.5, real.numel(), device=real.device).reshape(real.shape)
    return (real.float() * weights).mean().cpu()


# ---- records -------------------------------------------------------------------------------------------------------


def _record(model: nn.Module, output: Any, loss: Tensor, arguments: Any) -> dict[str, Record]:
    inputs = {
        f"input{path}": t.grad for path, t in _tensors(arguments) if t.is_leaf and t.requires_grad
    }
    attributes: Record = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in MODULE_INTERNALS or attribute == "training":
                attributes.update(_leaves(value, f"{name}.{attribute}" if name else attribute))
    return {
        "loss": {"loss": _digest(loss)},
        "output": _leaves(output),
        "gradient": {name: _digest(p.grad) for name, p in model.named_parameters()},
        "input gradient": {name: _digest(grad) for name, grad in inputs.items()},
        "buffer": {name: _digest(buffer) for name, buffer in model.named_buffers()},
        "attribute": attributes,
        "rng": _rng_record(),
    }


def _digest(tensor: Tensor | None) -> str:
    """Shape, dtype, and a hash of the bits; small tensors by value, too."""
    if tensor is None:
        return "None"
    tensor = tensor.detach()
    told = f"{tensor.dtype}".removeprefix("torch.") + f"{list(tensor.shape)}"
    if tensor.is_meta:
        return told
    flat = (tensor.to_dense() if tensor.layout is not torch.strided else tensor).cpu()
    flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
    bits = flat.contiguous().reshape(-1).view(torch.uint8)
    told += " " + hashlib.blake2b(bits.numpy().tobytes(), digest_size=8).hexdigest()
    return told + f" ({tensor.item()!r})" if tensor.numel() == 1 else told


def _leaves(value: Any, path: str = "") -> Record:
    """Describe the tensors and plain values in a value, by path."""
    record: Record = {}
    for where, leaf in _walk(value, path, 0, set()):
        record[where] = _digest(leaf) if isinstance(leaf, Tensor) else repr(leaf)
    return record


def _tensors(value: Any) -> Iterator[tuple[str, Tensor]]:
    for path, leaf in _walk(value, "", 0, set()):
        if isinstance(leaf, Tensor):
            yield path, leaf


def _walk(value: Any, path: str, depth: int, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Tensors and plain values in containers and objects (a cache in an output); modules and functions are left out."""
    if isinstance(value, torch.Generator):
        value = value.get_state()
    elif isinstance(value, set | frozenset):
        value = sorted(map(repr, value))
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        value = f"{value.dtype}{list(value.shape)} {hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()}"
    if isinstance(value, Tensor | bool | int | float | complex | str | bytes | type(None)):
        yield path, value
        return
    if id(value) in seen or depth > 8 or isinstance(value, nn.Module | type) or callable(value):
        return
    seen.add(id(value))
    parts: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Mapping):
        parts = ((f"{path}.{name}", part) for name, part in value.items())
    elif isinstance(value, Sequence):
        parts = ((f"{path}[{place}]", part) for place, part in enumerate(value))
    elif is_dataclass(value) or hasattr(value, "__dict__"):
        parts = ((f"{path}.{name}", part) for name, part in vars(value).items())
    for where, part in parts:
        yield from _walk(part, where, depth + 1, seen)


def _cloned(value: Any) -> Any:
    if isinstance(value, Tensor):
        clone = value.detach().clone()
        return clone.requires_grad_(value.requires_grad)
    if isinstance(value, dict):
        return {name: _cloned(part) for name, part in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return type(value)(_cloned(part) for part in value)
    return copy.deepcopy(value)


# ---- comparison ----------------------------------------------------------------------------------------------------


def _differences(
    plain: list[dict[str, Record]], other: list[dict[str, Record]], aside: Iterable[tuple[str, str]]
) -> list[Difference]:
    found: dict[tuple[str, str], Difference] = {}
    aside = set(aside)
    for step, (before, after) in enumerate(zip(plain, other, strict=True)):
        for kind, record in before.items():
            for name in {**record, **after[kind]}:
                key = kind, name
                one, two = record.get(name, "missing"), after[kind].get(name, "missing")
                if one != two and key not in found and key not in aside:
                    module = (
                        name.rpartition(".")[0]
                        if kind in ("gradient", "buffer", "attribute")
                        else ""
                    )
                    found[key] = Difference(kind, name, module, step, one, two)
    return list(found.values())


def _first_in_forward(
    plain: list[tuple[str, Record]], hooked: list[tuple[str, Record]]
) -> str | None:
    for (name, before), (other, after) in zip(plain, hooked, strict=False):
        if name != other:
            return f"the forward: module {other or 'itself'} was called where the plain run called {name or 'itself'}"
        for path in before:
            if before[path] != after.get(path):
                return f"the forward of module {name or 'itself'}, tensor output{path}"
    return None


def _first_in_backward(
    differences: list[Difference], calls: list[tuple[str, Record]]
) -> str | None:
    """The gradient of the module that ran last in the forward is the first in the backward."""
    order = {name: place for place, (name, _) in enumerate(calls)}
    gradients = [d for d in differences if d.kind == "gradient"]
    if not gradients:
        return None
    last = max(gradients, key=lambda d: (-d.step, order.get(d.module, -1)))
    return f"the backward of module {last.module or 'itself'}, gradient of {last.name}"


# ---- surroundings --------------------------------------------------------------------------------------------------


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _now(model: nn.Module) -> float:
    if _device(model).type not in ("cpu", "meta"):
        torch.accelerator.synchronize()
    return time.perf_counter()


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _rng_record() -> Record:
    record = {"torch": _digest(torch.get_rng_state()), "python": str(hash(random.getstate()))}
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        record["accelerator"] = _digest(module.get_rng_state())
    if "numpy" in sys.modules:
        state = sys.modules["numpy"].random.get_state()
        record["numpy"] = _digest(torch.from_numpy(state[1].astype("int64"))) + f" {state[2:]}"
    return record


@contextmanager
def _rngs_kept(rngs: list[tuple[Any, Any]]) -> Iterator[None]:
    """Put back the random generators: torch's, Python's and NumPy's, and those that the model reaches."""
    with rngs_kept():
        try:
            yield
        finally:
            _restore(rngs)


def _rng_state(rng: Any) -> Any:
    if isinstance(rng, random.Random):
        return rng.getstate()
    return (
        copy.deepcopy(rng.bit_generator.state) if hasattr(rng, "bit_generator") else rng.get_state()
    )


def _restore(rngs: list[tuple[Any, Any]]) -> None:
    for rng, state in rngs:
        if isinstance(rng, random.Random):
            rng.setstate(state)
        elif hasattr(rng, "bit_generator"):
            rng.bit_generator.state = state
        else:
            rng.set_state(state)
