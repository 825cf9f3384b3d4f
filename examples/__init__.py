"""Programs that a user runs: `python -m examples NAME --backend BACKEND`."""

from dicp.testing import torchvision_operators

torchvision_operators.define()  # the model libraries import torchvision
