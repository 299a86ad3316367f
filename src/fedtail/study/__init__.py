"""Many runs: grids of cells, each an ordinary run in a content-addressed folder."""
