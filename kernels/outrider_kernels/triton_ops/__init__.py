"""Kernels for GPUs, written in Triton; importing the modules with kernels needs triton.

configs.py lists every form in which a kernel is compiled. Launchers choose from these lists and
from nothing else, and the tests compile all of them.
"""
