"""What holds for all tests."""

from __future__ import annotations

import os
import warnings

import torch

# Without a GPU, Triton's kernels run in its interpreter. It asks for this when it is imported,
# which PyTorch may do at any time.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The networks here are so small that threads only wait for each other.
torch.set_num_threads(1)

with warnings.catch_warnings():
    # Typer asks for names that Click has since deprecated; warnings are errors in our tests.
    warnings.simplefilter("ignore", DeprecationWarning)
    import typer  # noqa: F401
