"""Benchmarks of the fused layers against what bounds them and against other implementations.

Everything that is compared runs in one process, alternating, so that clocks are equal.
"""
