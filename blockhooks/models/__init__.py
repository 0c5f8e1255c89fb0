"""`attach`: put hooks on the blocks of any model, unmodified."""

from blockhooks.models.attached import Handle, attach
from blockhooks.models.report import AttachReport

__all__ = ["AttachReport", "Handle", "attach"]
