"""The one registry pattern: a name for everything a config can name, with errors that help."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedtail.errors import FedtailError, one_of

T = TypeVar("T")


class Registry(Generic[T]):
    """Names -> classes or functions.

    ``kind`` is what error messages call an entry, ``section`` the config section its options live in, ``given``
    the parameters that the caller supplies and that are therefore no options.
    """

    def __init__(self, kind: str, section: str | None = None, given: tuple[str, ...] = ()) -> None:
        self.kind, self.section, self.given = kind, section or kind, given
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

    def options(self, name: str) -> dict[str, Any]:
        """Option names and defaults of an entry (``inspect.Parameter.empty`` where there is none)."""
        entry = self[name]
        if dataclasses.is_dataclass(entry):
            return {
                f.name: f.default if f.default is not dataclasses.MISSING else inspect.Parameter.empty
                for f in dataclasses.fields(entry)
                if f.init and f.name not in self.given
            }
        return {
            p.name: p.default
            for p in inspect.signature(entry).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in self.given
        }

    def check(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """The options with values of the declared types; one clear line for unknown names and wrong values."""
        allowed = self.options(name)
        hints = typing.get_type_hints(entry if inspect.isroutine(entry := self[name]) else _hinted(entry))
        out = {}
        for key, value in given.items():
            if key not in allowed:
                if not allowed:
                    raise FedtailError(f"{self.section}.{key} is unknown: {self.kind} {name!r} has no options")
                raise one_of(f"option of {self.kind} {name!r}", key, allowed)
            out[key] = convert(f"{self.section}.{key}", value, hints[key]) if key in hints else value
        return out

    def build(self, name: str, /, *args: Any, **options: Any) -> T:
        """Make an entry from options, with one clear line for options it does not have or values it refuses."""
        checked = self.check(name, options)
        missing = [
            key
            for key, default in list(self.options(name).items())
            if default is inspect.Parameter.empty and key not in checked
        ]
        if missing:
            raise FedtailError(f"{self.section}.{missing[0]} is missing: {self.kind} {name!r} needs it")
        return self[name](*args, **checked)


def convert(key: str, value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type, or one line that says what was expected."""
    try:
        config = ConfigDict(arbitrary_types_allowed=True)
        return TypeAdapter(annotation, config=config).validate_python(value)
    except ValidationError as error:
        said = error.errors()[0]["msg"].lower()
        said = "give a list, such as [1,2]" if "sequence" in said else said
        raise FedtailError(f"{key} = {value!r} is not allowed: {said}") from None
    except Exception:  # annotations that pydantic has no schema for are left to the entry itself
        return value


def _hinted(entry: Any) -> Any:
    return entry if dataclasses.is_dataclass(entry) else entry.__init__
