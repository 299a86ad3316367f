"""The one registry pattern: a name for everything a config can name, with errors that help."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from fedtail.core.errors import FedtailError, one_of

T = TypeVar("T")


class Registry(Generic[T]):
    """Names -> classes or functions. ``kind`` is what error messages call an entry."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Callable[..., T]] = {}

    def add(self, name: str) -> Callable[[Callable[..., T]], Any]:
        """Decorator that registers a class or function under ``name``."""

        def register(entry: Callable[..., T]) -> Callable[..., T]:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = entry
            return entry

        return register

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._entries:
            raise one_of(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def options(self, name: str, skip: tuple[str, ...] = ()) -> dict[str, Any]:
        """Option names and defaults of an entry (``inspect.Parameter.empty`` where there is none)."""
        entry = self[name]
        if dataclasses.is_dataclass(entry):
            return {
                f.name: f.default if f.default is not dataclasses.MISSING else inspect.Parameter.empty
                for f in dataclasses.fields(entry)
                if f.init and f.name not in skip
            }
        return {
            p.name: p.default
            for p in inspect.signature(entry).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in skip
        }

    def check_options(self, name: str, given: dict[str, Any], skip: tuple[str, ...] = ()) -> None:
        """Raise for an option that the entry does not have."""
        allowed = self.options(name, skip)
        for key in given:
            if key not in allowed:
                if not allowed:
                    raise FedtailError(f"{self.kind} {name!r} has no options, got {key!r}")
                raise one_of(f"option of {self.kind} {name!r}", key, allowed)

    def build(self, name: str, /, *args: Any, **options: Any) -> T:
        """Make an entry from options, with one clear line for options it does not have or values it refuses."""
        self.check_options(name, options)
        try:
            return self[name](*args, **options)
        except TypeError as error:
            raise FedtailError(f"{self.kind} {name!r}: {error}") from error
