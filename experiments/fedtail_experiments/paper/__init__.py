"""The paper's tables and figures: declared grids, the recorded search, our numbers beside its own."""
