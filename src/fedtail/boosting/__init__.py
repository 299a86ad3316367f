"""Gradient boosting across sites: the trees that all rows together would give, from exact sums of integers.

``bins`` -> ``histograms`` -> ``splits`` -> ``grower`` -> ``predictor``: what happens to a row, in this order.
"""
