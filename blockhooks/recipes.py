"""Recipes: how to compute the result of a cheap operation again, from what autograd's node of it tells.

A recipe is looked up by the name of the node (``tensor.grad_fn.name()``). It names the operation's tensors in the order
of its inputs: each is taken from the node (``grad_fn._saved_<name>``), or where the node did not save it, from the node
of that input in turn. What no recipe knows is kept.

::

    @recipe("SinBackward0", "self")
    def sin(x):
        return torch.ops.aten.sin(x)

A recipe must give the operation's result bit for bit. It is compared with the forward's the first time that it is used
for a dtype, shape and layout, and is left out there if it differs. Call operations below `torch.nn.functional` (such as
`torch.ops.aten`), which users may have replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from blockhooks.errors import HookError

__all__ = ["RECIPES", "Recipe", "recipe"]

aten = torch.ops.aten


class Recipe(NamedTuple):
    """How to compute an operation's result again.

    Attributes:
        function: ``function(*tensors, **constants) -> Tensor``.
        tensors: Names of the operation's tensors, in the order of its inputs; those after the inputs are results that
            the node saves. A name that ends in ``?`` may be missing, and is then None.
        constants: Names of the operation's other arguments, as in ``grad_fn._saved_<name>``. ``shape``, ``dtype`` and
            ``output_nr`` are those of the result that is wanted.
    """

    function: Callable[..., Tensor]
    tensors: tuple[str, ...]
    constants: tuple[str, ...] = ()


RECIPES: dict[str, Recipe] = {}
"""The recipes, by the name of autograd's node."""


def recipe(
    node: str,
    *tensors: str,
    constants: Sequence[str] = (),
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Enter a function into `RECIPES`; a decorator.

    Args:
        node: The name of autograd's node, such as ``"GeluBackward0"``.
        *tensors: See `Recipe`.
        constants: See `Recipe`.

    Raises:
        HookError: If a name is no text, or what is entered is no function.
    """
    for name in (node, *tensors, *constants):
        if not isinstance(name, str):
            raise HookError(
                f"recipe(node, *tensors, constants=...) expected names, found {name!r}."
            )

    def enter(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        if not callable(function):
            raise HookError(f"recipe({node!r}, ...) expected a function, found {function!r}.")
        RECIPES[node] = Recipe(function, tensors, tuple(constants))
        return function

    return enter


def _operation(node: str, function: Callable[..., Tensor], *tensors: str, **names: str) -> None:
    """Enter an operation whose arguments have the names that the node gives them, or those in `names`."""

    def call(*values: Tensor, **constants: Any) -> Tensor:
        return function(*values, **{names[name]: value for name, value in constants.items()})

    alike = all(name == there for name, there in names.items())
    recipe(node, *tensors, constants=tuple(names))(function if alike else call)


# Activations and other pointwise operations of one tensor.
for _name in (
    *("abs", "cos", "erf", "exp", "hardsigmoid", "hardswish", "log", "mish", "neg", "reciprocal"),
    *("relu", "rsqrt", "sigmoid", "silu", "sin", "sqrt", "tanh"),
):
    _operation(f"{_name.capitalize()}Backward0", getattr(aten, _name).default, "self")
_operation("GeluBackward0", aten.gelu.default, "self", approximate="approximate")
_operation("LeakyReluBackward0", aten.leaky_relu.default, "self", negative_slope="negative_slope")
_operation("CeluBackward0", aten.celu.default, "self", alpha="alpha")
_operation("HardtanhBackward0", aten.hardtanh.default, "self", min_val="min_val", max_val="max_val")
_operation("SoftplusBackward0", aten.softplus.default, "self", beta="beta", threshold="threshold")
_operation("LogSigmoidBackward0", aten.log_sigmoid.default, "self")
_operation(
    "EluBackward0",
    aten.elu.default,
    "self",
    alpha="alpha",
    scale="scale",
    input_scale="input_scale",
)
_operation("PowBackward0", aten.pow.Tensor_Scalar, "self", exponent="exponent")
_operation("SoftmaxBackward0", torch.softmax, "self", dim="dim", dtype="dtype")
_operation("LogSoftmaxBackward0", torch.log_softmax, "self", dim="dim", dtype="dtype")

# Of two tensors. A Python number on the right of + and - leaves no trace in the graph: those are kept.
_operation("AddBackward0", aten.add.Tensor, "self", "other", alpha="alpha")
_operation("SubBackward0", aten.sub.Tensor, "self", "other", alpha="alpha")
_operation("MulBackward0", aten.mul.Tensor, "self", "other")
_operation("DivBackward0", aten.div.Tensor, "self", "other")

# Casts, copies and views.
_operation("TransposeBackward0", aten.transpose.int, "self", dim0="dim0", dim1="dim1")
_operation("PermuteBackward0", aten.permute.default, "self", dims="dims")
_operation("UnsqueezeBackward0", aten.unsqueeze.default, "self", dim="dim")
_operation("ExpandBackward0", aten.expand.default, "self", shape="size")
_operation("SelectBackward0", aten.select.int, "self", dim="dim", index="index")
_operation(
    "SliceBackward0", aten.slice.Tensor, "self", dim="dim", start="start", end="end", step="step"
)
for _name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze"):
    _operation(f"{_name}Backward0", Tensor.reshape, "self", shape="shape")
_operation("ToCopyBackward0", Tensor.to, "self", dtype="dtype")


@recipe("CloneBackward0", "self")
def _clone(x: Tensor) -> Tensor:
    # Mostly ``contiguous()``, or part of a reshape. A clone of another layout is found out, and kept.
    return x.clone(memory_format=torch.contiguous_format)


@recipe("SplitBackward0", "self", constants=("split_size", "dim", "output_nr"))
def _split(x: Tensor, split_size: int, dim: int, output_nr: int) -> Tensor:
    return torch.split(x, split_size, dim)[output_nr]


# Dropout. On a CPU it is a product with the noise; on a GPU an operation of its own, which saves its mask.
@recipe("NativeDropoutBackward0", "input", "result1", constants=("p",))
def _dropout(x: Tensor, mask: Tensor, p: float) -> Tensor:
    result: Tensor = aten.native_dropout_backward.default(x, mask, 1 / (1 - p) if p < 1 else 0.0)
    return result


# Norms. A layer norm's node does not tell its eps, but its rstd, in which eps is contained.
@recipe("NativeLayerNormBackward0", "input", "weight?", "bias?", "result1", "result2")
def _layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor
) -> Tensor:
    result = (_as(x, rstd.dtype) - mean).mul_(rstd)
    if weight is not None and bias is not None and _rounds_once(rstd.dtype, rstd.device):
        torch.addcmul(bias, result, weight, out=result)
    else:
        result = result if weight is None else result.mul_(weight)
        result = result if bias is None else result.add_(bias)
    return _as(result, x.dtype)


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype is dtype else x.to(dtype)


@cache
def _rounds_once(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel of layer norm multiplies with the weight and adds the bias in one rounding."""
    x = torch.arange(1024, dtype=dtype, device=device).reshape(4, 256).sin()
    weight, bias = x[0].exp(), x[1].cos()
    normed, mean, rstd = aten.native_layer_norm.default(x, [256], weight, bias, 1e-5)
    return x.is_meta or torch.equal(normed, torch.addcmul(bias, (x - mean) * rstd, weight))


@recipe("FusedRmsNormBackward0", "input", "weight?", "result1")
def _rms_norm(x: Tensor, weight: Tensor | None, rstd: Tensor) -> Tensor:
    # As the kernel does it: in the precision of rstd, and rounded once.
    result = x.to(rstd.dtype) * rstd
    return (result if weight is None else result * weight.to(rstd.dtype)).to(x.dtype)
