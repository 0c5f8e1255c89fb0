"""The main job, at a size that takes a second."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from blockhooks import demo, hookimpl

TINY = {"steps": 2, "layers": 2, "width": 32, "seq": 16, "batch": 2, "memory_budget": 0.0}


def run(options):
    printed = io.StringIO()
    return demo.run(options, Console(file=printed, width=120)), printed.getvalue()


def test_the_job_shows_equal_bits_and_writes_its_files(tmp_path):
    fine, printed = run(demo.Options(**TINY, out=tmp_path / "new" / "folder"))
    assert fine
    out = tmp_path / "new" / "folder"
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "trace.json").read_text())
    found = json.loads((out / "figures.json").read_text())
    ways = found["ways"]
    assert list(ways) == ["plain", "checkpoint"]
    assert ways["checkpoint"]["bit_equal"]
    assert ways["checkpoint"]["peak_bytes"] < ways["plain"]["peak_bytes"]
    assert [step["loss"] for step in ways["plain"]["steps"]] == [
        step["loss"] for step in ways["checkpoint"]["steps"]
    ]
    for step in ways["checkpoint"]["steps"]:
        assert step["equal"] == step["gradients"] == len(list(demo.GPT(2, 32, 16).parameters()))
        assert f"{step['loss']:.9f}" in printed
    for name in set(demo.WRITTEN) - {"pareto.png"}:
        assert name in printed
        assert (out / name).exists()


def test_a_memory_budget_is_a_third_way(tmp_path):
    options = TINY | {"layers": 8, "memory_budget": 0.6}
    fine, printed = run(demo.Options(**options, out=tmp_path))
    assert fine
    found = json.loads((tmp_path / "figures.json").read_text())["ways"]
    assert list(found) == ["plain", "checkpoint", "budget 60%"]
    peaks = [way["peak_bytes"] for way in found.values()]
    assert peaks[1] < peaks[2] < peaks[0]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert "pareto.png" in printed


def test_the_job_tells_when_a_single_bit_differs(tmp_path, monkeypatch):
    class Nudge:
        @hookimpl(wrapper=True)
        def run_block(self, index, recomputing):
            x = yield
            return x + 1e-7 if index == 1 and not recomputing else x

    def with_nudge(options):
        return [demo.Way("plain", options, None), demo.Way("nudged", options, [Nudge()])]

    monkeypatch.setattr(demo, "make_ways", with_nudge)
    fine, printed = run(demo.Options(**TINY, out=tmp_path))
    assert not fine
    assert "NO" in printed


@pytest.mark.parametrize("model", demo.MODELS[1:])
def test_models_of_transformers_are_bit_equal_too(tmp_path, model):
    fine, _ = run(demo.Options(**TINY, model=model, out=tmp_path))
    assert fine
    ways = json.loads((tmp_path / "figures.json").read_text())["ways"]
    assert ways["checkpoint"]["peak_bytes"] < ways["plain"]["peak_bytes"]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model", "rnn", "--model: expected one of gpt, gpt2, llama, bert, vit, found 'rnn'"),
        ("steps", 0, "--steps: expected at least 1, found 0"),
        ("layers", -1, "--layers: expected at least 1, found -1"),
        ("width", 100, r"--width: expected a multiple of 32 .*, found 100"),
        ("memory_budget", 1.5, r"--memory-budget: expected a fraction .*, found 1.5"),
        ("device", "abacus", r"--device: 'abacus' cannot be used here"),
    ],
)
def test_options_that_do_not_fit_are_told(option, value, message):
    with pytest.raises(demo.OptionError, match=message):
        demo.Options(**{option: value})


def test_text_that_is_not_there_or_too_short_is_told(tmp_path):
    with pytest.raises(demo.OptionError, match="--text: no file or folder at"):
        demo.Options(text=tmp_path / "nowhere")
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(demo.OptionError, match="holds 3 bytes, a sequence needs 258"):
        demo.read_text(demo.Options(text=short))


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(demo.OptionError, match="--out: expected a folder, found a file"):
        demo.Options(out=tmp_path / "file")


def test_text_is_the_source_of_the_standard_library():
    text = demo.read_text(demo.Options())
    assert text.dtype == torch.int64
    assert 1 << 20 < len(text) <= demo.CORPUS_BYTES
    assert b"import" in bytes(text[:100_000].tolist())


def test_targets_are_the_inputs_one_byte_later():
    options = demo.Options(seq=8, batch=3)
    inputs, targets = next(demo.batches(torch.arange(100), options))
    assert inputs.shape == targets.shape == (3, 8)
    assert torch.equal(targets, inputs + 1)


def test_times_belong_to_phases():
    timeline = demo.Timeline(forward_done=10, done=30, recomputes=[(12, 15), (20, 25)])
    assert [timeline.phase(at) for at in (0, 9, 10, 12, 15, 24, 25)] == [
        "forward",
        "forward",
        "backward",
        "recompute",
        "backward",
        "recompute",
        "backward",
    ]


def test_the_ratio_is_that_of_the_times_that_are_shown():
    """By medians over all steps but the first, which warms up."""
    plain, other = (demo.Way(name, demo.Options(), None) for name in ("plain", "other"))
    plain.steps = [SimpleNamespace(seconds=s) for s in (90.0, 2.0, 9.0, 4.0)]
    other.steps = [SimpleNamespace(seconds=s) for s in (1.0, 6.0, 5.0, 70.0)]
    assert (demo.step_time(plain), demo.step_time(other)) == (4.0, 6.0)
    assert demo.time_ratio(other, plain) == 1.5
    plain.steps = plain.steps[:1]
    assert demo.step_time(plain) == 90.0
