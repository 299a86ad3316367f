"""Reading: formats, encodings, and what bad files lead to."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedtail.data.tables.read import Table, listing, read_table, table_name, unique_names
from fedtail.data.tables.source import inspect_source
from fedtail.errors import FedtailError

PLAIN = "a,b,label\n1,x,yes\n2.5,y,no\n"


def written(folder: Path, content: str | bytes, name: str = "t.csv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def as_zip(data: bytes, *names: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name in names:
            archive.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", PLAIN.encode()),
        ("t.tsv", PLAIN.replace(",", "\t").encode()),
        ("t.txt", PLAIN.replace(",", ";").encode()),
        ("t.data", PLAIN.replace(",", "|").encode()),
        ("bom.csv", b"\xef\xbb\xbf" + PLAIN.encode()),
        ("utf16.csv", PLAIN.encode("utf-16")),
        ("crlf.csv", PLAIN.replace("\n", "\r\n").encode()),
        ("old_mac.csv", PLAIN.replace("\n", "\r").encode()),
        ("no_last_newline.csv", PLAIN.rstrip().encode()),
        ("blank_lines.csv", PLAIN.replace("\n", "\n\n").encode()),
        ("spaces.csv", PLAIN.replace(",", ", ").encode()),
        ("quoted.csv", b'"a","b","label"\n"1","x","yes"\n"2.5","y","no"\n'),
        ("t.csv.gz", gzip.compress(PLAIN.encode(), mtime=0)),
        ("t.csv.xz", lzma.compress(PLAIN.encode())),
        ("t.csv.bz2", bz2.compress(PLAIN.encode())),
        ("t.zip", as_zip(PLAIN.encode(), "inside.csv")),
    ],
)
def test_every_plain_format_reads_to_the_same_table(tmp_path: Path, name: str, content: bytes) -> None:
    table = read_table(written(tmp_path, content, name))
    assert list(table.frame.columns) == ["a", "b", "label"]
    assert table.frame["a"].tolist() == [1.0, 2.5]
    assert table.frame["b"].tolist() == ["x", "y"] and table.frame["label"].tolist() == ["yes", "no"]
    assert [n for n in table.notes if "UTF-16" not in n] == []


def test_parquet_reads_with_its_types(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"a": [1.0, 2.5], "when": pd.to_datetime(["2020-01-01", "2021-01-01"])})
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet")
    assert list(table.frame.columns) == ["a", "when"] and table.frame["when"].dtype.kind == "M"


def test_text_that_is_not_utf8_is_read_as_windows_or_latin_and_said(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "name,label\nKöln,a\n„Ost“,b\n".encode("cp1252")))
    assert table.frame["name"].tolist() == ["Köln", "„Ost“"] and "Windows-1252" in table.notes[0]
    latin = read_table(written(tmp_path, b"name,label\nK\xf6ln\x81,a\nOst,b\n", "l.csv"))
    assert latin.frame["name"][0].startswith("Köln") and "Latin-1" in latin.notes[0]
    assert (
        read_table(written(tmp_path, "name,label\nKöln,a\n".encode("cp437")), encoding="cp437").frame["name"][0]
        == "Köln"
    )


def test_labels_and_sites_keep_words_that_mean_missing_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path, "x,code,label\nNA,01,None\n?,02,NA\n,03,\n")
    frame = read_table(path, plain={"label"}, text={"code"}).frame
    assert frame["x"].isna().all() and frame["code"].tolist() == ["01", "02", "03"]
    assert frame["label"].tolist()[:2] == ["None", "NA"] and pd.isna(frame["label"][2])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.csv", "", "is empty"),
        ("blank.csv", "\n\r\n\n", "is empty"),
        ("header.csv", "a,b,c\n", r"header \(3 columns\) but no rows"),
        ("long.csv", "a,b\n1,2\n1,2,3\n4,5\n", r"line 3: 3 fields where the header has 2 \(1 rows"),
        ("short.csv", "a,b,c\n1,2,3\n1,2\n4\n", r"line 3: 2 fields where the header has 3 \(2 rows"),
        ("quote.csv", 'a,b\n1,"2\n3,4\n', "cannot be parsed|fields where"),
        ("binary.csv", bytes(range(256)) * 4, "not a text table"),
        ("t.csv.gz", gzip.compress(PLAIN.encode(), mtime=0)[:-12], "not a complete gzip file"),
        ("t.csv.gz", PLAIN, "not a complete gzip file"),
        ("t.csv.xz", lzma.compress(PLAIN.encode())[:-20], "not a complete xz file"),
        ("t.zip", b"PK not a zip", "not a complete zip file"),
        ("two.zip", as_zip(PLAIN.encode(), "1.csv", "2.csv"), "contains 2 files"),
        ("t.parquet", "PAR1 no", "not a readable Parquet"),
        ("book.xlsx", b"PK", "is a .xlsx file, which is not read; save it as CSV"),
        ("rows.json", '{"a": {"0": 1}}', "is a .json file, which is not read; save it as CSV"),
        ("excel.csv", "sep=;\na;b\n1,5;2\n", "begins with the line 'sep=;'.*delete that line"),
        ("later.csv", b"a,b\n1,2\n\0\0,\xff\n", "not a text table"),
    ],
)
def test_a_file_that_is_no_table_is_one_clear_line(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(FedtailError, match=words) as caught:
        read_table(written(tmp_path, content, name))
    assert "\n" not in str(caught.value)


def test_missing_files_folders_and_bad_options_are_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path / "none.parquet"):
        with pytest.raises(FedtailError, match=r"table .* does not exist"):
            read_table(path)
    with pytest.raises(FedtailError, match="is a folder"):
        read_table(tmp_path)
    good = written(tmp_path, PLAIN)
    with pytest.raises(FedtailError, match="one plain character"):
        read_table(good, delimiter="::")
    with pytest.raises(FedtailError, match="klingon"):
        read_table(good, encoding="klingon")
    with pytest.raises(FedtailError, match="not readable as ascii"):
        read_table(written(tmp_path, "a,b\nö,1\n"), encoding="ascii")


def test_repeated_and_empty_names_are_repaired_and_said(tmp_path: Path) -> None:
    table = read_table(written(tmp_path, "a,a,,a (2)\n1,2,3,4\n"))
    assert list(table.frame.columns) == ["a", "a (3)", "column 3", "a (2)"]
    assert "'a' to 'a (3)'" in table.notes[0] and "'no name' to 'column 3'" in table.notes[0]


def test_row_names_and_closing_delimiters_do_not_shift_columns(tmp_path: Path) -> None:
    r_style = read_table(written(tmp_path, "a,b\nr1,1,2\nr2,3,4\n"))
    assert r_style.frame["a"].tolist() == [1, 3] and "row names" in r_style.notes[0]
    closing = read_table(written(tmp_path, "a,b\n1,2,\n3,4,\n"))
    assert closing.frame["a"].tolist() == [1, 3] and "ends with a delimiter" in closing.notes[0]


def test_a_file_without_header_is_suspected(tmp_path: Path) -> None:
    assert "is the header line missing" in read_table(written(tmp_path, "1,2\n3,4\n")).notes[0]


def test_table_names_and_listings() -> None:
    assert table_name(Path("x/site.a.csv.gz")) == "site.a" and table_name(Path("north.parquet")) == "north"
    assert listing("abc", 2) == "a, b and 1 more" and listing("ab", 2) == "a, b"


fields = st.text(st.characters(codec="utf-8", exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@given(st.lists(st.lists(fields, min_size=3, max_size=3), min_size=2, max_size=8), st.sampled_from(",;\t|"))
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_well_formed_table_comes_back_as_it_was_written(
    tmp_path: Path, rows: list[list[str]], delimiter: str
) -> None:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["first", "second", "third"])
    writer.writerows(rows)
    path = written(tmp_path, out.getvalue())
    table = read_table(path, delimiter=delimiter, encoding="utf-8", plain={"first", "second", "third"})
    back = [["" if pd.isna(v) else v for v in row] for row in table.frame.to_numpy().tolist()]

    # pandas reads \r and \r\n inside quotes as \n on some systems; nothing else may change
    def same(v: str) -> str:
        return v.replace("\r\n", "\n").replace("\r", "\n")

    assert [[same(v) for v in r] for r in back] == [[same(v) for v in r] for r in rows]


@given(st.binary(max_size=200) | st.text("ab,;\t|\"'\r\n 1.-é\0", max_size=60).map(lambda s: s.encode()))
@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_give_a_table_or_one_clear_line(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path, data)
    try:
        table = read_table(path)
    except FedtailError as error:
        assert "\n" not in str(error)
    else:
        assert isinstance(table, Table) and len(table.frame) > 0
        names = list(table.frame.columns)
        assert len(set(names)) == len(names) and all(names)


@given(st.lists(st.lists(st.text('ab", ;', max_size=5), min_size=1, max_size=4), min_size=2, max_size=8))
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_of_another_length_than_the_header_are_never_read(tmp_path: Path, rows: list[list[str]]) -> None:
    rows = [[f"c{i}" for i in range(len(rows[0]))], *(row for row in rows[1:] if row != [""])]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n", quoting=csv.QUOTE_ALL).writerows(rows)
    lengths = {len(row) for row in rows[1:]}
    path = written(tmp_path, out.getvalue())
    if not lengths:
        return
    if len(lengths) == 1 and lengths <= {len(rows[0]), len(rows[0]) + 1}:
        assert len(read_table(path, delimiter=",").frame) == len(rows) - 1
    else:
        with pytest.raises(FedtailError, match="fields where the header has"):
            read_table(path, delimiter=",")


def test_a_quote_inside_a_field_is_only_a_character(tmp_path: Path) -> None:
    path = written(tmp_path, 'size,label\n5" pipe,a\n6 inch,b\n')
    assert inspect_source(path).ragged() == []
    assert read_table(path).frame["size"].tolist() == ['5" pipe', "6 inch"]


@given(st.lists(st.sampled_from(["", "a", "a (2)", "b", "column 1"]), min_size=1, max_size=8))
def test_names_become_unique(header: list[str]) -> None:
    names, _ = unique_names(header)
    assert len(set(names)) == len(names) == len(header) and all(names)
    assert all(names[header.index(name)] == name for name in header if name)
    assert np.isin([n for n in header if n and header.count(n) == 1], names).all()
