"""One configuration in this process; prints one line of JSON.

    python -m lightning_hotcompile.bench.one_measurement REQUEST [--threads N]

REQUEST is JSON with the fields of :class:`lightning_hotcompile.bench.measurement.Request`. Where the
compiler keeps its files is up to the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import warnings

import torch

from lightning_hotcompile.bench import detector_cost
from lightning_hotcompile.bench.measure import measure
from lightning_hotcompile.bench.measurement import Measurement, Request
from lightning_hotcompile.bench.workloads.catalogue import DETECTOR


def run(request: Request) -> Measurement:
    """What the request asks for."""
    if request.workload == DETECTOR:
        return detector_cost.measure(request)
    start_compiler(request)
    return measure(request)


def start_compiler(request: Request) -> None:
    """Compile something small, or the first arm alone would pay for importing the compiler."""
    with contextlib.suppress(Exception):  # the arms will say what is wrong; eager has a time all the same
        torch.compile(_small, backend=request.backend)(torch.ones(8, device=request.device))


def _small(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + 1


def main() -> None:
    """One configuration in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("request", type=json.loads)
    parser.add_argument("--threads", type=int, default=0)
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(json.dumps(run(Request(**given.request)).to_dict()))


if __name__ == "__main__":
    main()
