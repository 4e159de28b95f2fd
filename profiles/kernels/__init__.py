"""From measured kernel times of the PyPI package aiconfigurator-core to step times (docs/kernels.md)."""
