"""The one registry pattern: a name for everything a config can name, with errors that help."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from fedtail.errors import FedtailError, first_line, not_of_kind, one_of
from fedtail.words import listing

T = TypeVar("T")
APART = ("method", "data", "rates", "model")
"""Sections of settings whose names the package fedtail-experiments has more of."""
OWN: dict[str, str] = {}
"""File -> what names it, of all code of the user's that was loaded."""


@cache
def _point_names(points: Callable[..., Iterable[Any]], group: str) -> list[str]:
    """Entry points of a group. Looking for them reads the metadata of every installed package, for milliseconds, and
    metrics are asked for of every site in every round."""
    return [point.name for point in points(group=group)]


class Registry(Generic[T]):
    """Names -> classes, functions or records.

    Beside what is registered, a name may point at the user's own: ``my_method.py:MyMethod``, ``package.module:Name``,
    or an entry point of an installed package.

    Args:
        kind: what error messages call an entry.
        section: the settings that its options live in.
        given: parameters that the caller supplies and that are therefore no options.
        group: the entry points that installed packages add to it by, ``fedtail.<group>``.
        adapt: (name, the user's object) -> entry; raises ``FedtailError`` for what cannot be one.
    """

    def __init__(
        self,
        kind: str,
        section: str | None = None,
        given: tuple[str, ...] = (),
        group: str | None = None,
        adapt: Callable[[str, Any], Any] = lambda name, found: found,
    ) -> None:
        self.kind, self.section, self.given, self.adapt = kind, section or kind, given, adapt
        self.group = f"fedtail.{group or self.section}"
        self._entries: dict[str, Any] = {}
        self._own: dict[str, Any] = {}
        self._apart: set[str] = set()

    def add(self, name: str, *, apart: bool = False) -> Callable[[Any], Any]:
        """Decorator that registers a class, function or record under ``name``. One that is ``apart`` is found by its
        name and left out where all entries are gone through."""

        def register(entry: Any) -> Any:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            if isinstance(entry, type):
                entry.name = name  # type: ignore[attr-defined]
            self._entries[name] = entry
            self._apart |= {name} if apart else set()
            return entry

        return register

    def __getitem__(self, name: str) -> Any:
        if name in self._entries:
            return self._entries[name]
        if name not in self._own:
            self._own[name] = self.adapt(name, self._find(name))
        return self._own[name]

    def _find(self, name: str) -> Any:
        if is_own(name):
            return load_object(self.kind, name)
        for point in entry_points(group=self.group, name=name):
            return point.load()
        error = one_of(self.kind, name, [*self, *sorted(self._apart)])
        if self.section in APART and importlib.util.find_spec("fedtail_experiments") is None:
            raise FedtailError(f"{error}. The package fedtail-experiments, which is not installed, has more")
        raise error

    def canonical(self, name: str) -> str:
        """Return the registered name that ``name`` is but for capitals and punctuation, or by title: ``FedCGNM``."""
        if name in self or is_own(name):
            return name
        wanted = _letters(name)
        titled = ((known, getattr(entry, "title", "")) for known, entry in self._entries.items())
        same = [known for known, title in titled if wanted and wanted in (_letters(known), _letters(str(title)))]
        return same[0] if len(same) == 1 else name

    def __contains__(self, name: object) -> bool:
        """Whether a name is registered or points at the user's own, which is only looked at when it is used."""
        return name in self._entries or (isinstance(name, str) and (is_own(name) or name in self._installed()))

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys([*(name for name in self._entries if name not in self._apart), *self._installed()]))

    def _installed(self) -> list[str]:
        return _point_names(entry_points, self.group)

    def remember(self, name: str, entry: Any) -> None:
        """Have a name of the user's own stand for ``entry``, unless it is loaded already."""
        self._own.setdefault(name, entry)

    def named(self) -> list[str]:
        """Every name, those of the user's own that were used in this process included."""
        return [*self, *(name for name in self._own if name not in self._installed())]

    def options(self, name: str) -> dict[str, Any]:
        """Option names and defaults of an entry (``inspect.Parameter.empty`` where there is none)."""
        return {
            p.name: p.default
            for p in inspect.signature(self[name]).parameters.values()
            if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in self.given
        }

    def check(self, name: str, given: dict[str, Any]) -> dict[str, Any]:
        """The options with values of the declared types; one clear line for unknown names and wrong values."""
        allowed, entry = self.options(name), self[name]
        plain = inspect.isroutine(entry) or dataclasses.is_dataclass(entry)
        hints = typing.get_type_hints(entry if plain else entry.__init__)
        out = {}
        for key, value in given.items():
            if key not in allowed:
                if not allowed:
                    raise FedtailError(f"{self.section}.{key} is unknown: {self.kind} {name!r} has no options")
                wrong = one_of("option", key, allowed, lead=f"{name} has no")
                others = [other for other in sorted([*self, *self._apart]) if key in self.options(other)]
                of = f"; {key!r} is an option of {listing(others, 4)}, see {self.section}.name" if others else ""
                raise FedtailError(f"{wrong}{of}")
            out[key] = convert(f"{self.section}.{key}", value, hints[key]) if key in hints else value
        return out

    def build(self, name: str, /, *args: Any, **options: Any) -> T:
        """Make an entry from options, with one clear line for options it does not have or values it refuses."""
        name = self.canonical(name)
        checked = self.check(name, options)
        needed = [key for key, default in self.options(name).items() if default is inspect.Parameter.empty]
        missing = [key for key in needed if key not in checked]
        if missing:
            raise FedtailError(f"{self.section}.{missing[0]} is missing: {self.kind} {name!r} needs it")
        return self[name](*args, **checked)


def convert(key: str, value: Any, annotation: Any) -> Any:
    """``value`` as the annotated type, or one line that says what was expected."""
    try:
        config = ConfigDict(arbitrary_types_allowed=True)
        return TypeAdapter(annotation, config=config).validate_python(value)
    except ValidationError as error:
        raise not_of_kind(key, value, error.errors()[0]) from None
    except Exception:  # annotations that pydantic has no schema for are left to the entry itself
        return value


def _letters(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def is_own(name: str) -> bool:
    """Whether a name points at code of the user's."""
    return ":" in name


def load_object(kind: str, name: str) -> Any:
    """Load what ``module:attribute`` or ``file.py:attribute`` names. The working folder counts as importable, as for
    ``python -m``."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise FedtailError(f"{kind} {name!r} is not of the form 'module:Name' or 'file.py:Name'")
    module = _load_file(kind, name, Path(where)) if where.endswith(".py") else _import(kind, name, where)
    OWN[str(module.__file__)] = f"{kind} {name!r}"
    value: Any = module
    for part in attribute.split("."):
        if not hasattr(value, part):
            public = ", ".join(n for n in sorted(vars(module)) if not n.startswith("_")) or "nothing"
            raise FedtailError(f"{kind} {name!r}: {where!r} has no {attribute!r} (it defines: {public})")
        value = getattr(value, part)
    return value


def in_user_code(kind: str, name: str, error: Exception) -> FedtailError:
    """One line with the place; the rest of the traceback is shown by ``--debug``."""
    return FedtailError(f"{kind} {name!r}: {in_words(error, anywhere=True)}; use --debug for the full traceback")


def in_words(error: BaseException, *, anywhere: bool = False) -> str:
    """What an error says, in one line, with the last place in the user's own code, or ``anywhere``."""
    if isinstance(error, FedtailError):
        return str(error)
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    mine = [place for place in frames if place[0] in OWN] or frames[-1:] * anywhere
    last = [(error.filename, error.lineno)] if isinstance(error, SyntaxError) else mine[-1:]
    where = "".join(f" in {file}, line {line}" for file, line in last)
    return ": ".join(dict.fromkeys([f"{type(error).__name__}{where}", first_line(error)]))


def _import(kind: str, name: str, where: str) -> ModuleType:
    try:
        with _importable(Path.cwd()):
            return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise FedtailError(
            f"{kind} {name!r}: cannot import {error.name!r}; run from the folder that holds it, install it, "
            "or name the file as 'path/to/file.py:Name'"
        ) from error
    except Exception as error:
        raise in_user_code(kind, name, error) from error


def _load_file(kind: str, name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise FedtailError(f"{kind} {name!r}: there is no file {str(path)!r}")
    module_name = f"fedtail_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    OWN[str(spec.origin)] = f"{kind} {name!r}"
    try:
        with _importable(path.resolve().parent):
            spec.loader.exec_module(module)
    except Exception as error:
        raise in_user_code(kind, name, error) from error
    return module


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
