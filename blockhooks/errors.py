"""The errors and the warning of blockhooks.

    BlockhooksError(Exception)
    ├── PlanError(ValueError)        a plan does not cover the run, or its numbers do not fit
    ├── HookError(TypeError)         a plugin, or what a hook returned, is not what the hook chain needs
    ├── RecomputeError(RuntimeError) a region could not be executed again as it was executed in the forward; also a
    │                                torch.utils.checkpoint.CheckpointError
    ├── AttachError(ValueError)      no blocks, or no suitable ones, were found in a model
    ├── OffloadError(OSError)        a saved tensor could not be moved to the disk, or brought back from it
    ├── BudgetError(ValueError)      a memory budget cannot be kept
    └── MissingExtraError(ImportError) an optional dependency is not installed
    BlockhooksWarning(UserWarning)

A message says what was expected, what was found (with names and values), and what to do. Exceptions of blocks and
of hooks keep their type; they get a note that names blocks, phase and plugins.
"""

from __future__ import annotations

import operator
from importlib import import_module
from types import ModuleType
from typing import Any

from torch.utils.checkpoint import CheckpointError

__all__ = [
    "AttachError",
    "BlockhooksError",
    "BlockhooksWarning",
    "BudgetError",
    "HookError",
    "MissingExtraError",
    "OffloadError",
    "PlanError",
    "RecomputeError",
    "check_count",
    "check_flag",
    "import_extra",
]


class BlockhooksError(Exception):
    """Base of all errors that blockhooks raises itself."""


class PlanError(BlockhooksError, ValueError):
    """A plan leaves a gap, overlaps, reaches beyond the blocks, or was asked for with numbers that do not fit."""


class HookError(BlockhooksError, TypeError):
    """A plugin is not one, implements no hook, was given an option that does not fit, or a hook returned what it must not."""


class RecomputeError(BlockhooksError, CheckpointError):
    """A region cannot be recomputed as it ran in the forward.

    A `RuntimeError`, and what code written for torch's checkpoint catches: a `torch.utils.checkpoint.CheckpointError`.

    Common causes: a weight or an input was changed in place between forward and backward (step the optimizer after
    the backward), or a block draws on something that no hook carries across the boundary (see `recompute_context`).
    """


class AttachError(BlockhooksError, ValueError):
    """No repeated blocks were found in a model, or the ones asked for do not exist."""


class BudgetError(BlockhooksError, ValueError):
    """A memory budget lies below what any plan can reach, or is not a budget.

    Attributes:
        floor: The least peak that a plan reaches, in bytes, where a budget was below it.
        plan: The `blockhooks.budget.Plan` that reaches it.
    """

    floor: int | None = None
    plan: Any = None


class OffloadError(BlockhooksError, OSError):
    """A saved tensor could not be written to a file, or its file is gone or changed before the backward.

    Common causes: a full disk, or something that cleans up temporary files while training runs.
    """


class MissingExtraError(BlockhooksError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class BlockhooksWarning(UserWarning):
    """Something will work, but probably not as it was meant."""


def check_count(value: Any, name: str) -> int:
    """Check a number that somebody gave as an argument.

    Args:
        value: The number.
        name: The argument, as in ``"Selective(min_bytes=...)"``.

    Raises:
        HookError: If it is no integer of at least 0.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 0:
        raise HookError(f"{name} expected an integer of at least 0, found {value!r}.")
    return operator.index(value)


def check_flag(value: Any, name: str) -> bool:
    """Check a switch that somebody gave as an argument.

    Args:
        value: The switch.
        name: The argument, as in ``"Checkpoint(early_stop=...)"``.

    Raises:
        HookError: If it is neither True nor False.
    """
    if not isinstance(value, bool):
        raise HookError(f"{name} expected True or False, found {value!r}.")
    return value


def import_extra(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Name of the module, such as ``"matplotlib.pyplot"``.
        extra: The extra of blockhooks that installs it.
        purpose: What it is needed for, as in "drawing a Pareto curve".

    Raises:
        MissingExtraError: If it is not installed; the message names the extra.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        raise MissingExtraError(
            f"{purpose} needs {error.name}, which is not installed; "
            f"install it with: pip install 'blockhooks[{extra}]'"
        ) from error
