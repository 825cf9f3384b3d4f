"""PyTorch's own device-generic tests, run as they are: `torch-tests`."""
