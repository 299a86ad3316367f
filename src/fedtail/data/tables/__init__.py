"""Bring your own table: read, infer, encode; pooled or one file per site."""
