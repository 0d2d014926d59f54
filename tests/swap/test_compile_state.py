"""What a graph is compiled with in another process is what it would be compiled with here."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config

from lightning_hotcompile.swap.prewarm.compile_state import CompileState

MATMUL = torch.backends.cuda.matmul


@pytest.fixture
def fresh() -> Iterator[None]:
    """A process in which nobody has set a precision, and whose configuration is as before afterwards."""
    before = (torch.backends.mkldnn.matmul.fp32_precision, MATMUL.fp32_precision)
    assert torch.get_float32_matmul_precision() == "highest"
    set_all("none")
    with inductor_config.patch(compile_threads=1):
        yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.matmul.fp32_precision, MATMUL.fp32_precision = before


def set_all(precision: str) -> None:
    """By the newer settings."""
    torch.backends.mkldnn.matmul.fp32_precision = precision
    MATMUL.fp32_precision = precision


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("earlier", ["none", "tf32", "ieee"])
def test_tf32_by_the_newer_setting(earlier: str) -> None:
    """After it torch raises where the older setting is read, here and in the other process."""
    MATMUL.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="legacy and new APIs"):
        torch.get_float32_matmul_precision()
    state = pickle.dumps(CompileState.now())
    set_all("none")
    MATMUL.fp32_precision = earlier  # by an earlier graph
    with pickle.loads(state).applied():
        assert MATMUL.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "none"


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("earlier", ["none", "tf32", "ieee"])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_by_the_older_setting(precision: str, earlier: str) -> None:
    torch.set_float32_matmul_precision(precision)
    state, wanted = pickle.dumps(CompileState.now()), MATMUL.fp32_precision
    torch.set_float32_matmul_precision("highest")
    set_all("none")
    MATMUL.fp32_precision = earlier
    with pickle.loads(state).applied():
        assert (torch.get_float32_matmul_precision(), MATMUL.fp32_precision) == (precision, wanted)
