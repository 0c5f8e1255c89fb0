"""Fit a step into a memory budget with the least recompute: measure blocks, solve for a plan, see what is possible.

::

    profile = budget.measure(model, inputs)      # or a list of blocks and their x
    plan = budget.solve(profile, "8GiB")         # a plan function: Checkpoint(plan)
    budget.pareto(profile).plot("pareto.png")

``Checkpoint(memory_budget=...)`` does the first two by itself, in the first step of a training.
"""

from blockhooks.budget.measure import measure
from blockhooks.budget.pareto import Pareto, Point, pareto
from blockhooks.costs import BlockCosts, ChainProfile, ModeCosts, Prediction, predict
from blockhooks.solver import Plan, solve

__all__ = [
    "BlockCosts",
    "ChainProfile",
    "ModeCosts",
    "Pareto",
    "Plan",
    "Point",
    "Prediction",
    "measure",
    "pareto",
    "predict",
    "solve",
]
