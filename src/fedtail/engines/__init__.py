"""How clients are run: in process (``simulator``) or on real federations."""

from fedtail.engines.base import Engine, LocalSettings
from fedtail.engines.simulator import simulator

__all__ = ["Engine", "LocalSettings", "simulator"]
