"""The pytest plugin: `assert_transparent` and `assert_repeatable` as fixtures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

__all__ = ["assert_repeatable", "assert_transparent"]


@pytest.fixture
def assert_transparent() -> Callable[..., None]:
    """The function `blockhooks.testing.assert_transparent`."""
    from blockhooks import testing

    return testing.assert_transparent


@pytest.fixture
def assert_repeatable() -> Callable[..., None]:
    """The function `blockhooks.testing.assert_repeatable`."""
    from blockhooks import testing

    return testing.assert_repeatable
