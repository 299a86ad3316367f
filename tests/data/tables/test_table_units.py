"""Numbers as offices write them: with a currency, a percent sign, thousands and decimal commas."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedtail as ft
from fedtail.data import table_from_frame
from fedtail.data.tables.columns import decimal_comma, level_numbers


@pytest.mark.parametrize(
    ("written", "numbers"),
    [
        (["$1,234.50", "-$5", "$ 7,000", "US$5", "$", "5%x"], [1234.5, -5, 7000, np.nan, np.nan, np.nan]),
        (["12%", "3.5 %", "£.5", "100 $", "+€3"], [12, 3.5, 0.5, 100, 3]),
        (["40.000,00 €", "1,5", "-3,25 %", "1.234.567,8", "12"], [40000, 1.5, -3.25, 1234567.8, 12]),
    ],
)
def test_signs_around_a_number_stay_out(written: list[str], numbers: list[float]) -> None:
    assert np.array_equal(level_numbers(written, decimal_comma(written)), numbers, equal_nan=True)


def test_a_table_of_an_office_has_numbers_and_its_codes_are_known_again() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "income": [f"{x:,.2f} €".translate(str.maketrans(",.", ".,")) for x in rng.uniform(900, 90_000, 300)],
            "rate": [f"{x:.1f} %".replace(".", ",") for x in rng.uniform(1, 9, 300)],
            "limit": rng.choice(["1,000", "2,000", "5,000"], 300),
            "late": rng.choice(["yes", "no"], 300),
        }
    )
    pool = table_from_frame(frame, "late")
    assert {c["name"]: c["kind"] for c in pool.preprocessing["columns"]} == {
        "income": "numeric", "rate": "numeric", "limit": "category"
    }  # fmt: skip
    model = ft.fit(ft.partition(pool, clients=2), method="trees", rounds=2).model()
    encoded = model.inputs(frame.drop(columns="late"), notes := [])
    assert not notes and encoded[:, -3:].sum(1).eq(1).all()
