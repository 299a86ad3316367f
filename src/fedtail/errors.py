"""Errors a user can act on: one line that names the value, what is allowed and the fix."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class FedtailError(Exception):
    """Bad input, or a run that cannot continue. Printed as one line; the command exits with code 2."""


def one_of(kind: str, value: object, allowed: Iterable[str], lead: str = "") -> FedtailError:
    """Return the error for a value that is not in a closed list, with the nearest right spelling.

    ``lead``: ``fedcgnm has no`` makes it ``fedcgnm has no option 'betta'`` instead of ``option 'betta' is unknown``.
    """
    names = sorted(allowed)
    given, spelled = str(value).lower(), {name.lower(): name for name in names}
    swapped = [name for low, name in spelled.items() if sorted(low) == sorted(given)]  # letters in another order
    close = swapped or [spelled[low] for low in difflib.get_close_matches(given, spelled, n=1, cutoff=0.5)]
    hint = f"; did you mean {close[0]!r}?" if close else ""
    wrong = f"{lead} {kind} {value!r}" if lead else f"{kind} {value!r} is unknown"
    return FedtailError(f"{wrong}{hint} (allowed: {', '.join(names)})")


KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "string": "text"}
"""What a value must be, by the first word of the kind of fault that pydantic reports."""


def not_of_kind(key: str, value: object, fault: Mapping[str, Any], either: str = "") -> FedtailError:
    """Return the error for a value of another type, from pydantic's account of it."""
    wanted = KINDS.get(fault["type"].partition("_")[0])
    if "sequence" in fault["msg"].lower() or fault["type"] in ("list_type", "tuple_type"):
        wanted = "a list, such as [1,2]"
    must = f"must be {wanted}" if wanted else f"is not allowed: {fault['msg'][0].lower()}{fault['msg'][1:]}"
    return FedtailError(f"{key} = {value!r} {must}{either}")


@contextmanager
def writing(path: object) -> Iterator[None]:
    """Around whatever makes a file or folder that the user named: if it cannot be made, one line says why."""
    try:
        yield
    except BrokenPipeError:  # standard output that nobody reads any more
        raise
    except OSError as error:
        raise FedtailError(f"cannot write {str(path)!r}: {error.strerror or error}; choose another location") from None


def check_range(
    name: str,
    value: float,
    low: float | None = None,
    high: float | None = None,
    *,
    open_low: bool = False,
    open_high: bool = False,
) -> None:
    """Raise unless ``low <= value <= high`` (strict where open); NaN never passes, nor infinity without a bound."""
    above = value > -math.inf if low is None else value > low if open_low else value >= low
    below = value < math.inf if high is None else value < high if open_high else value <= high
    if not (above and below):
        left = "-inf" if low is None else f"{low:g}"
        right = "inf" if high is None else f"{high:g}"
        bounds = f"{'(' if open_low or low is None else '['}{left}, {right}{')' if open_high or high is None else ']'}"
        raise FedtailError(f"{name} = {value!r} {outside(bounds)}")


def first_line(error: BaseException) -> str:
    """What an error of somebody else's says, for a line of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def outside(bounds: str) -> str:
    """Return what is wrong with a number outside ``[1, inf)``, in words: ``must be at least 1``."""
    low, high = bounds[1:-1].split(", ")
    if low == "-inf" and high == "inf":
        return "must be a finite number"
    if high == "inf":
        return f"must be {'at least' if bounds[0] == '[' else 'above'} {low}"
    if low == "-inf":
        return f"must be {'at most' if bounds[-1] == ']' else 'below'} {high}"
    return f"is outside {bounds}"
