"""Data that is not here: what a deployment's config names when every site brings its own."""

from __future__ import annotations

from fedtail.data.registry import DATASETS, Pooled
from fedtail.errors import FedtailError


@DATASETS.add("sites")
def sites() -> Pooled:
    """Data at the sites of a deployment, each described in its site.toml; only `fedtail deploy run` can use it."""
    raise FedtailError("data.name = 'sites' is data that lives at the sites of a deployment; use `fedtail deploy run`")
