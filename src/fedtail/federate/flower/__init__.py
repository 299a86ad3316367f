"""Flower: the transport over its grid, the ServerApp, and the light ClientApp at a site."""

TESTED = "1.41.0"
"""The version that fedtail is tested with; of another, what is not as it is here is left as it is, with a line."""
