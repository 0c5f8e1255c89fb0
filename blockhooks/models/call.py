"""The call of a block; see `blockhooks.calls`."""

from blockhooks.calls import call_block, in_backward

__all__ = ["call_block", "in_backward"]
