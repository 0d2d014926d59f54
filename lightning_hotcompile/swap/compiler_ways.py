"""What Inductor does otherwise while a plan is compiled, in the training and in a child process alike."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lightning_hotcompile.swap.draw_order import DrawsInOrder
from lightning_hotcompile.swap.draws import DrawsStaySeparate
from lightning_hotcompile.swap.dropout_masks import DropoutMasks
from lightning_hotcompile.swap.inductor_probes import ProbesAsNeeded
from lightning_hotcompile.swap.kept_dependencies import KeepsDependencies
from lightning_hotcompile.swap.loop_errors import RaisesAfterLoops
from lightning_hotcompile.swap.scatters import ScattersOnOneThread
from lightning_hotcompile.swap.vector_masks import VectorMasks
from lightning_hotcompile.swap.whole_files import WholeFiles


def compiler_ways() -> tuple[AbstractContextManager[object], ...]:
    """One of each, none of them entered: what graphs mean, then what the C++ compiler is given."""
    return (
        DrawsStaySeparate(),
        DrawsInOrder(),
        KeepsDependencies(),
        DropoutMasks(),
        ProbesAsNeeded(),
        WholeFiles(),
        RaisesAfterLoops(),
        VectorMasks(),
        ScattersOnOneThread(),
    )
