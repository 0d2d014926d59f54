"""Fixtures for all tests."""

import os

import torch

pytest_plugins = ("tests.te_fixture",)

# One busy process beside a training with two OpenMP threads slows its steps many times over.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start
