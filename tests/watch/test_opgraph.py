from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_hotcompile.watch import opgraph
from lightning_hotcompile.watch.canonical import OpGraph
from lightning_hotcompile.watch.opgraph import OpRecorder


def record(step: Callable[[], object]) -> OpGraph:
    with OpRecorder() as recorder:
        step()
    graph = recorder.graph()
    assert graph is not None
    return graph


def digest(step: Callable[[], object]) -> str:
    return record(step).digest


def fresh(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


def test_same_structure_under_other_tensors_matches():
    def step():
        x, w = fresh(4, 4), fresh(4, 4)
        return lambda: torch.relu(x @ w) + x

    assert digest(step()) == digest(step())


def test_other_dependency_differs():
    x, w = fresh(4, 4), fresh(4, 4)

    def chain():
        a = x @ w
        b = a.exp()
        return b.sin()

    def fork():
        a = x @ w
        a.exp()
        return a.sin()

    assert record(chain).ops == record(fork).ops
    assert digest(chain) != digest(fork)


def test_order_of_arguments_matters():
    x, w = fresh(4, 4), fresh(4, 4)

    def step(swap):
        a, b = x.exp(), w.sin()
        return b @ a if swap else a @ b

    assert digest(lambda: step(False)) != digest(lambda: step(True))
    # The same for what nobody was seen to make, as soon as it was used before.
    assert digest(lambda: (x.exp(), w.exp(), x @ w)) != digest(lambda: (x.exp(), w.exp(), w @ x))
    assert digest(lambda: x @ x) != digest(lambda: x @ w)


def test_names_do_not_matter():
    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            hidden = self.first(x)
            return self.second(hidden).sum()

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Linear(4, 4)})

        def forward(self, batch):
            for layer in self.blocks.values():
                batch = layer(batch)
            return batch.sum()

    one, other = One(), Other()
    assert digest(lambda: one(fresh(2, 4)).backward()) == digest(lambda: other(fresh(2, 4)).backward())


def test_digest_is_the_same_in_another_process():
    body = """
        import torch
        from torch import nn
        from lightning_hotcompile.watch.opgraph import OpRecorder
        junk = [torch.ones(n) for n in range({junk})]
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        def step():
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        step()
        with OpRecorder() as recorder:
            step()
        print(recorder.graph().digest)
    """
    digests = set()
    for junk in (0, 100):
        script = textwrap.dedent(body.format(junk=junk))
        run = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(junk + 1)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda: torch.zeros(3), lambda: torch.ones(3)),
        (lambda: torch.zeros(3), lambda: torch.zeros(4)),
        (lambda: torch.zeros(3), lambda: torch.zeros(3, dtype=torch.float64)),
        (lambda: torch.zeros(3), lambda: torch.zeros(3, device="meta")),
        (lambda: torch.randn(3), lambda: torch.rand(3)),
        (lambda: torch.zeros(3).add(1), lambda: torch.zeros(3).add_(1)),
        (lambda: fresh(2, 3).sum(0), lambda: fresh(2, 3).sum(1)),
        (lambda: fresh(2, 3).sum(0), lambda: fresh(2, 3).sum(0, keepdim=True)),
        (lambda: fresh(3) * 2, lambda: fresh(3) * 3),
        (lambda: fresh(3) * 2, lambda: fresh(3) * 2.0),
        (lambda: fresh(3) * 0.5, lambda: fresh(3) * 0.25),
        (lambda: fresh(2, 6).view(3, 4), lambda: fresh(2, 6).view(4, 3)),
        (lambda: fresh(4, 4).t().exp(), lambda: fresh(4, 4).exp()),
        (lambda: fresh(4, 4)[0].exp(), lambda: fresh(4, 4)[1].exp()),
        (lambda: F.gelu(fresh(3)), lambda: F.gelu(fresh(3), approximate="tanh")),
        (lambda: fresh(3).to(torch.float16), lambda: fresh(3).to(torch.bfloat16)),
        (lambda: torch.cat([fresh(2), fresh(3)]), lambda: torch.cat([fresh(3), fresh(2)])),
        (
            lambda: fresh(2, 2, 2, 2).clone(),
            lambda: fresh(2, 2, 2, 2).clone(memory_format=torch.channels_last),
        ),
    ],
)
def test_each_difference_is_seen(one, other):
    assert digest(one) == digest(one)
    assert digest(one) != digest(other)


def test_layout_of_what_comes_from_outside_is_seen():
    image = torch.ones(2, 3, 4, 4)
    other = image.contiguous(memory_format=torch.channels_last)
    assert digest(image.exp) != digest(other.exp)


def test_place_in_a_larger_tensor_is_not_seen():
    data = torch.ones(10, 4)
    assert digest(data[0:2].exp) == digest(data[6:8].exp)


def test_stride_of_a_single_element_is_not_seen():
    assert digest(torch.ones(1, 4).exp) == digest(torch.as_strided(torch.ones(16), (1, 4), (9, 1)).exp)


def test_backward_is_in_the_graph():
    weight = fresh(3, 3).requires_grad_()
    forward = record(lambda: torch.sigmoid(weight @ fresh(3, 3)).sum())
    both = record(lambda: torch.sigmoid(weight @ fresh(3, 3)).sum().backward())
    assert both.n_ops > forward.n_ops
    assert "aten.sigmoid_backward.default" in both.ops
    assert both.counts["aten.mm.default"] == 2


def test_creation_in_place_and_views_are_in_the_graph():
    def step():
        x = torch.zeros(2, 3)
        x.view(6)[0].fill_(1.0)
        torch.randn(3).add_(x[1])

    assert {"aten.zeros.default", "aten.view.default", "aten.select.int", "aten.fill_.Scalar"} <= set(
        record(step).ops
    )
    assert {"aten.randn.default", "aten.add_.Tensor"} <= set(record(step).ops)


def test_which_view_was_written_matters():
    def step(row):
        x = torch.zeros(2, 3)
        first, second = x[0], x[1]
        (second if row else first).add_(1)
        return x.sum()

    assert record(lambda: step(0)).ops == record(lambda: step(1)).ops
    assert digest(lambda: step(0)) != digest(lambda: step(1))


def test_saved_tensors_are_known_in_the_backward():
    # exp saves its output: in the backward it is another tensor object on the same storage.
    def step(pick):
        x = torch.ones(3, requires_grad=True)
        outputs = [x.exp(), x.exp()]
        outputs[pick].sum().backward()

    assert record(lambda: step(0)).ops == record(lambda: step(1)).ops
    assert digest(lambda: step(0)) != digest(lambda: step(1))


def test_an_alias_that_was_made_out_of_sight_is_known():
    x, other = fresh(2, 2), fresh(2, 2)
    alias = x.data
    assert digest(lambda: (x.exp(), alias.sin())) == digest(lambda: (x.exp(), x.sin()))
    assert digest(lambda: (x.exp(), alias.sin())) != digest(lambda: (x.exp(), other.sin()))


def test_a_square_matrix_is_told_from_its_transpose():
    x = fresh(2, 2)
    with_transpose = digest(lambda: x @ x.t())
    assert with_transpose != digest(lambda: x.t() @ x)
    assert with_transpose != digest(lambda: x @ x)


def tiny_gpt_step(**optimizer_options):
    torch.manual_seed(0)
    embed, head = nn.Embedding(11, 8), nn.Linear(8, 11)
    block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    parameters = [*embed.parameters(), *block.parameters(), *head.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **optimizer_options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))

    def step():
        tokens = torch.randint(0, 11, (2, 6))
        optimizer.zero_grad()
        logits = head(block(embed(tokens)))
        F.cross_entropy(logits.flatten(0, 1), tokens.flatten()).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()

    return step


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"amsgrad": True}])
def test_successive_steps_of_adamw_are_equal(options):
    step = tiny_gpt_step(**options)
    step()
    assert len({digest(step) for _ in range(4)}) == 1


def test_floats_count_in_the_backward():
    def step(scale):
        x = torch.ones(3, requires_grad=True)
        y = x.clone()
        y.register_hook(lambda grad: grad * scale)
        y.sum().backward()

    assert digest(lambda: step(0.5)) == digest(lambda: step(0.5))
    assert digest(lambda: step(0.5)) != digest(lambda: step(0.25))


def test_floats_without_gradients_count_by_type_only():
    def average(decay):
        with torch.no_grad():
            fresh(3).lerp_(fresh(3), decay)
            torch._foreach_mul_([fresh(3), fresh(2)], decay)

    assert digest(lambda: average(0.5)) == digest(lambda: average(0.25))
    with torch.no_grad():
        assert digest(lambda: fresh(3) * 2) != digest(lambda: fresh(3) * 2.0)
        assert digest(lambda: fresh(3) * 2) != digest(lambda: fresh(3) * 3)


def test_an_optimizer_inside_the_backward_is_an_optimizer_all_the_same():
    parameter = nn.Parameter(fresh(3))
    optimizer = torch.optim.AdamW([parameter])

    def update(_):
        optimizer.step()
        optimizer.zero_grad()

    parameter.register_post_accumulate_grad_hook(update)

    def step():
        (parameter * 2).sum().backward()

    step()
    assert digest(step) == digest(step)


def test_a_number_read_from_a_tensor_is_not_structure():
    values = iter([1.0, 2.0])

    def step():
        return torch.full((2,), 3.0).sum().item(), next(values)

    assert digest(step) == digest(step)


def test_memory_of_dead_tensors_is_told_from_theirs():
    array = np.ones(64, dtype=np.float32)

    def step(keep):
        kept = []
        for _ in range(20):
            x = torch.zeros(64)
            if keep:
                kept.append(x)
            del x
            y = torch.from_numpy(array.copy()) + 1
            if keep:
                kept.append(y)
            del y

    digests = [digest(lambda: step(False)), digest(lambda: step(False)), digest(lambda: step(True))]
    assert len(set(digests)) == 1


def test_zero_size_tensors_are_told_apart():
    def step(pick):
        empty = [torch.empty(0), torch.empty(0)]
        return empty[pick].sum()

    assert digest(lambda: step(0)) == digest(lambda: step(0))
    assert digest(lambda: step(0)) != digest(lambda: step(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.eye(3).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([fresh(2), fresh(3)]),
        lambda: torch.nested.nested_tensor([fresh(2), fresh(3)], layout=torch.jagged),
        lambda: torch.empty(3, device="meta"),
        lambda: nn.Parameter(fresh(3)),
        lambda: torch.quantize_per_tensor(fresh(3), 0.1, 0, torch.quint8),
    ],
)
def test_odd_tensors_are_recorded(make):
    def step():
        x = make()
        return x * 2 if not x.is_quantized else x.dequantize()

    step()  # torch makes some things on the first call only
    assert digest(step) == digest(step)
    outside = make()
    assert digest(lambda: (outside.clone(), outside.clone())) == digest(
        lambda: (outside.clone(), outside.clone())
    )


@pytest.mark.parametrize("make", [lambda: torch.ones(1000) * 2, lambda: torch.eye(3).to_sparse()])
def test_no_tensor_is_held(make):
    with OpRecorder() as recorder:
        tensor = make()
        tensor.clone()
        storage = None if tensor.is_sparse else StorageWeakRef(tensor.untyped_storage())
        gone = weakref.ref(tensor)
        del tensor
        # At once, and not only when the recording ends: the step must not need more memory than without it.
        assert gone() is None
        assert storage is None or storage.expired()
    assert recorder.graph() is not None


def test_tensors_saved_for_the_backward_are_freed_by_it():
    with OpRecorder():
        x = torch.ones(1000, requires_grad=True)
        y = x.exp()
        saved = StorageWeakRef(y.untyped_storage())
        loss = y.sum()
        del y
        assert not saved.expired()
        loss.backward()
        assert saved.expired()


def test_headers_are_given_back_on_stop_and_with_the_recorder():
    recorder = OpRecorder()
    recorder.start()
    torch.ones(3)
    assert recorder._seen._storages
    recorder.stop()
    assert not recorder._seen._storages
    recorder.start()
    torch.ones(3)
    recorder.stop()
    recorder._seen.keep(torch._C._storage_id(x := torch.ones(3)), x)
    weak = weakref.ref(recorder)
    del recorder
    assert weak() is None


@pytest.mark.parametrize("where", ["_inputs", "_outputs"])
def test_a_fault_of_the_recording_breaks_only_the_recording(monkeypatch, where):
    def fail(*args):
        raise ZeroDivisionError

    monkeypatch.setattr(OpRecorder, where, fail)
    counter = torch.zeros(())
    with OpRecorder() as recorder:
        counter.add_(1)
        counter.add_(1)
    assert counter.item() == 2
    assert recorder.graph() is None


def test_a_recorder_recovers_with_the_next_recording(monkeypatch):
    recorder = OpRecorder()
    with monkeypatch.context() as patch, recorder:
        patch.setattr(opgraph, "storage_number", None)
        fresh(2).exp()
    assert recorder.graph() is None
    with recorder:
        fresh(2).exp()
    assert recorder.graph() is not None


def test_an_error_of_the_user_passes_through_and_the_mode_is_left():
    recorder = OpRecorder()
    with pytest.raises(RuntimeError), recorder:
        fresh(2, 3) @ fresh(2, 3)
    assert _get_current_dispatch_mode_stack() == []
    assert recorder.graph() is not None


def test_an_error_that_the_user_catches_leaves_a_graph():
    x = fresh(2, 3)

    def step():
        with pytest.raises(RuntimeError):
            x @ x
        return x.exp()

    assert digest(step) == digest(step)


def test_nothing_recorded_is_no_graph():
    recorder = OpRecorder()
    assert recorder.graph() is None
    with recorder:
        assert recorder.graph() is None
    assert recorder.graph() is None


def test_start_and_stop_may_come_twice():
    recorder = OpRecorder()
    recorder.stop()
    recorder.start()
    recorder.start()
    fresh(2)
    recorder.stop()
    recorder.stop()
    assert _get_current_dispatch_mode_stack() == []
    graph = recorder.graph()
    assert graph is not None
    assert graph.ops == ("aten.ones.default",)
    assert recorder.graph() is graph


def test_start_forgets_the_recording_before():
    recorder = OpRecorder()
    for step in (lambda: fresh(2), lambda: torch.zeros(2)):
        recorder.start()
        step()
        recorder.stop()
    assert recorder.graph().ops == ("aten.zeros.default",)


def test_modes_may_be_closed_in_any_order():
    recorder, flops = OpRecorder(), FlopCounterMode(display=False)
    recorder.start()
    with flops:
        recorder.stop()
        fresh(2, 2) @ fresh(2, 2)
    assert flops.get_total_flops() == 16
    assert recorder.graph() is None
    assert _get_current_dispatch_mode_stack() == []


def test_a_mode_that_was_opened_before_and_is_closed_meanwhile_sees_nothing_more():
    recorder, flops = OpRecorder(), FlopCounterMode(display=False)
    flops.__enter__()
    recorder.start()
    x = fresh(2, 2) @ fresh(2, 2)
    flops.__exit__(None, None, None)
    x @ x
    recorder.stop()
    assert flops.get_total_flops() == 16
    assert recorder.graph().counts["aten.mm.default"] == 2
    assert _get_current_dispatch_mode_stack() == []


def test_torch_knows_of_no_mode_afterwards():
    """As its guards do: they fit on, also where another mode is in use that lets Dynamo compile."""

    class Polite(TorchDispatchMode):
        @classmethod
        def ignore_compile_internals(cls):
            return True

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    flops, recorder, graphs = FlopCounterMode(display=False), OpRecorder(), []
    flops.__enter__()
    recorder.start()
    flops.__exit__(None, None, None)
    recorder.stop()

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    for _ in range(3):
        with Polite():
            compiled(fresh(3))
    assert len(graphs) == 1


def test_results_and_gradients_are_as_without_it():
    def run(recorder):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        x = torch.randn(3, 4)
        if recorder is None:
            model(x).sum().backward()
        else:
            with recorder:
                model(x).sum().backward()
        return [p.grad for p in model.parameters()]

    assert all(map(torch.equal, run(None), run(OpRecorder())))


@torch.library.custom_op("hotcompile_tests::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("kind", ["custom operation", "encoder layer"])
def test_autocast_is_as_without_it(kind, enabled):
    """It was off in what an operation calls in its turn, which then computed in 32 bits."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 8)
    function = (lambda: layer(x)) if kind == "encoder layer" else (lambda: product(x, x.mT))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        plain = function()
        with OpRecorder() as recorder:
            recorded = function()
    assert recorded.dtype is plain.dtype is (torch.bfloat16 if enabled else torch.float32)
    assert torch.equal(recorded, plain)
    assert recorder.graph() is not None


def test_code_that_the_user_compiled_stays_compiled():
    graphs = []

    def backend(module, inputs):
        graphs.append(module)
        return module.forward

    compiled = torch.compile(lambda x: x.sin() + 1, backend=backend)
    with OpRecorder():
        compiled(fresh(3))
    compiled(fresh(3))
    assert len(graphs) == 1


def test_higher_order_operators_are_allowed():
    wrap = torch.ops.higher_order.cond
    x = fresh(3)
    plain = torch.cond(torch.tensor(True), torch.sin, torch.cos, (x,))
    with OpRecorder() as recorder:
        result = wrap(torch.tensor(True), torch.sin, torch.cos, (x,))
    assert torch.equal(result, plain)
    assert "cond" in recorder.graph().ops


def test_elements_are_those_that_an_operation_reads_and_makes():
    x, w = fresh(8, 3), fresh(3, 5)

    def step():
        y = torch.relu(x @ w)  # 8x3, 3x5 and 8x5, then 8x5 twice
        w.add_(y[0])  # a view of one row, then 3x5 in place and the row
        y.exp_()

    graph = record(step)
    assert dict(zip(graph.ops, graph.elements, strict=True)) == {
        "aten.mm.default": 24 + 15 + 40,
        "aten.relu.default": 80,
        "aten.select.int": 45,
        "aten.add_.Tensor": 20,
        "aten.exp_.default": 40,
    }


def test_sequence_reads_like_the_model():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    assert record(lambda: model(torch.empty(2, 4)).sum()).sequence_text() == "linear -> relu -> sum"


def test_sequence_counts_repeats_and_says_what_it_leaves_out():
    def step():
        x = fresh(2)
        for _ in range(3):
            x = x.exp()
        return x.sin().cos().sum()

    graph = record(step)
    assert graph.sequence_text() == "ones -> exp x3 -> sin -> cos -> sum"
    assert graph.sequence_text(limit=2) == "ones -> exp x3 -> ... (7 ops)"
    assert graph.counts["aten.exp.default"] == 3
    assert next(iter(graph.counts)) == "aten.exp.default"


class TestSecondDerivatives:
    """What asks for one is seen by who calls the operations: few backwards are named after one."""

    @staticmethod
    def is_seen(step: Callable[[Tensor], object]) -> bool:
        x = fresh(3).requires_grad_()
        with OpRecorder() as recorder:
            step(x)
        return recorder.differentiates_twice

    @pytest.mark.parametrize(
        "function", [torch.sin, torch.exp, torch.erf, torch.relu, torch.tanh, torch.square]
    )
    def test_create_graph_is_seen(self, function: Callable[[Tensor], Tensor]) -> None:
        assert self.is_seen(lambda x: torch.autograd.grad(function(x).sum(), x, create_graph=True))
        assert not self.is_seen(lambda x: torch.autograd.grad(function(x).sum(), x))

    @pytest.mark.parametrize("function", [torch.sin, torch.exp, lambda x: torch.dot(x, x)])
    def test_under_a_mode_of_somebody_else_too(self, function: Callable[[Tensor], Tensor]) -> None:
        with FlopCounterMode(display=False):
            assert self.is_seen(lambda x: torch.autograd.grad(function(x).sum(), x, create_graph=True))
            assert not self.is_seen(lambda x: torch.autograd.grad(function(x).sum(), x))
            assert not self.is_seen(lambda x: checkpoint(torch.sin, x, use_reentrant=False).sum().backward())

    @pytest.mark.parametrize("use_reentrant", [False, True])
    @pytest.mark.parametrize("function", [torch.sin, lambda x: torch.tanh(x) * x, nn.GELU()])
    def test_what_a_checkpoint_repeats_is_none(
        self, function: Callable[[Tensor], Tensor], use_reentrant: bool
    ) -> None:
        assert not self.is_seen(
            lambda x: checkpoint(function, x, use_reentrant=use_reentrant).sum().backward()
        )

    def test_hooks_with_gradients_on_are_none(self) -> None:
        def step(x: Tensor) -> None:
            y = x.sin()
            with torch.enable_grad():
                y.register_hook(lambda grad: grad * 2)
                y.sum().backward()

        assert not self.is_seen(step)
