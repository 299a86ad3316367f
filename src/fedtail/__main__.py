"""``python -m fedtail``."""

from fedtail.cli import main

main()
