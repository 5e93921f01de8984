"""Kernels of the back ends, on torch tensors. ``cpu`` wraps ``fastserve._core.cpu``."""
