"""The place of the largest element of a max pooling is one of the image, and not of the padding around it.

Inductor pads with minus infinity. Where all of a window is that (a sequence that is masked all through), the
first of equal ones is taken, which lies in the padding: code for a CPU then raises in the backward with torch
2.13, or the gradient goes to an element of another row. Eager takes the first element within the image.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from lightning_hotcompile.swap.replaced import Replacement, Replaces, put_in_place

_NAME = "_pool_offsets_to_indices"


def _replace() -> Callable[[], None] | None:
    # Not at the top: a run without a flip does not owe the compiler's import.
    from torch._inductor import lowering

    theirs: Any = getattr(lowering, _NAME, None)
    if theirs is None:
        return None

    @functools.wraps(theirs)
    def to_indices(offsets: Any, kernel_size: Any, input_size: Any, places_of: Any) -> Any:
        def within(index: Any, offset: Any) -> list[Any]:
            return [_not_before_the_first(place) for place in places_of(index, offset)]

        on_cpu = offsets.get_device().type == "cpu"
        return theirs(offsets, kernel_size, input_size, within if on_cpu else places_of)

    return put_in_place({(lowering, _NAME): to_indices})


def _not_before_the_first(place: Any) -> Any:
    """A place along one dimension; as it is where there is no padding: the first window begins at 0 then."""
    from torch.utils._sympy.functions import Max

    begin = place.xreplace(dict.fromkeys(place.free_symbols, 0))
    return place if begin.is_nonnegative else Max(0, place)  # type: ignore[no-untyped-call]


class KeepsPlaces(Replaces):
    """While any is entered, code for a CPU finds no largest element in the padding of a pooling.

    Nothing happens where this torch finds the places of largest elements in another way.
    """

    replacement = Replacement(_replace)
