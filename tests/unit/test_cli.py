"""The command line: options, exit codes, JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path

import blockhooks

TINY = [
    "--steps",
    "1",
    "--layers",
    "1",
    "--width",
    "32",
    "--seq",
    "8",
    "--batch",
    "1",
    "--memory-budget",
    "0",
]


def call(*arguments):
    source = str(Path(blockhooks.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "NO_COLOR": "1", "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "blockhooks", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_demo_runs_from_the_command_line(tmp_path):
    done = call("demo", *TINY, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "figures.json").exists()


def test_an_option_that_does_not_fit_is_a_message_and_exit_code_2(tmp_path):
    done = call("demo", *TINY, "--width", 100, "--out", tmp_path)
    assert done.returncode == 2
    assert "--width: expected a multiple of 32" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_option_that_is_no_number_is_exit_code_2():
    done = call("demo", "--steps", "many")
    assert done.returncode == 2
    assert "--steps" in done.stderr


def test_version_as_json():
    done = call("version", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["blockhooks"] == blockhooks.__version__
