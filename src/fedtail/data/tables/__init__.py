"""Bring your own table: read, infer, encode; pooled or one file per site."""

from fedtail.data.tables.encode import frame_columns
from fedtail.data.tables.pooled import table, table_from_frame
from fedtail.data.tables.read import Table, read_table
from fedtail.data.tables.schema import Column, TableSchema, load_schema, schema_text
from fedtail.data.tables.sites import (
    SiteTable,
    encode_site,
    propose_schema,
    read_site,
    site_moments,
    site_sketch,
    site_tables,
)
from fedtail.data.tables.sketch import (
    column_moments,
    column_sketch,
    fit_cuts,
    fit_schema,
    merge_moments,
    merge_sketches,
    pack_sketch,
    unpack_sketch,
)

__all__ = [
    "Column",
    "SiteTable",
    "Table",
    "TableSchema",
    "column_moments",
    "column_sketch",
    "encode_site",
    "fit_cuts",
    "fit_schema",
    "frame_columns",
    "load_schema",
    "merge_moments",
    "merge_sketches",
    "pack_sketch",
    "propose_schema",
    "read_site",
    "read_table",
    "schema_text",
    "site_moments",
    "site_sketch",
    "site_tables",
    "table",
    "table_from_frame",
    "unpack_sketch",
]
