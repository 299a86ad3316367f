"""What mkdocs does beyond the Markdown files, and the table of settings in docs/settings.md, made from the schema."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from fedtail.federate.site.config import Rules
from fedtail.settings import Settings, interval

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


def write_settings() -> None:
    """Bring docs/settings.md up to date: ``python docs/hooks.py``."""
    page = ROOT / "docs" / "settings.md"
    page.write_text(page.read_text(encoding="utf-8").partition(MARK)[0] + f"{MARK}\n\n{settings()}\n", encoding="utf-8")


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
    return interval(section, key)


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


if __name__ == "__main__":
    write_settings()
