"""How a process begins that measures one case and prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Callable

import torch

from lightning_hotcompile.bench.cases import CASES

Adds = Callable[[argparse.ArgumentParser], object]


def given(description: str | None, *more: Adds) -> argparse.Namespace:
    """What the command line says: a case, threads, options of the callback, and what ``more`` adds.

    The number of threads is set, and nothing but the result is printed from now on.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("case", choices=sorted(CASES))
    for add in more:
        add(parser)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--options", type=json.loads, default={})
    found = parser.parse_args()
    if found.threads:
        torch.set_num_threads(found.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    return found
