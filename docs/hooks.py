"""What mkdocs builds beyond the Markdown files: links out of docs/, and the table of settings from the schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedtail.runs.config import Config

ROOT = Path(__file__).parent.parent
MARK = "<!-- settings -->"


def on_config(config: Any) -> Any:
    """Leave pages that do not exist out of the navigation, and put pages it forgets at its end."""
    nav = _existing(config["nav"])
    listed = set(_targets(nav))
    more = sorted(p.name for p in (ROOT / "docs").glob("*.md") if p.name not in listed)
    config["nav"] = nav + ([{"More": more}] if more else [])
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in the settings; links to files of the repository outside docs/ become plain names."""
    if MARK in markdown:
        markdown = markdown.replace(MARK, settings())
    return re.sub(r"\[([^\]]+)\]\(\.\./([^)]+)\)", _outside, markdown)


def settings() -> str:
    """One table per section of the config: key, default, allowed values, meaning."""
    parts = []
    for name, field in Config.model_fields.items():
        section: Any = field.annotation
        lines = [f"## {name}", "", _prose(section.__doc__), ""]
        lines += ["| key | default | allowed | |", "|---|---|---|---|"]
        comments = _comments(name)
        for key, item in section.model_fields.items():
            lines.append(f"| `{name}.{key}` | {_default(item)} | {_allowed(item)} | {comments.get(key, '')} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _comments(section: str) -> dict[str, str]:
    """The docstrings under the fields of a section, read from the source of the schema."""
    source = (ROOT / "src" / "fedtail" / "runs" / "config.py").read_text(encoding="utf-8")
    name = type(getattr(Config(), section)).__name__
    body = re.search(rf"class {name}\(.*?(?=\n\n\n)", source, re.S)
    found = re.findall(r'^    (\w+):[^\n]*\n    """(.*?)"""', body[0] if body else "", re.S | re.M)
    return {key: _prose(text) for key, text in found}


def _prose(text: str | None) -> str:
    return " ".join((text or "").split()).replace("``", "`").replace("|", "\\|")


def _default(item: FieldInfo) -> str:
    if item.default is PydanticUndefined:
        return "required"
    return f"`{item.default!r}`" if item.default not in (None, ()) else "not set"


def _allowed(item: FieldInfo) -> str:
    options = getattr(item.annotation, "__args__", ()) if "Literal" in str(item.annotation) else ()
    if options and all(isinstance(o, str) for o in options):
        return ", ".join(f"`{o}`" for o in options)
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return ", ".join(
        f"{sign} {getattr(rule, name):g}"
        for rule in item.metadata
        for name, sign in signs.items()
        if hasattr(rule, name)
    )


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
