"""Flower: the transport over its grid, the ServerApp, and what answers messages at a site."""

from __future__ import annotations

import importlib
import operator
import sys
from importlib.metadata import version
from typing import Any

TESTED = "1.41.0"
"""The version that fedtail is tested with; of another, what is not as it is here is left as it is, with a line."""

SITE = "FEDTAIL_SITE"
"""Environment variable of a SuperNode: the site's folder."""
CONTACT = "contact"
"""The file there that is touched whenever the server has answered."""


def private(module: str, *names: str, loses: str) -> Any:
    """Return a module of Flower's that has all these names, none of which is part of its API; None, and a line that
    says what is lost, in a version without them."""
    try:
        found = importlib.import_module(module)
        for name in names:
            operator.attrgetter(name)(found)
    except (ImportError, AttributeError) as error:
        sys.stderr.write(f"WARNING :   flwr {version('flwr')} is not known here ({error}): {loses}\n")
        return None
    return found
