"""A memory budget over the steps of a training: measure in the first, plan from the second on.

The first step with gradients of a stack of blocks, at given shapes, runs by a plan that needs little memory: a tree
whose leaves are single blocks. After each block's forward its costs are measured (`blockhooks.measuring`), in what the
floor of memory allows. What the step holds outside of its blocks is seen in its backward (`blockhooks.outside`). From
these the solver makes a plan for the budget, and it is used until shapes, dtypes, modes or blocks are others. Plans are
remembered per shape.
"""

from __future__ import annotations

import contextlib
import statistics
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from blockhooks import memory
from blockhooks.costs import BlockCosts, ChainProfile, ModeCosts, budget_in_bytes, format_bytes
from blockhooks.errors import BlockhooksWarning, BudgetError
from blockhooks.measuring import measure_block
from blockhooks.outside import Gaps, Outside, storage_keys
from blockhooks.plan import Mode, Segment, every, tree
from blockhooks.recompute import as_recompute, can_recompute, is_recomputing
from blockhooks.run import Hidden, Region, Run
from blockhooks.solver import Plan, Solver
from blockhooks.structure import tensors_in
from blockhooks.survey import survey

__all__ = ["Around", "Planner"]

# Stacks and shapes whose plans are remembered; the oldest is forgotten.
REMEMBERED: Final = 256
# Forwards after which a plan is made although no backward has told what is outside of the blocks.
FORWARDS: Final = 2

Factories = Sequence[Callable[[], AbstractContextManager[Any]]]
Around = Callable[[Run, Segment], AbstractContextManager[Any]]
"""What is entered around a segment of a run in a mode."""
Signature = tuple[Any, ...]


@dataclass(slots=True, eq=False)
class _Chain:
    """What is known of one stack at given shapes.

    Attributes:
        key: What tells it from others.
        about: The same, in words.
        count: Number of blocks.
        apart: Whether its blocks are called one by one by somebody's own loop, so that a segment is one block.
        costs: What was measured, by block.
        segments: Its part of the plan, once there is one.
        inputs: Bytes of each block's x.
        keeps_output: Blocks of whose output autograd keeps something for the block itself.
        refused: Blocks that could not be executed again when they were to be measured.
        step: The step in which it was last measured.
        forwards: How many forwards were to measure it.
        communicates: What a block of it does that waits for other processes, in words, or nothing.
    """

    key: Signature
    about: str
    count: int
    apart: bool
    costs: dict[int, BlockCosts] = field(default_factory=dict)
    segments: tuple[Segment, ...] | None = None
    inputs: dict[int, int] = field(default_factory=dict)
    keeps_output: set[int] = field(default_factory=set)
    refused: set[int] = field(default_factory=set)
    step: _Step | None = None
    forwards: int = 0
    communicates: str = ""

    @property
    def measured(self) -> bool:
        """Whether the costs of all blocks are known."""
        return len(self.costs) == self.count

    @property
    def ready(self) -> bool:
        """Whether all is known of the step."""
        step = self.step
        if step is None or not step.measured:
            return False
        return step.gaps is not None or self.forwards >= FORWARDS

    def measuring_plan(self) -> tuple[Segment, ...]:
        """A plan of little memory in which each block is a segment of its own."""
        plan = every(1) if self.apart else tree(max(1, (self.count - 1).bit_length()))
        return plan(self.count)

    def evened(self) -> dict[int, BlockCosts]:
        """The costs that are known, by block."""
        return dict(zip(self.costs, _evened(tuple(self.costs.values())), strict=True))


@dataclass(slots=True, eq=False)
class _Step:
    """What is known of a step, in which one or several stacks were run.

    Attributes:
        chains: The stacks, in the order of their first calls.
        calls: The blocks in the order of their calls.
        outside: What sees the gaps, while the step is measured.
        gaps: What is held outside of the blocks.
        plan: The plan of all blocks.
        allocated: Bytes that were allocated as the first block was about to begin, when the plan was made.
    """

    chains: list[_Chain] = field(default_factory=list)
    calls: list[tuple[_Chain, int]] = field(default_factory=list)
    outside: Outside | None = None
    gaps: Gaps | None = None
    plan: Plan | None = None
    allocated: int = 0

    @property
    def measured(self) -> bool:
        """Whether the costs of all blocks that were called are known."""
        return bool(self.calls) and all(index in chain.costs for chain, index in self.calls)

    @property
    def about(self) -> str:
        """What tells it from others, in words."""
        count = sum(chain.count for chain in self.chains)
        stacks = f" in {len(self.chains)} stacks" if len(self.chains) > 1 else ""
        return f"{count} blocks{stacks}, {self.chains[0].about}"

    def saw(self, gaps: Gaps) -> None:
        """Learn what is held outside of the blocks, if none was called twice."""
        if len(self.calls) == len(set(self.calls)):
            self.gaps, self.outside = gaps, None
            for chain in self.chains:
                chain.segments = None

    def order(self) -> list[tuple[_Chain, int]]:
        """The blocks in the order of the profile: as they were called, and in between those that other steps call."""
        order = list(dict.fromkeys(self.calls))
        for chain in self.chains:
            for index in sorted(chain.costs.keys() - {i for c, i in order if c is chain}):
                before = [p for p, (c, i) in enumerate(order) if c is chain and i < index]
                order.insert(before[-1] + 1 if before else 0, (chain, index))
        return order

    def profile(self) -> ChainProfile:
        """What the step costs."""
        costs = {chain: chain.evened() for chain in self.chains}
        order, about, gaps = self.order(), self.chains[0].about, self.gaps
        places = [order.index(call) for call in self.calls]
        blocks = [
            _letting_go(costs[chain][index], alone)
            for (chain, index), alone in zip(order, self._alone(order, places), strict=True)
        ]
        if gaps is None:  # a loop that is not ours holds its first x
            starts = {(chain, 0): chain.inputs.get(0, 0) for chain in self.chains if chain.apart}
            held = [starts.get(call, 0) for call in order]
            blocks = [replace(block, gap=gap) for block, gap in zip(blocks, held, strict=True)]
            return ChainProfile(blocks=tuple(blocks), about=about)
        for call, place in enumerate(places):
            last = places[gaps.carried_to[call]]
            blocks[place] = replace(_in_its_place(blocks[place], gaps, call), carried_to=last)
        return ChainProfile(
            blocks=tuple(blocks),
            tail_peak=gaps.peaks[-1],
            tail_forward=gaps.tail,
            about=about,
        )

    def _alone(self, order: Sequence[tuple[_Chain, int]], places: Sequence[int]) -> list[int]:
        """Return the bytes of each block's x that nobody holds if that block does not."""
        # As long as no backward has told, the first x is held by its caller, and the others by nobody.
        alone = [chain.inputs[index] if index else 0 for chain, index in order]
        if self.gaps is not None:
            for place, nbytes in zip(places, self.gaps.alone, strict=True):
                alone[place] = nbytes
        for place, (chain, index) in enumerate(order[:-1], 1):
            if index in chain.keeps_output:
                alone[place] = 0
        return alone

    def solve(self, budget: str | int | float) -> None:
        """Plan all stacks together, since their activations are held at the same time.

        Raises:
            BudgetError: If no plan keeps the budget, or blocks that communicate are to be recomputed.
        """
        profile, apart = self.profile(), self.chains[0].apart
        before = max(self.allocated - profile.blocks[0].gap, 0)
        solver = Solver(profile, apart=apart)
        self.plan = solver.solve(budget, beside=before)
        communicates = next((c.communicates for c in self.chains if c.communicates), None)
        if communicates and self.plan.segments != solver.plain.segments:
            raise BudgetError(
                f"{communicates} waits for other processes, so all of them have to recompute it alike, but each would "
                "plan by its own measurements. Expected the same plan in all: solve for it in one (budget.measure, "
                "budget.solve), give it to the others (plan.save, Plan.load), and use Checkpoint(plan)."
            )
        if not apart:
            self.chains[0].segments = self.plan.segments
            return
        modes = [segment.mode for segment in self.plan.segments for _ in segment.indices]
        planned = dict(zip(self.order(), modes, strict=True))
        for chain in self.chains:
            chain.segments = tuple(
                Segment(index, index + 1, mode=planned.get((chain, index), "recompute"))
                for index in range(chain.count)
            )


@dataclass(slots=True)
class _ModelCall:
    """A call of a model whose blocks are planned for.

    Attributes:
        model: The model.
        signature: What tells it from calls with other shapes.
        given: Keys of the storages of its arguments.
        meter: What meters it, if its steps are not known yet.
    """

    model: nn.Module
    signature: Signature
    given: set[int]
    meter: memory.Meter | None


class Planner:
    """Plans for a memory budget; what `Checkpoint(memory_budget=...)` plans with.

    Args:
        memory_budget: See `blockhooks.costs.budget_in_bytes`. Bytes are those of a step's peak: what is allocated on an
            accelerator, what the step itself allocates on a CPU.
        modes: Modes that a plan may give a block, besides keeping and recomputing it, and what is entered around it. With
            ``"offload"`` among them what waits for the backward of a measuring step is away, too.
        new_gradients: Whether gradients of parameters that have none when a step begins are part of its peak.

    Raises:
        BudgetError: If `memory_budget` is not one.
    """

    def __init__(
        self,
        memory_budget: str | int | float,
        modes: Mapping[Mode, Around] | None = None,
        *,
        new_gradients: bool = True,
    ) -> None:
        budget_in_bytes(memory_budget, 1 << 40)  # refuses what is no budget, before any step
        self.memory_budget, self.new_gradients = memory_budget, new_gradients
        self.modes = dict(modes or {})
        self._chains: dict[Signature, _Chain] = {}
        self._running: dict[Signature, _Chain] = {}
        self._step = _Step()
        self._measuring = self._warned = False
        self._call: _ModelCall | None = None
        self._outside: weakref.ref[Outside] | None = None  # the last one that waits for a backward

    # ---- the plan of a run ----------------------------------------------------------------------------------------

    def begin_model(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a call of a model whose blocks are called by its own loops; it begins a step."""
        if can_recompute():
            tensors, new = tensors_in((args, kwargs)), self._without_gradient(model.parameters())
            signature = (id(model), model.training, _signature(tensors), _flags(args, kwargs), new)
            self._step = _Step()
            known = [chain for chain in self._chains.values() if chain.key[-1] == signature]
            meter = None
            if not known or not all(chain.ready for chain in known):
                meter = memory.peak(_device((*tensors, *model.parameters()))).__enter__()
            self._call = _ModelCall(model, signature, storage_keys(tensors), meter)

    def end_model(self, output: Any) -> None:
        """End the model's call.

        Args:
            output: What it returns.
        """
        call, self._call = self._call, None
        if call is not None and call.meter is not None:
            if self._step.outside is not None:
                self._step.outside.returned(output)
            call.meter.__exit__(None, None, None)

    def prepare(self, run: Run) -> tuple[Segment, ...]:
        """Plan a run, unless x has to be known first."""
        if not can_recompute():  # nothing is kept, and nothing can be measured
            return every(1)(len(run.blocks))
        if not run.apart:
            run.state[self] = True
            return every(1)(len(run.blocks))
        # x is not known, but among the side inputs.
        chain = self._chain_of(run, ())
        if any(other.key[0] == chain.key[0] for other in self._step.chains):
            self._step = _Step()
        return self._begun(chain, tensors_in((run.args, run.kwargs)))

    def plan(self, run: Run, x: Hidden) -> None:
        """Plan a run that begins with x, if it was prepared."""
        if run.state.get(self):
            self._step = _Step()
            run.segments = self._begun(self._chain_of(run, x), tensors_in(x))

    def _chain_of(self, run: Run, x: Hidden) -> _Chain:
        given, call = (x, run.args, run.kwargs), self._call
        within: Any = call and call.signature
        if call is None:
            modules = (block for block in run.blocks if isinstance(block, nn.Module))
            within = self._without_gradient(p for module in modules for p in module.parameters())
        autocast = torch._C._is_any_autocast_enabled()
        key = (_blocks(run), run.apart, _signature(given), autocast, within)
        return self._chains.get(key) or _Chain(key, _about(given), len(run.blocks), run.apart)

    def _without_gradient(self, parameters: Iterable[Tensor]) -> int:
        """Return how many parameters will get a new gradient that counts."""
        return self.new_gradients and sum(p.grad is None for p in parameters if p.requires_grad)

    def _begun(self, chain: _Chain, given: Sequence[Tensor]) -> tuple[Segment, ...]:
        """Return the segments of a stack that is about to be run."""
        step, device = self._step, _device(given)
        step.chains.append(chain)
        self._running[chain.key[0]] = chain
        allocated = self._allocated(device) if len(step.chains) == 1 else 0
        if chain.step is not None and chain.ready:
            if chain.segments is None or allocated > chain.step.allocated:
                chain.step.allocated = max(allocated, chain.step.allocated)
                chain.step.solve(self.memory_budget)
        else:
            chain.segments, chain.step = None, step
            chain.forwards += 1
            if step.outside is None:
                step.outside, step.allocated = self._watch(step, device), allocated
        self._measuring = any(
            chain.segments is None or not chain.measured for chain in self._running.values()
        )
        return chain.measuring_plan() if chain.segments is None else chain.segments

    def _watch(self, step: _Step, device: torch.device) -> Outside:
        """Watch what a step holds outside of its blocks, and no longer what the step before did."""
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled():
            self._warn_of_casts()
        waiting = None if self._outside is None else self._outside()
        if waiting is not None:
            waiting.stop()
        call = self._call
        given: set[int] = set()
        if call is not None:
            given = call.given | storage_keys((*call.model.parameters(), *call.model.buffers()))
        outside = Outside(
            device,
            given=given,
            meter=None if call is None else call.meter,
            new_gradients=self.new_gradients,
            moved="offload" in self.modes,
            finished=step.saw,
        )
        self._outside = weakref.ref(outside)
        return outside

    def _warn_of_casts(self) -> None:
        """Tell once what a budget does not know."""
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"a memory budget ({_tell(self.memory_budget)}) is planned for under autocast, which keeps the weights that "
                "it has cast to its end: what these take is not known, so that a step may take more than the budget, or a "
                "budget be refused that could be kept. Give the model the dtype it computes in, look at a step's peak "
                "(blockhooks.memory.peak) and set the budget by that, or use a plan.",
                BlockhooksWarning,
                stacklevel=2,
            )

    def _allocated(self, device: torch.device) -> int:
        """Bytes of a peak that are there before the step: parameters, gradients, what the optimizer holds."""
        if isinstance(self.memory_budget, float) or device.type in ("cpu", "meta"):
            return 0
        return torch.accelerator.memory_allocated(device)

    # ---- measuring ------------------------------------------------------------------------------------------------

    def around_waiting(self, run: Run, segment: Segment) -> AbstractContextManager[Any]:
        """Give what is entered around the forward of a segment to be recomputed.

        In a measuring step its input moves away if blocks may: that is seen to be held if somebody else holds it.
        """
        if self._measuring and "offload" in self.modes:
            chain = self._running.get(_blocks(run))
            if chain is not None and chain.segments is None:
                return self.modes["offload"](run, segment)
        return contextlib.nullcontext()

    def begin_block(self, run: Run, segment: Segment, x: Hidden) -> Callable[..., None] | None:
        """Begin to measure a block whose region is about to be executed, if that is still to do.

        Args:
            run: The run.
            segment: Its segment, in the measuring plan of one block.
            x: The hidden state that it is given.

        Returns:
            What is to be called when the region has been executed (see `_measure`); None if nothing is.
        """
        if not self._measuring or len(segment) > 1 or is_recomputing():
            return None
        chain = self._running.get(_blocks(run))
        if chain is None or chain.step is None:
            return None
        if chain.segments is not None:
            if segment.start not in chain.costs:  # it was not called in the steps before
                for other in chain.step.chains:
                    other.step, other.forwards = None, 0
            return None
        outside = chain.step.outside
        assert outside is not None
        outside.begin_block(tensors_in(x), tensors_in(run.side()))
        return partial(self._measure, chain, outside, run, segment, x)

    def _measure(
        self,
        chain: _Chain,
        outside: Outside,
        run: Run,
        segment: Segment,
        x: Hidden,
        region: Region,
        result: Hidden,
        factories: Factories,
    ) -> None:
        """Measure a block whose region has just been executed.

        Args:
            chain: Its stack.
            outside: What watches the step.
            run: The run.
            segment: Its segment.
            x: The hidden state that it was given.
            region: Its region.
            result: The hidden state that it gave.
            factories: What has to be entered around its recompute.

        Raises:
            BudgetError: If it was the last block of a run of its own, and no plan keeps the budget.
        """
        index = segment.start
        outside.end_block(tensors_in(result), tensors_in(run.side()))
        assert chain.step is not None
        chain.step.calls.append((chain, index))
        if index in chain.costs:
            outside.measured_block(None, keeps_output=index in chain.keeps_output)
            return
        self._remember(chain)
        chain.inputs[index] = sum(t.nbytes for t in tensors_in(x))
        if segment in run.kept:
            if index not in chain.refused:  # its state may only have changed for the first time
                chain.refused.add(index)
                return
            chain.costs[index] = _kept_only(run.name(index))
        else:
            with outside.paused():
                measured = measure_block(
                    _executing(region, factories),
                    x,
                    modules=survey([run.blocks[index]]).modules,
                    side=run,
                    name=run.name(index),
                    modes={m: partial(around, run, segment) for m, around in self.modes.items()},
                    new_gradients=self.new_gradients,
                )
            chain.costs[index] = measured.costs
            if measured.keeps_output:
                chain.keeps_output.add(index)
            if measured.communicates:
                chain.communicates = f"{run.name(index)} ({measured.communicates})"
            outside.measured_block(
                measured.saved, measured.unsaved, keeps_output=measured.keeps_output
            )
        if chain.measured and not chain.apart:
            chain.step.solve(self.memory_budget)

    def _remember(self, chain: _Chain) -> None:
        while len(self._chains) >= REMEMBERED and chain.key not in self._chains:
            del self._chains[next(iter(self._chains))]
        self._chains[chain.key] = chain

    # ---- what was done --------------------------------------------------------------------------------------------

    @property
    def _steps(self) -> list[_Step]:
        steps = [chain.step for chain in self._chains.values() if chain.step is not None]
        return list(dict.fromkeys(steps))

    @property
    def profiles(self) -> list[ChainProfile]:
        """The profiles of the steps that were measured, one for each shape."""
        measured = [s for s in self._steps if all(chain.measured for chain in s.chains)]
        return [step.profile() for step in measured]

    @property
    def plans(self) -> list[Plan]:
        """The plans of the steps that were measured, one for each shape. Its blocks are those of all stacks in turn."""
        return [step.plan for step in self._steps if step.plan is not None]

    def report(self) -> str:
        """Tell the budget, and for each step and shape what is planned, or that it is yet to be measured."""
        lines = [f"memory budget {_tell(self.memory_budget)}"]
        for step in self._steps:
            lines.append(f"{step.about}:")
            costs = [block for chain in step.chains for block in chain.costs.values()]
            told = str(step.plan) if step.plan else f"{len(costs)} blocks measured so far"
            lines += [f"  {line}" for line in told.splitlines()]
            moved = any(mode.mode == "offload" for block in costs for mode in block.modes)
            if "offload" in self.modes and costs and not moved:
                lines.append("  no block holds less by offloading")
        return "\n".join(lines)

    def __deepcopy__(self, memo: dict[int, Any]) -> Planner:
        """A copy knows nothing of blocks that are not its own."""
        return Planner(self.memory_budget, self.modes, new_gradients=self.new_gradients)

    def __reduce__(self) -> tuple[Any, ...]:
        make = partial(Planner, new_gradients=self.new_gradients)
        return make, (self.memory_budget, self.modes)


def _in_its_place(block: BlockCosts, gaps: Gaps, place: int) -> BlockCosts:
    """Return the costs of a block with what is held around it in a step."""
    kept_too, lasting = gaps.kept_too[place], gaps.lasting[place]
    waiting = gaps.waiting[place] + max(lasting - kept_too, 0)
    gap, gap_peak, passing = gaps.held[place], gaps.peaks[place], gaps.passing[place]
    needed = gaps.needed[place]
    return replace(
        block,
        backward=block.backward if needed else 0.0,
        recompute=block.recompute if needed else 0.0,
        output=block.output + gaps.handed_out[place],
        kept=max(block.kept - kept_too, 0),
        backward_peak=block.backward_peak + waiting,
        gradient=block.gradient + waiting,
        passing=passing,
        placed=gaps.placed[place],
        unkept=gaps.unkept[place],
        twice=min(lasting, kept_too),
        carried=gaps.carried[place],
        freed=gaps.freed[place],
        needed=needed,
        lasting=gaps.there[place],
        gap=gap,
        # What takes less than the block itself needs no thought.
        gap_peak=gap_peak if gap or gap_peak > block.forward_peak + passing else 0,
        modes=tuple(_mode_in_its_place(mode, gaps, place) for mode in block.modes),
    )


def _mode_in_its_place(mode: ModeCosts, gaps: Gaps, place: int) -> ModeCosts:
    """Return the costs of a mode in the same way: of what a block hands out, each mode keeps another part."""
    handed_out, placed = gaps.handed_out[place], gaps.placed[place]
    unkept = min(mode.unkept or 0, handed_out + placed)
    kept_too = max(handed_out - unkept, 0)
    waiting = gaps.waiting[place] + max(gaps.lasting[place] - kept_too, 0)
    return replace(
        mode,
        kept=max(mode.kept - kept_too, 0),
        backward_peak=mode.backward_peak + waiting,
        unkept=max(unkept - handed_out, 0),
        lingering=min(mode.let_go, gaps.lingering[place]),
    )


def _letting_go(block: BlockCosts, most: int) -> BlockCosts:
    """Return the costs of a block with no more of its input let go than nobody else holds."""
    modes = (replace(mode, let_go=min(mode.let_go, most)) for mode in block.modes)
    return replace(block, modes=tuple(modes))


def _executing(region: Region, factories: Factories) -> Callable[..., Any]:
    def execute(x: Any, inside: AbstractContextManager[Any]) -> Any:
        with contextlib.ExitStack() as stack:
            stack.enter_context(as_recompute())
            for factory in factories:
                stack.enter_context(factory())
            stack.enter_context(inside)
            return region(x)

    return execute


def _blocks(run: Run) -> Signature:
    """What tells a stack from another: its modules, or what else its blocks are, which may be made anew each step."""
    return tuple(
        (id(block), block.training, *(parameter.requires_grad for parameter in block.parameters()))
        if isinstance(block, nn.Module)
        else _kind(block)
        for block in run.blocks
    )


def _kind(block: Any) -> str:
    code = getattr(block, "__qualname__", None) or type(block).__qualname__
    return f"{getattr(block, '__module__', '')}.{code}"


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _signature(value: Any) -> Signature:
    """Shapes, dtypes and devices, in no order: x may stand in several places among the arguments."""
    return tuple(
        sorted(
            (str(t.dtype), str(t.device), tuple(t.shape), t.requires_grad)
            for t in tensors_in(value)
        )
    )


def _flags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Signature:
    """What else tells one call of a model from another, such as ``use_cache=True``."""
    named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
    return tuple((name, value) for name, value in named.items() if isinstance(value, bool))


def _about(value: Any) -> str:
    tensors: list[Tensor] = tensors_in(value)
    if not tensors:
        return "no tensors"
    shown = [f"{list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors[:3]]
    estimated = " (seconds are estimates)" if tensors[0].is_meta else ""
    return f"{', '.join(shown)} on {tensors[0].device}{estimated}"


def _tell(budget: str | int | float) -> str:
    if isinstance(budget, str):
        return budget
    return (
        f"{budget:.0%} of the plain loop's peak"
        if isinstance(budget, float)
        else format_bytes(budget)
    )


def _kept_only(name: str) -> BlockCosts:
    """Costs of a block that cannot be executed again: unknown, but never recomputed."""
    return BlockCosts(
        name=name, forward=0.0, backward=0.0, output=0, kept=0, recompute=float("inf")
    )


def _evened(blocks: Sequence[BlockCosts]) -> tuple[BlockCosts, ...]:
    """Give blocks of the same bytes the median of their times: what one measurement says of one block is noise."""
    groups: dict[Any, list[BlockCosts]] = {}
    for block in blocks:
        groups.setdefault(_bytes(block), []).append(block)
    return tuple(_with_median_times(block, groups[_bytes(block)]) for block in blocks)


def _bytes(block: BlockCosts) -> Any:
    modes = tuple((mode.mode, mode.kept) for mode in block.modes)
    return block.output, block.kept, block.forward_peak, block.backward_peak, modes


def _with_median_times(block: BlockCosts, group: Sequence[BlockCosts]) -> BlockCosts:
    extras = zip(*(other.modes for other in group), strict=True)
    return replace(
        block,
        forward=statistics.median(other.forward for other in group),
        backward=statistics.median(other.backward for other in group),
        recompute=statistics.median(other.recompute_time for other in group),
        modes=tuple(
            replace(mode, extra=statistics.median(other.extra for other in modes))
            for mode, modes in zip(block.modes, extras, strict=True)
        ),
    )
