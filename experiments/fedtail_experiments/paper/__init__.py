"""The paper's tables and figures: declared grids, the recorded search, with our results alongside."""
