"""Runs ``.cu`` files on the CPU: see ``README.md``."""

from cuda_emulator.build import MODES, BuildError, build
from cuda_emulator.module import EmulatedModule, KernelError

__all__ = ["MODES", "BuildError", "EmulatedModule", "KernelError", "build"]
