"""Statistics over many steps, told from plain numbers."""

import pytest

from blockhooks.report.figures import (
    SAMPLE,
    WINDOW,
    BlockStep,
    Figures,
    StepFigures,
    compare,
    scalars,
)


def step(number, forward, wall=None, kept=100, name="a", flops=None):
    block = BlockStep(
        0, name, ms=[forward, 2.0, 3.0], calls=[1, 1, 1], kept_bytes=kept, flops=flops
    )
    return StepFigures(number, forward + 6.0 if wall is None else wall, {name: block})


def figures_of(*forwards):
    figures = Figures()
    for number, forward in enumerate(forwards):
        figures.add(step(number, forward))
    return figures


def test_means_and_quantiles_are_per_step():
    (block,) = figures_of(1.0, 2.0, 3.0, 4.0, 100.0).blocks()
    assert block["ms"]["forward"] == {"mean": 22.0, "p50": 3.0, "p95": pytest.approx(80.8)}
    assert block["calls"] == {"forward": 5, "recompute": 5, "backward": 5}


def test_the_parts_of_a_step_add_up():
    ms = figures_of(1.0, 2.0, 4.5).to_dict(None)["totals"]["ms"]
    parts = sum(ms[part]["mean"] for part in ("forward", "recompute", "backward", "rest"))
    assert parts == pytest.approx(ms["wall"]["mean"], rel=1e-12)
    assert ms["rest"]["mean"] == pytest.approx(1.0)


def test_a_step_without_blocks_is_none():
    figures = Figures()
    figures.add(StepFigures(0, 5.0, {}))
    assert figures.steps == 0


def test_quantiles_of_a_long_run_come_from_a_bounded_sample():
    figures = Figures()
    for number in range(20 * SAMPLE):
        figures.add(step(number, float(number % 100)))
    (block,) = figures.blocks()
    assert len(figures._sample) == SAMPLE
    assert block["ms"]["forward"]["mean"] == pytest.approx(49.5, abs=0.5)
    assert block["ms"]["forward"]["p50"] == pytest.approx(49.5, abs=6)
    assert block["ms"]["forward"]["p95"] == pytest.approx(94, abs=3)


def test_a_sample_is_the_same_each_time_and_leaves_pythons_generator_alone():
    import random

    before = random.getstate()
    runs = [figures_of(*map(float, range(3 * SAMPLE))).blocks() for _ in range(2)]
    assert runs[0] == runs[1]
    assert random.getstate() == before


def test_a_block_that_became_twice_as_slow_is_told():
    figures = figures_of(*[1.0] * WINDOW, *[1.0] * WINDOW, *[2.0] * WINDOW)
    assert figures.drift() == [{"block": "a", "phase": "forward", "first_ms": 1.0, "last_ms": 2.0}]
    assert figures_of(*[1.0] * 3 * WINDOW).drift() == []
    assert figures_of(1.0, 2.0).drift() == []


def test_an_outlier_is_told_with_its_step():
    figures = figures_of(*[1.0] * WINDOW, 9.0, 1.0)
    assert figures.to_dict(None)["outliers"] == [
        {"step": WINDOW, "block": "a", "phase": "forward", "ms": 9.0, "usual_ms": 1.0}
    ]


def test_operations_counted_in_one_step_stand_for_all():
    figures = Figures()
    figures.add(step(0, 1.0, flops=[10, 10, 20]))
    figures.add(step(1, 1.0))
    totals = figures.to_dict(None)["totals"]
    assert totals["model_flops"] == 30
    assert totals["hardware_flops"] == 40
    assert totals["hardware_flops_per_second"] == pytest.approx(40 / 7e-3)


def test_bytes_are_those_of_the_last_step():
    figures = Figures()
    figures.add(step(0, 1.0, kept=100))
    figures.add(step(1, 1.0, kept=300))
    assert figures.blocks()[0]["kept_bytes"] == 300
    assert figures.to_dict(None)["totals"]["kept_bytes"] == 300


def test_measured_peaks_stand_with_their_blocks():
    memory = {"peak_bytes": 7, "block_peak_bytes": {"a": 5}}
    figures = figures_of(1.0).to_dict(memory)
    assert figures["totals"]["peak_bytes"] == 7
    assert figures["blocks"][0]["peak_bytes"] == 5


def test_a_comparison_divides_times_and_subtracts_bytes():
    ours, theirs = figures_of(2.0).to_dict(None), figures_of(1.0).to_dict(None)
    difference = compare(ours, theirs)
    assert difference["totals"]["forward_ratio"] == 2.0
    assert difference["totals"]["wall_ratio"] == 8 / 7
    assert difference["totals"]["kept_bytes_more"] == 0
    assert "peak_bytes_more" not in difference["totals"]
    assert difference["blocks"][0]["name"] == "a"


def test_a_comparison_leaves_out_what_only_one_has():
    ours, theirs = Figures(), Figures()
    ours.add(step(0, 1.0, name="a"))
    theirs.add(step(0, 1.0, name="b"))
    assert compare(ours.to_dict(None), theirs.to_dict(None))["blocks"] == []


def test_scalars_are_numbers_by_path():
    found = scalars(figures_of(2.0).to_dict(None))
    assert found["blocks/a/forward_ms"] == 2.0
    assert found["step/kept_bytes"] == 100
    assert "step/model_flops" not in found
    assert all(isinstance(value, int | float) for value in found.values())
