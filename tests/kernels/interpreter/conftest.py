"""Runs the Triton kernels on the CPU. The switch is read when a kernel is defined, so it is set before any import."""

import os

os.environ["TRITON_INTERPRET"] = "1"
