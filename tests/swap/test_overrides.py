"""What Dynamo does otherwise while it traces for us, also where it puts a backend of its own around ours."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._dynamo.utils as dynamo_utils
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.symbolic_convert import compare_op_handlers
from torch._dynamo.variables import BuiltinVariable
from torch._dynamo.variables.builder import VariableBuilder
from torch.nn.parallel import DistributedDataParallel

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.dynamo import compiling_allowed
from lightning_hotcompile.swap.graphs.witness import Witness
from lightning_hotcompile.swap.tracing import failing_properties
from lightning_hotcompile.swap.tracing.breaks import LOGGER, GraphBreak
from lightning_hotcompile.swap.tracing.otherwise import all_overrides
from lightning_hotcompile.swap.tracing.overrides import is_traced_for_others
from tests.elsewhere import threads_may_compile
from tests.hot import assert_same, hot
from tests.models import Net, fit, seeded


@pytest.fixture
def _group() -> Iterator[None]:
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=45)
    )
    yield
    dist.destroy_process_group()


class Draws(nn.Module):
    """Scales by a number of a generator that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False)
        self.rng = random.Random(5)

    def scaled(self, x: Tensor) -> Tensor:
        """Another factor in each call."""
        return self.layer(x).sum() * self.rng.random()

    def forward(self, x: Tensor) -> Tensor:
        """The same."""
        return self.scaled(x)


@pytest.mark.usefixtures("_group")
def test_they_hold_in_the_forward_of_ddp() -> None:
    # There Dynamo traces for a backend of its own that splits graphs, with ours inside of it.
    plain, model = Draws(), Draws()
    model.load_state_dict(plain.state_dict())
    backend = Witness("aot_eager").backend_for("one")
    model.scaled = CompiledFunction(model.scaled, backend, dynamic=None, fullgraph=False)  # type: ignore[method-assign]
    wrapped, x = DistributedDataParallel(model), torch.ones(2, 3)
    for _ in range(4):
        with compiling_allowed(suppress_errors=False):
            torch.testing.assert_close(wrapped(x), plain(x))


def _ways_of_torch() -> dict[str, Any]:
    """What is replaced while a training compiles, in the whole process."""
    log = logging.getLogger(LOGGER)
    return {
        "warnings": dynamo_utils.warn_once,
        "hooks": GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT,
        "comparisons": dict(compare_op_handlers),
        "calls": BuiltinVariable.call_function,
        "breaks": ("isEnabledFor" in vars(log), log.propagate),
        "buffers": vars(functorch_config)["_config"]["donated_buffer"].env_value_default,
    }


@threads_may_compile
def test_of_two_trainings_in_two_threads_the_first_one_to_end_takes_nothing_from_the_other() -> None:
    before = _ways_of_torch()
    plain, model = Draws(), Draws()
    model.load_state_dict(plain.state_dict())
    backend = Witness("aot_eager").backend_for("one")
    compiled = CompiledFunction(model.scaled, backend, dynamic=None, fullgraph=False)
    x = torch.ones(2, 3)
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        one, other = (compiling_allowed(suppress_errors=False) for _ in range(2))
        first.submit(one.__enter__).result()
        second.submit(other.__enter__).result()
        during = _ways_of_torch()
        first.submit(one.__exit__, None, None, None).result()
        after_first = _ways_of_torch()
        answers = [second.submit(compiled, x).result() for _ in range(3)]
        second.submit(other.__exit__, None, None, None).result()
        left = second.submit(lambda: functorch_config.donated_buffer).result()
    torch.testing.assert_close(answers, [plain(x) for _ in range(3)])
    assert after_first == during
    assert _ways_of_torch() == before
    assert left is functorch_config.donated_buffer


def test_after_a_trace_nothing_is_traced_for_others() -> None:
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
    assert not is_traced_for_others()


@threads_may_compile
def test_what_dynamo_tells_of_another_thread_is_told_to_that_one() -> None:
    failures: list[BaseException] = []
    broken: list[GraphBreak] = []
    log = logging.getLogger("torch._dynamo.convert_frame")

    def elsewhere() -> None:
        log.warning("not compiled", exc_info=ValueError("of another thread"))
        torch.compile(breaks, backend="eager")(torch.ones(2))

    def breaks(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with (
        compiling_allowed(suppress_errors=False, on_failure=failures.append, on_break=broken.append),
        ThreadPoolExecutor(1) as threads,
    ):
        threads.submit(elsewhere).result()
        assert (failures, broken) == ([], [])
        log.warning("not compiled", exc_info=ValueError("of this thread"))
    assert [str(each) for each in failures] == ["of this thread"]


def test_none_is_of_a_function_that_dynamo_keeps() -> None:
    """By type of a value it keeps what wraps one, from the first time on: an override would come too late."""
    VariableBuilder._type_dispatch_impl.cache_clear()  # one that is put would have no name of Dynamo's
    kept = {function.__name__ for function in VariableBuilder._type_dispatch().values()}
    assert "wrap_tensor" in kept
    assert not [each.name for each in all_overrides() if each.owner is VariableBuilder and each.name in kept]


def test_a_torch_without_what_is_overridden_trains_eagerly_and_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a version that is newer than this package, where Dynamo has another name for it."""
    monkeypatch.setattr(failing_properties, "GET_ATTRIBUTE", "of_another_torch")
    plain, model = seeded(Net), seeded(Net)
    fit(plain)
    callback = hot(scope="step", compile_optimizer=False, on_error="eager")
    fit(model, [callback])
    assert_same(plain, model, tolerance=0)
    (note,) = [note for note in callback.report.notes if "of_another_torch" in note]
    assert f"torch {torch.__version__} has no UnspecializedNNModuleVariable.of_another_torch" in note
    assert "lightning_hotcompile" in note
