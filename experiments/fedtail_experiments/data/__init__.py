"""Data sets that only experiments need, one file each; entry points name them."""
