"""One training step as a comparable record: bits of outputs, gradients, state, and random generators."""

from __future__ import annotations

import random

import numpy
import torch
from torch import nn

from blockhooks import apply_blocks
from blockhooks.structure import tensors_in

MODES = ("backward", "two backwards", "autograd.grad", "double backward", "no gradient")


def bits(tensor):
    """A tensor as dtype, shape and bytes, so that NaN equals itself and -0.0 does not equal 0.0."""
    if tensor is None:
        return None
    data = tensor.detach().contiguous()
    return str(data.dtype), tuple(data.shape), data.numpy().tobytes()


def total(output):
    """A scalar to which each element of each tensor contributes differently."""
    parts = [
        (t.square() + t).reshape(-1) @ torch.linspace(-1.0, 1.5, t.numel())
        for t in tensors_in(output)
        if t.requires_grad
    ]
    return torch.stack(parts).sum() if parts else None


def rng_states(blocks=()):
    generators = {
        id(value): value
        for block in blocks
        for module in (block.modules() if isinstance(block, nn.Module) else ())
        for value in vars(module).values()
        if isinstance(value, torch.Generator | numpy.random.Generator)
    }
    kept = [
        bits(g.get_state()) if isinstance(g, torch.Generator) else str(g.bit_generator.state)
        for g in generators.values()
    ]
    of_numpy = numpy.random.get_state()
    return (
        bits(torch.get_rng_state()),
        random.getstate(),
        (of_numpy[1].tobytes(), *of_numpy[2:]),
        *kept,
    )


def state(blocks):
    """Parameters, buffers, counters, flags and hooks of blocks, and all random generators."""
    record = {}
    for number, block in enumerate(blocks):
        for path, module in block.named_modules() if isinstance(block, nn.Module) else ():
            where = f"{number}.{path}"
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                record[f"{where}.{name}"] = bits(tensor)
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    record[f"{where}.{name}"] = bits(value)
                elif isinstance(value, bool | int | list):
                    record[f"{where}.{name}"] = list(value) if isinstance(value, list) else value
            hooks = module._forward_pre_hooks, module._forward_hooks
            record[f"{where} hooks"] = [len(registry) for registry in hooks]
    record["generators"] = rng_states(blocks)
    return record


def gradients(blocks, given):
    record = {
        f"gradient {number}.{name}": bits(parameter.grad)
        for number, block in enumerate(blocks)
        if isinstance(block, nn.Module)
        for name, parameter in block.named_parameters()
    }
    for number, tensor in enumerate(tensors_in(given)):
        record[f"gradient of input {number}"] = bits(tensor.grad)
    return record


def leaves(blocks, given):
    """Everything that has a gradient, each once."""
    parameters = [p for b in blocks if isinstance(b, nn.Module) for p in b.parameters()]
    unique = {id(t): t for t in (*parameters, *tensors_in(given)) if t.requires_grad}
    return list(unique.values())


def step(stack, hooks=(), mode="backward", steps=2):
    """Run steps of a stack built anew, and record everything."""
    blocks, x, side = stack.build()
    record = {}
    for number in range(steps):
        # In a block that works in place, x must be no leaf.
        start = (x[0] * 1.0, *x[1:]) if isinstance(x, tuple) else x * 1.0
        with torch.set_grad_enabled(mode != "no gradient"):
            output = apply_blocks(blocks, start, hooks=hooks, **side)
        loss = total(output)
        found = {f"output {i}": bits(t) for i, t in enumerate(tensors_in(output))}
        found["loss"] = bits(loss)
        if loss is not None:
            found.update(_backward(mode, loss, blocks, (x, side)))
        found.update(state(blocks))
        record.update({f"step {number}: {name}": value for name, value in found.items()})
    return record


def _backward(mode, loss, blocks, given):
    if mode == "two backwards":
        loss.backward(retain_graph=True)
        before = gradients(blocks, given)
        loss.backward()
        return {f"first {name}": value for name, value in before.items()} | gradients(blocks, given)
    if mode == "autograd.grad":
        found = torch.autograd.grad(loss, leaves(blocks, given), allow_unused=True)
        return {f"gradient {i}": bits(t) for i, t in enumerate(found)}
    if mode == "double backward":
        found = torch.autograd.grad(
            loss, leaves(blocks, given), allow_unused=True, create_graph=True
        )
        penalty = [t.square().sum() for t in found if t is not None and t.requires_grad]
        sum(penalty, loss).backward()
        return {f"first gradient {i}": bits(t) for i, t in enumerate(found)} | gradients(
            blocks, given
        )
    loss.backward()
    return gradients(blocks, given)


def difference(expected, found):
    """The names of what differs between two records, in order."""
    return [name for name in {**expected, **found} if expected.get(name) != found.get(name)]
