"""Costs are read as they were written, budgets as they were meant, and a plan costs what its executions add up to."""

from dataclasses import replace

import pytest

from blockhooks.budget import ChainProfile, predict
from blockhooks.costs import BlockCosts, ModeCosts, budget_in_bytes, format_bytes, format_table
from blockhooks.errors import BudgetError, PlanError
from blockhooks.plan import Segment, every, first, simulate, tree
from blockhooks.solver import Solver
from tests.budget.chains import all_plans, random_profile

BLOCK = BlockCosts(
    forward=3.0,
    recompute=2.0,
    backward=6.0,
    output=1,
    kept=10,
    forward_peak=12,
    backward_peak=15,
    gradient=1,
)
CHAIN = ChainProfile(blocks=(BLOCK,) * 4, tail=0.5)


@pytest.mark.parametrize(
    ("plan", "time", "peak"),
    [
        # 3 blocks are held with their outputs (33) when the last one's backward needs 15.
        pytest.param(first(0), 36.5, 48, id="all kept"),
        # 3 outputs and a backward; each block again, to its early stop.
        pytest.param(every(1), 36.5 + 4 * 2, 18, id="each block"),
        # 1 output, a block with its output (11), and a backward; the first of two blocks to its end.
        pytest.param(every(2), 36.5 + 2 * (3 + 2), 27, id="pairs"),
        pytest.param(first(2), 36.5 + 2 * 2, 2 + 11 + 15, id="two of four"),
        # Of the parent only the first child is executed again, and each block once more.
        pytest.param(
            lambda n: (Segment(0, 4, every(2)(4)),),
            36.5 + (3 + 3) + 2 * (3 + 2),
            1 + 11 + 15,
            id="nested",
        ),
    ],
)
def test_predicted_time_and_peak_are_those_counted_by_hand(plan, time, peak):
    assert predict(CHAIN, plan(4)) == (time, peak)


def test_what_is_executed_is_what_the_simulation_counts():
    ones = BlockCosts(forward=1.0, backward=0.0, output=0, kept=0)
    for plan in all_plans(0, 4, depth=2):
        time, _ = predict(ChainProfile(blocks=(ones,) * 4), plan)
        assert time == simulate(plan).total


def test_a_gradient_waits_while_its_segment_is_recomputed():
    waits = BlockCosts(forward=1.0, backward=1.0, output=1, kept=10, backward_peak=10, gradient=7)
    chain = ChainProfile(blocks=(waits,) * 2)

    assert predict(chain, every(2)(2)).peak == 7 + 11 + 10
    assert predict(chain, first(0)(2)).peak == 11 + 11


def test_a_side_input_is_held_in_the_forward_up_to_the_last_block_that_is_given_it():
    block = BlockCosts(forward=1, backward=1, output=1, kept=2, forward_peak=20, backward_peak=3)
    blocks = (replace(block, carried=7, carried_to=1), block, block)
    keep = (Segment(0, 3, mode="keep"),)

    assert predict(ChainProfile(blocks=(block,) * 3), keep).peak == 6 + 20
    assert predict(ChainProfile(blocks=blocks), keep).peak == max(3 + 7 + 20, 6 + 20)


def test_what_somebody_else_holds_is_there_beside_what_a_recompute_makes():
    block = BlockCosts(forward=1, backward=1, output=1, kept=2, backward_peak=20, twice=5)
    profile = ChainProfile(blocks=(block, block))

    assert predict(profile, (Segment(0, 2, mode="keep"),)).peak == 3 + 20
    assert predict(profile, (Segment(0, 1), Segment(1, 2))).peak == 1 + 5 + 20
    assert Solver(profile, apart=True).floor.peak == 3 + 20


MOVED = replace(
    BLOCK,
    modes=(
        ModeCosts(mode="offload", kept=2, forward_peak=12, backward_peak=15, extra=4.0, let_go=1),
    ),
)


@pytest.mark.parametrize(
    ("modes", "time", "peak"),
    [
        # The last block's backward needs 15; of each block before an output (1) and what stays (2) are held, and of
        # each that moves, the last one too, the input (1) is not.
        pytest.param("oooo", 36.5 + 4 * 4, 3 * (2 + 1) - 4 + 15, id="all"),
        # The first block's input was given to the run.
        pytest.param("kooo", 36.5 + 3 * 4, 11 + 2 * 3 - 3 + 15, id="all but the first"),
        pytest.param("orrr", 36.5 + 4 + 3 * 2, 2 + 3 - 1 + 15, id="the first"),
    ],
)
def test_what_moves_away_is_held_neither_with_its_input(modes, time, peak):
    names = {"o": "offload", "k": "keep", "r": "recompute"}
    segments = [Segment(i, i + 1, mode=names[mode]) for i, mode in enumerate(modes)]

    assert predict(ChainProfile(blocks=(MOVED,) * 4, tail=0.5), segments) == (time, peak)


def test_nothing_moves_in_what_is_executed_again():
    chain, inside = ChainProfile(blocks=(MOVED,) * 4), every(1)(4)
    moving, keeping = (
        (Segment(0, 4, (*inside[:2], Segment(2, 4, mode=mode))),) for mode in ("offload", "keep")
    )

    assert predict(chain, moving) == predict(chain, keeping)


def test_an_input_that_the_model_holds_for_a_while_is_let_go_when_the_forward_is_over():
    moved = replace(MOVED.modes[0], lingering=1)
    blocks = (replace(MOVED, modes=(moved,)), BLOCK, BLOCK)
    segments = (Segment(0, 1, mode="offload"), Segment(1, 3, mode="keep"))

    for tail_forward, most in ((14, 3 + 2 * 11 - 1 + 15), (15, 3 + 2 * 11 - 1 + 16)):
        chain = ChainProfile(blocks=blocks, tail_forward=tail_forward, tail_peak=14)
        assert predict(chain, segments).peak == most


def test_predict_refuses_a_plan_for_other_blocks():
    with pytest.raises(PlanError, match="blocks 2 and 3 are in no segment"):
        predict(CHAIN, every(1)(2))


@pytest.mark.parametrize(
    ("budget", "count"),
    [
        ("8GiB", 8 * 2**30),
        ("500 MB", 500 * 10**6),
        ("1.5 kib", 1536),
        ("12", 12),
        (" 3 B ", 3),
        (4096, 4096),
        (0.25, 250),
        (1.0, 1000),
    ],
)
def test_budgets_are_read(budget, count):
    assert budget_in_bytes(budget, 1000) == count


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "8 parsecs",
        "-3GiB",
        "GiB",
        "0",
        "0.5",
        0,
        -1,
        0.0,
        1.01,
        -0.5,
        float("nan"),
        True,
        None,
        [1],
    ],
    ids=repr,
)
def test_what_is_no_budget_is_refused_with_what_would_be_one(budget):
    with pytest.raises(BudgetError, match="expected a memory budget as text like '8GiB'") as error:
        budget_in_bytes(budget, 1000)
    assert f"found {budget!r}" in str(error.value)


def test_bytes_and_tables_are_readable():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**30, 2**50)] == [
        "0 B",
        "1023 B",
        "1.50 KiB",
        "3.00 GiB",
        "1024.00 TiB",
    ]
    assert format_table(("a", "long"), [("wide", "b")]) == ["a     long", "----  ----", "wide  b"]


def test_a_profile_survives_json(tmp_path):
    profile = random_profile(4, 6, modes=True)
    profile.save(tmp_path / "profile.json")

    assert ChainProfile.load(tmp_path / "profile.json") == profile
    with pytest.raises(BudgetError, match="expected a profile as a dict with a list of 'blocks'"):
        ChainProfile.from_dict({"block": []})


def test_a_profile_prints_one_line_for_each_block():
    lines = str(random_profile(4, 6, modes=True)).splitlines()

    assert lines[0].split()[:3] == ["block", "name", "forward"]
    assert [line.split()[:3] for line in lines[2:]] == [[str(i), "block", str(i)] for i in range(6)]


def test_trees_need_less_memory_than_pairs():
    chain = ChainProfile(blocks=(BLOCK,) * 16)

    assert predict(chain, tree(4)(16)).peak < predict(chain, every(1)(16)).peak
