"""The command line: options, targets, exit codes, JSON."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

import blockhooks
from blockhooks import cli
from blockhooks.plan import every, first

TINY = ["--steps", "1", "--layers", "1", "--width", "32", "--seq", "8", "--batch", "1"]
TINY += ["--memory-budget", "0"]
USERS_CODE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x

class Failing(Model):
    def forward(self, x):
        return super().forward(x) / self.missing

def positional():
    return Model(), torch.ones(2, 4)

def keyword():
    return Model(), {"x": torch.ones(2, 4)}

def alone():
    return Model()

def nothing():
    return 3

def unstable():
    model = Model()
    entropy = torch.Generator()
    def disturb(module, args, output):
        entropy.seed()
        return output + torch.rand(4, generator=entropy)
    model.blocks[1].register_forward_hook(disturb)
    return model, torch.ones(2, 4)

def raising():
    raise LookupError("no such data")

def failing():
    return Failing(), torch.ones(2, 4)
"""


@pytest.fixture
def call(monkeypatch, capsys, tmp_path):
    """Call the command line in this process; return exit code, output, and what went to stderr."""
    (tmp_path / "users_code.py").write_text(USERS_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["blockhooks", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^\d$") as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    return call


def test_the_module_and_its_exit_code(tmp_path):
    source = str(Path(blockhooks.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "blockhooks", "demo", *TINY, "--width", "100"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": source},
        check=False,
    )
    assert done.returncode == 2
    assert "--width: expected a multiple of 32" in done.stderr
    assert "Traceback" not in done.stderr


def test_demo(call, tmp_path):
    code, out, _ = call("demo", *TINY, "--out", tmp_path / "here")
    assert code == 0
    assert "gradients bit-equal" in out
    assert (tmp_path / "here" / "figures.json").exists()


def test_demo_as_json_prints_the_figures_alone(call):
    code, out, _ = call("demo", *TINY, "--json")
    assert code == 0
    assert json.loads(out)["ways"]["checkpoint"]["bit_equal"] is True


def test_demo_that_is_not_bit_equal_is_exit_code_1(call, monkeypatch):
    monkeypatch.setattr(cli.demo_job, "run", lambda options, console: False)
    assert call("demo", *TINY)[0] == 1


@pytest.mark.parametrize("target", ["users_code:positional", "users_code.py:keyword"])
def test_profile_measures_each_block(call, target):
    code, out, _ = call("profile", target, "--plan", "first(2)", "--json")
    assert code == 0
    found = json.loads(out)
    assert [block["name"] for block in found["blocks"]] == ["blocks.0", "blocks.1", "blocks.2"]
    assert found["steps"] == 3
    assert call("profile", target, "--plan", "first(2)", "--json", "--steps", 1)[0] == 0


def test_profile_shows_a_table_and_writes_trace_and_page(call, tmp_path):
    files = ["--trace", "trace.json", "--page", "page.html"]
    code, out, _ = call("profile", "users_code.py:positional", *files)
    assert code == 0
    assert "blocks.2" in out
    assert json.loads((tmp_path / "trace.json").read_text())
    assert "blocks.2" in (tmp_path / "page.html").read_text()


def test_profile_of_an_architecture_of_transformers(call):
    settings = ["n_layer=2", "n_embd=16", "n_head=2", "vocab_size=50"]
    options = [option for pair in settings for option in ("--config", pair)]
    code, out, _ = call("profile", "hf:gpt2", *options, "--batch", 1, "--seq", 8, "--json")
    assert code == 0
    assert len(json.loads(out)["blocks"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:x"], "no module 'no_such_module'"),
        (["missing.py:x"], "no file at missing.py"),
        (["users_code"], "expected module:factory"),
        (["users_code:absent"], "has no function 'absent'; it has .*positional"),
        (["users_code:alone"], r"return \(model, inputs\)"),
        (["users_code:nothing"], "returned a int; expected a model"),
        (["users_code:positional", "--config", "a=1"], "--config sets up hf: targets"),
        (["users_code:positional", "--plan", "every(0)"], "must be at least 1, found 0"),
        (["users_code:positional", "--plan", "some"], "--plan: expected one of .* found 'some'"),
        (["hf:no-such-type"], "has no model type 'no-such-type'"),
        (["hf:gpt2", "--config", "n_layer"], "--config: expected key=value, found 'n_layer'"),
        (
            ["users_code:positional", "--plan", "every(x)"],
            "--plan: expected one of .*'every\\(x\\)'",
        ),
        (["users_code:positional", "--plan", "every()"], "--plan: expected one of .*every\\(\\)"),
        (["users_code:positional", "--plan", "every(2"], "--plan: expected one of .*'every\\(2'"),
        (["users_code:positional", "--plan", "every(blocks=2)"], "--plan: expected one of"),
        (["users_code:positional", "--plan", ""], "--plan: expected one of .* found ''"),
        (["users_code:positional", "--trace", "missing/t.json"], "No such file .*missing/t.json"),
        (["hf:gpt2", "--config", "n_layers=2"], "no setting 'n_layers'; did you mean n_layer"),
        (["hf:gpt2", "--config", "zzz=2"], "--config: gpt2 has no setting 'zzz'$"),
        (["hf:gpt2", "--config", "n_layer=two"], "--config: gpt2 cannot be set up so: .*n_layer"),
        (["hf:llama", "--config", "hidden_size=1048576"], "has weights of .* Make it smaller"),
    ],
)
def test_what_does_not_fit_is_a_message_and_exit_code_2(call, arguments, message):
    code, _, err = call("profile", *arguments)
    assert code == 2
    assert "Traceback" not in err
    assert re.search(message, err)


@pytest.mark.parametrize(
    ("factory", "line"),
    [("raising", 'raise LookupError("no such data")'), ("failing", "/ self.missing")],
)
def test_an_error_in_the_users_code_shows_the_users_traceback(call, factory, line):
    code, _, err = call("profile", f"users_code.py:{factory}")
    assert code == 3
    first_frame = err[err.index("Traceback") :].splitlines()[1]
    assert "users_code.py" in first_frame
    assert line in err
    assert "runpy" not in err


def test_verify(call, monkeypatch):
    code, out, _ = call("verify", "users_code:positional", "--plan", "tree(2)")
    assert code == 0
    assert "the same, bit for bit" in out
    code, out, _ = call("verify", "users_code:keyword", "--json")
    assert code == 0
    assert json.loads(out)["exact"] is True


def test_verify_of_a_model_that_is_not_deterministic_is_exit_code_1(call):
    code, out, _ = call("verify", "users_code.py:unstable")
    assert code == 1
    assert "not deterministic" in out


def test_plan(call, tmp_path):
    options = ["--memory-budget", "1.0", "--save", "costs.json", "--json"]
    code, out, _ = call("plan", "users_code:positional", *options)
    assert code == 0
    segments = json.loads(out)["segments"]
    assert [segments[0]["start"], segments[-1]["stop"]] == [0, 3]
    code, out, _ = call("plan", "costs.json", "--memory-budget", "1GiB", "--picture", "p.png")
    assert code == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_plan_on_meta(call):
    options = ["--meta", "--memory-budget", "0.9", "--save", "costs.json", "--json"]
    code, out, _ = call("plan", "users_code:positional", *options)
    assert code == 0
    assert len(blockhooks.budget.Plan.from_dict(json.loads(out)).segments) > 0
    assert "on meta" in blockhooks.budget.ChainProfile.load("costs.json").about


def test_a_model_that_does_not_fit_is_planned_for_on_meta(call):
    pytest.importorskip("transformers")
    sizes = [f"--config={name}" for name in ("hidden_size=65536", "num_hidden_layers=2")]
    code, _, err = call("plan", "hf:llama", *sizes)
    assert code == 2
    assert "plan without its memory: blockhooks plan --meta" in err
    code, out, _ = call("plan", "hf:llama", *sizes, "--meta", "--memory-budget", "1.0")
    assert code == 0
    assert "of plain" in out


def test_a_budget_that_no_plan_keeps_is_exit_code_1(call):
    code, _, err = call("plan", "users_code:positional", "--memory-budget", "1")
    assert code == 1
    assert "budget" in err
    code, _, err = call("demo", *TINY, "--memory-budget", 0.01, "--out", "small")
    assert code == 1
    assert "cannot be kept" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.json"], "No such file or directory: 'missing.json'"),
        (["broken.json"], "broken.json: expected a JSON file"),
        (
            ["users_code:positional", "--memory-budget", "1.0", "--picture", "p.xyz"],
            "suffix is one of",
        ),
        (
            ["users_code:positional", "--memory-budget", "1.0", "--save", "missing/c.json"],
            "No such",
        ),
    ],
)
def test_files_that_do_not_fit_are_exit_code_2(call, tmp_path, arguments, message):
    (tmp_path / "broken.json").write_text("{")
    code, _, err = call("plan", *arguments)
    assert code == 2
    assert "Traceback" not in err
    assert message in err


def test_a_budget_that_is_none_is_exit_code_2(call):
    code, _, err = call("plan", "users_code:positional", "--memory-budget", "plenty")
    assert code == 2
    assert "found 'plenty'" in err


def test_plugins(call):
    code, out, _ = call("plugins", "--json")
    assert code == 0
    found = {entry["name"]: entry for entry in json.loads(out)}
    assert {"plan_segments", "run_segment"} <= set(found["Checkpoint"]["hooks"])
    assert found["RNGSnapshot"]["hooks"] == ["recompute_context"]
    assert {name for name, entry in found.items() if entry["default"]} == {
        "RNGSnapshot",
        "StateSnapshot",
        "VersionGuard",
    }
    code, out, _ = call("plugins")
    assert code == 0
    assert "VersionGuard" in out


def test_version(call, monkeypatch):
    monkeypatch.setattr(cli, "version", lambda name: f"9.9 of {name}")
    assert json.loads(call("version", "--json")[1]) == {
        "blockhooks": "9.9 of blockhooks",
        "torch": torch.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
    }
    assert "blockhooks 9.9 of blockhooks" in call("version")[1]


def test_plans_are_read_as_they_are_written_in_python():
    assert cli.parse_plan("every(2)")(5) == every(2)(5)
    assert cli.parse_plan("first(3)")(5) == first(3)(5)
    assert cli.parse_plan("blocks([0, -1])")(3)[0].start == 0


def test_each_command_has_help_with_an_example(call):
    commands = [
        command.name or command.callback.__name__ for command in cli.app.registered_commands
    ]
    assert set(commands) >= {"demo", "profile", "plan", "verify", "plugins", "version"}
    for command in commands:
        code, out, _ = call(command, "--help")
        assert code == 0
        assert f"Example: blockhooks {command}" in out


def test_the_console_script_is_declared():
    scripts = {entry.name: entry.value for entry in metadata.entry_points(group="console_scripts")}
    if "blockhooks" not in scripts:
        pytest.skip("run from the source tree without an installation")
    assert scripts["blockhooks"] == "blockhooks.cli:main"
