"""Flower: the transport over its grid, the ServerApp, and the light ClientApp at a site."""
