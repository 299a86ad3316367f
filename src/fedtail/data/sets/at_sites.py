"""Data that is not here: what a deployment's config names when every site brings its own."""

from __future__ import annotations

from collections.abc import Sequence

from fedtail.data.registry import DATASETS, Pooled
from fedtail.errors import FedtailError


@DATASETS.add("sites")
def sites(
    schema: str | None = None,
    classes: Sequence[str] = (),
    size: int | Sequence[int] = 64,
    channels: int = 3,
    augment: str = "flip",
) -> Pooled:
    """Data at the sites of a deployment, each described in its site.toml; only `fedtail deploy run` can use it.

    Where the server is not trusted, sites sign what the data are, and tell nothing: ``schema`` is the schema file of
    their tables, or ``classes``, ``size``, ``channels`` and ``augment`` are those of their images.
    """
    raise FedtailError("data.name = 'sites' is data that lives at the sites of a deployment; use `fedtail deploy run`")
