"""The registry of methods; each method's file adds itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedtail.errors import FedtailError
from fedtail.methods.base import Method
from fedtail.registry import Registry


def _own_method(name: str, kind: Any) -> Any:
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise FedtailError(f"method {name!r} is not a subclass of fedtail.methods.Method")
    kind.name = name
    return kind


METHODS: Registry[Method] = Registry("method", group="methods", adapt=_own_method)


def describe_methods() -> list[dict[str, Any]]:
    """Every method in plain values, by name: title, paper, wire, client_state, auxiliary, tunable, defaults."""
    return [
        {
            "name": name,
            "title": method.title,
            "paper": method.paper,
            "wire": method.wire,
            "client_state": method.client_state,
            "auxiliary": method.traits.needs_auxiliary,
            "tunable": list(method.tunable),
            "defaults": METHODS.options(name),
        }
        for name, method in ((name, METHODS[name]) for name in sorted(METHODS))
    ]


def methods_markdown() -> str:
    """The table of docs/methods.md."""
    lines = ["| method | sent beyond FedAvg | client state | options and defaults |", "|---|---|---|---|"]
    for m in describe_methods():
        options = ", ".join(f"`{o}`" for o in options_text(m["defaults"]))
        lines.append(f"| [{m['title']}](#{m['name']}) | {m['wire']} | {m['client_state']} | {options} |")
    return "\n".join(lines) + "\n"


def options_text(defaults: Mapping[str, Any]) -> list[str]:
    """``["mu = 0.01", ...]`` as a TOML file would say it."""
    return [f"{key} = {_toml(value)}" for key, value in defaults.items()]


def _toml(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else f"{value:g}"
