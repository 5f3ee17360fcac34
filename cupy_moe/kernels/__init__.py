"""One launcher per CUDA source: its configuration, parameter layout, grid and shared memory."""
