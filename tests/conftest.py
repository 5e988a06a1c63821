"""What holds for all tests."""

from __future__ import annotations

import warnings

import torch

# The networks here are so small that threads only wait for each other.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # Typer asks for names that Click has since deprecated; warnings are errors in our tests.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer  # noqa: F401
