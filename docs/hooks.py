"""What mkdocs does beyond the Markdown files, and what is made from the code: the tables of docs/settings.md, from the
schema, and docs/api.md, from docstrings."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

import fedtail
from fedtail.federate.site.config import Rules
from fedtail.settings import KEYWORDS, Settings, interval

ROOT = Path(__file__).parent.parent
MARK = "<!-- made -->"
API = {
    "Data": ["Federation", "partition", "datasets.load", "data.table_from_frame"],
    "Training": ["fit", "Result"],
    "Trained models": ["load_model", "SavedModel", "write_run_report"],
    "In your own training loop": ["optim.CGNM", "group_classes", "resampled_counts"],
    "To build on": ["methods.Method", "rates.RateStrategy", "rates.FedHOO", "FedtailError"],
}
"""What docs/api.md shows, by heading."""


def on_config(config: Any) -> Any:
    """Leave pages that do not exist out of the navigation, and put pages it forgets at its end."""
    nav = _existing(config["nav"])
    listed = set(_targets(nav))
    more = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in listed)
    config["nav"] = nav + ([{"More": more}] if more else [])
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links to files of the repository outside docs/ become plain names."""
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", _outside, markdown)


def settings() -> str:
    """One table per section: key, default, allowed values, meaning; then those of a site's own file."""
    parts = []
    fields = {**Settings.model_fields, **Rules.model_fields}
    for name, field in fields.items():
        section: Any = field.annotation
        lines = [f"## {name}", "", _prose(section.__doc__), ""]
        lines += ["| key | default | allowed | |", "|---|---|---|---|"]
        for key, item in section.model_fields.items():
            lines.append(
                f"| `{name}.{key}` | {_default(item)} | {_allowed(section, key)} | {_prose(item.description)} |"
            )
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def write_made() -> None:
    """Bring docs/settings.md and docs/api.md up to date: ``python docs/hooks.py``."""
    for name, made in MADE.items():
        page = ROOT / "docs" / name
        text = page.read_text(encoding="utf-8").partition(MARK)[0] + f"{MARK}\n\n{made()}\n"
        page.write_text(text, encoding="utf-8")


def api() -> str:
    """Signature and docstring of every public name, and of what users call on it."""
    parts = []
    for title, names in API.items():
        parts.append(f"## {title}")
        for name in names:
            made: Any = fedtail
            for step in name.split("."):
                made = getattr(made, step)
            parts += [f"### fedtail.{name}", _called(f"fedtail.{name}", made), _docstring(made)]
            if inspect.isclass(made) and not issubclass(made, Exception):
                parts.append("\n".join(filter(None, (_member(made, m) for m in _members(made)))))
    return "\n\n".join(filter(None, parts))


def _members(kind: Any) -> list[str]:
    """Public methods and properties that the class or a parent of ours has a docstring for."""
    ours = [c for c in kind.__mro__ if c.__module__.startswith("fedtail")]
    names = dict.fromkeys(n for c in ours for n in vars(c) if not n.startswith("_"))
    return [n for n in names if inspect.isroutine(made := getattr(kind, n, None)) or isinstance(made, property)]


def _member(kind: Any, name: str) -> str:
    made = inspect.getattr_static(kind, name)
    said = inspect.getdoc(getattr(kind, name)) or ""
    if not said:
        return ""
    said = _prose(said.partition("\n\n")[0])
    call = "" if isinstance(made, property) or not callable(getattr(kind, name)) else _arguments(getattr(kind, name))
    return f"- `.{name}{call}`: {said}"


def _arguments(made: Any) -> str:
    """Arguments with defaults and without types, which docstrings tell; ``fit``'s settings are on their own page."""
    shown = []
    for p in inspect.signature(made).parameters.values():
        if p.name in ("self", "cls") or (made is fedtail.fit and p.name in KEYWORDS):
            continue
        stars = {p.VAR_KEYWORD: "**", p.VAR_POSITIONAL: "*"}.get(p.kind, "")
        plain = p.default is p.empty or "<" in repr(p.default)
        shown.append(f"{stars}{p.name}" + ("" if plain else f"={p.default!r}"))
    return f"({', '.join([*shown, *(['**settings'] if made is fedtail.fit else [])])})"


def _called(name: str, made: Any) -> str:
    return "" if inspect.isclass(made) and issubclass(made, Exception) else f"```text\n{name}{_arguments(made)}\n```"


def _docstring(made: Any) -> str:
    """A docstring as Markdown: its list of arguments becomes a list."""
    text, _, behind = (inspect.getdoc(made) or "").partition("Args:\n")
    arguments, *more = re.split(r"\n\n(?=\S)", behind, maxsplit=1)
    lines = [" ".join(part.split()) for part in re.split(r"\n(?=    \w+: )", "\n" + arguments) if part.strip()]
    items = [f"- `{name}`: {said}" for name, _, said in (line.partition(": ") for line in lines)]
    return "\n\n".join(filter(None, (_paragraphs(text), _unquoted("\n".join(items)), *map(_paragraphs, more))))


def _paragraphs(text: str) -> str:
    parts = _unquoted(text).strip().split("\n\n")
    return "\n\n".join(f"```text\n{part}\n```" if part.startswith(">>>") else part for part in parts)


def _unquoted(text: str) -> str:
    return text.replace("``", "`")


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")


def _default(item: FieldInfo) -> str:
    if item.default is PydanticUndefined:
        return "required"
    return f"`{item.default!r}`" if item.default not in (None, ()) else "not set"


def _allowed(section: Any, key: str) -> str:
    kinds = get_args(section.model_fields[key].annotation)
    if kinds and all(isinstance(kind, str) for kind in kinds):
        return ", ".join(f"`{kind}`" for kind in kinds)
    return interval(section.model_fields[key])


def _outside(match: re.Match[str]) -> str:
    words, path = match[1], match[2]
    target = ROOT / path.partition("#")[0]
    if not target.exists():
        raise FileNotFoundError(f"a page links to ../{path}, which does not exist")
    return f"`{path}`" if words == path else f"{words} (`{path}`)"


def _targets(nav: Any) -> list[str]:
    """The files a navigation names."""
    out: list[str] = []
    for entry in nav:
        (_, target), *_ = entry.items()
        out += _targets(target) if isinstance(target, list) else [target]
    return out


def _existing(nav: Any) -> Any:
    out: list[Any] = []
    for entry in nav:
        (title, target), *_ = entry.items()
        if isinstance(target, list):
            inside = _existing(target)
            out += [{title: inside}] if inside else []
        elif (ROOT / "docs" / target).is_file():
            out.append(entry)
    return out


MADE = {"settings.md": settings, "api.md": api}
"""Pages whose text behind ``MARK`` is made from the code."""

if __name__ == "__main__":
    write_made()
