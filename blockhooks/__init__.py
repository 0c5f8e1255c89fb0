"""blockhooks: do things around the blocks of a model (checkpoint, profile, offload, intervene), bit for bit.

This file is the public face. The floors below it, lowest first: `plan`, `structure` and `errors`; `recompute` (the one
hard file) and `memory`; `hookspecs` and `run`; the built-in `hooks`; `chain`; `apply`.
"""

from __future__ import annotations

from blockhooks import budget, plan
from blockhooks.apply import apply_blocks
from blockhooks.chain import HookChain
from blockhooks.checkpointing import checkpoint
from blockhooks.errors import (
    AttachError,
    BlockhooksError,
    BlockhooksWarning,
    BudgetError,
    HookError,
    MissingExtraError,
    OffloadError,
    PlanError,
    RecomputeError,
)
from blockhooks.hooks.checkpoint import Checkpoint
from blockhooks.hooks.offload import Offload
from blockhooks.hooks.profile import Profile
from blockhooks.hooks.rng import RNGSnapshot
from blockhooks.hooks.selective import Selective
from blockhooks.hooks.state import StateSnapshot
from blockhooks.hooks.versions import VersionGuard
from blockhooks.hookspecs import hookimpl
from blockhooks.models import attach
from blockhooks.modules import Checkpointed, HookedBlock, HookedBlocks
from blockhooks.plan import Segment
from blockhooks.recompute import is_recomputing
from blockhooks.run import current_block
from blockhooks.verify import verify

__all__ = [
    "AttachError",
    "BlockhooksError",
    "BlockhooksWarning",
    "BudgetError",
    "Checkpoint",
    "Checkpointed",
    "HookChain",
    "HookError",
    "HookedBlock",
    "HookedBlocks",
    "MissingExtraError",
    "Offload",
    "OffloadError",
    "PlanError",
    "Profile",
    "RNGSnapshot",
    "RecomputeError",
    "Segment",
    "Selective",
    "StateSnapshot",
    "VersionGuard",
    "apply_blocks",
    "attach",
    "budget",
    "checkpoint",
    "current_block",
    "hookimpl",
    "is_recomputing",
    "plan",
    "verify",
]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("blockhooks")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
