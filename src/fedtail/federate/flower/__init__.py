"""Flower: the transport over its grid, the app bundle, and what runs at a site."""
