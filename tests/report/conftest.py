"""Run folders as the commands write them."""

from tests.run_folders import comparison, run_folder

__all__ = ["comparison", "run_folder"]
