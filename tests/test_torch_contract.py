"""What this package relies on in torch and Lightning, one fact a test.

An upgrade that changes one of them fails here, with the fact's name.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.metadata
import inspect
import pickle
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch._dynamo
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.variables import UserDefinedObjectVariable
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable
from torch._dynamo.variables.misc import NumpyVariable
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_hotcompile.swap import compiled_function, dynamo
from lightning_hotcompile.swap.compile_timer import CompileTimer
from lightning_hotcompile.swap.compiled_function import (
    CodeNames,
    CompiledFunction,
    mark_graph,
    without_disable,
)
from lightning_hotcompile.swap.graphs.kept_buffers import KeepsBuffers
from lightning_hotcompile.swap.graphs.later_frames import LaterFrames
from lightning_hotcompile.swap.inductor import compilers
from lightning_hotcompile.swap.inductor.paths import use_headers
from lightning_hotcompile.swap.own_thread import is_traced_here
from lightning_hotcompile.swap.parity.captured import copy_of
from lightning_hotcompile.swap.past_compiles import latest_reason
from lightning_hotcompile.swap.process.saved_tensors import hooks_in_use
from lightning_hotcompile.swap.repeats import checkpoint_of, forget_repeated, forget_saved
from lightning_hotcompile.swap.swapped_region import call_module
from lightning_hotcompile.swap.tracing import stance
from lightning_hotcompile.swap.tracing.overrides import mark
from tests.elsewhere import threads_may_compile
from tests.functions import turned
from tests.hot import Counting
from tests.models import Block, Net, fit, loader, make_trainer, seeded

until_2_13 = pytest.mark.skipif(dynamo.TORCH > (2, 13), reason="no longer so with torch 2.14")


@pytest.fixture
def counter() -> CompileCounterWithBackend:
    return CompileCounterWithBackend("aot_eager")


def swap(module: nn.Module, backend: Any) -> None:
    compiled = CompiledFunction(call_module, backend, dynamic=None, fullgraph=False)
    module._compiled_call_impl = functools.partial(compiled, module)


class TestModules:
    def test_compile_sets_only_the_compiled_call(self, counter: Any) -> None:
        block = Block(4)
        before, keys = set(vars(block)), list(block.state_dict())
        block.compile(backend=counter)
        assert set(vars(block)) - before == {"_compiled_call_impl"}
        assert list(block.state_dict()) == keys
        assert block._compiled_call_impl is not None

    def test_pickle_and_deepcopy_drop_the_compiled_call(self, counter: Any) -> None:
        block = Block(4)
        swap(block, counter)
        assert copy.deepcopy(block)._compiled_call_impl is None
        assert pickle.loads(pickle.dumps(block))._compiled_call_impl is None

    @until_2_13
    @pytest.mark.parametrize(
        "make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU())]
    )
    def test_module_compile_is_a_silent_no_op_on_builtins_and_our_frame_is_not(
        self, make: Any, counter: Any
    ) -> None:
        module, x = make(), torch.randn(2, 4)
        module.compile(backend=counter)
        module(x)
        assert counter.frame_count == 0
        swap(module, counter)
        module(x)
        assert counter.frame_count == 1

    def test_different_modules_behind_one_function_hit_the_recompile_limit_silently(
        self, counter: Any
    ) -> None:
        shared = torch.compile(call_module, backend=counter, dynamic=False)
        for width in range(4, 16):
            shared(Block(width), torch.randn(2, width))
        assert counter.frame_count == 8, "the limit of 8 recompiles per code object"

    def test_a_full_graph_at_the_limit_is_a_compilers_error(self) -> None:
        compiled = torch.compile(torch.sin, backend="eager", fullgraph=True, dynamic=False)
        with torch._dynamo.config.patch(accumulated_recompile_limit=1):
            compiled(torch.ones(2))
            with pytest.raises(dynamo.CompilerError, match="fullgraph"):
                compiled(torch.ones(3))

    def test_functions_in_one_process_have_no_limit_together(self) -> None:
        def function(x: Tensor) -> Tensor:
            return x + 1

        backend = Counting()
        with torch._dynamo.config.patch(accumulated_recompile_limit=2, recompile_limit=2):
            for _ in range(5):
                compiled = CompiledFunction(function, backend, dynamic=False, fullgraph=False)
                compiled.compile(torch.ones(2))
                compiled.reuse(torch.ones(2))
        assert (backend.graphs, backend.runs) == (5, 10)

    def test_isolated_functions_have_a_limit_of_their_own(self, counter: Any) -> None:
        for width in range(4, 16):
            block = Block(width)
            swap(block, counter)
            block(torch.randn(2, width))
        assert counter.frame_count == 12

    @pytest.mark.parametrize("has_isolation", [True, False])
    def test_a_call_can_be_made_again_by_the_code_that_it_had(
        self, has_isolation: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not has_isolation:
            monkeypatch.setattr(compiled_function, "_HAS_ISOLATION", False)
            monkeypatch.setattr(compiled_function, "_HAS_BUCKETS", False)
        backend, ran = Counting(), []

        def counted(graph: Any, inputs: Any) -> Any:
            code, number = backend(graph, inputs), backend.graphs
            return mark_graph(lambda *args: ran.append(number) or code(*args), number)

        compiled = CompiledFunction(lambda x, n: x * n, counted, dynamic=None, fullgraph=False)
        again = []
        for n in (1.0, 2.0, 3.0):
            compiled.compile(torch.ones(2), n)
            again.append(compiled.that_runs(ran[-1]))
        compiled.reuse(torch.ones(2), 1.0)
        assert ran == [1, 2, 2, 2], "code for any number is asked before that for the first one"
        torch._dynamo.reset()
        for call, n in zip(again, (1.0, 2.0, 3.0), strict=True):
            assert call(torch.ones(2), n).tolist() == [n, n]
        assert ran[4:] == [1, 2, 2]
        assert compiled.that_runs("of a frame that it calls") is compiled.reuse

    def test_without_isolation_a_fresh_code_object_does_the_same(
        self, counter: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(compiled_function, "_HAS_ISOLATION", False)
        for width in range(4, 16):
            block = Block(width)
            swap(block, counter)
            block(torch.randn(2, width))
        assert counter.frame_count == 12

    def test_identical_blocks_share_one_graph(self, counter: Any) -> None:
        compiled = CompiledFunction(call_module, counter, dynamic=None, fullgraph=False)
        x = torch.randn(2, 4, requires_grad=True)
        for block in (Block(4) for _ in range(12)):
            x = compiled(block, x)
        assert counter.frame_count == 1

    def test_compiling_the_lightning_module_compiles_nothing_if_the_step_calls_its_children(
        self, counter: Any
    ) -> None:
        class CallsChildren(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                return nn.functional.cross_entropy(self.head(self.inp(batch[0])), batch[1])

        model = CallsChildren()
        model.compile(backend=counter)
        fit(model, limit_train_batches=2, max_epochs=1)
        assert counter.frame_count == 0

    def test_compile_is_lazy(self, counter: Any) -> None:
        compiled = torch.compile(lambda x: x + 1, backend=counter)
        assert counter.frame_count == 0
        compiled(torch.ones(2))
        assert counter.frame_count == 1

    def test_a_hook_is_one_more_guard_and_means_a_recompile(self, counter: Any) -> None:
        block, x = Block(4), torch.randn(2, 4)
        handle = block.register_forward_pre_hook(lambda m, args: None)
        swap(block, counter)
        block(x)
        handle.remove()
        block(x)
        assert counter.frame_count == 2, "hooks have to be gone before the flip"


class TestStateOfTheThread:
    def test_another_autocast_is_another_graph(self, counter: Any) -> None:
        block, x = Block(4), torch.randn(2, 4, requires_grad=True)
        swap(block, counter)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                block(x).sum().backward()
        assert counter.frame_count == 1
        block(x)
        assert counter.frame_count == 2

    def test_inference_mode_is_another_graph(self, counter: Any) -> None:
        block, x = Block(4), torch.randn(2, 4)
        swap(block, counter)
        block(x)
        with torch.inference_mode():
            block(x)
        assert counter.frame_count == 2

    @until_2_13
    def test_a_dispatch_mode_during_the_first_call_skips_the_code_for_good(self, counter: Any) -> None:
        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return func(*args, **(kwargs or {}))

        class Polite(Mode):
            @classmethod
            def ignore_compile_internals(cls) -> bool:
                return True

        compiled = torch.compile(lambda x: x * 2, backend=counter)
        with Mode():
            compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert counter.frame_count == 0
        polite = torch.compile(lambda x: x * 3, backend=counter)
        with Polite():
            polite(torch.ones(2))
        polite(torch.ones(2))
        assert counter.frame_count == 1

    def test_only_the_thread_that_compiles_is_traced(self) -> None:
        """Since 2.13 torch says so of all threads while one compiles; before, of none."""
        answers: list[tuple[bool, bool]] = []

        def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
            with ThreadPoolExecutor(1) as threads:
                elsewhere = threads.submit(is_traced_here).result()
            answers.append((is_traced_here() is torch.compiler.is_compiling(), elsewhere))
            return graph

        torch.compile(torch.sin, backend=backend)(torch.ones(2))
        assert answers == [(True, False)]
        assert not is_traced_here()


class TestBackends:
    def test_the_backward_can_be_compiled_with_the_forward(self) -> None:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        order: list[str] = []

        def part(name: str) -> Any:
            def compile_part(graph: Any, inputs: Any) -> Any:
                order.append(name)
                return make_boxed_func(graph.forward)

            return compile_part

        inner = aot_autograd(fw_compiler=part("forward"), bw_compiler=part("backward"))

        def backend(graph: Any, inputs: Any) -> Any:
            with compilers.backward_with_forward():
                return inner(graph, inputs)

        torch.compile(call_module, backend=backend)(Block(4), torch.randn(2, 4))
        assert order == ["forward", "backward"]

    def test_mode_and_options_reach_a_callable_backend_as_keywords(self) -> None:
        seen: list[dict[str, Any]] = []

        def backend(graph: Any, inputs: Any, **given: Any) -> Any:
            seen.append(given)
            return graph.forward

        torch.compile(lambda x: x + 1, backend=backend, mode="reduce-overhead")(torch.ones(2))
        torch.compile(lambda x: x + 2, backend=backend, options={"max_autotune": False})(torch.ones(2))
        assert seen == [{"mode": "reduce-overhead"}, {"options": {"max_autotune": False}}]

    def test_a_frame_that_cannot_be_traced_runs_eagerly_when_errors_are_suppressed(
        self, counter: Any
    ) -> None:
        def backend(graph: Any, inputs: Any) -> Any:
            raise RuntimeError("broken")

        compiled = torch.compile(lambda x: x * 5, backend=backend)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed):
            compiled(torch.ones(1))
        torch._dynamo.reset()
        with dynamo.compiling_allowed(suppress_errors=True):
            assert compiled(torch.ones(1)).item() == 5

    def test_the_compile_timer_hears_every_compile_and_lets_go(self, counter: Any) -> None:
        times = iter(range(100))
        timer = CompileTimer(now=lambda: float(next(times)))
        timer.start()
        torch.compile(lambda x: x + 4, backend=counter)(torch.ones(2))
        heard = timer.seconds
        assert heard > 0
        timer.stop()
        torch.compile(lambda x: x + 5, backend=counter)(torch.ones(2))
        assert timer.seconds == heard

    def test_the_compile_timer_listens_again_after_a_reset_and_once_only(self, counter: Any) -> None:
        timer = CompileTimer()
        timer.start()
        torch._dynamo.reset()  # takes away whoever listens
        timer.start()
        timer.start()
        torch.compile(lambda x: x + 7, backend=counter)(torch.ones(2))
        assert timer.seconds > 0
        assert torch._dynamo.callback.callback_handler.start_callbacks.count(timer._on_start) == 1
        timer.stop()

    @threads_may_compile
    def test_the_compile_timer_does_not_count_what_another_thread_compiles(self, counter: Any) -> None:
        timer = CompileTimer()
        timer.start()
        with ThreadPoolExecutor(1) as threads:
            threads.submit(torch.compile(lambda x: x + 6, backend=counter), torch.ones(2)).result()
        timer.stop()
        assert (counter.frame_count, timer.seconds) == (1, 0.0)

    def test_recompile_reasons_and_graph_breaks_can_be_read(self, counter: Any) -> None:
        before = dynamo.graph_break_count()

        def breaks(x: Tensor) -> Tensor:
            x = x + 1
            torch._dynamo.graph_break()
            return x + 1

        torch.compile(breaks, backend=counter)(torch.ones(2))
        assert dynamo.graph_break_count() == before + 1
        compiled = torch.compile(lambda x: x + 6, backend=counter, dynamic=False)
        compiled(torch.ones(2))
        compiled(torch.ones(3))
        assert "size mismatch" in (latest_reason() or "")

    def test_restart_of_an_analysis_is_a_control_flow_exception(self) -> None:
        from torch._dynamo.exc import TensorifyScalarRestartAnalysis

        assert issubclass(TensorifyScalarRestartAnalysis, dynamo.RestartCompile)
        assert issubclass(torch._dynamo.exc.Unsupported, dynamo.CompilerError)
        assert issubclass(torch._dynamo.exc.InternalTorchDynamoError, dynamo.CompilerError)

    def test_known_backends_can_be_listed(self) -> None:
        assert {"inductor", "eager", "aot_eager"} <= set(compilers.backend_names())

    def test_inductor_refuses_unknown_options(self) -> None:
        with pytest.raises(RuntimeError, match="no_such_option"):
            compilers.resolve_backend("inductor", None, {"no_such_option": 1})


class TestRandomNumbers:
    @pytest.mark.slow
    @pytest.mark.parametrize("draws", ["dropout", "attention", "several"])
    def test_inductor_can_draw_eagers_numbers_from_the_same_stream(self, draws: str) -> None:
        functions: dict[str, Any] = {
            "dropout": lambda x: nn.functional.dropout(x * 2, 0.3),
            "attention": lambda x: nn.functional.scaled_dot_product_attention(
                x[None], x[None], x[None], dropout_p=0.3
            ),
            "several": lambda x: torch.rand_like(x) * nn.functional.dropout(x, 0.3) + torch.randn(16, 8),
        }
        compiled = torch.compile(
            functions[draws], backend=compilers.resolve_backend("inductor", None, None, "eager")
        )
        results = []
        for function in (functions[draws], compiled):
            x = torch.ones(16, 8, requires_grad=True)
            torch.manual_seed(3)
            y = function(x)
            y.sum().backward()
            assert x.grad is not None
            results.append((y.detach(), x.grad, torch.rand(3)))
        for eager, found in zip(*results, strict=True):
            torch.testing.assert_close(found, eager)

    def test_options_of_the_user_come_last_also_beside_a_mode(self) -> None:
        def settings(**given: Any) -> dict[str, Any]:
            backend = compilers.resolve_backend("inductor", **{"mode": None, "options": None, **given})
            nonlocals = inspect.getclosurevars(backend).nonlocals
            for inner in ("in_cpp", "backend"):
                if inner in nonlocals:
                    nonlocals = inspect.getclosurevars(nonlocals[inner]).nonlocals
            return nonlocals["wrapper"]({}).config

        in_cpp = {"cpp_wrapper": True} if dynamo.TORCH >= (2, 13) else {}
        in_cpp["triton.cudagraphs"] = False
        assert settings() == {"fallback_random": True, **in_cpp}
        assert settings(random="backend") == in_cpp
        assert settings(options={"fallback_random": False}) == {"fallback_random": False, **in_cpp}
        in_python = {"cpp_wrapper": False, "triton.cudagraphs": False}
        assert settings(options={"cpp_wrapper": False}) == {"fallback_random": True, **in_python}
        both = settings(mode="max-autotune-no-cudagraphs", options={"max_autotune": False})
        assert (both["fallback_random"], both["max_autotune"]) == (True, False)


class TestLayouts:
    """No guard of Dynamo's looks at what an optimizer is given."""

    def test_an_optimizers_gradients_are_not_guarded(self, counter: Any) -> None:
        parameter = nn.Parameter(torch.rand(4, 6))
        optimizer = torch.optim.AdamW([parameter])
        step = torch.compile(optimizer.step, backend=counter)
        for gradient in (torch.rand(4, 6), torch.rand(4, 6), turned(torch.rand(4, 6))):
            parameter.grad = gradient
            step()
        assert counter.frame_count == 1


class TestCapturedGraphs:
    def test_a_backend_can_compile_a_captured_graph_once_more_from_real_inputs(self) -> None:
        graphs: list[Any] = []

        def keep(graph: Any, inputs: Any) -> Any:
            graphs.append(copy_of(graph))
            return graph.forward

        x = torch.randn(4, 8, requires_grad=True)
        expected = torch.compile(lambda x: (x * 2).sin(), backend=keep)(x)
        (found,) = compilers.resolve_backend("aot_eager", None, None)(graphs[0], [x])(x)
        assert torch.equal(found, expected)
        assert found.requires_grad

    def test_a_copy_is_not_what_the_backend_rewrites(self) -> None:
        def rewrites(graph: Any, inputs: Any) -> Any:
            copied = copy_of(graph)
            for node in graph.graph.find_nodes(op="call_method", target="sin"):
                node.target = "cos"
            graph.recompile()
            return copied.forward

        x = torch.ones(2)
        assert torch.equal(torch.compile(lambda x: x.sin(), backend=rewrites)(x), x.sin())

    def test_changes_in_place_are_counted_except_in_inference_mode(self) -> None:
        x = torch.ones(2)
        before = dynamo.version_of(x)
        x.mul_(1)
        assert dynamo.version_of(x) == (before or 0) + 1
        with torch.inference_mode():
            assert dynamo.version_of(torch.ones(2)) is None

    def test_checkpointing_leaves_its_repeated_forward_by_this_exception(self) -> None:
        left: list[BaseException] = []

        def forward(x: Tensor) -> Tensor:
            try:
                return (x * x).sin() * 2
            except BaseException as error:
                left.append(error)
                raise

        torch.utils.checkpoint.checkpoint(
            forward, torch.ones(2, requires_grad=True), use_reentrant=False
        ).sum().backward()
        assert [type(e) for e in left] == [dynamo.StopRecompute]

    def test_hooks_of_a_checkpoint_hold_its_frame_which_holds_what_is_repeated(self) -> None:
        seen: list[Any] = []

        def forward(x: Tensor) -> Tensor:
            hooks = hooks_in_use()
            assert hooks is not None
            seen.append(checkpoint_of(hooks))
            return (x * x).sin()

        x = torch.ones(2, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
        ((frame, is_repeated),) = seen
        assert not is_repeated
        repeated: list[Any] = []
        repeats = frame.recompute_fn
        frame.recompute_fn = lambda *args: (repeated.append(args), repeats(*args))
        y.sum().backward()
        assert [len(args) for args in repeated] == [1]
        assert seen[1:] == [(frame, True)]

    def test_a_refused_frame_keeps_what_was_compiled_before_if_it_is_told_to_run_that_only(self) -> None:
        """By default it is skipped from then on, with all its code."""

        class Runs:
            is_to_be_repeated = True

        runs: list[int] = []
        first: Any = Runs()
        frames = LaterFrames(lambda name, region: False)

        def backend(graph: Any, inputs: Any) -> Any:
            frames.keep_those_before("one", backend, RuntimeError("no second one"))
            frames.compiled("one", first)

            def run(*args: Any) -> Any:
                runs.append(len(args[0]))
                return graph(*args)

            return run

        function = torch.compile(lambda x: x.sin(), backend=backend, dynamic=False)
        with torch._dynamo.config.patch(suppress_errors=True):
            for size in (2, 3, 2, 3, 2):
                assert torch.equal(function(torch.ones(size)), torch.ones(size).sin())
        assert runs == [2, 2, 2]

    def test_what_a_checkpoint_has_saved_can_be_forgotten(self) -> None:
        """In its forward, and where it is repeated, which then begins anew."""
        frames: list[Any] = []

        def forward(x: Tensor) -> Tensor:
            hooks = hooks_in_use()
            assert hooks is not None
            frame, is_repeated = checkpoint_of(hooks) or (None, False)
            if not is_repeated:
                frames.append(frame)
                x.exp()  # fails, say
                forget_saved(frame, 0)
            return (x * x).sin()

        x = torch.ones(2, requires_grad=True)
        y = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False, early_stop=False)
        (frame,) = frames
        assert len(frame.weak_holders) == len(frame.x_metadatas) == 3
        repeats, counted = frame.recompute_fn, []

        def twice(*args: Any) -> None:
            repeats(*args)
            counted.append(list(frame.recomp_counter.values()))
            forget_repeated(hooks_in_use())
            counted.append(list(frame.recomp_counter.values()))
            repeats(*args)

        frame.recompute_fn = twice
        y.sum().backward()
        assert counted == [[3], [0]]
        torch.testing.assert_close(x.grad, 2 * torch.ones(2).cos())

    def test_a_generator_of_the_users_own_is_not_captured(self, counter: Any) -> None:
        generator = torch.Generator()
        compiled = torch.compile(lambda x: x + torch.rand(2, generator=generator), backend=counter)
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(lambda x: x + torch.rand(2, generator=generator), backend=counter, fullgraph=True)(
                torch.ones(2)
            )
        compiled(torch.ones(2))


class TestReuse:
    def test_reuse_runs_what_is_compiled_and_compiles_nothing_new(self) -> None:
        backend = Counting()
        compiled = CompiledFunction(lambda x: x * 7, backend, dynamic=False, fullgraph=False)
        torch.testing.assert_close(compiled.reuse(torch.ones(2)), torch.full((2,), 7.0))
        assert (backend.graphs, backend.runs) == (0, 0)
        compiled.compile(torch.ones(2))
        compiled.reuse(torch.ones(2))
        assert (backend.graphs, backend.runs) == (1, 2)
        torch.testing.assert_close(compiled.reuse(torch.ones(3)), torch.full((3,), 7.0))
        assert (backend.graphs, backend.runs) == (1, 2)

    def test_reuse_goes_on_after_a_graph_break(self) -> None:
        def function(x: Tensor) -> Tensor:
            x = x * 2
            torch._dynamo.graph_break()
            return x + 1

        backend = Counting()
        compiled = CompiledFunction(function, backend, dynamic=None, fullgraph=False)
        compiled.compile(torch.ones(2))
        assert (backend.graphs, backend.runs) == (2, 2)
        compiled.reuse(torch.ones(2))
        assert (backend.graphs, backend.runs) == (2, 4)

    @pytest.mark.parametrize("apart", [True, False])
    def test_what_varies_is_remembered_by_the_name_of_the_code(self, apart: bool) -> None:
        """For as long as the process lives: the next one with other sizes is compiled for any size."""
        static = []

        def backend(graph: Any, inputs: Any) -> Any:
            sizes = [size for each in inputs for size in (each.shape if isinstance(each, Tensor) else [each])]
            static.append(all(type(size) is int for size in sizes))
            return graph.forward

        names = CodeNames()
        for size, others in ((2, names), (3, CodeNames() if apart else names)):
            name = others.of("turned", "step")
            CompiledFunction(turned, backend, dynamic=None, fullgraph=False, name=name)(torch.ones(size))
        assert static == [True, apart]

    def test_two_of_one_code_do_not_share_their_graphs(self) -> None:
        def function(x: Tensor) -> Tensor:
            return x.sin()

        backends = Counting(), Counting()
        first, second = (
            CompiledFunction(function, backend, dynamic=False, fullgraph=False) for backend in backends
        )
        first.compile(torch.ones(2))
        second.reuse(torch.ones(2))
        assert [b.runs for b in backends] == [1, 0]
        second.compile(torch.ones(2))
        first.reuse(torch.ones(2))
        second.reuse(torch.ones(2))
        assert [b.runs for b in backends] == [2, 2]

    @pytest.mark.parametrize("stance", ["default", "eager_on_recompile"])
    def test_what_is_disabled_runs_without_dynamo_unless_a_stance_says_otherwise(self, stance: str) -> None:
        callbacks: list[Any] = []

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def outside() -> None:
            callbacks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())

        with torch.compiler.set_stance(stance):
            outside()
        # run-only for each frame in there: the reason to do without the stance
        assert callbacks == [None if stance == "default" else False]

    def test_code_that_the_user_compiles_goes_its_own_way(self, counter: Any) -> None:
        theirs = torch.compile(lambda x: x * 3, backend=counter)

        def function(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return outside(x)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def outside(x: Tensor) -> Tensor:
            return theirs(x)

        ours = CompiledFunction(function, Counting(), dynamic=None, fullgraph=False)
        ours.reuse(torch.ones(2))
        assert len(counter.graphs) == 1

    def test_a_function_of_torchs_own_is_reused_too(self) -> None:
        backend = Counting()
        compiled = CompiledFunction(torch.nn.functional.gelu, backend, dynamic=False, fullgraph=False)
        compiled.compile(torch.ones(2))
        compiled.reuse(torch.ones(2))
        assert (backend.graphs, backend.runs) == (1, 2)

    def test_compiled_code_is_called_with_dynamo_off_and_needs_no_second_switch(self) -> None:
        callbacks: list[Any] = []

        def backend(graph: Any, inputs: Any) -> Any:
            def run(*args: Any) -> Any:
                callbacks.append(torch._C._dynamo.eval_frame.get_eval_frame_callback())
                return graph.forward(*args)

            switched_off = torch.compiler.disable(run)
            assert without_disable(switched_off) is run
            assert without_disable(run) is run
            return run

        compiled = CompiledFunction(lambda x: x * 2, backend, dynamic=False, fullgraph=False)
        compiled.compile(torch.ones(2))
        compiled.reuse(torch.ones(2))
        assert callbacks == [None, None]

    def test_a_wrapper_that_copies_the_marks_of_a_switch_stays(self) -> None:
        inner = torch.compiler.disable(lambda x: x * 2)

        @functools.wraps(inner)
        def wrapper(x: Tensor) -> Any:
            return inner(x)

        assert wrapper._torchdynamo_disable
        assert without_disable(wrapper) is wrapper

    def test_what_aotautograd_returns_is_switched_off_once_more(self) -> None:
        kinds: list[bool] = []

        def backend(graph: Any, inputs: Any) -> Any:
            compiled = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)
            kinds.append(without_disable(compiled) is compiled)
            return compiled

        torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        assert kinds == [False]

    @pytest.mark.parametrize(("name", "runs"), [("force_eager", 1), ("default", 2)])
    def test_a_stance_of_the_users_holds(self, name: str, runs: int) -> None:
        backend = Counting()
        compiled = CompiledFunction(lambda x: x * 5, backend, dynamic=False, fullgraph=False)
        compiled.compile(torch.ones(2))
        with torch.compiler.set_stance(name):
            compiled.reuse(torch.ones(2))
        assert backend.runs == runs


def test_a_stance_of_the_users_is_seen() -> None:
    assert not stance.is_forced_eager()
    assert stance.stance_against_compiling() is None
    for name in ("force_eager", "eager_on_recompile", "fail_on_recompile"):
        with torch.compiler.set_stance(name):
            assert stance.is_forced_eager() is (name == "force_eager")
            assert stance.stance_against_compiling() == name


class TestHookGuards:
    """Guards look at the four kinds of hooks, and at which of them take keywords only where there are any."""

    @staticmethod
    def names() -> list[str]:
        seen: list[str] = []
        block = Block(4)

        def tell(builder: Any, guard: Any) -> None:
            seen.append(guard.name)
            guard_no_hooks(builder, guard)

        guard_no_hooks = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
        GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = functools.wraps(guard_no_hooks)(tell)
        try:
            with dynamo.compiling_allowed(suppress_errors=False):
                CompiledFunction(call_module, Counting(), dynamic=None, fullgraph=True)(
                    block, torch.ones(2, 4)
                )
        finally:
            GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT = guard_no_hooks
        return seen

    def test_each_module_has_four(self) -> None:
        kinds = {name.rpartition(".")[2] for name in self.names()}
        assert kinds == {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}

    def test_it_is_as_before_afterwards(self) -> None:
        before = GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT
        with dynamo.compiling_allowed(suppress_errors=False):
            assert GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT is not before
        assert GuardBuilder.EMPTY_NN_MODULE_HOOKS_DICT is before

    @pytest.mark.parametrize("with_kwargs", [False, True])
    @pytest.mark.parametrize("kind", ["forward_pre", "forward", "full_backward", "full_backward_pre"])
    def test_a_hook_of_any_kind_is_noticed(self, kind: str, with_kwargs: bool) -> None:
        backend, calls = Counting(), list[str]()
        block = Block(4)
        compiled = CompiledFunction(call_module, backend, dynamic=None, fullgraph=False)
        with dynamo.compiling_allowed(suppress_errors=False):
            compiled.compile(block, torch.ones(2, 4, requires_grad=True))
        compiled.reuse(block, torch.ones(2, 4, requires_grad=True))
        assert backend.runs == 2
        keywords = {"with_kwargs": True} if with_kwargs and "backward" not in kind else {}
        register = getattr(block, f"register_{kind}_hook")
        handle = register(lambda *args: calls.append(kind), **keywords)
        compiled.reuse(block, torch.ones(2, 4, requires_grad=True)).sum().backward()
        assert calls == [kind]
        assert backend.runs == 2
        handle.remove()
        compiled.reuse(block, torch.ones(2, 4, requires_grad=True))
        assert backend.runs == 3

    @pytest.mark.parametrize("kind", ["forward_pre", "forward"])
    def test_a_hook_that_is_registered_anew_to_take_keywords_is_noticed(self, kind: str) -> None:
        def hook(module: Any, args: Any, *rest: Any) -> Any:
            with_kwargs = len(rest) == (2 if kind == "forward" else 1)
            factor = 3 if with_kwargs else 2
            if kind == "forward":
                return rest[-1] * factor
            return ((args[0] * factor,), rest[0]) if with_kwargs else (args[0] * factor,)

        block, x = Block(4), torch.ones(2, 4)
        register = getattr(block, f"register_{kind}_hook")
        handle = register(hook)
        compiled = CompiledFunction(call_module, Counting(), dynamic=None, fullgraph=False)
        with dynamo.compiling_allowed(suppress_errors=False):
            torch.testing.assert_close(compiled.compile(block, x), block(x))
        handle.remove()
        register(hook, with_kwargs=True)
        torch.testing.assert_close(compiled.reuse(block, x), block(x))


class TestIntegers:
    def test_listed_integers_are_symbols_from_the_first_compile_on(self, counter: Any) -> None:
        def step(args: tuple[Any, ...]) -> Tensor:
            return args[0] * args[1]

        compiled = torch.compile(step, backend=counter)
        for index in (0, 1, 2, 7):
            with dynamo.dynamic_integers([r"L\['args'\]\[1\]$"]):
                assert compiled((torch.ones(2), index))[0].item() == index
        assert counter.frame_count == 1

    def test_a_list_that_is_not_empty_at_entry_recompiles(self, counter: Any) -> None:
        calls: list[Tensor] = []

        def step(x: Tensor) -> Tensor:
            calls.append(x + 1)
            return x * 2

        compiled = torch.compile(step, backend=counter)
        compiled(torch.ones(2))
        calls.clear()
        compiled(torch.ones(2))
        assert counter.frame_count == 1
        compiled(torch.ones(2))
        assert counter.frame_count == 2


class TestGuards:
    def test_they_see_that_a_parameter_is_frozen(self, counter: Any) -> None:
        block, x = Block(4), torch.ones(2, 4)
        compiled = CompiledFunction(call_module, counter, dynamic=None, fullgraph=False)
        with dynamo.compiling_allowed(suppress_errors=False):
            compiled(block, x)
            next(block.parameters()).requires_grad_(False)
            compiled(block, x)
        assert counter.frame_count == 2

    def test_a_method_that_its_class_has_no_longer_is_called_on(
        self, counter: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        compiled, x = torch.compile(call_module, backend=counter), torch.ones(2, 4)
        block = Block(4)
        before = compiled(block, x)
        monkeypatch.setattr(Block, "forward", lambda block, x: x * 0)
        assert torch.equal(compiled(block, x), before)

    @pytest.mark.parametrize("owner", [Block, nn.Module])
    @pytest.mark.parametrize("name", ["__call__", "_call_impl"])
    def test_what_is_put_in_place_of_a_modules_call_is_not_seen(
        self, counter: Any, monkeypatch: pytest.MonkeyPatch, name: str, owner: type
    ) -> None:
        compiled, x = torch.compile(lambda block, x: block(x), backend=counter), torch.ones(2, 4)
        block = Block(4)
        before = compiled(block, x)
        prior = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda module, x: prior(module, x) * (0 if module is block else 1))
        assert torch.equal(compiled(block, x), before)
        assert torch.equal(block(x), x * 0)

    def test_where_a_class_has_its_methods_is_asked_in_one_place(
        self, counter: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        asked: list[Any] = []
        prior: Any = UserDefinedObjectVariable.get_source_by_walking_mro  # type: ignore[attr-defined]

        def look(variable: Any, *args: Any) -> Any:
            asked.append((type(variable.value), args[-1]))
            return prior(variable, *args)

        monkeypatch.setattr(UserDefinedObjectVariable, "get_source_by_walking_mro", look)
        torch.compile(lambda block, x: block(x), backend=counter)(Block(4), torch.ones(2, 4))
        assert (Block, "forward") in asked


class TestOptimizers:
    def test_the_bare_step_is_below_two_wrappers(self) -> None:
        bare = inspect.unwrap(torch.optim.AdamW.step)
        assert bare.__name__ == "step"
        assert not hasattr(bare, "__wrapped__")
        assert torch.optim.AdamW.step is not bare

    def test_schedulers_look_for_these_two_marks(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        assert optimizer.step._wrapped_by_lr_sched
        optimizer.step()
        assert optimizer._opt_called

    def test_eager_multi_tensor_adam_refuses_a_learning_rate_tensor(self) -> None:
        parameter = nn.Parameter(torch.ones(1))
        parameter.grad = torch.ones(1)
        optimizer = torch.optim.Adam([parameter], lr=0.1, foreach=True)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        with pytest.raises((ValueError, RuntimeError), match="lr as a Tensor"):
            optimizer.step()

    def test_to_compile_its_step_moves_counts_to_the_parameters_for_good(self) -> None:
        parameter = nn.Parameter(torch.ones(1, device="meta"))
        parameter.grad = torch.ones(1, device="meta")
        optimizer = torch.optim.Adam([parameter], lr=torch.tensor(0.1))
        optimizer.step()
        assert optimizer.state[parameter]["step"].device.type == "cpu"
        with torch.no_grad():
            torch.compile(inspect.unwrap(torch.optim.Adam.step), backend="eager")(optimizer)
        assert optimizer.state[parameter]["step"].is_meta


@pytest.mark.parametrize("in_thread", [False, True])
def test_what_a_backward_leaves_is_left_in_any_thread(in_thread: bool) -> None:
    """The backward pass of an accelerator has a thread of its own; since 2.13 threads have own settings."""

    def twice(loss: Tensor) -> None:
        loss.backward(retain_graph=True)
        loss.backward()

    weight = nn.Parameter(torch.ones(4))
    with KeepsBuffers(), compilers.backward_with_forward(), ThreadPoolExecutor(1) as threads:
        compiled = torch.compile(lambda w: w.sin().cos().exp().sum(), backend="aot_eager_decomp_partition")
        loss = compiled(weight)
        threads.submit(twice, loss).result() if in_thread else twice(loss)
    torch._dynamo.reset()
    once = torch.autograd.grad(weight.sin().cos().exp().sum(), weight)[0]
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, 2 * once)


_LEFT_OUT = frozenset(["mine", "__getstate__"])


class TestLightning:
    @pytest.mark.skipif(dynamo.TORCH != (2, 13), reason="an error of torch 2.13 alone")
    def test_a_log_call_inside_a_compiled_step_is_an_internal_error(self) -> None:
        trainer = make_trainer(limit_train_batches=1, max_epochs=1)
        with pytest.raises(dynamo.CompilerError):
            trainer.fit(torch.compile(Net(), backend="eager"), loader())

    def test_a_method_on_the_instance_survives_pickle_and_deepcopy(self) -> None:
        model = Net()

        @functools.wraps(model.training_step)
        def training_step(self: Any, *args: Any) -> Any:
            return self

        vars(model)["training_step"] = types.MethodType(training_step, model)
        assert is_overridden("training_step", model)
        assert is_param_in_hook_signature(model.training_step, "batch_idx", explicit=True)
        clone = copy.deepcopy(model)
        assert clone.training_step() is clone, "a closure would have run with the original's weights"
        assert pickle.loads(pickle.dumps(model)).training_step.__func__ is Net.training_step

    def test_copies_and_pickles_ask_the_instance_for_its_state(self) -> None:
        model = Net()
        vars(model)["mine"] = 1
        vars(model)["__getstate__"] = lambda: {
            name: value for name, value in Net.__getstate__(model).items() if name not in _LEFT_OUT
        }
        for clone in (copy.copy(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert _LEFT_OUT.isdisjoint(vars(clone))
            assert list(clone.state_dict()) == list(model.state_dict())

    def test_the_parameters_of_a_step_are_looked_for_behind_one_decorator(self) -> None:
        def step(self: Any, batch: Any) -> Any:
            return batch

        def decorated(function: Any) -> Any:
            return functools.wraps(function)(lambda *args: function(*args))

        assert not is_param_in_hook_signature(step, "batch_idx", min_args=2)
        assert not is_param_in_hook_signature(decorated(step), "batch_idx", min_args=2)
        assert is_param_in_hook_signature(decorated(decorated(step)), "batch_idx", min_args=2)

    def test_a_training_step_that_takes_more_than_the_batch_gets_the_number_of_it(self) -> None:
        given: list[tuple[tuple[Any, ...], int]] = []

        def note(model: Net, *args: Any) -> Any:
            given.append((args[1:], model.trainer.fit_loop.batch_idx))
            return model.loss(args[0])

        steps: list[Any] = [note, lambda m, batch: note(m, batch), lambda m, x, n, o=0: note(m, x, n)]
        for step in steps:
            fit(type("Noting", (Net,), {"training_step": step})(), max_epochs=1, limit_train_batches=2)
        assert given == [((0,), 0), ((1,), 1), ((), 0), ((), 1), ((0,), 0), ((1,), 1)]
        assert [is_param_in_hook_signature(s, "batch_idx", min_args=2) for s in steps] == [True, False, True]

    def test_what_a_lightning_module_pickles_holds_its_compiled_call(self) -> None:
        model = Net()
        model._compiled_call_impl = call = model.forward  # type: ignore[assignment]
        assert model.__getstate__()["_compiled_call_impl"] is call
        assert "_compiled_call_impl" not in nn.Module.__getstate__(model)

    def test_callbacks_come_from_this_entry_point_group(self) -> None:
        points = importlib.metadata.entry_points(group="lightning.pytorch.callbacks_factory")
        assert "hotcompile" in {p.name for p in points}

    def test_the_batch_start_hook_runs_before_the_step_and_the_end_hook_after_the_optimizer(self) -> None:
        order: list[str] = []

        class Spy(pl.Callback):
            def on_train_batch_start(self, *args: Any) -> None:
                order.append("start")

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                order.append(f"end {trainer.fit_loop._should_accumulate()}")

            def on_before_optimizer_step(self, *args: Any) -> None:
                order.append("optimizer")

        fit(Net(), [Spy()], limit_train_batches=2, max_epochs=1, accumulate_grad_batches=2)
        assert order == ["start", "end True", "start", "optimizer", "end False"]

    def test_the_trainer_hands_plain_arguments_to_the_step(self) -> None:
        seen: list[Any] = []

        class Looks(Net):
            def training_step(self, *args: Any) -> Any:
                seen.append([type(a).__name__ for a in args])
                return self.loss(args[0])

        fit(Looks(), limit_train_batches=1, max_epochs=1)
        assert seen == [["list", "int"]]

    def test_the_counters_behind_global_step_and_current_epoch_have_these_names(self) -> None:
        model = Net()
        trainer = fit(model, limit_train_batches=2, max_epochs=1)
        progress = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress
        assert trainer.global_step == progress.optimizer.step.total.completed == 2
        assert trainer.current_epoch == trainer.fit_loop.epoch_progress.current.completed == 1

    def test_a_compiled_lightning_module_is_marked(self) -> None:
        model = seeded(Net)
        trainer = make_trainer(limit_train_batches=1, max_epochs=1)
        seen: list[Any] = []

        class Spy(pl.Callback):
            def on_train_start(self, trainer: Any, pl_module: Any) -> None:
                seen.append(pl_module._compiler_ctx)
                trainer.should_stop = True

        trainer.callbacks.append(Spy())
        model.log = lambda *a, **k: None  # type: ignore[method-assign]
        trainer.fit(torch.compile(model, backend="eager"), loader())
        assert seen[0] is not None


class TestCollectives:
    def test_lightning_reduces_a_logged_value_in_the_call_unless_it_is_for_the_epoch_alone(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reduced: list[float] = []

        class Reduces(SingleDeviceStrategy):
            def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
                reduced.append(float(tensor))
                return tensor

        class Logs(Net):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                monkeypatch.setattr(_AcceleratorConnector, "is_distributed", True)
                reduced.clear()
                self.log("a", 1.0, sync_dist=True)
                self.log_dict({"b": 2.0}, sync_dist=True, on_epoch=True)
                assert reduced == [1.0, 2.0]
                self.log("c", 3.0, sync_dist=True, on_step=False, on_epoch=True)
                assert reduced == [1.0, 2.0]
                monkeypatch.undo()
                return self.loss(batch)

        fit(Logs(), strategy=Reduces(device="cpu"), limit_train_batches=1, max_epochs=1)

    @pytest.mark.parametrize(("method", "value"), [("log", "value"), ("log_dict", "dictionary")])
    def test_arguments_of_a_log_call_have_these_places(self, method: str, value: str) -> None:
        names = list(inspect.signature(getattr(pl.LightningModule, method)).parameters)
        after = names[names.index(value) + 1 :]
        assert (after[2], after[5], after[6]) == ("on_step", "enable_graph", "sync_dist")

    @pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has none")
    @pytest.mark.parametrize(
        "name", ["all_reduce", "all_gather", "all_gather_into_tensor", "all_to_all_single"]
    )
    def test_dynamo_rewrites_a_collective_behind_this_variable(self, name: str) -> None:
        assert CollectiveFunctionRewriteVariable.can_rewrite(getattr(torch.distributed, name))
        assert "call_function" in vars(CollectiveFunctionRewriteVariable)


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this build of torch has none")
def test_in_the_forward_of_ddp_the_backend_is_inside_of_a_method_of_dynamos() -> None:
    from torch._dynamo.backends.distributed import DDPOptimizer

    found = DDPOptimizer(2**25, "ours").compile_fn
    assert isinstance(found, types.MethodType)
    assert found.__self__.backend_compile_fn == "ours"


class TestHooks:
    def test_a_hook_on_one_of_two_equal_blocks_runs_when_guards_look_at_hooks(self, counter: Any) -> None:
        first, second, x = Block(4), Block(4), torch.randn(2, 4, requires_grad=True)
        second.register_forward_hook(lambda module, args, output: output * 0)
        compiled = CompiledFunction(call_module, counter, dynamic=None, fullgraph=False)
        with dynamo.compiling_allowed(suppress_errors=False):
            compiled(first, x)
            assert compiled(second, x).abs().sum() == 0
        assert counter.frame_count == 2

    @until_2_13
    def test_by_default_it_is_silently_left_out(self, counter: Any) -> None:
        first, second, x = Block(4), Block(4), torch.randn(2, 4, requires_grad=True)
        second.register_forward_hook(lambda module, args, output: output * 0)
        compiled = CompiledFunction(call_module, counter, dynamic=None, fullgraph=False)
        compiled(first, x)
        assert compiled(second, x).abs().sum() != 0


class TestFunctionsWithACache:
    """Dynamo looks past ``functools.cache``; it says so through ``warn_once``, which we stand in for."""

    def test_dynamo_says_so_through_a_function_that_can_be_replaced(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        monkeypatch.setattr(torch._dynamo.utils, "warn_once", lambda msg, *_, **__: told.append(msg))

        @functools.cache
        def made_once() -> torch.Tensor:
            return torch.ones(2)

        torch.compile(lambda x: x + made_once(), backend="eager")(torch.zeros(2))
        assert any("functools.lru_cache" in message for message in told)

    def test_a_break_in_its_place_calls_the_real_function(self) -> None:
        calls: list[int] = []

        @functools.cache
        def made_once() -> torch.Tensor:
            calls.append(1)
            return torch.randn(2)

        def backend(graph: Any, inputs: Any) -> Any:
            return graph.forward

        mark(backend)
        step = torch.compile(lambda x: x + made_once(), backend=backend)
        with dynamo.compiling_allowed(suppress_errors=False):
            first, second = step(torch.zeros(2)), step(torch.zeros(2))
        assert torch.equal(first, second)
        assert len(calls) == 1

    def test_a_guard_may_call_what_it_guards(self) -> None:
        # swap/tracing/cached_functions.py: it asks for what the cache holds.
        answers = {"sign": 1}
        asked: list[str] = []
        graphs: list[Any] = []

        @functools.cache
        def sign(name: str) -> int:
            asked.append(name)
            return answers[name]

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        mark(backend)
        step = torch.compile(lambda x: x * sign("sign"), backend=backend)
        sign("sign")
        with dynamo.compiling_allowed(suppress_errors=False):
            assert step(torch.ones(2)).sum() == step(torch.ones(2)).sum() == 2
            assert (len(asked), len(graphs)) == (1, 1)
            answers["sign"] = -1
            assert step(torch.ones(2)).sum() == 2  # as in eager, where the cache still holds it
            sign.cache_clear()
            assert step(torch.ones(2)).sum() == -2
        assert (len(asked), len(graphs)) == (2, 2)

    def test_what_the_user_compiles_is_as_without(self) -> None:
        @functools.cache
        def made_once() -> torch.Tensor:
            return torch.ones(2)

        step = torch.compile(lambda x: x + made_once(), backend="eager", fullgraph=True)
        with dynamo.compiling_allowed(suppress_errors=False):
            assert step(torch.zeros(2)).sum() == 2


def test_compiled_code_does_not_look_at_the_stride_of_a_dimension_of_one_element() -> None:
    # swap/optimizers/gradients.py: an optimizer that was compiled for other such strides takes these too.
    tensor = torch.empty_strided((3, 2, 1), (2, 1, 77))
    torch._C._dynamo.guards.assert_size_stride(tensor, (3, 2, 1), (2, 1, 1))
    with pytest.raises(AssertionError, match="stride"):
        torch._C._dynamo.guards.assert_size_stride(tensor, (3, 2, 1), (1, 3, 1))


class TestNumpy:
    """Dynamo stands in for numpy, unless it is told to leave it alone."""

    @staticmethod
    def ours(step: Any, backend: Any) -> Any:
        return CompiledFunction(step, backend, dynamic=None, fullgraph=False)

    @staticmethod
    def allowed() -> contextlib.AbstractContextManager[None]:
        return dynamo.compiling_allowed(suppress_errors=False)

    @staticmethod
    def draws(step: Any) -> tuple[bool, bool]:
        """Whether the numbers are numpy's, and whether torch's generator is where it was."""
        np.random.seed(4)
        expected = torch.from_numpy(np.random.rand(3))
        np.random.seed(4)
        before = torch.get_rng_state()
        found = step(torch.zeros(3, dtype=torch.float64))
        return torch.equal(found, expected), torch.equal(torch.get_rng_state(), before)

    def test_by_default_torchs_numbers_are_drawn(self) -> None:
        step = torch.compile(lambda x: x + torch.from_numpy(np.random.rand(3)), backend="eager")
        assert self.draws(step) == (False, False)

    def test_in_what_is_compiled_here_numpys_are(self, counter: Any) -> None:
        step = self.ours(lambda x: x + torch.from_numpy(np.random.rand(3)), counter)
        with self.allowed():
            assert self.draws(step) == (True, True)

    def test_a_percentile_is_an_array_by_default(self) -> None:
        step = torch.compile(lambda x: x * float(np.percentile(x.numpy(), 90)), backend="eager")
        with pytest.raises(TypeError, match="0-dimensional"):
            step(torch.arange(8.0))

    def test_in_what_is_compiled_here_it_is_a_number(self, counter: Any) -> None:
        step = self.ours(lambda x: x * float(np.percentile(x.numpy(), 90)), counter)
        with self.allowed():
            found = step(torch.arange(8.0))
        torch.testing.assert_close(found, torch.arange(8.0) * 6.3)

    def test_what_the_user_compiles_is_as_it_was(self) -> None:
        def adds(x: Tensor) -> Tensor:
            return x + torch.from_numpy(np.cumsum([1.0, 2]))

        step = torch.compile(adds, backend="eager", fullgraph=True)
        with self.allowed():
            assert step(torch.zeros(2)).tolist() == [1, 3]

    def test_an_array_of_a_tensor_ends_the_graph(self, counter: Any) -> None:
        def gives_one(x: Tensor) -> tuple[Tensor, Any]:
            return x * 2, x.numpy()

        step, found = self.ours(gives_one, counter), []
        told = dynamo.compiling_allowed(suppress_errors=False, on_break=found.append)
        with told:
            _, array = step(torch.ones(2))
        assert array.tolist() == [1, 1]
        assert len(found) == 1

    @pytest.mark.parametrize(
        "use",
        [
            lambda a: float(np.mean(a)),
            lambda a: float(a.mean()),
            lambda a: float(a[0]),
            lambda a: 1.0 if a.sum() > 12 else 2.0,
            lambda a: len(a) * float(np.max([a.sum(), 1.0])),
            lambda a: torch.from_numpy(a * 2).sum().item(),
        ],
        ids=["function", "method", "element", "branch", "list", "arithmetic"],
    )
    @pytest.mark.parametrize("source", ["tensor", "argument"])
    def test_an_array_is_never_a_constant(self, use: Any, source: str, counter: Any) -> None:
        def function(x: Tensor, array: Any) -> Tensor:
            return x * use(x.numpy() if source == "tensor" else array)

        step = self.ours(function, counter)
        for i in range(4):
            x = torch.arange(4.0) + i
            with self.allowed() if i == 0 else contextlib.nullcontext():
                found = (step.compile if i == 0 else step.reuse)(x, x.numpy().copy())
            torch.testing.assert_close(found, function(x, x.numpy().copy()))

    @pytest.mark.parametrize(
        ("compute", "expected"),
        [
            (lambda n: np.sqrt(n), 2.0),
            (lambda n: np.prod([n, 3]), 12),
            (lambda n: np.float32(n) * 0.5, 2.0),
            (lambda n: np.maximum(n, 7), 7),
            (lambda n: np.log2(n) > 1, True),
        ],
        ids=["sqrt", "prod", "float32", "maximum", "log2"],
    )
    def test_what_has_numbers_only_is_part_of_the_graph(
        self, compute: Any, expected: float, counter: Any
    ) -> None:
        step = CompiledFunction(lambda x: x * compute(x.shape[0]), counter, dynamic=None, fullgraph=True)
        with self.allowed():
            found = step(torch.ones(4))
        assert torch.equal(found, torch.ones(4) * expected)
        assert found.dtype == torch.float32
        assert counter.frame_count == 1

    def test_an_error_of_numpys_is_the_users(self, counter: Any) -> None:
        step = self.ours(lambda x: x * np.sqrt("x"), counter)
        with dynamo.compiling_allowed(suppress_errors=True), pytest.raises(TypeError):
            step(torch.ones(4))

    def test_it_is_as_before_afterwards(self) -> None:
        before = NumpyVariable.call_function
        with self.allowed():
            assert NumpyVariable.call_function is not before
            with contextlib.suppress(KeyError), self.allowed():
                raise KeyError
        assert NumpyVariable.call_function is before


class TestFusedOptimizers:
    """Torch's fused kernels for the CPU. Fails once torch looks at strides: then we need not."""

    @staticmethod
    def updated(weight: Tensor, gradient: Tensor, *, fused: bool) -> tuple[Tensor, int]:
        parameter = nn.Parameter(weight.detach().clone())
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
        version = parameter._version
        parameter.grad = gradient
        optimizer.step()
        return parameter.detach(), parameter._version - version

    def test_strides_are_not_looked_at(self) -> None:
        weight, gradient = torch.zeros(2, 3), torch.tensor([[1.0, -1, 1], [-1, 1, 1]])
        turned = gradient.t().contiguous().t()
        expected, _ = self.updated(weight, gradient, fused=True)
        torch.testing.assert_close(expected, -0.1 * gradient)
        misread, _ = self.updated(weight, turned, fused=True)
        assert not torch.allclose(misread, expected)
        by_loop, _ = self.updated(weight, turned, fused=False)
        torch.testing.assert_close(by_loop, expected)

    def test_changes_in_place_are_not_counted(self) -> None:
        weight = torch.ones(3)
        assert self.updated(weight, torch.ones(3), fused=False)[1] > 0
        assert self.updated(weight, torch.ones(3), fused=True)[1] == 0
        torch.autograd.graph.increment_version([weight])
        assert weight._version == 1

    def test_steps_are_counted_one_tensor_at_a_time(self) -> None:
        """Fails once torch adds a tensor, as its loop over tensors does: then its own call is as good."""
        parameter = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=True)
        parameter.grad = torch.ones(3)
        added = list[Any]()
        original = torch._foreach_add_
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                torch, "_foreach_add_", lambda *args, **kw: (added.append(args[1]), original(*args, **kw))
            )
            optimizer.step()
        assert [type(number) for number in added] == [int]

    @pytest.mark.parametrize(
        ("kernel", "arguments"),
        [
            ("adam", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]),
            ("adamw", ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "state_steps"]),
            ("adagrad", ["state_sums", "state_steps"]),
            ("sgd", ["momentum_buffer_list"]),
        ],
    )
    def test_what_the_kernels_take(self, kernel: str, arguments: list[str]) -> None:
        schema = getattr(torch.ops.aten, f"_fused_{kernel}_").default._schema
        assert [a.name for a in schema.arguments if not a.kwarg_only] == ["self", "grads", *arguments]


@pytest.mark.slow
@pytest.mark.parametrize("cache", ["CppWrapperCodeCache", "CppPythonBindingsCodeCache"])
def test_asking_for_no_code_makes_the_header_and_compiles_nothing(
    cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import codecache

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "compiler"))
    monkeypatch.setattr(getattr(codecache, cache), "cache", {})  # a process asks once
    undo = use_headers(tmp_path / "headers")
    try:
        getattr(codecache, cache).load_async("", "cpu")
        assert len([*(tmp_path / "headers").glob("*.gch"), *(tmp_path / "headers").glob("*.pch")]) == 1
        assert not list((tmp_path / "compiler").rglob("*.main.so"))
    finally:
        undo()


@pytest.mark.parametrize("automatic", [True, False])
def test_lightning_says_what_it_is_running(automatic: bool) -> None:
    seen: dict[str, set[str | None]] = {}

    def note(place: str, module: Any) -> None:
        seen.setdefault(place, set()).add(vars(module).get("_current_fx_name"))

    class Noting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = automatic

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            note("training_step", self)
            loss = self.loss(batch)
            loss.register_hook(lambda _: note("backward", self))
            if automatic:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            return None

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            note("validation_step", self)

        def on_after_backward(self) -> None:
            note("a hook", self)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            optimizer.register_step_pre_hook(lambda *_: note("optimizer_step", self))
            return optimizer

    class Between(pl.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            note("a callback", pl_module)

    fit(Noting(), [Between()], val=loader(), max_epochs=1)
    assert seen["training_step"] == {"training_step"}
    assert seen["validation_step"] == {"validation_step"}
    assert seen["backward"] == {"backward" if automatic else "training_step"}
    assert seen["optimizer_step"] == {"optimizer_step" if automatic else "training_step"}
    assert seen["a hook"] == {"on_after_backward"}
    assert seen["a callback"] == {"on_train_batch_end"}


def test_amid_a_trace_new_tensors_are_fake_and_real_ones_are_refused() -> None:
    # Why handlers of signals are called outside of it, with the dispatch keys of the call.
    found: list[Any] = []
    weight = nn.Parameter(torch.ones(2))

    @torch.library.custom_op("hotcompile_contract::looked_at", mutates_args=())
    def looked_at(x: Tensor) -> Tensor:
        return x.clone()

    @looked_at.register_fake
    def _(x: Tensor) -> Tensor:
        found.append(type(torch.ones(1)))
        with pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
            weight.detach()
        keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        found.append(keys[0].has(torch._C.DispatchKey.Python) or keys != before)
        return torch.empty_like(x)

    before = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    torch.compile(lambda x: looked_at(x) + 1, backend="aot_eager")(torch.ones(3))
    assert {kind.__name__ for kind in found[::2]} == {"FakeTensor"}
    assert True in found[1::2]
