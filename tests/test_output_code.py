"""The compiler's code can be read: its own log has it, also of what the callback compiles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

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
    code = tmp_path / "code.log"
    environment = {
        **os.environ,
        "TORCH_LOGS": "output_code",
        "TORCH_LOGS_OUT": str(code),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    subprocess.run([sys.executable, "-c", SCRIPT], env=environment, cwd=tmp_path, check=True, timeout=500)
    text = code.read_text(encoding="utf-8")
    assert text.count("def call(") >= 3, "forward, backward and optimizer"
    assert "cross_entropy" in text or "nll_loss" in text, "the loss is in the step's graph"
    assert "Output code written to: " in text
