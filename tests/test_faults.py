"""Faults of the compiler, one after the other: the training goes on as without the callback, and says why."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_hotcompile import HotCompile
from lightning_hotcompile.swap.parity import trial
from lightning_hotcompile.swap.parity.captured import tensors_of
from tests.functions import WrongGradient, from_run
from tests.hot import assert_same, hot
from tests.models import Batches, Net, Small, fit, seeded, weights

SCOPES = ["step", "regions"]

NEVER = 20.0
"""What stands for ever in these tests has an end of its own."""


# --- backends with a fault ------------------------------------------------------------------------------


def compile_raises(error: Callable[[], BaseException]) -> Callable[..., Any]:
    def backend(graph: Any, inputs: Any, **_: Any) -> Any:
        raise error()

    return backend


def hangs(graph: Any, inputs: Any, **_: Any) -> Any:
    threading.Event().wait(NEVER)
    return graph.forward


def each(change: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A fault of each output by itself."""
    return lambda graph, outputs: tuple(map(change, outputs))


def raises(graph: Any, outputs: Any) -> Any:
    raise RuntimeError("illegal instruction")


def lacks_memory(graph: Any, outputs: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nand more advice")


def scaled(value: Any) -> Any:
    return value * 1.05 if value.is_floating_point() else value


def nan(value: Any) -> Any:
    return value * float("nan") if value.is_floating_point() else value


def wrong_gradient(value: Any) -> Any:
    return WrongGradient.apply(value) if value.requires_grad else value


def slow(graph: Any, inputs: Any, **_: Any) -> Any:
    """Right, but with much to do on the side."""
    ballast = torch.ones(400, 400)

    def code(*args: Any) -> Any:
        for _ in range(8):
            torch.mm(ballast, ballast)
        return graph.forward(*args)

    return code


# --- a training with the fault, held against one without the callback -----------------------------------


def train(callback: HotCompile, factory: Any = Net, **options: Any) -> HotCompile:
    """Train twice; without and with the callback the weights are equal to the last bit."""
    plain, model = seeded(factory), seeded(factory)
    fit(plain, **options)
    fit(model, [callback], **options)
    for name, value in weights(plain).items():
        assert torch.equal(value, weights(model)[name]), name
    assert_given_back(model)
    return callback


def assert_given_back(model: nn.Module) -> None:
    assert "training_step" not in vars(model)
    assert all(vars(m).get("_compiled_call_impl") is None for m in model.modules())


FAULTS: dict[str, tuple[Any, str]] = {
    "the backend raises": (
        compile_raises(lambda: RuntimeError("no such instruction\nlong story")),
        "RuntimeError: no such instruction",
    ),
    "the backend looks past an end": (
        compile_raises(lambda: IndexError("list index out of range")),
        "list index out of range",
    ),
    "no memory to compile": (
        compile_raises(lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")),
        "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
    ),
    "the disk is full": (
        compile_raises(lambda: OSError(errno.ENOSPC, "No space left on device", "/cache/x.so")),
        "No space left on device",
    ),
    "wrong values": (from_run(1, each(scaled)), "not right: differs from eager by up to"),
    "wrong gradients": (from_run(1, each(wrong_gradient)), "not right: differs from eager by up to"),
    "NaN from the first run on": (from_run(1, each(nan)), "not right: differs from eager by up to inf"),
    "NaN from a later run on": (from_run(3, each(nan)), "not right: NaN or Inf in run 2"),
    "raises in its first run": (
        from_run(1, raises),
        "compiled code raised RuntimeError: illegal instruction",
    ),
    "raises in a later run": (from_run(5, raises), "compiled code raised in run 4: RuntimeError: illegal"),
    "no memory in its first run": (
        from_run(1, lacks_memory),
        "compiled code raised in run 1: OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    "no memory in a later run": (from_run(4, lacks_memory), "in run 3: OutOfMemoryError: CUDA out of memory"),
}


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("name", FAULTS)
def test_training_goes_on_as_without_the_callback_and_says_why(name: str, scope: str) -> None:
    backend, reason = FAULTS[name]
    callback = train(hot(backend=backend, scope=scope, on_error="eager", compile_optimizer=False))
    assert callback.report.phase == "reverted"
    assert reason in callback.report.reason + callback.report.parity
    assert "fallback" in {e["kind"] for e in callback.report.events}
    (told,) = notes_on_failures(callback)
    assert told.startswith("region ")


def notes_on_failures(callback: HotCompile) -> list[str]:
    return [n for n in callback.report.notes if "did not run compiled" in n or "runs eagerly" in n]


@pytest.mark.parametrize("name", ["the backend raises", "no memory to compile", "NaN from a later run on"])
def test_a_note_has_the_reason_once(name: str) -> None:
    backend, _ = FAULTS[name]
    callback = train(hot(backend=backend, scope="step", on_error="eager", compile_optimizer=False))
    reason = {
        "the backend raises": "RuntimeError: no such instruction",
        "no memory to compile": "OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB",
        "NaN from a later run on": "not right: NaN or Inf in run 2, where eager has finite numbers",
    }[name]
    assert notes_on_failures(callback) == [f"region training_step did not run compiled: {reason}"]


def spoils_the_parameters(graph: Any, outputs: Any) -> Any:
    """The parameters that an optimizer's code updates are in its graph."""
    for tensor in tensors_of(graph):
        tensor.data.mul_(float("nan")) if tensor.is_floating_point() else None
    return outputs


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        (FAULTS["the backend raises"][0], "RuntimeError: no such instruction"),
        (FAULTS["the backend looks past an end"][0], "list index out of range"),
        (compile_raises(lambda: AssertionError("cannot be")), "cannot be"),
        # Raised after the parameters were changed.
        (from_run(3, raises), "compiled code raised in run 2: RuntimeError: illegal instruction"),
        (from_run(3, spoils_the_parameters), "not right: NaN or Inf in run 2"),
    ],
    ids=["the backend raises", "past an end", "asserts", "raises in a later run", "NaN from a later run on"],
)
def test_the_same_for_the_optimizer(backend: Any, reason: str) -> None:
    def only_the_optimizer(graph: Any, inputs: Any, **given: Any) -> Any:
        return backend(graph, inputs, **given) if tensors_of(graph) else graph.forward

    plain, model = seeded(Small), seeded(Small)
    callback = hot(backend=only_the_optimizer, scope="step", on_error="eager", compile_optimizer=True)
    fit(plain)
    fit(model, [callback])
    assert_same(plain, model, tolerance=1e-6)
    fallbacks = [str(e["reason"]) for e in callback.report.events if e["kind"] == "fallback"]
    assert [r for r in fallbacks if reason in r]
    assert callback.report.phase == "steady", "the step stays compiled"


@pytest.mark.parametrize("options", [{"compile_optimizer": True}, {"fullgraph": True}], ids=str)
def test_under_a_mode_that_sees_each_operation_nothing_is_compiled(options: dict[str, Any]) -> None:
    """Dynamo skips each frame there; with ``fullgraph`` torch 2.13 raises that after it has run."""
    plain, model = seeded(Small), seeded(Small)
    callback = hot(scope="step", on_error="eager", **options)
    for each, callbacks in ((plain, []), (model, [callback])):
        with FlopCounterMode(display=False) as counter:
            trainer = fit(each, callbacks)
        assert trainer.global_step == 48
        assert counter.get_total_flops() > 0
    assert_same(plain, model, tolerance=0.0)
    assert not any(region.proven for region in callback.report.regions)


@pytest.mark.parametrize("scope", SCOPES)
def test_a_compiler_that_hangs_is_interrupted(scope: str) -> None:
    callback = train(
        hot(backend=hangs, scope=scope, on_error="eager", compile_optimizer=False, compile_timeout=0.02)
    )
    assert callback.report.phase == "reverted"
    assert "took longer than compile_timeout=0.02 s" in callback.report.reason


def test_code_that_is_right_but_slow_is_taken_back() -> None:
    callback = train(hot(backend=slow, scope="step", min_speedup=1.02, compile_optimizer=False), max_epochs=8)
    assert callback.report.phase == "reverted"
    assert "below min_speedup=1.02" in callback.report.reason
    assert callback.report.speedup is not None
    assert callback.report.speedup.high < 1.02


class TestBackward:
    def backend(self, fails_in: int) -> Callable[..., Any]:
        def no_backward(graph: Any, outputs: Any) -> Any:
            raise RuntimeError("no backward today")

        faulty = from_run(fails_in, no_backward)
        return aot_autograd(
            fw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            bw_compiler=lambda graph, inputs: make_boxed_func(faulty(graph, inputs)),
        )

    @pytest.mark.parametrize("parity", ["auto", "warn"])  # with "warn" numbers are used that are not right
    def test_one_that_raises_at_once_is_found_by_the_comparison(self, parity: str) -> None:
        plain, model = seeded(Net), seeded(Net)
        options: dict[str, Any] = {"parity": parity, "on_error": "eager", "compile_optimizer": False}
        callback = hot(backend=self.backend(1), scope="step", **options)
        fit(plain)
        fit(model, [callback])
        assert "compiled code raised RuntimeError: no backward today" in callback.report.reason
        assert_same(plain, model, tolerance=0)

    def test_a_later_one_stops_the_training_with_its_own_error_and_gives_the_model_back(self) -> None:
        # The forward has long returned: there is nothing left that eager's backward could start from.
        model = seeded(Net)
        callback = hot(backend=self.backend(4), scope="step", on_error="eager", compile_optimizer=False)
        with pytest.raises(RuntimeError, match=r"^no backward today$"):
            fit(model, [callback])
        assert_given_back(model)


class TestUsersOwnErrors:
    @pytest.mark.parametrize("scope", SCOPES)
    def test_a_hook_that_raises(self, scope: str) -> None:
        error, calls = ValueError("mine"), []

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls.append(1)
            if len(calls) == 12:
                raise error

        model = seeded(Small)
        model.blocks[0].register_forward_hook(torch.compiler.disable(hook))
        with pytest.raises(ValueError, match=r"^mine$") as caught:
            fit(model, [hot(scope=scope, on_error="eager", compile_optimizer=False)])
        assert caught.value is error
        assert_given_back(model)

    def test_a_callback_that_raises(self) -> None:
        import lightning.pytorch as pl

        class Raises(pl.Callback):
            def on_before_optimizer_step(self, trainer: Any, *_: Any) -> None:
                if trainer.global_step == 8:
                    raise KeyError("mine")

        model = seeded(Small)
        with pytest.raises(KeyError, match="mine"):
            fit(model, [hot(), Raises()])
        assert_given_back(model)

    @pytest.mark.parametrize("scope", SCOPES)
    def test_a_forward_that_raises(self, scope: str) -> None:
        class Picky(Net):
            def forward(self, x: Tensor) -> Tensor:
                index = (x.sum() * 0).long() + self.offset
                return super().forward(x)[:, torch.arange(3) + index]

            def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
                if self.global_step == 10:
                    self.offset.fill_(5)

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("offset", torch.zeros((), dtype=torch.long))

        model, callback = seeded(Picky), hot(scope=scope, on_error="eager", compile_optimizer=False)
        with pytest.raises(IndexError, match="out of"):
            fit(model, [callback])
        assert callback.report.phase in ("settling", "steady")
        assert_given_back(model)


class TestMemory:
    @pytest.mark.parametrize("scope", SCOPES)
    def test_none_left_for_the_comparison(self, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
        def clone_inputs(*_: Any) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

        monkeypatch.setattr(trial, "clone_inputs", clone_inputs)
        callback = train(hot(backend="eager", scope=scope, compile_optimizer=False))
        assert callback.report.phase == "steady"
        assert "not compared for lack of memory: CUDA out of memory" in callback.report.parity


class TestSecondSignature:
    """What one kind of step has shown of the compiled code holds for the others."""

    @pytest.mark.parametrize("scope", SCOPES)
    @pytest.mark.parametrize("name", ["the backend raises", "wrong values", "raises in its first run"])
    @pytest.mark.parametrize("sizes", [[8, 4] * 10, [8] * 12 + [4] * 12], ids=["in turns", "one by one"])
    def test_is_not_compiled_where_nothing_is_left(self, sizes: list[int], name: str, scope: str) -> None:
        backend, reason = FAULTS[name]
        batches = DataLoader(Batches(sizes), batch_size=None)
        callback = train(
            hot(backend=backend, scope=scope, on_error="eager", compile_optimizer=False), train=batches
        )
        phases = [e["phase"] for e in callback.report.events if e["kind"] == "phase_changed"]
        assert phases.count("flipping") == 1, phases
        declined = [e["reason"] for e in callback.report.events if e.get("phase") == "declined"]
        assert len(declined) == 1
        assert "nothing is left that can be used" in declined[0]
        assert reason in declined[0]

    def test_that_fails_takes_the_first_one_back_with_its_reason(self) -> None:
        made: list[Any] = []

        def wrong_from_the_second_graph_on(graph: Any, inputs: Any, **given: Any) -> Any:
            made.append(graph)
            return graph.forward if len(made) == 1 else FAULTS["wrong values"][0](graph, inputs, **given)

        batches = DataLoader(Batches([8] * 60 + [4] * 6 + [8] * 20), batch_size=None)
        callback = train(
            hot(
                backend=wrong_from_the_second_graph_on,
                scope="step",
                on_error="eager",
                compile_optimizer=False,
                dynamic=False,
            ),
            train=batches,
        )
        phases = [e["phase"] for e in callback.report.events if e["kind"] == "phase_changed"]
        assert phases.count("flipping") == 2, phases
        assert phases.count("steady") == 1
        assert callback.report.phase == "reverted"
        of_second, of_first = [e["step"] for e in callback.report.events if e["kind"] == "reverted"]
        assert of_second <= 66 == of_first, "the first step that comes back"
        assert "not right: differs from eager by up to" in callback.report.reason


def test_a_step_that_only_tried_to_compile_stood_still() -> None:
    class Breaks(Net):
        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    callback = train(
        hot(backend="eager", scope="step", fullgraph=True, on_error="eager", compile_optimizer=False), Breaks
    )
    assert callback.report.phase == "reverted"
    assert [s.note for s in callback.report.samples].count("stalled") == 1


class Restless(Net):
    """A model with a constant that is another one in each step."""

    count = 0
    tag = ""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.tag = f"step {self.count}"

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.tag != "step 0" else x


def test_a_recompile_in_each_step_ends() -> None:
    callback = train(hot(scope="step", backend="eager", on_error="eager", compile_optimizer=False), Restless)
    assert callback.report.phase == "reverted"
    assert callback.report.recompiles <= 16
    assert "fit" in callback.report.reason


@pytest.mark.slow
class TestInductor:
    """What the machine may lack when the real compiler runs on it."""

    def train(self) -> HotCompile:
        return train(hot(backend="inductor", scope="step", on_error="eager", compile_optimizer=False), Small)

    def test_no_cpp_compiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        with torch._inductor.config.patch({"cpp.cxx": (str(tmp_path / "no-such-compiler"),)}):
            callback = self.train()
        assert callback.report.phase == "declined"
        assert "needs a C++ compiler" in callback.report.reason

    def test_a_cpp_compiler_that_fails(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        compiler = tmp_path / "broken-compiler"
        compiler.write_text("#!/bin/sh\nexit 1\n")
        compiler.chmod(0o755)
        with torch._inductor.config.patch({"cpp.cxx": (str(compiler),)}):
            callback = self.train()
        assert callback.report.phase == "reverted"
        assert "compiler" in callback.report.reason.lower()

    def test_a_cache_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        file = tmp_path / "cache"
        file.write_text("a file where the folder should be")
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(file))
        callback = self.train()
        assert callback.report.phase == "reverted"
        assert str(file) in callback.report.reason
