"""The Pareto curve goes from the least memory to the plain loop, and no plan by rule lies below it."""

import json
from itertools import combinations

import pytest
from matplotlib.figure import Figure

from blockhooks import BudgetError, PlanError
from blockhooks.budget import Pareto, Plan, Point, pareto, predict, solve
from blockhooks.costs import ChainProfile
from blockhooks.plan import every
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


def test_names_of_points_cover_neither_points_nor_each_other(monkeypatch, tmp_path):
    """Over four blocks every(2) and sqrt() are one point; over 48, five rules lie close together."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **_: drawn.append(figure))
    for n in (2, 4, 8, 48):
        pareto(random_profile(n, n, modes=True)).plot(tmp_path / "p.png")
        (axes,) = drawn.pop().axes
        (dots,) = [line for line in axes.lines if line.get_marker() == "o"]
        points = axes.transData.transform(dots.get_xydata())
        boxes = [text.get_window_extent() for text in axes.texts]
        assert len(boxes) == len(points)
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert not any(box.contains(*point) for box in boxes for point in points)
        assert all(axes.bbox.contains(*corner) for box in boxes for corner in box.corners())


def test_more_names_than_places_are_all_written(profile, tmp_path):
    point = Point("a rule of many", solve(profile, 0.5))
    Pareto((point,), (point,) * 20).plot(tmp_path / "p.svg")
    assert (tmp_path / "p.svg").read_text().count("<!-- a rule of many -->") == 20


def test_arguments_are_checked(profile, tmp_path):
    for function in (pareto, lambda given: solve(given, 0.5), lambda given: predict(given, ())):
        with pytest.raises(
            BudgetError, match=r"\(profile, ...\) expected a ChainProfile, .* found 3"
        ):
            function(3)
    curve = pareto(profile)
    with pytest.raises(
        BudgetError, match=r"plot\(chosen=...\) expected a Plan, .* found every\(2\)"
    ):
        curve.plot(tmp_path / "p.png", every(2))
    with pytest.raises(
        BudgetError, match=r"plot\(path\) expected a file whose suffix is one of .*png"
    ):
        curve.plot(tmp_path / "p.xyz")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "error"), [(Plan, PlanError), (ChainProfile, BudgetError)])
@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_file_that_holds_something_else_is_told(kind, error, text, tmp_path):
    (tmp_path / "file.json").write_text(text)
    with pytest.raises(error, match="expected a"):
        kind.load(tmp_path / "file.json")
