"""The compiler's code can be read: its own log has it, also of what the callback compiles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.generated import bodies, output_code

SCRIPT = """
from tests.hot import hot
from tests.models import Net, fit, seeded

callback = hot(backend="inductor", scope="step", store=None)
fit(seeded(Net, width=8, n_block=1), [callback], max_steps=8, max_epochs=-1)
assert any(region.proven for region in callback.report.regions), callback.report.to_text()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_torchs_log_has_the_code_of_each_graph(tmp_path: Path) -> None:
    text = output_code(SCRIPT, tmp_path)
    assert len(bodies(text)) >= 3, "forward, backward and optimizer"
    assert "cross_entropy" in text or "nll_loss" in text, "the loss is in the step's graph"
    assert "Output code written to: " in text
