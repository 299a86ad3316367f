"""The GPU's fast path: recorded graphs and fused kernels."""
