"""Modes that another callback opens and closes within a step: they see what they see without ours."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.hot import assert_same, hot
from tests.swap.test_repeated_runs import SelectiveForAll, trained

HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_train_batch_end"]
COUNTED_STEPS = 3
"""Before anything is compiled: one of them is recorded."""


class Counts(pl.Callback):
    """The floating-point operations of the first steps, up to a hook."""

    def __init__(self, until: str) -> None:
        self.counted: list[int] = []
        self._mode: FlopCounterMode | None = None
        setattr(self, until, self._close)

    def on_train_batch_start(self, *_: Any) -> None:
        if len(self.counted) < COUNTED_STEPS:
            self._mode = FlopCounterMode(display=False)
            self._mode.__enter__()

    def _close(self, *_: Any) -> None:
        if (mode := self._mode) is not None:
            self._mode = None
            mode.__exit__(None, None, None)
            self.counted.append(mode.get_total_flops())


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("until", HOOKS)
def test_a_counter_of_operations(until: str, is_first: bool) -> None:
    """Torch took off the recording in place of it, and held it for open ever after.

    Then no guard fits under a selective checkpoint: its repeat was another than its forward.
    """
    expected, counts = Counts(until), Counts(until)
    plain = trained(SelectiveForAll, [expected])
    callback = hot(scope="regions", compile_optimizer=False)
    model = trained(SelectiveForAll, [counts, callback] if is_first else [callback, counts])
    assert_same(plain, model)
    assert counts.counted == expected.counted
    assert len(counts.counted) == COUNTED_STEPS
    assert all(region.proven for region in callback.report.regions)
