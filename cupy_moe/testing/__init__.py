"""Helpers of the tests, the notebooks and the demo: comparisons, and inputs made from a seed."""
