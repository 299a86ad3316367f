"""Totals over clients in one process."""

import numpy as np

from fedtail.core.totals import LocalTotals


def test_the_total_adds_every_client_once():
    parts = np.array([[1, -2, 3], [10, 20, 30], [100, 200, -300]])
    assert LocalTotals(3).total(3, lambda k: parts[k]).tolist() == [111, 218, -267]
