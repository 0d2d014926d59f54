"""Fixtures for all tests."""

import torch

pytest_plugins = ("tests.te_fixture",)

# One busy process beside a training with two OpenMP threads slows its steps many times over.
torch.set_num_threads(1)
