"""fedtail."""
