"""Kernels of the back ends: the CPU's are ``fastserve._core.cpu``, which run on a ``pool``."""
