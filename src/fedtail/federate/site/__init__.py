"""A site's half of a federation: its configuration, its data, its worker."""
