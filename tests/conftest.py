"""What holds for every test: one thread, deterministic algorithms, known seeds, no network."""

import os

# Set before torch and transformers are imported.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # deterministic cuBLAS

import random

import hypothesis
import numpy
import pytest
import torch

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,  # the same examples on every machine
    deadline=None,  # a shared machine has no stable times
    max_examples=25,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore", parent=hypothesis.settings.get_profile("ci"), derandomize=False, max_examples=500
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _known_state():
    """Start each test from the same seeds, with deterministic algorithms, and leave torch as it was."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    torch.use_deterministic_algorithms(True)
    # Filling would add operations that are counted.
    torch.utils.deterministic.fill_uninitialized_memory = False
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
