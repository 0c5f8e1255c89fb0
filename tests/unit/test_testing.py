"""The kit for plugin authors passes what is right, and catches each of the usual mistakes by name."""

import gc

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from blockhooks import Checkpoint, HookChain, HookError, Segment, hookimpl, plan, testing
from blockhooks.plan import check_plan

pytest_plugins = ["pytester"]


class Count:
    """An observer as it should be."""

    def __init__(self):
        self.forwards = 0

    @hookimpl(wrapper=True)
    def run_block(self, recomputing):
        self.forwards += not recomputing
        return (yield)


@pytest.fixture
def stack():
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)),
    ]
    blocks += [nn.Sequential(nn.Linear(4, 4), nn.GELU())]
    return blocks, torch.randn(5, 4, requires_grad=True)


def test_an_observer_is_transparent(stack):
    count = Count()
    testing.assert_transparent(*stack, count)
    assert count.forwards > 0


@pytest.mark.parametrize(
    "hooks",
    [
        Checkpoint(),
        [Checkpoint(plan.tree(2)), Count()],
        HookChain([Count(), Checkpoint(plan.every(2))]),
        [],
    ],
    ids=["checkpoint", "observer inside", "chain", "none"],
)
def test_checkpoints_are_transparent(stack, hooks):
    testing.assert_transparent(*stack, hooks)


def test_side_inputs_follow_x_in_a_tuple():
    class Scaled(nn.Linear):
        def forward(self, x, scale):
            return super().forward(x) * scale

    testing.assert_transparent(
        [Scaled(4, 4), Scaled(4, 4)],
        (torch.randn(2, 4), torch.rand(4, requires_grad=True)),
        Count(),
    )


def test_a_model_keeps_its_own_loop():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return torch.tanh(self.linear(x))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x, shift=0.0):
            for layer in self.layers:
                x = layer(x) + shift
            return x

    testing.assert_transparent(Model(), {"x": torch.randn(2, 4), "shift": 1.0}, Count())


def test_the_random_generators_are_left_as_they_were(stack):
    before = torch.get_rng_state()
    testing.assert_transparent(*stack, Count(), trials=1)
    assert torch.equal(before, torch.get_rng_state())


# ---- mistakes --------------------------------------------------------------------------------------------------------


def test_an_observer_that_draws_is_caught(stack):
    class Sample:
        @hookimpl(wrapper=True)
        def run_block(self):
            torch.rand(1)
            return (yield)

    with pytest.raises(
        AssertionError, match=r"hooks=\[Sample\]: the output in step 1 differs: expected .* at \["
    ):
        testing.assert_transparent(*stack, Sample())


def test_an_observer_that_draws_after_all_blocks_is_caught(stack):
    class Sample:
        @hookimpl(wrapper=True)
        def run_blocks(self):
            result = yield
            torch.rand(1)
            return result

    with pytest.raises(
        AssertionError, match="the state of torch's CPU generator in step 1 differs"
    ):
        testing.assert_transparent(*stack, Sample())


def test_an_observer_that_draws_in_the_recompute_alone_is_caught(stack):
    class Sample:
        @hookimpl(wrapper=True)
        def run_block(self, recomputing):
            if recomputing:
                torch.rand(1)
            return (yield)

    with pytest.raises(AssertionError, match=r"hooks=\[Sample, Checkpoint.*: the gradient of "):
        testing.assert_transparent(*stack, Sample())


def test_an_observer_that_keeps_a_tensor_is_caught(stack):
    class Keep:
        def __init__(self):
            self.seen = []

        @hookimpl(wrapper=True)
        def run_block(self, x):
            self.seen.append(x.detach())
            return (yield)

    with pytest.raises(
        AssertionError, match=r"keep 160 bytes of tensors alive after the forward.*R8"
    ):
        testing.assert_transparent(*stack, Keep())


def test_an_observer_that_keeps_tensors_until_the_garbage_collector_runs_is_caught(stack):
    class Cycle:
        @hookimpl(wrapper=True)
        def run_blocks(self, x):
            result = yield
            cycle = [x.detach() + 1]
            cycle.append(cycle)
            return result

    with pytest.raises(AssertionError, match="keep 80 bytes of tensors alive after the forward"):
        testing.assert_transparent(*stack, Cycle())
    gc.collect()


def test_an_observer_that_swallows_exceptions_is_caught(stack):
    class Swallow:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            try:
                return (yield)
            except Exception:
                return x

    with pytest.raises(AssertionError, match=r"where a block raises, .*clean up in `finally`"):
        testing.assert_transparent(*stack, Swallow())


def test_an_observer_that_changes_an_exception_is_caught(stack):
    class Change:
        @hookimpl(wrapper=True)
        def run_block(self, x):
            try:
                return (yield)
            except ArithmeticError:
                raise
            except Exception as error:
                raise type(error)("something went wrong") from error

    with pytest.raises(
        AssertionError, match="where a block raises, the exception of a block in step 1 differs"
    ):
        testing.assert_transparent(*stack, Change())


def test_an_observer_that_changes_a_buffer_is_caught(stack):
    class Touch:
        @hookimpl(wrapper=True)
        def run_block(self, block, recomputing):
            result = yield
            for buffer in block.buffers():
                if not recomputing and not buffer.is_floating_point():
                    buffer.add_(1)
            return result

    with pytest.raises(
        AssertionError, match=r"buffer blocks\[1\]\.0\.num_batches_tracked in step 1 .* found 2"
    ):
        testing.assert_transparent(*stack, Touch())


def test_an_observer_that_changes_a_flag_is_caught(stack):
    class Freeze:
        @hookimpl(wrapper=True)
        def run_blocks(self, run):
            result = yield
            run.blocks[0].eval()
            return result

    with pytest.raises(
        AssertionError, match=r"blocks\[0\]\.training in step 1 differs: expected True, found False"
    ):
        testing.assert_transparent(*stack, Freeze())


def test_an_observer_that_drops_a_gradient_is_caught(stack):
    class Detach:
        @hookimpl(wrapper=True)
        def run_block(self, index):
            result = yield
            return result.detach() if index == 0 else result

    with pytest.raises(
        AssertionError, match=r"the gradient of blocks\[0\]\.0\.weight .* expected a tensor"
    ):
        testing.assert_transparent(*stack, Detach())


def test_a_plan_that_makes_gradients_wrong_is_caught(stack):
    class Twice:
        """A strategy that executes the region once too often."""

        @hookimpl
        def plan_segments(self, run):
            return [Segment(0, len(run.blocks))]

        @hookimpl
        def run_segment(self, region, x):
            region(x)
            return region(x)

    with pytest.raises(AssertionError, match=r"hooks=\[Twice\]: the output in step 1 differs"):
        testing.assert_transparent(*stack, Twice())


def test_blocks_that_are_not_deterministic_are_told_apart():
    calls = iter(range(100))

    def block(x):
        return x * next(calls)

    with pytest.raises(
        AssertionError, match="the plain loop: two runs from the same seeds differ: the output"
    ):
        testing.assert_transparent([block], torch.ones(2, requires_grad=True), Count())


def test_an_output_without_gradient_is_refused():
    with pytest.raises(ValueError, match="give loss="):
        testing.assert_transparent([lambda x: x], torch.ones(2), Count())


@pytest.mark.parametrize("blocks", [None, 3, [], nn.ModuleList()], ids=str)
def test_without_any_block_nothing_is_asserted(blocks):
    with pytest.raises(HookError, match="expected a model, or a sequence of at least one block"):
        testing.assert_transparent(blocks, torch.ones(2), Count())


def test_a_hook_that_makes_nothing_of_a_blocks_exception_is_told():
    class Swallows:
        @hookimpl(wrapper=True)
        def run_block(self):
            try:
                return (yield)
            except BaseException:
                return None

    with pytest.raises(
        AssertionError,
        match=r"(?s)^hooks=\[Swallows\]: the step raised .*Where a block raises, the plain loop did not\.$",
    ):
        testing.assert_transparent(
            [torch.sin, torch.tanh], torch.ones(2, requires_grad=True), Swallows()
        )


def test_a_number_of_plans_is_one():
    with pytest.raises(HookError, match="trials expected an integer of at least 0, found '3'"):
        testing.assert_transparent(
            [torch.sin], torch.ones(2, requires_grad=True), Count(), trials="3"
        )


def test_blocks_for_a_value_hook_come_with_inputs():
    with pytest.raises(HookError, match="has no inputs for the blocks; expected both"):
        testing.assert_repeatable(Count(), [torch.sin])


# ---- value hooks -----------------------------------------------------------------------------------------------------


class Steer:
    @hookimpl(wrapper=True)
    def run_block(self, index):
        x = yield
        return x + index


def test_a_value_hook_is_repeatable(stack):
    testing.assert_repeatable(Steer())
    testing.assert_repeatable([Steer()], *stack)


def test_a_value_hook_of_the_forward_alone_is_caught():
    class Once:
        @hookimpl(wrapper=True)
        def run_block(self, index, recomputing):
            x = yield
            return x if recomputing else x + index + 1

    with pytest.raises(
        AssertionError, match=r"hooks=\[Once, Checkpoint.*Expected what hooks=\[Once\] gives"
    ):
        testing.assert_repeatable(Once())


def test_a_value_hook_that_counts_its_calls_is_caught():
    class Growing:
        calls = 0

        @hookimpl(wrapper=True)
        def run_block(self):
            self.calls += 1
            x = yield
            return x + self.calls

    with pytest.raises(AssertionError, match="two runs from the same seeds differ"):
        testing.assert_repeatable(Growing())


def test_a_value_hook_is_not_transparent(stack):
    with pytest.raises(AssertionError, match="the output in step 1 differs"):
        testing.assert_transparent(*stack, Steer())


# ---- strategies ------------------------------------------------------------------------------------------------------


@settings(max_examples=5)
@given(testing.blocks(max_size=3), testing.inputs())
def test_strategies_prove_an_observer(blocks, x):
    testing.assert_transparent(blocks, x, Count(), trials=1)


@given(testing.plans(5))
def test_drawn_plans_cover_all_blocks(segments):
    check_plan(segments, 5)


@given(testing.chains(3, Count()))
def test_drawn_chains_hold_the_plugins(hooks):
    assert sum(isinstance(plugin, Count) for plugin in hooks) == 1
    assert sum(isinstance(plugin, Checkpoint) for plugin in hooks) == 1
    HookChain(hooks)


# ---- the pytest plugin -----------------------------------------------------------------------------------------------


def test_the_pytest_plugin_offers_both_functions(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    pytester.makepyfile(
        """
        import torch
        from blockhooks import Checkpoint, hookimpl

        class Shift:
            @hookimpl(wrapper=True)
            def run_block(self):
                return (yield) + 1

        def test_transparent(assert_transparent):
            assert_transparent([torch.nn.Linear(2, 2)], torch.ones(1, 2), Checkpoint())

        def test_repeatable(assert_repeatable):
            assert_repeatable(Shift(), trials=1)

        def test_caught(assert_transparent):
            assert_transparent([torch.nn.Linear(2, 2)], torch.ones(1, 2), Shift())
        """
    )
    result = pytester.runpytest_inprocess("-p", "blockhooks.pytest_plugin")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        ["*AssertionError: hooks=[[]Shift[]]: the output in step 1 differs*"]
    )
