"""What other machines have or lack, as far as it can be made up on a CPU."""

from __future__ import annotations

import importlib.machinery
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor_config
from torch._inductor.runtime import cache_dir_utils

from lightning_hotcompile.cli import gathering
from lightning_hotcompile.run import judge
from lightning_hotcompile.store import compiler_cache, hardware
from lightning_hotcompile.store.hardware import Machine
from lightning_hotcompile.swap.inductor import paths as inductor_paths
from lightning_hotcompile.swap.inductor import triton as inductor_triton
from lightning_hotcompile.swap.inductor.cxx import why_no_compiler
from lightning_hotcompile.swap.optimizers.optimizer_values import LearningRates
from lightning_hotcompile.swap.parity import clones, difference, proportion
from lightning_hotcompile.swap.parity.difference import Run, largest_difference
from lightning_hotcompile.swap.parity.proportion import norm
from lightning_hotcompile.swap.prewarm.choice import Surroundings
from lightning_hotcompile.swap.process.cores import usable_cores
from lightning_hotcompile.swap.process.thread_state import ThreadState
from tests.hot import hot
from tests.models import Net, fit, seeded


class FakeGenerator(types.SimpleNamespace):
    """The random numbers of an accelerator that this machine has not."""

    def __init__(self) -> None:
        super().__init__(state=torch.tensor([1]))

    def get_rng_state(self, device: Any) -> Any:
        return self.state.clone()

    def set_rng_state(self, state: Any, device: Any) -> None:
        self.state = state


def test_the_random_state_of_any_accelerator_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGenerator()
    monkeypatch.setattr(clones, "_accelerators_in_use", lambda: [torch.device("mps")])
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    with clones.random_state_kept():
        before = clones.RandomState()
        fake.state = torch.tensor([7])
        assert not before.is_same(clones.RandomState(), of_gpus=True)
    assert fake.state.tolist() == [1]


def test_an_accelerator_without_64_bit_numbers_is_compared_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    for module in (difference, proportion):
        monkeypatch.setattr(module, "HAVE_64_BIT", ())
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: (asked.append(1), cpu(tensor))[1])
    one, other = (Run(tensors=[torch.tensor([1.0, x])], gradients=[], inputs=[]) for x in (2.0, 2.5))
    assert largest_difference(one, other) == 0.5
    assert len(asked) == 2
    assert norm(one.tensors[0], other.tensors[0]) == 0.5
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("limit", "cores"),
    [("max 100000", None), ("150000 100000", 2), ("50000 100000", 1), ("6400000 100000", None), ("", None)],
)
def test_a_container_may_have_fewer_cores(tmp_path: Path, limit: str, cores: int | None) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(f"{limit}\n")
    usual = usable_cores(tmp_path / "nothing here")
    assert usable_cores(tmp_path) == min(usual, cores or usual)


@pytest.mark.parametrize(
    ("own", "folder", "files"),
    [
        ("0::/job/step\n", "job", {"cpu.max": "50000 100000"}),
        (
            "0::/\n3:cpu,cpuacct:/job\n",
            "cpu,cpuacct/job",
            {"cpu.cfs_quota_us": "9", "cpu.cfs_period_us": "10"},
        ),
        ("0::/\n3:cpu,cpuacct:/job\n", "cpu/job", {"cpu.cfs_quota_us": "9", "cpu.cfs_period_us": "10"}),
    ],
)
def test_a_job_may_have_fewer_cores(tmp_path: Path, own: str, folder: str, files: dict[str, str]) -> None:
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{folder}/{n}": t for n, t in files.items()},
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert usable_cores(tmp_path) == 1


def test_a_group_of_version_1_without_a_limit(tmp_path: Path) -> None:
    (tmp_path / "sys/fs/cgroup/cpu").mkdir(parents=True)
    for name, text in (("cpu.cfs_quota_us", "-1"), ("cpu.cfs_period_us", "100000")):
        (tmp_path / "sys/fs/cgroup/cpu" / name).write_text(text)
    assert usable_cores(tmp_path) == usable_cores(tmp_path / "nothing here")


@pytest.mark.parametrize(("name", "value"), [("frozen", True), ("executable", ""), ("executable", None)])
def test_a_frozen_program_is_no_interpreter(monkeypatch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    assert Surroundings.here(accelerator=False).interpreter
    monkeypatch.setattr(sys, name, value, raising=False)
    assert not Surroundings.here(accelerator=False).interpreter


@pytest.mark.parametrize("device", ["cpu", "cuda", "mps", "xpu"])
def test_autocast_of_each_device_is_kept(device: str) -> None:
    before = ThreadState.now()
    torch.set_autocast_enabled(device, True)
    assert ThreadState.now() != before
    before.put_back()
    assert not torch.is_autocast_enabled(device)
    assert ThreadState.now() == before


def test_learning_rates_stay_on_the_cpu() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    rates = LearningRates(optimizer)
    with torch.device("meta"):
        rates.as_tensors()
    assert optimizer.param_groups[0]["lr"].device.type == "cpu"
    rates.as_given()


def test_a_training_on_the_cpu_asks_no_accelerator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hardware, "_devices", lambda: pytest.fail("asked"))
    callback = hot(store=str(tmp_path / "store"))
    fit(seeded(Net), [callback])
    assert callback.report.phase != "observing"
    assert [file for file in (tmp_path / "store").rglob("*") if file.is_file()]


def test_others_know_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_devices", lambda: ("Some GPU 9.0",))
    assert Machine.here().devices == ("Some GPU 9.0",)
    assert Machine.here(on_cpu=True).devices == ()


def test_a_system_without_times_of_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    utime = os.utime

    def as_on_windows(path: Any, *args: Any, follow_symlinks: bool = True, **kwargs: Any) -> None:
        if not follow_symlinks:
            raise NotImplementedError("utime: follow_symlinks unavailable on this platform")
        utime(path, *args, **kwargs)

    monkeypatch.setattr(os, "utime", as_on_windows)
    monkeypatch.setattr(compiler_cache, "_FOLLOWS", True)
    file = tmp_path / "code.py"
    file.write_text("x = 1")
    compiler_cache._arm(tmp_path, time.time(), alone=True)
    assert file.exists()


@pytest.mark.parametrize("switch", ["TORCHDYNAMO_DISABLE", "config"])
def test_a_compiler_that_is_switched_off_is_a_reason(monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    callback = hot(fused_optimizer=True)
    if switch == "config":
        with torch._dynamo.config.patch(disable=True):
            fit(seeded(Net), [callback])
    else:
        monkeypatch.setenv(switch, "1")
        fit(seeded(Net), [callback])
    assert callback.report.phase == "declined"
    assert "switched off by" in callback.report.reason
    assert "DISABLE" in callback.report.reason
    assert callback.report.fused, "what needs no compiler is tried all the same"


def no_name() -> str:
    raise KeyError("getpwuid(): uid not found: 4242")


def no_temporary_folder() -> str:
    raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")


@pytest.mark.parametrize(
    ("default", "reason"), [(no_name, "no name (set USER)"), (no_temporary_folder, "No usable temporary")]
)
@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("cost_gate", [True, False])
def test_a_compiler_without_a_folder_is_a_reason(
    default: Callable[[], str],
    reason: str,
    stored: bool,
    cost_gate: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", default)
    monkeypatch.delenv(inductor_paths.FOLDER, raising=False)
    callback = hot(backend="inductor", cost_gate=cost_gate, store=tmp_path / "store" if stored else None)
    fit(seeded(Net), [callback])
    assert callback.report.phase == "declined"
    assert "Inductor has no folder of its own" in callback.report.reason
    assert reason in callback.report.reason


def test_a_cpu_without_a_compiler_is_a_reason() -> None:
    callback = hot(backend="inductor", fused_optimizer=True, prewarm=True)
    with inductor_config.patch({"cpp.cxx": (None, "g++-of-nobody")}):
        fit(seeded(Net), [callback])
    assert callback.report.phase == "declined"
    assert "a C++ compiler on a CPU: there is no g++-of-nobody (install one" in callback.report.reason
    assert callback.report.compile_s == 0.0
    assert callback.report.fused, "what needs no compiler is tried all the same"
    others = hot(backend="aot_eager")
    fit(seeded(Net), [others])
    assert others.report.phase == "steady"


@pytest.mark.parametrize(
    ("cxx", "there"),
    [
        ((None, "sh"), True),
        ("sh", True),
        (["nobodys", "sh"], True),
        ("sh -c", True),
        ((None, "nobodys"), False),
        ("nobodys sh", False),
        ("sh 'of", False),
        ((None,), False),
    ],
)
def test_a_compiler_is_found_by_its_name(cxx: Any, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    with inductor_config.patch({"cpp.cxx": cxx}):
        assert (why_no_compiler(cpu) is None) == there
        assert why_no_compiler(torch.device("cuda")) is None
        monkeypatch.setenv("TORCH_INDUCTOR_INSTALL_GXX", "1")
        assert (why_no_compiler(cpu) is None) == (there or isinstance(cxx, tuple))


@pytest.fixture
def old_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A GPU that this machine has not, with Triton."""
    found = types.SimpleNamespace(__spec__=importlib.machinery.ModuleSpec("triton", None))
    monkeypatch.setitem(sys.modules, "triton", found)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    return torch.device("cuda", 0)


def test_triton_writes_for_newer_gpus_and_for_amds(
    monkeypatch: pytest.MonkeyPatch, old_gpu: torch.device
) -> None:
    why_no_kernels = inductor_triton.why_no_kernels
    assert "6.1, and Triton needs 7.0 or more" in (why_no_kernels(old_gpu) or "")
    assert why_no_kernels(torch.device("cpu")) is None
    with monkeypatch.context() as amd:
        amd.setattr(torch.version, "hip", "6.4")
        assert why_no_kernels(old_gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    assert why_no_kernels(old_gpu) is None


@pytest.mark.parametrize(
    ("installed", "reason"),
    [(False, "Triton is not installed (pip install triton)"), (True, "it has compute capability 6.1")],
)
def test_a_gpu_for_which_inductor_writes_nothing_is_a_reason(
    installed: bool, reason: str, monkeypatch: pytest.MonkeyPatch, old_gpu: torch.device
) -> None:
    if not installed:
        monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(judge, "why_no_kernels", lambda device: inductor_triton.why_no_kernels(old_gpu))
    callback = hot(backend="inductor", fused_optimizer=True)
    fit(seeded(Net), [callback])
    assert callback.report.phase == "declined"
    assert reason in callback.report.reason
    assert callback.report.compile_s == 0.0
    others = hot(backend="aot_eager")
    fit(seeded(Net), [others])
    assert others.report.phase == "steady"


def test_a_folder_is_the_users_where_torch_has_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache_dir_utils, "default_cache_dir", no_name)
    monkeypatch.setenv(inductor_paths.FOLDER, str(tmp_path))
    assert inductor_paths.chosen_by_user() == str(tmp_path)
    assert gathering.cache_facts()["cache"] == str(tmp_path)


@pytest.mark.parametrize("stance", ["force_eager", "fail_on_recompile", "eager_on_recompile"])
def test_a_stance_that_compiles_nothing_is_waited_for(stance: str) -> None:
    plain, model, callback = seeded(Net), seeded(Net), hot()
    fit(plain)
    with torch.compiler.set_stance(stance):
        fit(model, [callback])
    assert callback.report.phase == "observing"
    assert f"stance is no longer '{stance}'" in callback.report.decision
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, other)
