"""FedML and FedLab import torchvision, whose builds match one build of PyTorch each; nothing that is timed needs it."""

import importlib.machinery
import sys
import types


class _Nothing(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def without_torchvision():
    """Let ``import torchvision`` and its parts succeed with empty classes."""
    parts = ("", ".datasets", ".datasets.folder", ".datasets.utils", ".models", ".models.resnet")
    for name in (*parts, ".transforms", ".transforms.functional", ".utils"):
        module = _Nothing(f"torchvision{name}")
        module.__spec__, module.__path__ = importlib.machinery.ModuleSpec(module.__name__, None), []
        sys.modules[module.__name__] = module
