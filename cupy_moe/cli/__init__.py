"""Command line: ``python -m cupy_moe``."""
