"""The compiler's code can be read: its own log has it, also of what the callback compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_hotcompile.swap.dynamo import TORCH
from tests.generated import bodies, output_code

SCRIPT = """
from tests.hot import assert_proven, hot
from tests.models import Net, fit, seeded

for i, options in enumerate([None, {"size_asserts": True}, {"cpp_wrapper": False}]):
    callback = hot(backend="inductor", scope="step", store=None, compile_optimizer=True, options=options)
    fit(seeded(Net, width=8 + i, n_block=1), [callback], max_steps=8, max_epochs=-1)
    assert_proven(callback.report)
"""
GRAPHS = 3
"""Of each training: forward, backward, optimizer."""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchs_log_has_the_code_of_each_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CPP_WRAPPER", "TORCHINDUCTOR_SIZE_ASSERTS"):
        monkeypatch.delenv(name, raising=False)
    code = output_code(SCRIPT, tmp_path)
    assert "cross_entropy" in code or "nll_loss" in code, "the loss is in the step's graph"
    assert "Output code written to: " in code
    calls = bodies(code)
    assert len(calls) == 3 * GRAPHS
    checked = [" assert_size_stride(" in call for call in calls]
    assert checked[:GRAPHS] == [True, True, False], "the optimizer's checks all at once"
    assert checked[GRAPHS : 2 * GRAPHS] == [True, True, True], "unless asked to do it one by one"
    if TORCH >= (2, 13):
        ways = [way for way in code.split() if way in ("inductor_entry_impl(", "call(self,")]
        assert ways == 2 * GRAPHS * ["inductor_entry_impl("] + GRAPHS * ["call(self,"]
