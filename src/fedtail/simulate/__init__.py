"""The in-process simulator: a plain reference path, and fast paths that prove themselves against it."""

from fedtail.simulate.batched.simulator import BatchedSimulator
from fedtail.simulate.graph.simulator import GraphSimulator
from fedtail.simulate.paths import simulator
from fedtail.simulate.reference import ReferenceSimulator

__all__ = ["BatchedSimulator", "GraphSimulator", "ReferenceSimulator", "simulator"]
