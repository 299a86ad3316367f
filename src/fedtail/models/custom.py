"""The user's own network: ``package.module:callable`` or ``file.py:callable``."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from fedtail.errors import FedtailError, first_line
from fedtail.registry import in_user_code, load_object


def custom_model(name: str, input_shape: tuple[int, ...], n_classes: int, **options: Any) -> nn.Module:
    """Import and call the user's factory or module class, and check that it classifies samples of this shape.

    ``input_shape`` and ``n_classes`` (or ``num_classes``) are passed where the signature names them; a callable
    with two required arguments gets both in that order; ``options`` are passed by name.
    """
    target = load_object("model", name)
    if isinstance(target, nn.Module):
        module = copy.deepcopy(target)
    elif callable(target):
        args, given = _arguments(name, target, input_shape, n_classes, options)
        try:
            module = target(*args, **given)
        except Exception as error:
            raise in_user_code("model", name, error) from error
    else:
        raise FedtailError(f"model {name!r} is a {type(target).__name__}, not a class or function that makes a module")
    if not isinstance(module, nn.Module):
        raise FedtailError(f"model {name!r} returned a {type(module).__name__}, not a torch.nn.Module")
    check_output(module, input_shape, n_classes, f"model {name!r}")
    return module


def check_output(module: nn.Module, input_shape: tuple[int, ...], n_classes: int, what: str) -> None:
    """Raise unless the module maps (2, *input_shape) to (2, n_classes). Also gives lazy layers their sizes, and brings
    weights to float32, in which models train."""
    training = module.training
    module.float()
    module.eval()
    try:
        with torch.no_grad():
            device = next((p.device for p in module.parameters()), None)
            out = module(torch.zeros(2, *input_shape, device=device))
    except Exception as error:  # whatever the user's code raises
        raise FedtailError(f"{what} does not accept samples of shape {input_shape}: {first_line(error)}") from error
    finally:
        module.train(training)
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != (2, n_classes):
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise FedtailError(f"{what} must return one row of {n_classes} scores per sample, (2, {n_classes}), not {got}")


def _arguments(
    name: str, target: Any, input_shape: tuple[int, ...], n_classes: int, options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return (input_shape, n_classes), options
    known = {"input_shape": input_shape, "n_classes": n_classes, "num_classes": n_classes}
    given = {key: value for key, value in known.items() if key in parameters and key not in options}
    any_key = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if strange := [key for key in options if key not in parameters and not any_key]:
        allowed = ", ".join(p for p in parameters if p not in known) or "none"
        raise FedtailError(f"model {name!r} has no option {strange[0]!r} (allowed: {allowed})")
    if given:
        return (), {**given, **options}
    positional = (p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))
    required = [p for p in positional if p.default is p.empty and p.name not in options]
    return ((input_shape, n_classes) if len(required) == 2 else ()), options
