"""For `make test-gpu`: with torch, numpy and pytest alone, from a checkout that is not installed.

`TIERKV_GPU=cuda` runs these tests, `TIERKV_GPU=cpu` the same on the CPU (tests/bench/test_gpu.py
does); without it they are not there, so that `make test` has nothing to skip.
"""

from __future__ import annotations

import os

import pytest
import torch

WHERE = os.environ.get("TIERKV_GPU", "")
if not WHERE:
    collect_ignore_glob = ["test_*"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the pages are."""
    return torch.device("cuda:0" if WHERE == "cuda" else "cpu")
