"""Plans cover their blocks, cost what they promise, and are refused with the numbers that are wrong."""

import json
import pickle
import re
from functools import cache
from math import ceil, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from blockhooks import plan
from blockhooks.errors import PlanError
from blockhooks.plan import Segment, check_plan, simulate

PLAN_FUNCTIONS = [
    plan.every(1),
    plan.every(3),
    plan.sqrt(),
    plan.tree(1),
    plan.tree(4),
    plan.binomial(1),
    plan.binomial(3),
    plan.first(0),
    plan.first(4),
    plan.blocks(()),
]


@pytest.mark.parametrize("function", PLAN_FUNCTIONS, ids=repr)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 8, 13])
def test_plan_functions_cover_every_number_of_blocks(function, n):
    segments = function(n)

    assert check_plan(segments, n) == segments
    assert [index for segment in segments for index in segment.indices] == list(range(n))


@pytest.mark.parametrize("function", PLAN_FUNCTIONS, ids=repr)
def test_plan_functions_and_segments_survive_pickle_and_json(function):
    segments = pickle.loads(pickle.dumps(function))(13)
    text = json.dumps([segment.to_dict() for segment in segments])

    assert segments == function(13)
    assert tuple(map(Segment.from_dict, json.loads(text))) == segments
    assert hash(segments) == hash(function(13))


def test_plan_functions_read_as_they_were_written():
    assert [repr(function) for function in PLAN_FUNCTIONS] == [
        "every(1)",
        "every(3)",
        "sqrt()",
        "tree(1)",
        "tree(4)",
        "binomial(1)",
        "binomial(3)",
        "first(0)",
        "first(4)",
        "blocks(())",
    ]
    assert plan.every(2) == plan.every(2) != plan.every(3)


def ranges(segments):
    return [(segment.start, segment.stop, segment.mode) for segment in segments]


def test_every_leaves_the_rest_to_the_last_segment():
    assert ranges(plan.every(3)(7)) == [
        (0, 3, "recompute"),
        (3, 6, "recompute"),
        (6, 7, "recompute"),
    ]


def test_sqrt_divides_evenly():
    lengths = [len(segment) for segment in plan.sqrt()(12)]

    assert lengths == [3, 3, 3, 3]
    for n in range(1, 200):
        lengths = [len(segment) for segment in plan.sqrt()(n)]
        assert max(lengths) - min(lengths) <= 1
        assert len(lengths) == ceil(n**0.5)


def test_first_and_blocks_keep_the_others_in_one_segment():
    assert ranges(plan.first(2)(6)) == [
        (0, 1, "recompute"),
        (1, 2, "recompute"),
        (2, 6, "keep"),
    ]
    assert ranges(plan.first(9)(2)) == [(0, 1, "recompute"), (1, 2, "recompute")]
    assert ranges(plan.blocks([-1, 2, 2])(6)) == [
        (0, 2, "keep"),
        (2, 3, "recompute"),
        (3, 5, "keep"),
        (5, 6, "recompute"),
    ]


def test_tree_nests_to_its_depth_and_not_below_one_block():
    assert [max(s.depth for s in plan.tree(depth)(8)) for depth in (1, 2, 3, 9)] == [1, 2, 3, 3]


@given(st.integers(1, 40), st.integers(1, 6))
def test_tree_keeps_its_promises(n, depth):
    counted = simulate(plan.tree(depth), n)

    assert max(counted.executions) <= depth + 1
    assert counted.peak_states <= depth + 1
    assert counted.peak_blocks == ceil(n / 2**depth)


def test_early_stop_executes_20_instead_of_32_blocks_again_in_a_binary_tree_over_8():
    tree = [Segment(0, 8, plan.tree(3)(8))]

    assert simulate(tree).recomputed == 20
    assert simulate(tree, early_stop=False).recomputed == 32


@cache
def fewest_executions(n, slots):
    """Executions of the best schedule, tried out over every place for the next saved state."""
    if n == 1:
        return 1
    if slots == 0:
        return inf
    return min(
        k + fewest_executions(k, slots) + fewest_executions(n - k, slots - 1) for k in range(1, n)
    )


@pytest.mark.parametrize("slots", range(1, 8))
def test_binomial_executes_as_few_blocks_as_any_plan(slots):
    for n in range(1, 40):
        counted = simulate(plan.binomial(slots), n)

        assert counted.total == fewest_executions(n, slots)
        assert counted.peak_states <= slots
        assert counted.peak_blocks == 1


def test_binomial_plans_ten_thousand_blocks_a_few_levels_deep():
    segments = plan.binomial(16)(10_000)
    counted = simulate(segments)

    assert max(segment.depth for segment in segments) <= 6
    assert counted.peak_states == 16
    assert max(counted.executions) <= 6


def test_binomial_says_how_many_slots_are_enough():
    with pytest.raises(PlanError, match="3 slots are enough") as error:
        plan.binomial(1)(10_000)
    assert "50 levels" in str(error.value)
    assert check_plan(plan.binomial(3)(10_000), 10_000)


@pytest.mark.parametrize(
    ("segments", "executions", "peak_states", "peak_blocks"),
    [
        pytest.param(plan.first(0)(6), [1] * 6, 0, 6, id="all kept"),
        pytest.param(plan.every(1)(6), [2] * 6, 6, 1, id="every block"),
        pytest.param(plan.every(2)(6), [2] * 6, 3, 2, id="pairs"),
        pytest.param(plan.first(2)(6), [2, 2, 1, 1, 1, 1], 2, 4, id="first two"),
        pytest.param(
            (Segment(0, 2, mode="selective"), Segment(2, 4, plan.every(1)(4)[2:], "keep")),
            [1, 1, 2, 2],
            2,
            3,
            id="segments within a kept one",
        ),
    ],
)
def test_simulate_counts(segments, executions, peak_states, peak_blocks):
    counted = simulate(segments)

    assert list(counted.executions) == executions
    assert counted.recomputed == sum(executions) - len(executions)
    assert (counted.peak_states, counted.peak_blocks) == (peak_states, peak_blocks)


def test_simulate_of_nothing_and_of_a_plan_function_without_a_number():
    assert simulate(()).total == 0
    with pytest.raises(PlanError, match=re.escape("write simulate(every(1), n)")):
        simulate(plan.every(1))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        (
            [Segment(0, 6), Segment(8, 9)],
            "plan by hooks[1] (Checkpoint) leaves a gap: segment 8..9 follows segment 0..6; "
            "blocks 6 and 7 are in no segment.",
        ),
        (
            [Segment(1, 9)],
            "plan by hooks[1] (Checkpoint) leaves a gap: segment 1..9 follows the start of 0..9; "
            "block 0 is in no segment.",
        ),
        (
            [Segment(0, 6)],
            "plan by hooks[1] (Checkpoint) leaves a gap: blocks 6 to 8 are in no segment.",
        ),
        ([], "plan by hooks[1] (Checkpoint) leaves a gap: blocks 0 to 8 are in no segment."),
        (
            [Segment(0, 6), Segment(5, 9)],
            "plan by hooks[1] (Checkpoint) overlaps: "
            "segment 5..9 follows segment 0..6, so it must start at 6.",
        ),
        (
            [Segment(0, 3), Segment(3, 6), Segment(0, 3)],
            "plan by hooks[1] (Checkpoint) is out of order: "
            "segment 0..3 follows segment 3..6, so it must start at 6.",
        ),
        (
            [Segment(0, 12)],
            "plan by hooks[1] (Checkpoint) reaches beyond the end: "
            "segment 0..12 ends at 12, but the blocks are 0..9.",
        ),
        (
            [(0, 9)],
            "plan by hooks[1] (Checkpoint): expected a sequence of Segment, found (0, 9) in it.",
        ),
        (None, "plan by hooks[1] (Checkpoint): expected a sequence of Segment, found None."),
    ],
)
def test_check_plan_names_plugin_and_blocks(segments, message):
    with pytest.raises(PlanError, match=f"^{re.escape(message)}$"):
        check_plan(segments, 9, "hooks[1] (Checkpoint)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Segment(2, 2), "segment 2..2 holds no block"),
        (lambda: Segment(-1, 2), "a segment's start must be at least 0, found -1"),
        (lambda: Segment(0, 1.5), "a segment's stop must be an integer, found 1.5"),
        (lambda: Segment(0, 1, mode="drop"), "segment 0..1 has mode 'drop'; the modes are"),
        (
            lambda: Segment(2, 8, [Segment(2, 6)]),
            "segment 2..8 leaves a gap: blocks 6 and 7 are in no segment",
        ),
        (
            lambda: Segment(2, 8, [Segment(0, 8)]),
            "segment 2..8 overlaps: segment 0..8 follows the start of 2..8, so it must start at 2",
        ),
        (lambda: Segment.from_dict({"start": 3}), "'start' and 'stop', found {'start': 3}"),
        (lambda: plan.every(0), r"blocks of every\(blocks\) must be at least 1, found 0"),
        (lambda: plan.every(2.5), r"blocks of every\(blocks\) must be an integer, found 2.5"),
        (lambda: plan.tree(0), r"depth of tree\(depth\) must be at least 1, found 0"),
        (lambda: plan.tree(51), "must be at most 50, found 51"),
        (lambda: plan.binomial(0), r"slots of binomial\(slots\) must be at least 1, found 0"),
        (lambda: plan.first(-1), "must be at least 0, found -1"),
        (lambda: plan.blocks([0, 4])(4), "names block 4, but the run has 4 blocks"),
        (lambda: plan.blocks(["a"]), "must be an integer, found 'a'"),
        (lambda: plan.blocks(3), r"must be a sequence of integers, such as \[0, 3\], found 3"),
        (lambda: plan.every(1)(-1), r"number of blocks for every\(1\) must be at least 0"),
        (lambda: plan.every(True), r"blocks of every\(blocks\) must be an integer, found True"),
        (lambda: Segment(0, 2, None), "children of segment 0..2: expected a sequence .* None"),
        (lambda: Segment(0, 2, [3]), "children of segment 0..2: expected a sequence .* 3 in it"),
        (
            lambda: check_plan([Segment(0, 2)], "2"),
            "number of blocks must be an integer, found '2'",
        ),
        (lambda: plan.simulate(3), "plan: expected a sequence of Segment, found 3"),
        (lambda: plan.simulate([3]), "plan: expected a sequence of Segment, found 3 in it"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(make, message):
    with pytest.raises(PlanError, match=message):
        make()


def test_segment_reads_as_a_range_and_is_frozen():
    segment = Segment(2, 5)

    assert str(segment) == "2..5"
    assert len(segment) == 3
    assert list(segment.indices) == [2, 3, 4]
    assert segment.depth == 1
    with pytest.raises(AttributeError, match="stop"):
        segment.stop = 7
