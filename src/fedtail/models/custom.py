"""The user's own network: ``package.module:callable`` or ``file.py:callable``."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtail.errors import FedtailError


def is_custom(name: str) -> bool:
    """Whether a model name points at user code."""
    return ":" in name


def custom_model(name: str, input_shape: tuple[int, ...], n_classes: int, **options: Any) -> nn.Module:
    """Import and call the user's factory or module class, and check that it classifies samples of this shape.

    ``input_shape`` and ``n_classes`` (or ``num_classes``) are passed where the signature names them; a callable
    with two required arguments gets both in that order; ``options`` are passed by name.
    """
    target = load_attribute(name)
    if isinstance(target, nn.Module):
        module = copy.deepcopy(target)
    elif callable(target):
        args, given = _arguments(name, target, input_shape, n_classes, options)
        try:
            module = target(*args, **given)
        except Exception as error:
            raise _in_user_code(name, error) from error
    else:
        raise FedtailError(f"model {name!r} is a {type(target).__name__}, not a class or function that makes a module")
    if not isinstance(module, nn.Module):
        raise FedtailError(f"model {name!r} returned a {type(module).__name__}, not a torch.nn.Module")
    check_output(module, input_shape, n_classes, f"model {name!r}")
    return module


def load_attribute(name: str) -> Any:
    """What ``module:attribute`` names. The working folder counts as importable, as for ``python -m``."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise FedtailError(f"model {name!r} is not of the form 'module:callable' or 'file.py:callable'")
    module = _load_file(name, Path(where)) if where.endswith(".py") else _import(name, where)
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = ", ".join(n for n in sorted(vars(module)) if not n.startswith("_")) or "nothing"
            raise FedtailError(f"model {name!r}: {where!r} has no {attribute!r} (it defines: {public})")
        value = getattr(value, part)
    return value


def check_output(module: nn.Module, input_shape: tuple[int, ...], n_classes: int, what: str) -> None:
    """Raise unless the module maps (2, *input_shape) to (2, n_classes). Also gives lazy layers their sizes."""
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            device = next((p.device for p in module.parameters()), None)
            out = module(torch.zeros(2, *input_shape, device=device))
    except Exception as error:  # whatever the user's code raises
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FedtailError(f"{what} does not accept samples of shape {input_shape}: {first}") from error
    finally:
        module.train(training)
    if not isinstance(out, torch.Tensor) or tuple(out.shape) != (2, n_classes):
        got = tuple(out.shape) if isinstance(out, torch.Tensor) else type(out).__name__
        raise FedtailError(f"{what} must return one row of {n_classes} scores per sample, (2, {n_classes}), not {got}")


def _import(name: str, where: str) -> Any:
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise FedtailError(
            f"model {name!r}: cannot import {error.name!r}; run from the folder that holds it, install it, "
            "or name the file as 'path/to/file.py:callable'"
        ) from error
    except Exception as error:
        raise _in_user_code(name, error) from error


def _load_file(name: str, path: Path) -> Any:
    if not path.is_file():
        raise FedtailError(f"model {name!r}: there is no file {str(path)!r}")
    module_name = f"fedtail_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _importable(path.resolve().parent):
            spec.loader.exec_module(module)
    except Exception as error:
        raise _in_user_code(name, error) from error
    return module


def _in_user_code(name: str, error: Exception) -> FedtailError:
    """One line with the place; the rest of the traceback is shown by ``--debug``."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (last.filename, last.lineno)
    first = (str(error).strip() or "no message").splitlines()[0]
    return FedtailError(f"model {name!r}: {type(error).__name__} in {file}, line {line}: {first}; --debug shows all")


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    known = entry in sys.path
    if not known:
        sys.path.insert(0, entry)
    try:
        yield
    finally:
        if not known and entry in sys.path:
            sys.path.remove(entry)


def _arguments(
    name: str, target: Any, input_shape: tuple[int, ...], n_classes: int, options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return (input_shape, n_classes), options
    known = {"input_shape": input_shape, "n_classes": n_classes, "num_classes": n_classes}
    given = {key: value for key, value in known.items() if key in parameters and key not in options}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key in options:
            if key not in parameters:
                allowed = ", ".join(p for p in parameters if p not in known) or "none"
                raise FedtailError(f"model {name!r} has no option {key!r} (allowed: {allowed})")
    if given:
        return (), {**given, **options}
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [
        p for p in parameters.values() if p.kind in positional and p.default is p.empty and p.name not in options
    ]
    return ((input_shape, n_classes) if len(required) == 2 else ()), options
