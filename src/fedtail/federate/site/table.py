"""A site's own table: its rows stay here; moments and bin counts of columns leave once, before round 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedtail.core.random import generator
from fedtail.data.federation import Client, Samples, Transform, stratified_holdout
from fedtail.data.tables import (
    TableSchema,
    encode_site,
    load_schema,
    pack_sketch,
    read_site,
    site_moments,
    site_sketch,
)
from fedtail.data.tables.pooled import numbers_of
from fedtail.errors import FedtailError, check_range
from fedtail.federate.protocol.faults import CodedError
from fedtail.federate.protocol.job import Job
from fedtail.runs.judged import Judged, judge
from fedtail.runs.saved import SavedModel


class TableSite:
    """One file under a schema all sites agreed on (``fedtail data schema`` proposes one).

    Splits and draws are keyed as in the simulator's ``site_tables``, so the same files give the same model there.
    """

    def __init__(
        self,
        path: str | Path,
        schema: str | Path,
        *,
        new: str | Path = "",
        validation: float = 0.1,
        test: float = 0.2,
        min_count: int = 5,
    ) -> None:
        """new: later rows, on which the site judges trained models."""
        check_range("data.test", test, 0.0, 1.0, open_high=True)
        self.schema_: TableSchema = load_schema(schema).unfitted()
        self.table = read_site(path, self.schema_)
        if not len(self.table):
            raise FedtailError(f"table {str(path)!r} has no rows with a label")
        self.validation, self.test_share, self.min_count, self.new = validation, test, min_count, new

    def schema(self) -> dict[str, Any]:
        return {
            "kind": "table",
            "name": "site tables",
            "classes": list(self.schema_.classes),
            "columns": [f"{c.name} ({c.kind})" for c in self.schema_.columns],
            "table": self.schema_.to_dict(),
            "model": "auto",
        }

    def statistics(self, request: dict[str, Any]) -> dict[str, Any]:
        train, _ = self._split(int(request["client"]), int(request["seed"]))
        if "scaling" in request:
            scaled = TableSchema.from_dict(request["scaling"], "the server's scaling")
            if not scaled.fitted or declared(scaled) != declared(self.schema_):
                raise CodedError("data", "the server's schema is not the one this site agreed to")
            return {"sketch": pack_sketch(site_sketch(self.table, scaled, train, min_count=self.min_count))}
        return {"moments": site_moments(self.table, self.schema_, train, min_count=self.min_count).tolist()}

    def columns(self, index: int, seed: int) -> list[np.ndarray]:
        train, _ = self._split(index, seed)
        return list(numbers_of(self.schema_, self.table.columns, train))

    def client(self, index: int, job: Job) -> Client:
        fitted = TableSchema.from_dict(job.preprocessing)
        if not fitted.fitted or declared(fitted) != declared(self.schema_):
            raise CodedError("data", "the server's schema is not the one this site agreed to")
        samples: Samples = encode_site(self.table, fitted)
        rest, _ = self._split(index, job.seed)
        y = samples.y.numpy()
        train, held = stratified_holdout(y, rest, self.validation, generator(job.seed, "validation", index))
        return Client(index, samples, train, held, job.n_classes, Transform(), None)

    def judged(self, model: SavedModel) -> Judged:
        return judge_new(model, self.new)

    def test(self, index: int, job: Job) -> np.ndarray:
        return self._split(index, job.seed)[1]

    def _split(self, index: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """(rest, test) rows."""
        rng = generator(seed, "site_tables/test", index)
        return stratified_holdout(self.table.y, np.arange(len(self.table)), self.test_share, rng)


def judge_new(model: SavedModel, new: str | Path) -> Judged:
    """The rows that a site's file names for judging models."""
    if not new:
        raise CodedError("data", "this site names no rows to judge a model on: set new under [data] in site.toml")
    return judge(model, Path(new))


def declared(schema: TableSchema) -> list[tuple[str, str, tuple[str, ...], int, tuple[float, ...]]]:
    """What fitting does not change: names, kinds, levels, marks of missing values."""
    return [(c.name, c.kind, c.levels, c.buckets, c.marks) for c in schema.columns]
