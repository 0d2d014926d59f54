"""The backends behind Dynamo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor import lowering

from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.inductor.compilers import resolve_backend


@pytest.fixture
def tags(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What caches are asked with, one for each compile."""
    seen: list[str] = []

    class Compiles:
        def __init__(self, *_: Any) -> None:
            pass

        def __call__(self, graph: Any, _: Any) -> Any:
            seen.append(torch.compiler.config.cache_key_tag)  # type: ignore[attr-defined]
            return graph.forward

    monkeypatch.setattr(torch, "_TorchCompileInductorWrapper", Compiles)
    return seen


@pytest.mark.parametrize("theirs", ["", "mine-"])
def test_caches_are_asked_for_code_as_it_is_written_here(theirs: str, tags: list[str]) -> None:
    with torch.compiler.config.patch(cache_key_tag=theirs):  # type: ignore[attr-defined]
        torch.compile(torch.sin, backend=resolve_backend("inductor", None, None))(torch.ones(3))
        assert torch.compiler.config.cache_key_tag == theirs  # type: ignore[attr-defined]
    assert tags
    assert all(tag.startswith(f"{theirs}hotcompile-") for tag in tags)


@pytest.mark.parametrize(("version", "apart"), [((2, 11), True), ((2, 13), False)])
def test_older_caches_are_told_the_type_of_autocast(
    version: tuple[int, int], apart: bool, tags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_hotcompile.swap.inductor.compilers.TORCH", version)
    for dtype in (torch.bfloat16, torch.float16):
        torch._dynamo.reset()
        with torch.autocast("cpu", dtype):
            torch.compile(torch.sin, backend=resolve_backend("inductor", None, None))(torch.ones(3))
    assert len(set(tags)) == (2 if apart else 1)


@pytest.mark.parametrize("process", [False, True])
@pytest.mark.parametrize(
    ("mode", "options", "asked"),
    [
        (None, None, False),
        ("default", None, False),
        ("max-autotune-no-cudagraphs", None, False),
        ("reduce-overhead", None, True),
        ("max-autotune", None, True),
        (None, {"triton.cudagraphs": False}, False),
        (None, {"triton.cudagraphs": True}, True),
    ],
)
def test_cuda_graphs_are_recorded_where_they_are_asked_for_and_never_of_an_optimizer(
    mode: str | None, options: Any, asked: bool, process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process's own setting (``TORCHINDUCTOR_CUDAGRAPHS=1``) was not held against the Trainer's options.

    And what a backward has recorded, gradients, is gone when the next graph is recorded.
    """
    recorded: list[bool] = []

    def compiles(graph: Any, inputs: Any, config_patches: dict[str, Any], **_: Any) -> Any:
        with torch._inductor.config.patch(config_patches):
            recorded.append(torch._inductor.config.triton.cudagraphs)
        return graph.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compiles)
    for at_once in (False, True):
        torch._dynamo.reset()
        backend = resolve_backend("inductor", mode, options, checks_at_once=at_once)
        with torch._inductor.config.patch({"triton.cudagraphs": process}):
            torch.compile(torch.sin, backend=backend)(torch.ones(3))
    assert recorded == [asked, False]


def test_a_number_that_is_an_input_has_a_key_of_its_own(tags: list[str]) -> None:
    """Where the environment says that caches are on, they are."""

    def clamped(x: Tensor, n: Tensor) -> Tensor:
        return x.clamp(max=n.item())

    for _ in range(2):
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            torch.compile(clamped, backend=resolve_backend("inductor", None, None))(
                torch.ones(3), torch.ones(())
            )
    assert len(tags) > 1
    assert len(set(tags)) == len(tags)


def spectrum(x: Tensor) -> Tensor:
    """Inductor calls eager's operations for complex numbers, and warns once that it may be slower."""
    return torch.fft.rfft(x, norm="ortho").abs().mean()


def off_diagonal(x: Tensor) -> Tensor:
    """As a contrastive loss; for a diagonal Inductor calls a function that torch has deprecated."""
    similar = x @ x.mT
    return similar.logsumexp(1).mean() - similar.diagonal().mean()


@pytest.mark.parametrize("step", [spectrum, off_diagonal])
@pytest.mark.parametrize("are_errors", [False, True])
def test_of_what_inductor_warns_nothing_is_said(
    step: Callable[[Tensor], Tensor], are_errors: bool, recwarn: pytest.WarningsRecorder
) -> None:
    lowering._warn_complex_not_supported.cache_clear()
    if are_errors:
        warnings.filterwarnings("error", message="Torchinductor|`torch._prims_common")
    x = torch.rand(8, 4, requires_grad=True)
    witness = Witness("inductor")
    with torch.compiler.config.patch(force_disable_caches=True):
        found = torch.compile(step, backend=witness.backend_for("one"))(x)
    assert torch.allclose(found, step(x))
    assert (witness.error_of("one"), witness.runs_of("one")) == (None, 1)
    assert not [each for each in recwarn if "complex" in str(each.message) or "_prims" in str(each.message)]


def lags(x: Tensor) -> Tensor:
    """As GluonTS's models take them: torch warns of each index that is a list."""
    return torch.cat([x[[slice(None), slice(lag, lag + 2)]] for lag in range(3)]).square().mean()  # type: ignore[call-overload, no-any-return]


def test_what_an_operation_warns_of_is_not_said_by_each_line_of_a_graph() -> None:
    x = torch.rand(8, 4, requires_grad=True)
    witness = Witness("aot_eager")
    with warnings.catch_warnings(record=True) as said:
        warnings.resetwarnings()  # a test's own would have all of them given
        found = torch.compile(lags, backend=witness.backend_for("one"))(x)
        found.backward()
    assert witness.runs_of("one") == 1
    assert all("_dynamo" in each.filename for each in said), [each.filename for each in said]
