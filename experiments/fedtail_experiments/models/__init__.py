"""Networks that only the experiments use."""
