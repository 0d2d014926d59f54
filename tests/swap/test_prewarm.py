"""The child process that compiles ahead: its work, its end, and that the caches are hit afterwards."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import LocalSource, TensorProperty, TensorPropertySource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from lightning_hotcompile.swap.compiled_function import CompiledFunction
from lightning_hotcompile.swap.prewarm import graphfile
from lightning_hotcompile.swap.prewarm import worker as prewarm_worker
from lightning_hotcompile.swap.prewarm.choice import (
    CROWDED,
    ON_ACCELERATOR,
    SLOWED_SHARE,
    Surroundings,
    crowding,
    slowed_share,
    threads_meanwhile,
    why_not,
)
from lightning_hotcompile.swap.prewarm.compile_state import CompileState
from lightning_hotcompile.swap.prewarm.graphfile import compile_packed, pack
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm, Status
from lightning_hotcompile.swap.prewarm.run import PrewarmRun
from lightning_hotcompile.swap.prewarm.symbols import NotPortable, SizeSpec, symbols_of
from lightning_hotcompile.swap.prewarm.tensor_spec import TensorSpec
from lightning_hotcompile.swap.prewarm.threads import FewerThreads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120  # an upper bound for a busy machine; nothing waits for it to pass

ANSWER = """
import json, os, pathlib, sys
def answer(name, **more):
    folder = pathlib.Path(sys.argv[1])
    (folder / "part").write_text(json.dumps({"seconds": 1.5, "error": None, "cached": True, **more}))
    os.replace(folder / "part", folder / f"{name}.json")
"""
WILLING = ANSWER + "for line in sys.stdin: answer(line.strip())"
HANGING = "import signal; signal.pause()"
WITH_A_PROCESS = (
    "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import signal; signal.pause()'])"
)


def worker(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def until(condition: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < end, "it never came"
        threading.Event().wait(0.02)
    return found


def group(pid: int | None) -> list[int]:
    """Living processes of a process group."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp, *_ = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(pgrp) == pid and state not in "ZX":
            found.append(int(path.parent.name))
    return found


def settled(child: Prewarm) -> Status:
    until(lambda: child.poll().state != "running")
    return child.poll()


def job(name: str = "blocks") -> Job:
    return Job(name=name, graph=b"")


@contextlib.contextmanager
def at_work(*jobs: Job, **options: Any) -> Iterator[Prewarm]:
    """A child that was given these to do."""
    with Prewarm(**options) as child:
        for each in jobs:
            child.add(each)
        yield child


def test_the_work_is_done_in_order_and_told(tmp_path: Path) -> None:
    given: dict[str, Any] = {"cache_dir": tmp_path, "toolchain": ["cpu"], "worker": worker(WILLING)}
    with at_work(job("a"), job("b"), **given) as child:
        status = settled(child)
        assert (status.state, status.reason) == ("done", None)
        assert [r.name for r in status.results] == ["toolchain (cpu)", "a", "b"]
        assert [(r.seconds, r.error, r.cached) for r in status.results] == [(1.5, None, True)] * 3
    assert child.poll().state == "done"
    until(lambda: not group(child.pid))  # the system may take a moment
    assert list(tmp_path.iterdir()) == []


def test_a_child_is_kept_and_gets_more(tmp_path: Path) -> None:
    with Prewarm(cache_dir=tmp_path, toolchain=["cpu"], worker=worker(WILLING)) as child:
        assert settled(child).state == "done"
        assert group(child.pid)
        child.add(job("late"))
        until(lambda: len(child.poll().results) == 2)
        child.close()
        until(lambda: not group(child.pid))
        assert settled(child).state == "done"


@pytest.mark.slow
def test_it_ends_though_a_fork_of_the_training_holds_its_input_open(tmp_path: Path) -> None:
    """Workers of a data loader do that, and it stayed for as long as they lived."""
    with Prewarm(cache_dir=tmp_path) as child:
        assert child._child is not None
        stdin = child._child._process.stdin
        assert stdin is not None
        held = os.dup(stdin.fileno())
        try:
            child.close()
            until(lambda: not group(child.pid))
            assert child._child.ended() == "ended with status 0"
        finally:
            os.close(held)


def test_what_is_handed_over_after_its_end_is_left(tmp_path: Path) -> None:
    with at_work(job("early"), cache_dir=tmp_path, worker=worker(WILLING)) as child:
        assert [r.name for r in settled(child).results] == ["early"]
    child.add(job("too late"))
    assert len(child.poll().results) == 1


def test_what_a_killed_training_has_left_of_its_child_goes_after_a_day(tmp_path: Path) -> None:
    old, young = tmp_path / "prewarm-old", tmp_path / "prewarm-young"
    of_the_compiler = tmp_path / "fxgraph"
    for folder in (old, young, of_the_compiler):
        folder.mkdir()
        (folder / "log").write_text("killed", encoding="utf-8")
    for folder in (old, of_the_compiler):
        os.utime(folder, (time.time() - 2 * 86_400,) * 2)
    with Prewarm(cache_dir=tmp_path, worker=worker(WILLING)):
        assert [f.exists() for f in (old, young, of_the_compiler)] == [False, True, True]


def test_the_folder_is_private_and_the_child_modest(tmp_path: Path) -> None:
    code = (
        ANSWER + "for line in sys.stdin:"
        " answer(line.strip(), seconds=os.nice(0), error=os.environ['OMP_NUM_THREADS']"
        " + ' ' + open('/proc/self/oom_score_adj').read().strip())"
    )
    with at_work(job(), cache_dir=tmp_path, threads=2, worker=worker(code)) as child:
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700
        (result,) = settled(child).results
    assert (result.seconds, result.error) == (min(os.nice(0) + 10, 19), "2 1000")


def test_one_graph_that_fails_leaves_the_others(tmp_path: Path) -> None:
    code = ANSWER + "for n, line in enumerate(sys.stdin): answer(line.strip(), error='no' if n else None)"
    with at_work(job("a"), job("b"), cache_dir=tmp_path, worker=worker(code)) as child:
        status = settled(child)
    assert (status.state, [r.error for r in status.results]) == ("done", [None, "no"])


def test_if_all_fail_the_first_error_is_the_reason(tmp_path: Path) -> None:
    code = ANSWER + "for line in sys.stdin: answer(line.strip(), error='no compiler')"
    with at_work(job("a"), job("b"), cache_dir=tmp_path, worker=worker(code)) as child:
        until(lambda: len(child.poll().results) == 2)
    assert (child.poll().state, child.poll().reason) == ("failed", "a: no compiler")


def test_a_child_that_hangs_is_ended_by_the_limit(tmp_path: Path) -> None:
    now = 0.0
    given: dict[str, Any] = {"cache_dir": tmp_path, "limit_s": 30, "now": lambda: now}
    with at_work(job(), **given, worker=worker(HANGING)) as child:
        now = 30.0
        assert child.poll().state == "running"
        now = 31.0
        status = child.poll()
        assert (status.state, status.seconds) == ("failed", 31.0)
        assert "longer than 30 s" in str(status.reason)
        until(lambda: not group(child.pid))  # the system may take a moment


def test_the_limit_is_for_one_piece_of_work(tmp_path: Path) -> None:
    now = 0.0
    one_and_no_more = f"{ANSWER}\nanswer(sys.stdin.readline().strip())\n{HANGING}"
    given: dict[str, Any] = {"cache_dir": tmp_path, "limit_s": 30, "now": lambda: now}
    with at_work(job("a"), job("b"), **given, worker=worker(one_and_no_more)) as child:
        now = 25.0
        until(lambda: child.poll().results)
        now = 54.0
        assert child.poll().state == "running", "the second one has taken 29 s"
        now = 56.0
        status = child.poll()
    assert (status.state, [r.name for r in status.results]) == ("failed", ["a"])
    assert "longer than 30 s" in str(status.reason)


def test_without_a_limit_it_is_waited_for(tmp_path: Path) -> None:
    now = 0.0
    given: dict[str, Any] = {"cache_dir": tmp_path, "limit_s": None, "now": lambda: now}
    with at_work(job(), **given, worker=worker(HANGING)) as child:
        now = 1e6
        assert child.poll().state == "running"


def test_a_child_without_work_has_no_limit(tmp_path: Path) -> None:
    now = 0.0
    with at_work(job(), cache_dir=tmp_path, limit_s=30, now=lambda: now, worker=worker(WILLING)) as child:
        settled(child)
        now = 1000.0
        assert child.poll().state == "done"


@pytest.mark.parametrize("whom", ["watcher", "worker"])
def test_a_child_that_is_killed_is_a_reason(tmp_path: Path, whom: str) -> None:
    with at_work(job(), cache_dir=tmp_path, worker=worker(WITH_A_PROCESS)) as child:
        members = until(lambda: len(group(child.pid)) == 3 and group(child.pid))
        os.kill(child.pid if whom == "watcher" else sorted(set(members) - {child.pid})[0], signal.SIGKILL)
        status = settled(child)
        assert status.state == "crashed"
        assert "SIGKILL" in str(status.reason)
        until(lambda: not group(child.pid))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE"])
def test_a_child_that_its_own_code_has_ended_has_crashed(tmp_path: Path, name: str) -> None:
    code = f"import os, signal; print('so it went', flush=True); os.kill(os.getpid(), signal.{name})"
    with at_work(job(), cache_dir=tmp_path, worker=worker(code)) as child:
        status = settled(child)
    assert (status.state, status.reason) == ("crashed", f"the child process was ended by {name}: so it went")


def test_its_last_words_are_told(tmp_path: Path) -> None:
    with at_work(job(), cache_dir=tmp_path, worker=worker("raise SystemExit('no room')")) as child:
        status = settled(child)
    assert status.reason == "the child process ended with status 1: no room"


def test_a_child_that_cannot_start_is_a_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    child = Prewarm(cache_dir=tmp_path / "file" / "cache", worker=worker(WILLING)).start()
    child.add(job())
    assert child.poll().state == "failed"
    assert "could not be started" in str(child.poll().reason)
    assert child.cancel().reason == child.poll().reason


def test_cancel_ends_whatever_the_child_started(tmp_path: Path) -> None:
    child = Prewarm(cache_dir=tmp_path, worker=worker(WITH_A_PROCESS)).start()
    child.add(job())
    until(lambda: len(group(child.pid)) == 3)
    assert child.cancel("the fit ended").reason == "the fit ended"
    until(lambda: not group(child.pid))
    assert child.cancel("again").reason == "the fit ended"


PARENT = """
import sys
from lightning_hotcompile.swap.prewarm.parent import Job, Prewarm
child = Prewarm(cache_dir=sys.argv[1], worker=[sys.executable, "-c", sys.argv[2]])
child.start()
child.add(Job(name="a", graph=b""))
print(child.pid, flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "exits"])
def test_no_process_outlives_its_parent(tmp_path: Path, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), WITH_A_PROCESS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        until(lambda: len(group(pid)) == 3)
        if how == "killed":
            parent.kill()
        else:
            parent.stdin.write("\n")
            parent.stdin.flush()
        parent.wait(PATIENCE_S)
    until(lambda: not group(pid))


@pytest.mark.slow
def test_the_caches_are_hit_afterwards(tmp_path: Path) -> None:
    out = subprocess.run(
        [sys.executable, "-m", "tests.swap.prewarm_run", str(tmp_path), "prewarm"],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert out.returncode == 0, out.stderr
    report = json.loads(out.stdout.splitlines()[-1])
    results = report.pop("results")
    assert len(results) == 6
    assert [r["error"] for r in results] == 6 * [None]
    graphs = [r for r in results if not r["name"].startswith("toolchain")]
    assert len(graphs) == 5
    assert all(r["cached"] and r["new"] for r in graphs)
    assert {name: (r["hits"], r["misses"]) for name, r in report.items()} == dict.fromkeys(
        ("step", "bf16", "block", "dynamic", "optimizer"), (1, 0)
    )


@pytest.mark.parametrize(("device", "chosen"), [("cuda:1", ["cuda:1"]), ("mps:0", [])])
def test_a_child_compiles_on_the_gpu_of_the_training(
    device: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []

    def backend(graph_module: GraphModule, _: Any) -> Callable[..., Any]:
        happened.append("compiled")
        return graph_module.forward

    ones = torch.ones
    monkeypatch.setattr(torch, "ones", lambda *size, device, **options: ones(*size, **options))
    monkeypatch.setattr(torch.cuda, "set_device", happened.append)
    monkeypatch.setattr(prewarm_worker, "resolve_backend", lambda *_: backend)
    prewarm_worker.work_named(Path(), f"toolchain-on-{device}")()
    assert happened == [*chosen, "compiled"]


def packed(function: Callable[..., Any], *inputs: Any, dynamic: bool | None = None) -> bytes:
    """The graph of a call, as bytes."""
    found: list[Any] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            found.append(pack(gm, example_inputs))
        except NotPortable as error:
            found.append(error)
        return gm.forward

    CompiledFunction(function, backend, dynamic=dynamic, fullgraph=True)(*inputs)
    if isinstance(found[0], NotPortable):
        raise found[0]
    return bytes(found[0])


def test_sizes_that_vary_still_do_where_their_graph_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(lambda x: x @ x.transpose(1, 2), torch.ones(3, 7, 8), dynamic=True)
    given: list[Any] = []
    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(graphfile, "resolve_backend", lambda *_: lambda _, inputs: given.extend(inputs))
    compile_packed(data)
    sizes = [value for value in given if isinstance(value, torch.SymInt)]
    assert len(sizes) == 3
    assert not any(size.node.is_constant() for size in sizes)
    assert all(size.node.expr.free_symbols for size in sizes)


def test_a_graph_writes_its_code_as_late_as_dynamos(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch 2.11 the order of its fields, code included, is a part of the key."""
    data, given = packed(lambda x: x.sin() + 1, torch.ones(4)), list[GraphModule]()
    # Not to be set in this process: it is for a process of its own.
    monkeypatch.setattr(CompileState, "applied", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(graphfile, "resolve_backend", lambda *_: lambda module, _: given.append(module))
    compile_packed(data)
    (module,) = given
    assert isinstance(module, _LazyGraphModule)
    assert "_code" not in vars(module)
    assert torch.equal(module(torch.zeros(4))[0], torch.ones(4))


def test_a_packed_graph_has_no_data() -> None:
    layer = nn.Linear(1000, 1000)
    assert len(packed(lambda m, x: m(x).sum(), layer, torch.ones(2, 1000))) < 200_000


def test_inputs_that_share_memory_are_refused() -> None:
    x = torch.ones(8)
    with pytest.raises(NotPortable, match="share memory"):
        packed(lambda a, b: a + b, x[:4], x[4:])


def test_sizes_that_vary_are_described_by_their_symbols() -> None:
    content = pickle.loads(
        packed(lambda a, b: (a * a.shape[0]) @ b, torch.ones(5, 3), torch.ones(3, 5), dynamic=True)
    )
    sizes = {spec.symbol: spec.hint for spec in content["inputs"] if isinstance(spec, SizeSpec)}
    shapes = [s for s in content["symbols"] if s]
    assert sorted(sizes.values()) == [3, 5]
    (first, second), (third, fourth) = shapes
    assert (sizes[first], sizes[second]) == (5, 3)
    assert (third, fourth) == (second, first), "what has to be equal is one symbol"


def test_sizes_that_are_computed_are_refused() -> None:
    env = ShapeEnv()
    source = TensorPropertySource(LocalSource("x"), TensorProperty.SIZE, 0)
    size = env.create_symintnode(env.create_symbol(6, source), hint=6, source=source)
    assert isinstance(size, torch.SymInt)
    assert SizeSpec.of("s", size).hint == 6
    with pytest.raises(NotPortable, match="size without a value"):
        SizeSpec.of("u", env.create_unbacked_symint())
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    node.meta["example_value"] = FakeTensorMode(shape_env=env).from_tensor(torch.ones(2)).new_empty(2 * size)
    with pytest.raises(NotPortable, match="only single symbols"):
        symbols_of(node)


def test_other_kinds_of_tensors_are_refused() -> None:
    class Own(Tensor):
        pass

    with pytest.raises(NotPortable, match="input x is of type Own"):
        TensorSpec.of("x", torch.ones(2).as_subclass(Own))
    with pytest.raises(NotPortable, match="sparse_coo"):
        TensorSpec.of("x", torch.ones(2).to_sparse())


def test_a_function_that_no_other_process_knows_is_refused() -> None:
    # What allow_in_graph puts into a graph: a function of the user's script.
    def own(x: Tensor) -> Tensor:
        return x + 1

    graph = torch.fx.Graph()
    graph.output(graph.call_function(own, (graph.placeholder("x"),)))
    with pytest.raises(NotPortable, match="cannot be serialised: NotImplementedError"):
        pack(GraphModule({}, graph), [torch.ones(2)])


def test_a_policy_that_is_a_function_is_refused() -> None:
    module = GraphModule({}, torch.fx.Graph())
    module.meta["_checkpoint_context_fn"] = print
    with pytest.raises(NotPortable, match="selective activation checkpointing"):
        pack(module, [])


def around(**changes: Any) -> Surroundings:
    usual: dict[str, Any] = {"posix": True, "cores": 8, "training_threads": 4, "accelerator": False}
    return Surroundings(**{**usual, "free_memory": 2**34, **changes})


@pytest.mark.parametrize(
    ("prewarm", "backend", "changes", "reason"),
    [
        ("auto", "inductor", {}, None),
        (False, "inductor", {}, "prewarm=False"),
        ("auto", "aot_eager", {}, "'aot_eager' has no cache"),
        ("auto", print, {}, "has no cache"),
        ("auto", "inductor", {"posix": False}, "POSIX"),
        (True, "inductor", {"posix": False}, "POSIX"),
        ("auto", "inductor", {"processes": 2}, "no spare core: training uses 8 threads on 8 cores"),
        (True, "inductor", {"processes": 2}, None),
        ("auto", "inductor", {"training_threads": 1, "processes": 7}, None),
        ("auto", "inductor", {"processes": 2, "accelerator": True}, "several accelerators"),
        (True, "inductor", {"processes": 2, "accelerator": True}, "several accelerators"),
        ("auto", "inductor", {"training_threads": 8}, None),
        (
            "auto",
            "inductor",
            {"training_threads": 8, "compiled": True},
            "8 threads on 8 cores, and compiled code",
        ),
        ("auto", "inductor", {"compiled": True}, None),
        ("auto", "inductor", {"training_threads": 1, "cores": 1}, "no spare core"),
        (True, "inductor", {"training_threads": 1, "cores": 1}, None),
        ("auto", "inductor", {"training_threads": 64, "cores": 1}, "no spare core: training uses 64 threads"),
        (True, "inductor", {"training_threads": 64, "cores": 1}, None),
        ("auto", "inductor", {"training_threads": 64, "cores": 2}, None),
        ("auto", "inductor", {"training_threads": 8, "accelerator": True}, None),
        ("auto", "inductor", {"free_memory": 2**30}, "1.0 GiB of memory are free, 2.0 GiB are needed"),
        ("auto", "inductor", {"free_memory": None}, None),
        ("auto", "inductor", {"device_memory": 2**31}, None),
        ("auto", "inductor", {"device_memory": 2**29}, "0.5 GiB of the accelerator's memory are free"),
        (True, "inductor", {"device_memory": 2**29}, None),
        (True, "inductor", {"interpreter": False}, "needs a Python interpreter"),
    ],
)
def test_when_a_child_is_worth_it(prewarm: Any, backend: Any, changes: Any, reason: str | None) -> None:
    found = why_not(prewarm, backend, around(**changes))
    assert found == reason if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("changes", "threads"),
    [
        ({}, None),
        ({"training_threads": 7}, None),
        ({"training_threads": 8}, 7),
        ({"training_threads": 16}, 7),
        ({"training_threads": 2, "cores": 2}, 1),
        ({"training_threads": 1, "cores": 2}, None),
        ({"training_threads": 1, "cores": 1}, None),
        ({"training_threads": 4, "cores": 1}, 1),
        ({"training_threads": 8, "accelerator": True}, None),
        ({"training_threads": 8, "compiled": True}, None),
        ({"training_threads": 4, "processes": 2}, None),
    ],
)
def test_training_gives_up_a_thread_where_no_core_is_spare(changes: Any, threads: int | None) -> None:
    assert threads_meanwhile(around(**changes)) == threads


def test_training_and_the_child_are_slower_without_a_spare_core() -> None:
    spare = around(cores=4, training_threads=2)
    elsewhere = around(accelerator=True, cores=2, training_threads=2)
    assert (slowed_share(spare), crowding(spare)) == (0.0, 1.0)
    assert (slowed_share(elsewhere), crowding(elsewhere)) == (0.0, ON_ACCELERATOR)
    assert slowed_share(around(cores=2, training_threads=2)) == SLOWED_SHARE < 1
    assert slowed_share(around(cores=9, training_threads=9)) == SLOWED_SHARE / 8
    assert slowed_share(around(cores=4, training_threads=64)) == SLOWED_SHARE / 3  # a container's quota
    assert crowding(around(cores=2, training_threads=2)) == CROWDED > 1


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
class TestFewerThreads:
    def test_they_are_given_back(self) -> None:
        fewer = FewerThreads(1)
        fewer.begin()
        fewer.begin()
        assert (fewer.active, torch.get_num_threads()) == (True, 1)
        fewer.end()
        fewer.end()
        assert (fewer.active, torch.get_num_threads()) == (False, 2)

    def test_nothing_stays_that_makes_later_steps_slower(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """``torch.set_num_threads`` would, by what it tells MKL, also with the number that there was."""
        monkeypatch.setattr(torch, "set_num_threads", lambda _: pytest.fail("told MKL a number"))
        before = torch.__config__.parallel_info()
        fewer = FewerThreads(1)
        fewer.begin()
        assert torch.get_num_threads() == 1
        assert torch.__config__.parallel_info() != before
        fewer.end()
        assert torch.__config__.parallel_info() == before

    def test_a_number_that_somebody_has_chosen_since_stays(self) -> None:
        fewer = FewerThreads(1)
        fewer.begin()
        torch.set_num_threads(3)
        fewer.end()
        assert torch.get_num_threads() == 3

    def test_none_changes_nothing(self) -> None:
        fewer = FewerThreads(None)
        fewer.begin()
        assert (fewer.active, torch.get_num_threads()) == (False, 2)
        fewer.end()
        assert torch.get_num_threads() == 2


def test_the_surroundings_of_this_process() -> None:
    here = Surroundings.here(accelerator=True, processes=2)
    assert (here.posix, here.processes, here.accelerator) == (True, 2, True)
    assert here.training_threads == torch.get_num_threads()
    assert 1 <= here.cores <= (os.cpu_count() or 1)


@pytest.mark.parametrize(("step_s", "looks"), [(0.001, 3), (1.0, 30)])
def test_how_often_a_child_is_looked_at(step_s: float, looks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    polled: list[int] = []
    now = itertools.count(step=step_s)
    monkeypatch.setattr("lightning_hotcompile.swap.prewarm.run.time.monotonic", lambda: next(now))
    run = PrewarmRun.__new__(PrewarmRun)
    run._graphs, run._polls, run._looked_at, run._over = 1, 0, -1e9 if step_s > 0.1 else 0.0, False
    child: Any = SimpleNamespace(poll=lambda: polled.append(1) or SimpleNamespace(state="running"))
    run._child = child
    assert not any(run.is_over() for _ in range(30))
    assert len(polled) == looks
