"""What a step holds outside of its blocks: embedding, head and loss, and what lies between stacks.

A gap is what a step does before its first block, between one block and the next, or after the last; there is one more
than there are blocks. Blocks can be executed again to be measured, but the code in the gaps is the model's and the
user's own. What it holds is in autograd's graph, though, once the backward begins: `Outside` counts the tensors that
nodes of the gaps have saved, and then follows their gradients, node by node, while the backward goes on.

Nothing of the step is changed. No tensor is held, hooks on nodes only look, and what a node takes inside itself is what
torch's allocator records meanwhile: no dispatch mode is around the backward, under which some derivatives give other
bits.
"""

from __future__ import annotations

import contextlib
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from math import prod
from operator import add, sub
from typing import Any, Final

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from blockhooks import memory
from blockhooks.structure import tensors_in

__all__ = ["LEAF", "Gaps", "Outside", "nodes_behind", "storage_keys"]

LEAF: Final = "torch::autograd::AccumulateGrad"

Gradients = Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class Gaps:
    """What a step of n blocks held outside of them, in bytes.

    Attributes:
        held: What came to be held in each of the n + 1 gaps, from the forward to the backward; negative where less is
            held than the output of the block before.
        peaks: Most at a time in each gap, above what was held before it.
        handed_out: What each block has put into its side inputs that the user holds in the backward, as in a cache.
        kept_too: How much of that is among what autograd keeps of the block.
        placed: What else each block has put there.
        unkept: How much of that is not among what autograd keeps of the block.
        lasting: What of all that each block gave is still held after the backward, by the user.
        waiting: What waits while the backward of each block is executed: gradients that later blocks and gaps have
            given to parameters, and to tensors that they share with this block or earlier ones; and what the user
            holds of the results.
        passing: What is held besides in the forward of each block, and no longer in the backward: by the model's own
            code.
        tail: Most at a time in the forward after the last block, as far as the model goes.
        carried: What is first given to each block, and held only for it or later ones to be executed again: side inputs
            that autograd does not keep.
        carried_to: The last block that is given it.
        freed: What of its hidden state before it nothing holds after each block's forward, as autograd does not keep
            it; but it is held where the block is to be executed again.
        needed: Whether the backward needs each block.
        there: Whether each block's part of autograd's graph is there in the backward.
        alone: What of the hidden state that each block is given nobody holds until the backward but the block.
        lingering: What of that the model's own code holds for a while when the block is over.
    """

    held: tuple[int, ...]
    peaks: tuple[int, ...]
    handed_out: tuple[int, ...]
    kept_too: tuple[int, ...]
    placed: tuple[int, ...]
    unkept: tuple[int, ...]
    lasting: tuple[int, ...]
    waiting: tuple[int, ...]
    passing: tuple[int, ...]
    carried: tuple[int, ...]
    carried_to: tuple[int, ...]
    freed: tuple[int, ...]
    needed: tuple[bool, ...]
    there: tuple[bool, ...]
    alone: tuple[int, ...]
    lingering: tuple[int, ...]
    tail: int


class Outside:
    """Watches the gaps of one step, from its first block to the end of its backward.

    The blocks and gaps of a step in order are its stages: even ones are gaps, odd ones blocks.

    Args:
        device: Where bytes are counted.
        given: Keys of storages that are there before the step.
        meter: What meters the forward of a model, if it is known where that begins and ends: all that is not given is
            made in it then. Otherwise, and after the model has returned, a tensor without gradients is taken for
            given: a mask, a target.
        new_gradients: Whether gradients of parameters that have none are counted.
        moved: Whether blocks let go of the hidden states that they are given, so that only others hold them.
        finished: Called at the end of the backward.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        given: Iterable[int] = (),
        meter: memory.Meter | None = None,
        new_gradients: bool = True,
        moved: bool = False,
        finished: Callable[[Gaps], None],
    ) -> None:
        self._device, self._given, self._meter = device, set(given), meter
        self._moved = moved
        self._new_gradients, self._finished = new_gradients, finished
        self._edges: list[int] = []  # autograd's sequence numbers where blocks begin and end
        self._end: int | None = None  # the one where the model has returned
        self._inputs: list[list[_Mark]] = []  # by block, if it lets go of them
        self._outputs: list[list[_Mark]] = []  # by block
        self._ends: set[int] = set()  # the numbers of the nodes that made them
        self._unsaved: list[int] = []  # by block
        self._placed: list[int] = []  # by block, bytes that it put into its side inputs
        # By gap, most bytes in it, those live at its end, and the hidden states that were.
        self._in_forward: list[tuple[int, int, list[_Mark]]] = []
        self._gap: memory.Meter | None = None
        self._results: list[weakref.ref[Tensor]] = []
        self._marks: dict[int, _Mark] = {}
        self._passed_on: list[
            _Mark
        ] = []  # what has gone of hidden states that autograd does not keep
        self._live = 0
        self._handles: list[Any] = []
        self._nodes: dict[Any, tuple[memory.Meter | None, int]] = {}  # that are being executed
        self._sums: dict[Any, int] = {}  # new tensors that gradients of parameters were added up in
        self._paused = False
        _watch(self)

    def stop(self) -> None:
        """Wait for no backward any more."""
        _unwatch(self)

    # ---- the forward ----------------------------------------------------------------------------------------------

    def begin_block(self, x: Sequence[Tensor], side: Sequence[Tensor]) -> None:
        """Begin a block, with the tensors in its hidden state and in its side inputs."""
        stage = len(self._edges)
        for tensor in x:
            self._hold(tensor, stage, kept=True)
        keys = storage_keys(x) if self._moved else ()
        self._inputs.append([self._marks[key] for key in keys if key in self._marks])
        for tensor in side:
            self._hold(tensor, stage)
        for key in storage_keys((*x, *side)):
            if key in self._marks:
                self._marks[key].given.append(stage)
        self._end_gap()
        self._edges.append(_get_sequence_nr())

    def end_block(self, output: Iterable[Tensor], side: Iterable[Tensor]) -> None:
        """End a block, with the hidden state that it gave and what is in its side inputs now."""
        stage = len(self._edges)
        self._edges.append(_get_sequence_nr())
        made = []
        for tensor in output:
            made += self._hold(tensor, stage)
            if tensor.grad_fn is not None:
                self._ends.add(tensor.grad_fn._sequence_nr())
        for mark in made:
            mark.output = True
        self._outputs.append(made)
        placed = [mark for tensor in side for mark in self._hold(tensor, stage)]
        self._placed.append(sum(mark.nbytes for mark in placed))
        self._unsaved.append(0)

    def measured_block(
        self, saved: Iterable[int] | None, unsaved: int = 0, *, keeps_output: bool = False
    ) -> None:
        """Learn more of the block that has just ended.

        Args:
            saved: Keys of the storages that it was given and that autograd keeps; None if not known.
            unsaved: Bytes that it put into its side inputs, and that autograd does not keep.
            keeps_output: Whether autograd keeps what it gives, for the block itself.
        """
        for mark in self._outputs[-1]:
            mark.own = keeps_output
        self._unsaved[-1] = min(unsaved, self._placed[-1])
        self._save(self._marks if saved is None else saved)
        if self._meter is not None:
            self._gap = memory.peak(self._device).__enter__()

    def _save(self, keys: Iterable[int]) -> None:
        """Note what autograd keeps."""
        for key in keys:
            if key in self._marks:
                self._marks[key].kept = self._marks[key].saved = True

    def returned(self, output: Any) -> None:
        """End the model's forward, with what it returns."""
        self._end_gap()
        self._end = _get_sequence_nr()
        for part in _parts(output):
            weak = part if not isinstance(part, tuple | list | dict) else None
            for tensor in tensors_in(part):
                self._hold(tensor, len(self._edges))
                self._results.append(weakref.ref(tensor))
                mark = self._marks.get(_key(tensor) or 0)
                if mark is not None:
                    mark.holders.append(weakref.ref(tensor if weak is None else weak))

    def _end_gap(self) -> None:
        """Note what a gap has held in the forward."""
        meter, gap = self._meter, self._gap
        if meter is None:
            self._in_forward.append((0, 0, []))
            return
        now, most = meter.now, meter.peak
        inputs = [mark for mark in chain(*self._inputs) if mark() is not None]
        if gap is not None:
            gap.__exit__(None, None, None)
            most, self._gap = now - gap.now + gap.peak, None
        self._in_forward.append((most, now, inputs))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let backwards that begin in the context pass: they are not the step's."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def _hold(
        self, tensor: Tensor, stage: int, *, kept: bool = False, known: bool = True
    ) -> list[_Mark]:
        """Note what a tensor holds from a stage on; return what is new of it.

        Args:
            tensor: The tensor.
            stage: The stage.
            kept: Whether it is held in every plan.
            known: Whether it was made in the step if it is not given; else that is so if it has gradients.
        """
        key = _key(tensor)
        if key is None or key in self._given or tensor.device != self._device:
            return []
        mark, new = self._marks.get(key), []
        if mark is None:
            if not tensor.requires_grad and not (self._meter is not None and known):
                return []
            mark = self._mark(tensor, key, stage)
            new.append(mark)
        elif mark.stage % 2 == 0:
            mark.stage = min(mark.stage, stage)
        mark.kept |= kept
        return new

    def _mark(self, tensor: Tensor, key: int, stage: int) -> _Mark:
        storage = tensor.untyped_storage()
        mark = self._marks[key] = _Mark(storage, self._freed)
        mark.key, mark.nbytes = key, storage.nbytes()
        mark.stage = stage
        mark.output = mark.kept = mark.saved = mark.own = mark.gradient = False
        mark.given, mark.holders = [], []
        self._live += mark.nbytes
        return mark

    def _freed(self, mark: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(mark, _Mark)
        if self._marks.get(mark.key) is mark:
            if mark.passed_on:
                self._passed_on.append(mark)
            self._forget(mark)

    def _forget(self, mark: _Mark) -> None:
        del self._marks[mark.key]
        self._live -= mark.nbytes

    # ---- the backward ---------------------------------------------------------------------------------------------

    def begin_backward(self, roots: Iterable[Any]) -> bool:
        """Look at the graph of a backward that is about to begin; return whether it is that of this step."""
        if self._paused or len(self._edges) % 2:
            return False
        needed = _graph(roots)
        self._needed = self._blocks_of(needed)
        if not any(self._needed):
            return False
        self.stop()
        if self._end is None:
            self._end_gap()
        results = [tensor for reference in self._results if (tensor := reference()) is not None]
        nodes = _graph((*roots, *results))
        self._there = self._blocks_of(nodes)
        stages = {node: self._stage(node) for node in nodes if node.name() != LEAF}
        leaves = [node for node in nodes if node not in stages]
        self._given |= storage_keys(leaf.variable for leaf in leaves)
        for mark in [mark for key, mark in self._marks.items() if key in self._given]:
            self._forget(mark)
        for root in roots if self._meter is not None else ():
            if isinstance(root, Tensor):  # the loss
                self._hold(root, len(self._edges), kept=True)
        self._weigh(self._hook(stages))
        self._waiting = self._waits(needed, stages)
        return True

    def _blocks_of(self, nodes: Iterable[Any]) -> list[bool]:
        """Tell of each block whether it has made some of the nodes."""
        stages = {self._stage(node) for node in nodes if node.name() != LEAF}
        return [stage in stages for stage in range(1, len(self._edges), 2)]

    def _hook(self, stages: dict[Any, int]) -> int:
        """Find what the nodes of the gaps have saved, and put hooks on them.

        Returns:
            Bytes of what the user's own code has saved, after the model.
        """
        after_model, firsts, leaves = 0, dict[Any, int](), set[Any]()
        for user in stages:
            for edge in user.next_functions:
                firsts[edge] = max(firsts.get(edge, 0), user._sequence_nr())
        for node, stage in stages.items():
            if stage % 2:
                continue
            try:
                saved, packed = _saved(node)
            except RuntimeError:  # changed in place, or freed: the backward will end here
                continue
            known = self._end is None or node._sequence_nr() < self._end
            for tensor in saved:
                new = self._hold(tensor, stage, known=known)
                after_model += sum(mark.nbytes for mark in new) * (not known)
            self._save(storage_keys(saved))
            # Code of the user's may do anything, also begin to profile.
            users = packed or isinstance(node, torch._C._FunctionBase)
            looks = self._device.type != "cpu" or not users
            edges, number = node.next_functions, node._sequence_nr()
            sums = [(i, edge[0]) for i, edge in enumerate(edges) if number < firsts[edge]]
            leaves |= {edge[0] for edge in edges} - stages.keys() - {None}
            before, after = partial(self._before, stage, looks), partial(self._after, stage, sums)
            self._handles += [node.register_prehook(before), node.register_hook(after)]
        for leaf in leaves:
            if leaf.variable.grad is None:
                self._sums[leaf] = 0
                self._handles.append(leaf.register_hook(partial(self._accumulated, leaf)))
        return after_model

    def _weigh(self, after_model: int) -> None:
        """Sum up what is held as the backward begins.

        Args:
            after_model: Bytes of what the user's own code has saved, which may hold all that the model returned meanwhile.
        """
        stages = len(self._edges) + 1
        held, handed_out, carried, last = ([0] * stages for _ in range(4))
        for mark in list(self._marks.values()):
            used = any(holder() is not None for holder in mark.holders)
            if mark.output or (mark.stage % 2 == 0 and (mark.kept or used)):
                held[mark.stage] += mark.nbytes
            elif used:
                handed_out[mark.stage] += mark.nbytes
            else:  # for blocks to be executed again
                carried[mark.stage] += mark.nbytes
                last[mark.stage] = max(last[mark.stage], mark.stage, *mark.given)
                self._forget(mark)
        gone = self._weigh_inputs()
        self._held = list(map(add, held[::2], gone))
        self._carried = carried[:-1:2]
        self._carried_to = [stage // 2 for stage in last[:-1:2]]
        self._handed_out = handed_out[1::2]
        both = list(map(min, self._unsaved, self._handed_out))
        self._kept_too = list(map(sub, self._handed_out, both))
        self._placed = list(map(sub, self._placed, self._handed_out))
        self._unkept = list(map(sub, self._unsaved, both))
        held = list(map(add, held, handed_out))
        self._below = [0, *accumulate(held)]
        self._dropped = [0] + [sum(map(self._lost, output)) for output in self._outputs]
        # In the forward there was also all that blocks have put into side inputs, and what is carried.
        carried[1::2] = self._placed
        there = [0, *accumulate(map(add, held, carried))]
        self._passing, self._peaks = [], []
        for gap, (most, now, inputs) in enumerate(self._in_forward):
            # What has gone since then is held where nothing moves.
            since = [mark for mark in inputs if mark() is None]
            before = sum(mark.nbytes for mark in since if mark.stage < 2 * gap)
            now -= sum(mark.nbytes for mark in since)
            self._passing.append(max(now - there[2 * gap + 1], 0))
            self._peaks.append(max(most - before - there[2 * gap], 0))
        self._peaks[-1] = max(self._peaks[-1], now + after_model - there[-2])
        self._seen = [0] * len(self._peaks)

    def _lost(self, output: _Mark) -> int:
        """Return the bytes of a block's output if nobody holds it: no user, nor a block that is to be gone through."""
        for_others = any(self._there[stage // 2] for stage in output.given)
        held = for_others or output.own or self._marks.get(output.key) is output
        return 0 if held else output.nbytes

    def _weigh_inputs(self) -> list[int]:
        """Sum up what has gone of the hidden states that blocks were given.

        Returns:
            Bytes of those that were made in each gap: where blocks are executed again and nothing moves they are held.
        """
        inputs = chain(*self._inputs, self._passed_on)
        gone = {id(mark): mark for mark in inputs if mark() is None}
        times = Counter(map(id, chain(*self._inputs)))
        self._alone, self._lingering = [], []
        for marks, (_, _, later) in zip(self._inputs, self._in_forward[1:], strict=True):
            alone = {id(m): m.nbytes for m in marks if id(m) in gone and times[id(m)] == 1}
            self._alone.append(sum(alone.values()))
            self._lingering.append(sum(alone.get(id(mark), 0) for mark in later))
        in_gaps = [0] * len(self._in_forward)
        for mark in gone.values():
            if mark.stage % 2 == 0:
                in_gaps[mark.stage // 2] += mark.nbytes
        return in_gaps

    def end_backward(self) -> None:
        """Tell what was seen, now that the backward is over."""
        self.let_go()
        outlived = [mark for mark in self._marks.values() if not mark.gradient]
        freed = [0] * len(self._outputs)
        for mark in self._passed_on:
            freed[mark.given[0] // 2] += mark.nbytes
        lasting = [0] * len(self._outputs)
        for mark in outlived:  # it was there in the backward of all before
            if mark.stage % 2:
                lasting[mark.stage // 2] += mark.nbytes
            for stage in range(1, min(mark.stage, len(self._edges)), 2):
                self._waiting[stage] += mark.nbytes
        backward = [
            seen + wait if seen else 0
            for seen, wait in zip(self._seen, self._waiting[::2], strict=True)
        ]
        *forward, tail = self._peaks
        peaks = map(max, (*forward, 0), backward, self._held)
        self._finished(
            Gaps(
                held=tuple(map(sub, self._held, self._dropped)),
                peaks=tuple(map(sub, peaks, self._dropped)),
                handed_out=tuple(self._handed_out),
                kept_too=tuple(self._kept_too),
                placed=tuple(self._placed),
                unkept=tuple(self._unkept),
                lasting=tuple(lasting),
                waiting=tuple(self._waiting[1::2]),
                passing=tuple(self._passing[:-1]),
                carried=tuple(self._carried),
                carried_to=tuple(self._carried_to),
                freed=tuple(freed),
                needed=tuple(self._needed),
                there=tuple(self._there),
                alone=tuple(self._alone),
                lingering=tuple(self._lingering),
                tail=tail - self._dropped[-1],
            )
        )

    def let_go(self) -> None:
        """Take the hooks away from the graph, which may live on."""
        for handle in self._handles:
            handle.remove()
        for meter, _ in self._nodes.values():  # there was an error
            if meter is not None:
                meter.__exit__(None, None, None)
        self._handles, self._nodes, self._sums = [], {}, {}

    def _stage(self, node: Any) -> int:
        return bisect_right(self._edges, node._sequence_nr())

    def _waits(self, nodes: Iterable[Any], stages: dict[Any, int]) -> list[int]:
        """Return the bytes of gradients that wait during each stage for a node of an earlier one."""
        first: dict[Any, int] = {}
        last: dict[Any, int] = {}
        for user in nodes:
            stage = stages.get(user, 0)
            for node, _ in user.next_functions:
                first[node] = min(first.get(node, stage), stage)
                last[node] = max(last.get(node, stage), stage)
        waiting = [0] * (len(self._edges) + 1)
        for node in nodes:
            if node not in last:
                continue
            if node not in stages:
                new = self._new_gradients and node.variable.grad is None
                start, nbytes = 0 if new else first[node], node.variable.nbytes
            else:
                own = stages[node]
                # What a block gives beside x gets a gradient that its own measuring does not know.
                extra = own % 2 == 1 and node._sequence_nr() not in self._ends
                start, nbytes = own if extra else own + 1, _gradient_bytes(node)
            for stage in range(start, last[node]):
                # What gaps give to gaps is seen by the hooks there.
                if stage % 2 or last[node] % 2:
                    waiting[stage] += nbytes
        return waiting

    def _before(self, stage: int, looks: bool, gradients: Gradients) -> None:
        """Look at the gradients that a node is about to be called with, and `looks` into it from now on."""
        self._see(gradients)
        self._note(stage, self._live)
        meter = memory.inside(self._device).__enter__() if looks else None
        # On several devices, several threads of autograd's are here.
        self._nodes[torch._C._current_autograd_node()] = meter, self._live

    def _after(
        self, stage: int, sums: list[tuple[int, Any]], gradients: Gradients, given: Gradients
    ) -> None:
        """Look at the gradients that a node has made, and at what it took itself.

        Some, by their indices in `sums`, are then added to what other nodes have made for a node. The meter of a CPU is a
        dispatch mode, under which that takes a further tensor.
        """
        meter, live = self._nodes.pop(torch._C._current_autograd_node())
        if meter is not None:
            meter.__exit__(None, None, None)
            memory.forget([t for t in gradients if t is not None and _key(t) not in self._marks])
            self._note(stage, live + meter.peak)
        self._see(gradients)
        self._note(stage, self._live)
        added = {leaf: t.nbytes for i, leaf in sums if (t := gradients[i]) is not None}
        if added and self._device.type == "cpu":
            done = sum(t.nbytes for t in given if t is not None and _is_alone(t))
            self._note(stage, self._live + max(added.values()) - done)
            if _len_torch_dispatch_stack():
                for leaf in added.keys() & self._sums.keys():
                    self._live += added[leaf] - self._sums[leaf]
                    self._sums[leaf] = added[leaf]

    def _accumulated(self, leaf: Any, *_: Gradients) -> None:
        """Look at the new gradient of a parameter, for which autograd takes what nodes have made, a sum, or a copy."""
        self._live -= self._sums.pop(leaf, 0)
        self._see([leaf.variable.grad])

    def _see(self, gradients: Gradients) -> None:
        for tensor in gradients:
            key = None if tensor is None else _key(tensor)
            if tensor is not None and key is not None and key not in self._marks:
                self._mark(tensor, key, len(self._edges)).gradient = True

    def _note(self, stage: int, live: int) -> None:
        self._seen[stage // 2] = max(self._seen[stage // 2], live - self._below[stage])


class _Mark(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage of a step.

    Attributes:
        key: The storage's key.
        nbytes: Its bytes.
        stage: From which on it is held.
        given: At which it was given to blocks.
        output: Whether it is a block's hidden state.
        kept: Whether it is held in every plan, not only where a block is to be executed again.
        saved: Whether autograd keeps it.
        own: Whether autograd keeps it for the block that made it.
        gradient: Whether it was made in the backward.
        holders: What holds it among the model's results.
    """

    __slots__ = (
        "given",
        "gradient",
        "holders",
        "kept",
        "key",
        "nbytes",
        "output",
        "own",
        "saved",
        "stage",
    )
    key: int
    nbytes: int
    stage: int
    given: list[int]
    output: bool
    kept: bool
    saved: bool
    own: bool
    gradient: bool
    holders: list[weakref.ref[Any]]

    @property
    def passed_on(self) -> bool:
        """Whether it is a hidden state that one block was given, and that autograd does not keep."""
        return self.kept and not (self.saved or self.own) and len(self.given) == 1


def _is_alone(tensor: Tensor) -> bool:
    """Whether a hook that is given a tensor is all that holds it and its storage."""
    key = _key(tensor)
    users: Any = tensor
    return key is not None and users._use_count() == torch._C._storage_Use_Count(key) == 2


def storage_keys(tensors: Iterable[Tensor]) -> set[int]:
    """Return keys of the tensors' storages, as `Outside` takes them."""
    return {key for tensor in tensors if (key := _key(tensor)) is not None}


def _parts(output: Any) -> Iterable[Any]:
    if isinstance(output, Mapping):
        return output.values()
    return output if isinstance(output, tuple | list) else (output,)


def _key(tensor: Tensor) -> int | None:
    strange = (
        tensor.layout is not torch.strided
        or not torch._C._has_storage(tensor)  # batched
        or is_traceable_wrapper_subclass(tensor)
    )
    return None if strange else int(tensor.untyped_storage()._cdata)


# ------------------------------------------------------------------------------------------------- autograd's graph


def _graph(roots: Iterable[Any]) -> list[Any]:
    """Return all nodes that a backward can reach."""
    firsts = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    nodes = dict.fromkeys(node for node in firsts if node is not None)
    return [*nodes, *(node for node in nodes_behind(nodes) if node not in nodes)]


def nodes_behind(nodes: Iterable[Any]) -> list[Any]:
    """Return all nodes that the gradients of some are handed on to."""
    todo, found = list(nodes), dict[Any, None]()
    while todo:
        for earlier, _ in todo.pop().next_functions:
            if earlier is not None and earlier not in found:
                found[earlier] = None
                todo.append(earlier)
    return list(found)


def _saved(node: Any) -> tuple[list[Tensor], bool]:
    """Return the tensors that a node has saved, or those that saved-tensor hooks gave, and whether there are such."""
    packed = False
    tensors: list[Any] = list(getattr(node, "__dict__", {}).values())  # of somebody's own Function
    for raw, name in _names_of_saved(type(node)):
        parts = getattr(node, raw)
        parts = parts if isinstance(parts, tuple | list) else (parts,)
        if all(part.unpack_hook is None for part in parts):
            value = getattr(node, name)
            tensors += value if isinstance(value, tuple | list) else (value,)
        else:
            packed = True
            tensors += [part.data for part in parts]
    return [tensor for tensor in tensors if isinstance(tensor, Tensor)], packed


_names: dict[type, list[tuple[str, str]]] = {}


def _names_of_saved(kind: type) -> list[tuple[str, str]]:
    """Return the names of a node's saved tensors: as they are packed, and as they are."""
    if kind not in _names:
        raws = [name for name in dir(kind) if name.startswith("_raw_saved_")]
        names = [name.removeprefix("_raw") for name in raws]
        names = [name if hasattr(kind, name) else name[1:] for name in names]
        _names[kind] = list(zip(raws, names, strict=True))
    return _names[kind]


def _gradient_bytes(node: Any) -> int:
    outputs = [output for output in node._input_metadata if not output.is_nested_tensor]
    return sum(prod(output.shape) * output.dtype.itemsize for output in outputs)


# --------------------------------------------------------------------------------------------- where backwards begin

_waiting: weakref.WeakSet[Outside] = weakref.WeakSet()
_autograd: Any = torch.autograd
_patch: partial[Any] | None = None


def _watch(outside: Outside) -> None:
    """Let a step know when a backward begins: there is no other sign of it (torch 2.14)."""
    global _patch
    _waiting.add(outside)
    weakref.finalize(outside, _restore).atexit = False
    if _autograd._engine_run_backward is not _patch:
        # With its own engine each: somebody may have put one that calls the patch before in its place.
        _patch = partial(_run_backward, _autograd._engine_run_backward)
        _autograd._engine_run_backward = _patch


def _unwatch(outside: Outside) -> None:
    _waiting.discard(outside)
    _restore()


def _restore() -> None:
    patch = _patch
    if not tuple(_waiting) and patch is not None and _autograd._engine_run_backward is patch:
        (_autograd._engine_run_backward,) = patch.args


def _run_backward(engine: Any, roots: Any, *args: Any, **kwargs: Any) -> Any:
    _restore()  # those that waited may be gone
    outermost = torch._C._current_graph_task_id() == -1
    begun = [o for o in tuple(_waiting) if o.begin_backward(roots)] if outermost else []
    try:
        result = engine(roots, *args, **kwargs)
    except BaseException:
        for outside in begun:
            outside.let_go()
        raise
    for outside in begun:
        outside.end_backward()
    return result
