"""The errors: their kinds, and their words."""

import pytest

import blockhooks
from blockhooks import errors

KINDS = {
    "PlanError": ValueError,
    "HookError": TypeError,
    "RecomputeError": RuntimeError,
    "AttachError": ValueError,
    "BudgetError": ValueError,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_an_error_is_ours_and_of_a_usual_kind(name, kind):
    error = getattr(blockhooks, name)
    assert issubclass(error, blockhooks.BlockhooksError)
    assert issubclass(error, kind)
    assert error.__doc__


def test_the_tree_in_the_docstring_is_complete():
    for name, kind in KINDS.items():
        assert f"{name}({kind.__name__})" in errors.__doc__
    assert "BlockhooksWarning(UserWarning)" in errors.__doc__
    assert issubclass(blockhooks.BlockhooksWarning, UserWarning)


def test_an_extra_that_is_missing_is_named():
    with pytest.raises(
        blockhooks.MissingExtraError,
        match=r"^drawing needs no_such_package, which is not installed; install it with: pip install 'blockhooks\[demo\]'$",
    ):
        errors.import_extra("no_such_package.part", "demo", "drawing")


def test_an_extra_that_is_there_is_imported():
    assert errors.import_extra("collections.abc", "demo", "nothing").Iterable


def test_an_error_inside_of_an_extra_is_not_called_missing(tmp_path, monkeypatch):
    (tmp_path / "broken_extra.py").write_text("import no_such_package_either\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_either") as caught:
        errors.import_extra("broken_extra", "demo", "drawing")
    assert not isinstance(caught.value, blockhooks.BlockhooksError)


@pytest.mark.parametrize("value", ["no", None, 0, 1])
def test_a_switch_is_true_or_false(value):
    with pytest.raises(
        blockhooks.HookError, match=rf"^x expected True or False, found {value!r}\.$"
    ):
        errors.check_flag(value, "x")
    assert errors.check_flag(False, "x") is False
