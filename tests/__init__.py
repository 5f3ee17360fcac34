"""Tests: those at this level run anywhere, those in ``gpu`` need an NVIDIA GPU."""
