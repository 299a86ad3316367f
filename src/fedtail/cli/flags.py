"""Flags that commands share which must start quickly."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]
