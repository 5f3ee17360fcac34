"""Tests that run kernels; ``pytest -m gpu`` selects them."""
