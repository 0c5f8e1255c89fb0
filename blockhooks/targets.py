"""What the command line works on: a model and example inputs, from the user's own code or from transformers.

* ``package.module:factory`` or ``path/to/file.py:factory``: a function without arguments that returns a model, or a
  model and its inputs. Inputs are a tensor, a tuple (positional) or a dict (by keyword).
* ``hf:gpt2``: an architecture of transformers by its model type, with random weights; nothing is downloaded.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from blockhooks.errors import BlockhooksError, import_extra

__all__ = ["FactoryError", "Target", "TargetError", "build_model", "load_target", "loss_of"]


class TargetError(BlockhooksError, ValueError):
    """A target does not name a model; the message says what was expected."""


class FactoryError(BlockhooksError):
    """The user's own code raised; its exception is the cause."""


@dataclass(frozen=True)
class Target:
    """A model with example inputs.

    Attributes:
        name: How the user named it.
        model: The model, in training mode.
        args: Positional inputs.
        kwargs: Inputs by keyword.
    """

    name: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def loss(self) -> Tensor:
        """Run the model forward and return its loss."""
        return loss_of(self.model(*self.args, **self.kwargs))


def loss_of(output: Any) -> Tensor:
    """Return the model's own loss where it has one, else the mean square of all that can be differentiated.

    Raises:
        TargetError: If nothing in the output depends on the weights.
    """
    loss = output.get("loss") if hasattr(output, "get") else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    parts = [t.abs().square().mean() for t in tensors if t.requires_grad]
    if not parts:
        raise TargetError(
            f"the model returned a {type(output).__name__} without any tensor that depends on its weights; "
            "a step needs one"
        )
    return torch.stack([part.to(parts[0].device, torch.float32) for part in parts]).sum()


def load_target(
    target: str,
    *,
    batch: int = 2,
    seq: int = 128,
    config: Sequence[str] = (),
    meta: bool = False,
) -> Target:
    """Load a target.

    Args:
        target: ``module:factory``, ``file.py:factory`` or ``hf:type``.
        batch: Batch size of the inputs that are made up (``hf:``).
        seq: Tokens in a sequence of the inputs that are made up (``hf:``).
        config: Settings of the architecture as ``key=value`` (``hf:``).
        meta: Make the model on the meta device, where it takes no memory.

    Raises:
        TargetError: If there is no such thing, or the factory returns something else than a model.
        FactoryError: If the user's code raises.
    """
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise TargetError(
            f"expected module:factory, file.py:factory or hf:type (such as hf:gpt2), found {target!r}"
        )
    if source == "hf":
        torch.manual_seed(0)
        model = build_model(name, _settings(config), meta=meta)
        return Target(target, model, (), _inputs(model, model.config, batch, seq))
    if config:
        raise TargetError(
            "--config sets up hf: targets; a factory has its settings in its own code"
        )
    factory = _find(source, name)
    with torch.device("meta") if meta else nullcontext():
        return _from_factory(target, factory)


# --- the user's own code ----------------------------------------------------------------------------------------------


def _find(source: str, name: str) -> Callable[[], Any]:
    """Find a function in a file or a module of the user's."""
    if source.endswith(".py"):
        if not Path(source).exists():
            raise TargetError(f"no file at {source}")
        names = _call(source, lambda: runpy.run_path(source))
    else:
        sys.path.insert(0, str(Path.cwd()))
        if _missing(source):
            raise TargetError(f"no module {source!r} in {Path.cwd()} or among what is installed")
        names = _call(source, lambda: vars(importlib.import_module(source)))
    factory: Callable[[], Any] | None = names.get(name)
    if not callable(factory):
        known = sorted(n for n, v in names.items() if isinstance(v, FunctionType))
        raise TargetError(
            f"{source} has no function {name!r}; it has {', '.join(known) or 'none at all'}"
        )
    return factory


def _missing(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        return True


def _call(what: str, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except Exception as error:
        raise FactoryError(f"{what} raised {type(error).__name__}") from error


def _from_factory(target: str, factory: Callable[[], Any]) -> Target:
    made = _call(target, factory)
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise TargetError(
            f"{target} returned a {type(model).__name__}; expected a model, or a model and its inputs"
        )
    if inputs is None:
        raise TargetError(f"{target} returned a model alone; return (model, inputs)")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, dict):
        kwargs = inputs
    else:
        args = inputs if isinstance(inputs, tuple) else (inputs,)
    return Target(target, model.train(), args, kwargs)


# --- transformers -----------------------------------------------------------------------------------------------------

HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModel",
)


def _settings(pairs: Sequence[str]) -> dict[str, Any]:
    settings = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise TargetError(f"--config: expected key=value, found {pair!r}")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


def build_model(kind: str, settings: dict[str, Any], *, meta: bool = False) -> Any:
    """Build an architecture of transformers with random weights, in training mode.

    Args:
        kind: The model type, such as ``"gpt2"``.
        settings: What its configuration shall have other than by default.
        meta: Make it on the meta device, where it takes no memory.

    Raises:
        TargetError: If there is no such type or setting, or it does not fit into this machine's memory.
        MissingExtraError: If transformers is not installed.
    """
    transformers = import_extra("transformers", "hf", f"hf:{kind}")
    if kind not in transformers.CONFIG_MAPPING:
        close = [known for known in transformers.CONFIG_MAPPING if kind.split("-")[0] in known][:5]
        raise TargetError(
            f"transformers {transformers.__version__} has no model type {kind!r}"
            + (f"; did you mean {', '.join(close)}?" if close else "")
        )
    config = _configured(transformers.AutoConfig, kind, settings)
    head = next(
        getattr(transformers, name)
        for name in HEADS
        if type(config) in getattr(transformers, name)._model_mapping
    )
    with torch.device("meta"):
        model = head.from_config(config)
    if not meta:
        _refuse_what_does_not_fit(model, kind)
        model = head.from_config(config)
    return model.train()


def _configured(configs: Any, kind: str, settings: dict[str, Any]) -> Any:
    """Make a configuration; transformers itself takes settings of any name."""
    known = configs.for_model(kind)
    for name in settings:
        if not hasattr(known, name):
            close = difflib.get_close_matches(name, known.to_dict(), n=3)
            raise TargetError(
                f"--config: {kind} has no setting {name!r}"
                + (f"; did you mean {' or '.join(close)}?" if close else "")
            )
    try:
        return configs.for_model(kind, **settings)
    except Exception as error:
        raise TargetError(f"--config: {kind} cannot be set up so: {error}") from error


def _refuse_what_does_not_fit(model: nn.Module, kind: str) -> None:
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if 2 * nbytes > memory:  # the weights and their gradients
        raise TargetError(
            f"hf:{kind} has weights of {nbytes / 2**30:.1f} GiB, and as much again for gradients; this machine has "
            f"{memory / 2**30:.1f} GiB. Make it smaller, as in --config num_hidden_layers=2, or plan "
            "without its memory: blockhooks plan --meta"
        )


def _inputs(model: nn.Module, config: Any, batch: int, seq: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        shape = (batch, getattr(config, "num_channels", 3), height, width)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    vocabulary = config.get_text_config().vocab_size
    tokens = torch.randint(vocabulary, (batch, seq), generator=generator)
    return {"input_ids": tokens, "labels": tokens}
