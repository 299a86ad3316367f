"""Flower: the transport over its grid, the ServerApp, and the light ClientApp at a site."""

TESTED = "1.41.0"
"""The version whose inner workings are known here; any other is run as it is."""
