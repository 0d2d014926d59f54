"""What Inductor does otherwise while a plan is compiled, in the training and in a child process alike."""

from __future__ import annotations

from contextlib import AbstractContextManager

from lightning_hotcompile.swap.inductor.conv_gradients import KeepsLayouts
from lightning_hotcompile.swap.inductor.draw_order import DrawsInOrder
from lightning_hotcompile.swap.inductor.draws import DrawsStaySeparate
from lightning_hotcompile.swap.inductor.dropout_masks import DropoutMasks
from lightning_hotcompile.swap.inductor.equal_elements import KeepsElements
from lightning_hotcompile.swap.inductor.kept_dependencies import KeepsDependencies
from lightning_hotcompile.swap.inductor.local_buffers import KeepsRowsApart
from lightning_hotcompile.swap.inductor.loop_errors import RaisesAfterLoops
from lightning_hotcompile.swap.inductor.pool_indices import KeepsPlaces
from lightning_hotcompile.swap.inductor.probes import ProbesAsNeeded
from lightning_hotcompile.swap.inductor.reduction_tiles import KeepsResultsOfRows
from lightning_hotcompile.swap.inductor.scatters import ScattersOnOneThread
from lightning_hotcompile.swap.inductor.vector_masks import VectorMasks
from lightning_hotcompile.swap.inductor.whole_files import WholeFiles


def compiler_ways() -> tuple[AbstractContextManager[object], ...]:
    """One of each, none of them entered: what graphs mean, then what the C++ compiler is given."""
    return (
        DrawsStaySeparate(),
        DrawsInOrder(),
        KeepsDependencies(),
        KeepsElements(),
        KeepsRowsApart(),
        KeepsResultsOfRows(),
        KeepsPlaces(),
        KeepsLayouts(),
        DropoutMasks(),
        ProbesAsNeeded(),
        WholeFiles(),
        RaisesAfterLoops(),
        VectorMasks(),
        ScattersOnOneThread(),
    )
