"""Declarations that ship with the package: a recipe per data set, and what the search found best."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from fedtail.study.compare import BUILT_IN

FOLDER = files(__package__)


@cache
def load_toml(path: str) -> dict[str, Any]:
    """A declaration of this package; not to be changed, since every caller gets the same one."""
    return tomllib.loads((FOLDER / path).read_text(encoding="utf-8"))


def load_recipes() -> dict[str, Any]:
    """Recipes by data set: its settings (``set``), and those that go with a number of clients (``clients``). That for
    digits is what ``fedtail demo`` trains on, apart from the rate, which is the default."""
    digits = {key: value for key, value in BUILT_IN.items() if key != "rates.rate"}
    return {"digits": {"set": digits}, **load_toml("recipes.toml")}


def load_tuned() -> dict[str, Any]:
    """recipe -> method -> the settings that a recorded search found best on validation; "recipe/dirichlet" is for
    clients of that partition."""
    return load_toml("tuned.toml")
