"""The Pareto curve goes from the least memory to the plain loop, and no plan by rule lies below it."""

import json

import pytest

from blockhooks.budget import Plan, pareto, solve
from blockhooks.costs import ChainProfile
from blockhooks.solver import Solver
from tests.budget.chains import random_profile


@pytest.fixture(scope="module")
def profile():
    return random_profile(7, 16, modes=True)


def test_points_trade_memory_for_time_without_exception(profile):
    points = pareto(profile).points

    assert [p.memory for p in points] == sorted({p.memory for p in points})
    assert [p.time for p in points] == sorted({p.time for p in points}, reverse=True)
    assert points[0].memory == Solver(profile).floor.peak
    assert points[-1].plan.segments == Solver(profile).plain.segments


def test_the_usual_rules_are_there_and_none_beats_the_solver(profile):
    heuristics = {point.name: point.plan for point in pareto(profile).heuristics}

    assert list(heuristics) == [
        "every(1)",
        "every(2)",
        "every(4)",
        "sqrt()",
        "first(4)",
        "first(8)",
        "first(12)",
    ]
    for plan in heuristics.values():
        assert solve(profile, plan.peak).time <= plan.time


def test_it_prints_and_goes_to_json(profile):
    curve = pareto(profile)
    data = json.loads(json.dumps(curve.to_dict()))

    assert Plan.from_dict(data["points"][0]["plan"]) == curve.points[0].plan
    assert len(str(curve).splitlines()) == 2 + len(curve.points) + len(curve.heuristics)


def test_it_draws_a_picture_with_the_plan_that_was_chosen(profile, tmp_path):
    curve = pareto(profile)
    curve.plot(tmp_path / "plain.svg")
    curve.plot(tmp_path / "chosen.svg", solve(profile, 0.5))

    without, chosen = ((tmp_path / f"{n}.svg").read_text() for n in ("plain", "chosen"))
    assert "<svg" in without
    assert "chosen: " in chosen
    assert "chosen: " not in without


def test_a_chain_without_blocks_has_one_point():
    curve = pareto(ChainProfile(blocks=()))

    assert [point.memory for point in curve.points] == [0]
    assert curve.heuristics == ()
