"""`HookChain`: checks, order, wrappers, and what it explains."""

import types

import pluggy
import pytest
import torch

from blockhooks import (
    Checkpoint,
    HookChain,
    HookError,
    RNGSnapshot,
    Segment,
    StateSnapshot,
    VersionGuard,
    apply_blocks,
    hookimpl,
    hookspecs,
)
from tests.agree import leaf

DEFAULTS = ["VersionGuard", "StateSnapshot", "RNGSnapshot"]


def names(chain):
    return [type(plugin).__name__ for plugin in chain.plugins]


class Marks:
    """Notes each call of run_block, as a wrapper."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    @hookimpl(wrapper=True)
    def run_block(self, x):
        self.log.append(f"{self.name} in")
        try:
            return (yield)
        finally:
            self.log.append(f"{self.name} out")


# ---- what is in it ---------------------------------------------------------------------------------------------------


def test_defaults_are_at_the_inner_end():
    assert names(HookChain([Checkpoint()])) == ["Checkpoint", *DEFAULTS]
    assert names(HookChain()) == DEFAULTS
    assert (
        repr(HookChain(Checkpoint()))
        == "HookChain([Checkpoint, VersionGuard, StateSnapshot, RNGSnapshot])"
    )


def test_an_own_instance_takes_the_place_of_a_default():
    own = RNGSnapshot()
    assert names(HookChain([own, Checkpoint()])) == [
        "RNGSnapshot",
        "Checkpoint",
        "VersionGuard",
        "StateSnapshot",
    ]


def test_an_instance_of_a_subclass_takes_the_place_of_a_default():
    class Mine(StateSnapshot):
        pass

    assert names(HookChain([Mine()])) == ["Mine", "VersionGuard", "RNGSnapshot"]


@pytest.mark.parametrize(
    "without", ["RNGSnapshot", ("RNGSnapshot",), ["StateSnapshot", "VersionGuard"]], ids=str
)
def test_defaults_can_be_left_out(without):
    left = {without} if isinstance(without, str) else set(without)
    assert (
        set(names(HookChain([Checkpoint()], without=without))) == {"Checkpoint", *DEFAULTS} - left
    )


def test_no_default_of_this_name():
    with pytest.raises(
        HookError,
        match=r"without='RngSnapshot' names no default plugin; did you mean 'RNGSnapshot'\?",
    ):
        HookChain(without="RngSnapshot")
    with pytest.raises(HookError, match=r"without=<class .*VersionGuard'> names no default plugin"):
        HookChain(without=[VersionGuard])
    with pytest.raises(HookError, match=r"without=3: expected names of default plugins, such as"):
        HookChain(without=3)


def test_a_module_may_be_a_plugin():
    module = types.ModuleType("plugin")
    log = []

    @hookimpl
    def run_block(index, x):
        log.append(index)

    module.run_block = run_block
    apply_blocks([torch.sin] * 2, leaf(2), hooks=module)
    assert log == [0, 1]


def test_methods_of_an_instance_are_found():
    class Empty:
        pass

    plugin, log = Empty(), []
    plugin.run_block = hookimpl(lambda index: log.append(index))
    apply_blocks([torch.sin] * 2, leaf(2), hooks=[plugin])
    other = Empty()
    with pytest.raises(HookError, match="implements no hook"):
        HookChain([other])
    assert log == [0, 1]


def test_inherited_implementations_are_found():
    class Base:
        @hookimpl
        def run_block(self, index):
            log.append(index)

    class Child(Base):
        pass

    log = []
    apply_blocks([torch.sin] * 2, leaf(2), hooks=[Child()])
    assert log == [0, 1]


def test_specname_gives_another_name_to_an_implementation():
    class Plugin:
        @hookimpl(specname="run_block")
        def look(self, index):
            log.append(index)

    log = []
    apply_blocks([torch.sin] * 2, leaf(2), hooks=[Plugin()])
    assert log == [0, 1]


def test_two_instances_of_a_class_are_two_plugins():
    log = []
    apply_blocks([torch.sin], leaf(2), hooks=[Marks("a", log), Marks("b", log)])
    assert log == ["a in", "b in", "b out", "a out"]


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_class_is_refused():
    with pytest.raises(
        HookError,
        match=r"^hooks\[1\] is the class Checkpoint, not an instance; write Checkpoint\(\)\.$",
    ):
        HookChain([RNGSnapshot(), Checkpoint])


def test_the_same_plugin_twice_is_refused():
    plugin = Marks("a", [])
    with pytest.raises(HookError, match=r"hooks\[2\] \(Marks\) is the same plugin as hooks\[0\]"):
        HookChain([plugin, Checkpoint(), plugin])


@pytest.mark.parametrize(
    "plugin",
    [3, None, "Checkpoint", object(), torch.nn.Linear(2, 2)],
    ids=lambda p: type(p).__name__,
)
def test_something_that_implements_no_hook_is_refused(plugin):
    with pytest.raises(HookError, match=r"hooks\[0\] .* implements no hook of blockhooks"):
        HookChain([plugin])


def test_an_unknown_hook_is_refused_with_a_suggestion():
    class Steer:
        @hookimpl
        def run_blok(self, x):
            return x

    with pytest.raises(
        HookError,
        match=r"^hooks\[0\] \(Steer\) implements 'run_blok', which is no hook of blockhooks; did you mean 'run_block'\?$",
    ):
        HookChain([Steer()])


def test_a_hook_of_a_far_name_lists_those_there_are():
    class Steer:
        @hookimpl
        def zzz(self, x):
            return x

    with pytest.raises(
        HookError, match=r"implements 'zzz'.*known are plan_segments, run_blocks, run_segment"
    ):
        HookChain([Steer()])


def test_an_unknown_argument_is_refused_with_a_suggestion():
    class Steer:
        @hookimpl
        def run_block(self, idx, x):
            return x

    with pytest.raises(
        HookError,
        match=r"run_block of hooks\[0\] \(Steer\) takes the argument 'idx', which the hook does not have; .*"
        r"It has: run, index, block, x, recomputing\.",
    ):
        HookChain([Steer()])


def test_an_old_style_wrapper_is_refused():
    class Trace:
        @hookimpl(hookwrapper=True)
        def run_block(self, x):
            yield

    with pytest.raises(
        HookError,
        match=r"hooks\[0\] \(Trace\) uses hookwrapper=True; write @hookimpl\(wrapper=True\)",
    ):
        HookChain([Trace()])


def test_a_refused_class_is_refused_again():
    class Steer:
        @hookimpl
        def run_blok(self, x):
            return x

    for _ in range(2):
        with pytest.raises(HookError, match="run_blok"):
            HookChain([Steer()])


# ---- calls -----------------------------------------------------------------------------------------------------------


def test_the_first_result_wins():
    class Gives:
        def __init__(self, value):
            self.value = value

        @hookimpl
        def run_block(self):
            log.append(self.value)
            return self.value

    log = []
    assert apply_blocks([torch.sin], leaf(2), hooks=[Gives(None), Gives(2), Gives(3)]) == 2
    assert log == [None, 2]


@pytest.mark.parametrize("side", ["tryfirst", "trylast"])
def test_tryfirst_and_trylast(side):
    class Usual:
        @hookimpl
        def run_block(self):
            log.append("usual")

    class Special:
        @hookimpl(**{side: True})
        def run_block(self):
            log.append("special")

    log = []
    apply_blocks(
        [torch.sin],
        leaf(2),
        hooks=[Special(), Usual()] if side == "trylast" else [Usual(), Special()],
    )
    assert log == (["special", "usual"] if side == "tryfirst" else ["usual", "special"])


def test_an_implementation_takes_only_the_arguments_that_it_wants():
    class One:
        @hookimpl
        def run_block(self, recomputing, index):
            log.append((recomputing, index))

    class Every:
        @hookimpl
        def run_block(self, run, index, block, x, recomputing):
            log.append((len(run.blocks), index, block, recomputing))

    class Nothing:
        @hookimpl
        def run_block(self):
            log.append("called")

    log = []
    apply_blocks([torch.sin], leaf(2), hooks=[One(), Every(), Nothing()])
    assert log == [(False, 0), (1, 0, torch.sin, False), "called"]


def test_a_wrapper_may_change_the_value_on_both_sides():
    class Doubles:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            result = yield
            return result * 2

    assert apply_blocks([lambda x: x + 1] * 2, 1, hooks=[Doubles()]) == 10


def test_a_wrapper_sees_an_exception_and_may_answer_it():
    class Rescues:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            try:
                return (yield)
            except ZeroDivisionError:
                return -x

    assert apply_blocks([lambda x: 1 // 0, lambda x: x + 1], 5, hooks=[Rescues()]) == -4


def test_a_wrapper_may_raise_another_exception():
    class Names:
        @hookimpl(wrapper=True)
        def run_block(self):
            try:
                return (yield)
            except ZeroDivisionError as error:
                raise LookupError("block") from error

    log = []
    with pytest.raises(LookupError, match="block") as caught:
        apply_blocks([lambda x: 1 // 0], 5, hooks=[Marks("a", log), Names()])
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert log == ["a in", "a out"]


def test_wrappers_are_left_under_an_exception():
    log = []
    with pytest.raises(ZeroDivisionError, match="division"):
        apply_blocks([lambda x: 1 // 0], 5, hooks=[Marks("a", log), Marks("b", log)])
    assert log == ["a in", "b in", "b out", "a out"]


def test_an_early_stop_cannot_be_swallowed_by_a_wrapper():
    class Swallows:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            try:
                return (yield)
            except BaseException:  # catches all there is, on purpose
                return x

    x = leaf(3)
    out = apply_blocks([lambda x: x.exp().sin()], x, hooks=[Checkpoint(), Swallows()])
    out.sum().backward()
    assert torch.equal(x.grad, x.detach().exp() * x.detach().exp().cos())


def test_wrappers_are_left_under_an_early_stop():
    log = []
    out = apply_blocks(
        [lambda x: x.exp().sin() + 1], leaf(3), hooks=[Checkpoint(), Marks("a", log)]
    )
    out.sum().backward()
    assert log == ["a in", "a out"] * 2


def test_the_chains_wrappers_mean_what_pluggys_mean():
    """The same plugins in a plain pluggy manager, in the other order: there the last registered is outermost."""

    class Adds:
        def __init__(self, number):
            self.number = number

        @hookimpl(wrapper=True)
        def run_block(self, x):
            return (yield) * 10 + self.number

    class Gives:
        @hookimpl
        def run_block(self, x):
            return x

    plugins = [Adds(1), Gives(), Adds(2)]
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    for plugin in reversed(plugins):
        manager.register(plugin)
    expected = manager.hook.run_block(run=None, index=0, block=None, x=3, recomputing=False)
    assert apply_blocks([None], 3, hooks=plugins) == expected == 321


# ---- what hooks must not return --------------------------------------------------------------------------------------


def test_a_wrapper_that_returns_none():
    class Skip:
        @hookimpl(wrapper=True)
        def run_block(self):
            yield

    with pytest.raises(
        HookError, match=r"run_block of hooks\[0\] \(Skip\) returned None for block 1; return x"
    ):
        apply_blocks([torch.sin, torch.cos], leaf(3), hooks=[OnlyAt(1, Skip())])


class OnlyAt:
    """Passes block `index` alone through another plugin's wrapper."""

    def __new__(cls, index, plugin):
        class Skip:
            @hookimpl(wrapper=True)
            def run_block(self, **_):
                return (yield)

        inner = type(plugin).run_block

        def run_block(self, index, x, _index=index):
            if index != _index:
                return (yield)
            return (yield from inner(self))

        Skip.run_block = hookimpl(wrapper=True)(run_block)
        return Skip()


def test_a_wrapper_that_does_not_yield():
    class Skip:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            if False:
                yield

    with pytest.raises(
        HookError, match=r"run_block of hooks\[0\] \(Skip\) is a wrapper that did not yield"
    ):
        apply_blocks([torch.sin], leaf(3), hooks=[Skip()])


def test_a_wrapper_that_yields_twice():
    class Skip:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            yield
            yield

    with pytest.raises(
        HookError, match=r"run_block of hooks\[0\] \(Skip\) is a wrapper that yielded twice"
    ):
        apply_blocks([torch.sin], leaf(3), hooks=[Skip()])


def test_a_recompute_context_that_is_no_factory():
    class Carries:
        @hookimpl
        def recompute_context(self):
            return 3

    with pytest.raises(
        HookError,
        match=r"recompute_context of hooks\[1\] \(Carries\) returned a int; expected a factory",
    ):
        apply_blocks([torch.sin], leaf(3), hooks=[Checkpoint(), Carries()])


# ---- explain ---------------------------------------------------------------------------------------------------------


def test_explain_tells_the_order_and_what_is_shadowed():
    class Plans:
        @hookimpl
        def plan_segments(self, run):
            return [Segment(0, len(run.blocks))]

    told = HookChain([Marks("a", []), Plans(), Checkpoint()]).explain()
    for part in (
        [
            "plan_segments",
            "  hooks[1] (Plans)",
            "  hooks[2] (Checkpoint): shadowed unless hooks[1] (Plans) has no plan",
        ],
        ["run_segment", "  hooks[2] (Checkpoint)"],
        ["recompute_context", "  VersionGuard", "  StateSnapshot", "  RNGSnapshot"],
        ["run_block", "  hooks[0] (Marks): wrapper"],
    ):
        assert "\n".join(part) in told


def test_installed_plugins_are_loaded_only_when_asked(monkeypatch):
    class Entry:
        def load(self):
            return VersionGuard

    monkeypatch.setattr(
        "importlib.metadata.entry_points", lambda group: [Entry()] if group == "blockhooks" else []
    )
    assert names(HookChain([Checkpoint()])) == ["Checkpoint", *DEFAULTS]
    chain = HookChain.from_entry_points([Checkpoint()], without="RNGSnapshot")
    assert names(chain) == ["Checkpoint", "VersionGuard", "StateSnapshot"]


def test_a_forgotten_wrapper_mark_is_noticed():
    class Forgot:
        @hookimpl
        def run_block(self, x):
            return (yield)

    with pytest.raises(HookError, match="has a yield, but is no wrapper"):
        HookChain([Forgot()])


def test_a_wrapper_without_a_yield_is_noticed():
    class NeverYields:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            return x

    with pytest.raises(HookError, match="is a wrapper, but has no yield"):
        HookChain([NeverYields()])
