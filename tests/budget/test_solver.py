"""The solver finds the optimum that trying every plan finds, keeps every budget, and is never slower with more."""

import json
from dataclasses import replace
from itertools import product
from math import inf

import pytest

from blockhooks.budget import Plan, predict, solve
from blockhooks.costs import BlockCosts, ChainProfile, ModeCosts
from blockhooks.errors import BudgetError, PlanError
from blockhooks.plan import Segment, check_plan, every, first
from blockhooks.solver import Solver
from tests.budget.chains import (
    all_plans,
    least_times,
    random_profile,
    with_gaps,
    with_offload,
    with_side_inputs,
)


def budgets(profile, count=12):
    """From below the least peak of any plan to above that of the plain loop."""
    peak = profile.plain.peak
    return [peak * step // count for step in range(2, count + 2)]


def best_of(points, budget):
    return min((time for time, peak in points if peak <= budget), default=inf)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("modes", [False, True], ids=["kept or recomputed", "with selective"])
def test_the_byte_by_byte_optimum_is_the_best_of_all_plans(seed, modes):
    profile = random_profile(seed, 4 if modes else 5, modes=modes)
    kinds = ("keep", "selective") if modes else ("keep",)
    points = [predict(profile, plan) for plan in all_plans(0, len(profile), kinds, depth=2)]
    times = least_times(profile)

    for budget in range(profile.plain.peak + 1):
        assert times[budget] == pytest.approx(best_of(points, budget))


def as_fast_as_the_optimum(profile):
    """Assert that at every budget the plan keeps it, and is as fast as the fastest of all plans."""
    solver, times, plain = Solver(profile), least_times(profile), profile.plain
    before = inf

    for budget in range(1, plain.peak + 1, 1 + plain.peak // 200):
        if times[budget] == inf:
            with pytest.raises(BudgetError, match="cannot be kept"):
                solver.solve(budget)
        else:
            plan = solver.solve(budget)
            assert (plan.time, plan.peak) == predict(profile, plan.segments)
            assert plan.peak <= budget
            assert times[budget] - 1e-6 <= plan.time <= times[budget] + 0.005 * plain.time
            assert plan.time <= before
            before = plan.time
    assert solver.solve(solver.floor.peak).peak == solver.floor.peak


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("modes", [False, True], ids=["kept or recomputed", "with selective"])
def test_solver_is_as_fast_as_the_optimum_at_every_budget(seed, modes):
    as_fast_as_the_optimum(random_profile(seed, 5 + seed, modes=modes))


@pytest.mark.parametrize("blocks", [1, 2, 7, 24, 60])
@pytest.mark.parametrize("modes", [False, True], ids=["kept or recomputed", "with selective"])
def test_a_larger_budget_is_never_slower_and_each_is_kept(blocks, modes):
    profile = random_profile(blocks, blocks, modes=modes)
    solver = Solver(profile)
    before = inf

    for step in range(12):
        budget = solver.floor.peak + (profile.plain.peak - solver.floor.peak) * step // 11
        plan = solver.solve(budget)
        assert plan.peak <= budget
        assert (plan.time, plan.peak) == tuple(predict(profile, plan(blocks)))
        assert check_plan(plan(blocks), blocks)
        assert plan.time <= before
        before = plan.time
    assert plan.segments == solver.plain.segments


@pytest.mark.parametrize("seed", range(8))
def test_solver_is_as_fast_as_the_optimum_where_blocks_may_move(seed):
    profile = random_profile(seed, 4 + seed, modes=seed % 2 == 1)
    as_fast_as_the_optimum(with_offload(profile, seed))


@pytest.mark.parametrize("seed", range(3))
def test_the_optimum_where_blocks_may_move_is_the_best_of_all_plans(seed):
    profile = with_offload(random_profile(seed, 4), seed)
    points = [predict(profile, plan) for plan in all_plans(0, 4, ("keep", "offload"), depth=2)]
    times = least_times(profile)

    for budget in range(profile.plain.peak + 1):
        assert times[budget] == pytest.approx(best_of(points, budget))


@pytest.mark.parametrize("seed", range(4))
def test_blocks_that_may_move_are_planned_around_gaps_and_one_by_one(seed):
    modes = ("keep", "offload", "recompute")
    profile = with_gaps(with_offload(random_profile(seed, 6), seed), seed)
    apart = [
        tuple(Segment(index, index + 1, mode=mode) for index, mode in enumerate(chosen))
        for chosen in product(modes, repeat=len(profile))
    ]
    assert optimal(Solver(profile, apart=True), apart)


@pytest.mark.parametrize("blocks", [24, 60, 300])
def test_the_floor_of_blocks_that_move_with_their_inputs_is_that_of_one_block(blocks):
    moved = ModeCosts(mode="offload", kept=0, forward_peak=6, backward_peak=9, extra=5, let_go=2)
    block = BlockCosts(forward=1, backward=2, output=2, kept=10, backward_peak=12, modes=(moved,))
    profile = ChainProfile(blocks=(replace(block, modes=()), *(block,) * (blocks - 1)))

    floor = Solver(profile).floor
    assert floor.peak == max(12, 2 + 9)
    assert floor.time < Solver(replace(profile, blocks=(block,) * blocks)).floor.time
    with pytest.raises(BudgetError, match=r"\(12 bytes"):
        solve(profile, 11)


@pytest.mark.parametrize("blocks", [24, 60, 300])
def test_a_larger_budget_is_never_slower_where_blocks_may_move(blocks):
    profile = with_offload(random_profile(blocks, blocks, modes=True), blocks)
    solver, without = Solver(profile), Solver(random_profile(blocks, blocks, modes=True))
    floor, before = solver.floor.peak, inf
    assert floor <= without.floor.peak

    for step in range(12):
        budget = floor + (profile.plain.peak - floor) * step // 11
        plan = solver.solve(budget)
        assert plan.peak <= budget
        assert plan.time <= before
        before = plan.time
    assert plan.segments == solver.plain.segments


@pytest.mark.parametrize("seed", range(4))
def test_solver_is_no_slower_than_recomputing_the_first_blocks(seed):
    profile = random_profile(seed, 20)
    solver = Solver(profile)

    for count in range(21):
        rule = solver.plan(first(count)(20))
        assert solver.solve(rule.peak).time <= rule.time
        assert solver._first_peaks[count] == rule.peak


def test_a_time_that_is_said_to_be_unbeatable_is_not_beaten():
    profile = random_profile(3, 4, modes=True)
    points = [predict(profile, plan) for plan in all_plans(0, 4, ("keep", "selective"), depth=1)]
    solver = Solver(profile)

    for budget in budgets(profile):
        assert solver._bound(budget) <= best_of(points, budget)


def test_blocks_that_are_called_one_by_one_get_segments_of_one_block():
    profile = random_profile(1, 12, modes=True)
    solver, together = Solver(profile, apart=True), Solver(profile)

    for budget in budgets(profile):
        try:
            plan = solver.solve(budget)
        except BudgetError:
            continue
        assert plan.peak <= budget
        assert all(len(s) == 1 for s in plan.segments if s.mode == "recompute")
        assert not any(s.children for s in plan.segments)
        assert plan.time >= together.solve(budget).time


def optimal(solver, plans):
    """Whether a solver finds the best of all plans for each budget."""
    profile = solver.profile
    points = [predict(profile, plan) for plan in plans]
    for budget in [*budgets(profile, 40), min(peak for _, peak in points)]:
        best = best_of(points, budget)
        if best == inf:
            with pytest.raises(BudgetError, match="cannot be kept"):
                solver.solve(budget)
            continue
        found = solver.solve(budget)
        assert found.peak <= budget
        assert found.time <= best + 0.005 * profile.plain.time
    return True


@pytest.mark.parametrize("seed", range(12))
def test_what_is_held_outside_of_blocks_is_planned_around(seed):
    modes = ("keep", "selective", "recompute")
    profile = with_gaps(random_profile(seed, 6, modes=True), seed)
    apart = [
        tuple(Segment(index, index + 1, mode=mode) for index, mode in enumerate(chosen))
        for chosen in product(modes, repeat=len(profile))
    ]
    assert optimal(Solver(profile, apart=True), apart)

    profile = with_gaps(random_profile(seed, 4), seed, before=[0])
    assert optimal(Solver(profile), all_plans(0, 4, depth=3))


@pytest.mark.parametrize("seed", [*range(12), 111])
@pytest.mark.parametrize("apart", [False, True], ids=["any segments", "one by one"])
def test_what_blocks_put_into_side_inputs_is_planned_around(seed, apart):
    profile = random_profile(seed, 3 + seed % 6, modes=seed % 2 == 1)
    profile = with_gaps(with_side_inputs(profile, seed), seed)
    solver, before = Solver(profile, apart=apart), inf
    floor, plain = solver.floor, solver.plain

    for budget in range(1, plain.peak + 1, 1 + plain.peak // 100):
        if budget < floor.peak:
            with pytest.raises(BudgetError, match=rf"\({floor.peak} bytes"):
                solver.solve(budget)
        else:
            plan = solver.solve(budget)
            assert (plan.time, plan.peak) == predict(profile, plan.segments)
            assert plan.peak <= budget
            assert plan.time <= before
            before = plan.time
    assert Solver(profile, apart=apart).solve(floor.peak).peak == floor.peak


@pytest.mark.parametrize("seed", range(4))
def test_no_segment_goes_over_what_is_between_two_blocks(seed):
    profile = with_gaps(random_profile(seed, 20), seed)
    solver = Solver(profile)
    gaps = {index for index, block in enumerate(profile.blocks) if block.gap or block.gap_peak}

    for budget in budgets(profile):
        if budget >= solver.floor.peak:
            for segment in solver.solve(budget).segments:
                inside = segment.indices[1:] if segment.mode == "recompute" else ()
                assert not gaps & set(inside)
    assert [solver._first_peaks[count] for count in range(21)] == [
        solver.plan(first(count)(20)).peak for count in range(21)
    ]


def test_below_the_floor_the_error_names_the_floor_and_the_plan_that_reaches_it():
    profile = random_profile(0, 9)

    with pytest.raises(
        BudgetError, match="cannot be kept: the least that a plan reaches is"
    ) as caught:
        solve(profile, 3)

    floor = caught.value.floor
    assert f"({floor} bytes" in str(caught.value)
    assert predict(profile, caught.value.plan.segments).peak == floor
    assert solve(profile, floor).peak == floor
    with pytest.raises(BudgetError, match="cannot be kept"):
        solve(profile, floor - 1)


def test_thousands_of_blocks_are_planned_with_little_memory():
    block = BlockCosts(forward=1.0, backward=2.0, output=1, kept=17, backward_peak=24)
    profile = ChainProfile(blocks=(block,) * 3_000)

    plan = solve(profile, 0.003)

    assert plan.peak <= profile.plain.peak * 0.003
    assert max(segment.depth for segment in plan.segments) <= 50


def test_a_chain_without_blocks_has_an_empty_plan():
    plan = solve(ChainProfile(blocks=()), 0.5)

    assert plan(0) == ()
    assert (plan.peak, plan.slowdown, plan.share) == (0, 1.0, 1.0)


def test_a_tail_with_a_high_peak_makes_the_last_blocks_give_way():
    block = BlockCosts(forward=1.0, backward=2.0, output=1, kept=10, backward_peak=14)
    profile = ChainProfile(blocks=(block,) * 4, tail_peak=30)

    plan = solve(profile, profile.plain.peak - 35)

    assert plan.peak <= profile.plain.peak - 35
    assert plan.segments[-1].mode == "recompute"


def test_a_plan_survives_json_and_is_a_plan_function(tmp_path):
    plan = solve(random_profile(2, 8, modes=True), 0.4)
    plan.save(tmp_path / "plan.json")

    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["budget"] == plan.budget
    assert plan(8) == plan.segments
    with pytest.raises(PlanError, match="the plan is for 8 blocks, but the run has 9"):
        plan(9)
    with pytest.raises(PlanError, match="expected a plan as a dict"):
        Plan.from_dict({"time": 1.0})


def test_a_plan_prints_as_a_table():
    profile = random_profile(2, 3)
    text = str(Solver(profile).plan((Segment(0, 2, every(1)(2)), Segment(2, 3, mode="keep"))))

    assert [line.split() for line in text.splitlines()[1:]] == [
        ["blocks", "mode"],
        ["------", "---------"],
        ["0..2", "recompute"],
        ["0..1", "recompute"],
        ["1..2", "recompute"],
        ["2..3", "keep"],
    ]
    assert "of plain" in text.splitlines()[0]


def test_a_budget_below_the_floor_is_told_with_what_is_held_beside():
    solver, beside = Solver(random_profile(0, 6)), 1000
    with pytest.raises(BudgetError, match="are held outside of the blocks") as caught:
        solver.solve(beside, beside=beside)
    assert caught.value.floor == solver.floor.peak + beside
    assert solver.solve(caught.value.floor, beside=beside).peak <= caught.value.floor - beside
