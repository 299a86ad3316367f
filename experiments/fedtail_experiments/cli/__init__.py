"""Commands that the package adds to ``fedtail``."""
