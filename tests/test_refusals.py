"""What is refused, and what is declined: each with a sentence that says what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_hotcompile import HotCompile, HotCompileConfig, HotCompileError
from lightning_hotcompile.errors import ConfigError, PlanError, TargetError
from lightning_hotcompile.run import preflight
from tests.hot import assert_same, hot
from tests.models import Net, fit, loader, make_trainer, seeded


@pytest.fixture(autouse=True)
def _not_switched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOTCOMPILE", raising=False)


class Quiet(Net):
    """Counts its steps and logs nothing, so that a user may compile it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.steps_begun = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.steps_begun += 1


def refused(kind: type[HotCompileError], *parts: str, fit_options: Any = None, **options: Any) -> str:
    """Training with these options is refused before its first step; the message holds all parts."""
    model, callback = seeded(Quiet), hot(**options)
    with pytest.raises(kind) as caught:
        fit(model, [callback], **(fit_options or {}))
    message = str(caught.value)
    for part in parts:
        assert part in message
    assert model.steps_begun == 0
    assert "training_step" not in vars(model)
    return message


def declined(callback: HotCompile, *parts: str, steps: int = 0) -> None:
    """The callback stood aside and said why; ``steps`` were watched for what needs no compiler."""
    report = callback.report
    assert report.phase == callback.phase == "declined"
    for part in parts:
        assert part in report.reason
    assert (report.steps, report.compile_s, report.regions) == (steps, 0.0, ())
    checkpoint: dict[str, object] = {}
    callback.on_save_checkpoint(None, None, checkpoint)  # type: ignore[arg-type]
    assert checkpoint == {}


class TestAtConstruction:
    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"threshold": -1}, ("threshold=-1", "0 or more")),
            ({"scope": "region"}, ("scope='region'", "did you mean 'regions'?")),
            ({"scope": "everything"}, ("scope='everything'", "'auto', 'step', 'regions'")),
            ({"mode": "reduce-overheads"}, ("mode='reduce-overheads'", "did you mean 'reduce-overhead'")),
            ({"mode": "default", "options": {"max_autotune": True}}, ("contradict each other",)),
            ({"scope": "pattern"}, ("needs targets",)),
            ({"on_error": "ignore"}, ("on_error='ignore'", "'eager', 'raise'")),
        ],
        ids=str,
    )
    def test_a_value_that_is_not_allowed(self, options: dict[str, Any], parts: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError) as caught:
            HotCompile(**options)
        for part in parts:
            assert part in str(caught.value)

    def test_an_option_that_does_not_exist_is_named(self) -> None:
        with pytest.raises(TypeError, match="treshold"):
            HotCompile(treshold=3)  # type: ignore[call-arg]


class TestBeforeTheFirstStep:
    @pytest.mark.parametrize(
        ("target", "near"),
        [("block.*", "'blocks"), ("hed", "'head'"), ("blocks.7", "'blocks.")],
    )
    def test_a_target_that_matches_nothing_has_near_names(self, target: str, near: str) -> None:
        message = refused(
            TargetError, f"targets={target!r}", "did you mean", scope="pattern", targets=["inp", target]
        )
        assert near in message.partition("did you mean")[2]

    @pytest.mark.parametrize("target", ["tests.functions:scale", "tests.function:scaled"])
    def test_a_function_that_is_not_there(self, target: str) -> None:
        refused(TargetError, f"targets={target!r}", scope="pattern", targets=[target])

    @pytest.mark.parametrize("option", ["keep_eager", "compile_anyway"])
    def test_an_exception_that_matches_nothing(self, option: str) -> None:
        refused(TargetError, f"{option}", "'hed'", "'head'", **{option: ["hed"]})

    def test_fullgraph_with_a_module_that_stays_eager(self) -> None:
        refused(
            PlanError, "fullgraph=True", "blocks.1", "compile_anyway", fullgraph=True, keep_eager=["blocks.1"]
        )

    @pytest.mark.parametrize(
        ("options", "parts"),
        [
            ({"mode": "reduce-overhead"}, ("mode='reduce-overhead'", "'max-autotune-no-cudagraphs'")),
            ({"mode": "max-autotune"}, ("mode='max-autotune'", "'max-autotune-no-cudagraphs'")),
            (
                {"options": {"triton.cudagraphs": True}},
                ("options={'triton.cudagraphs': True}", "that option"),
            ),
            ({"backend": "cudagraphs"}, ("backend='cudagraphs'", "that option")),
        ],
        ids=["reduce-overhead", "max-autotune", "options", "backend"],
    )
    def test_cuda_graphs_with_gradient_accumulation(
        self, options: dict[str, Any], parts: tuple[str, ...]
    ) -> None:
        accumulate = {"accumulate_grad_batches": 2}
        message = refused(
            ConfigError,
            "accumulate_grad_batches=2",
            *parts,
            fit_options=accumulate,
            **{"backend": "inductor", **options},
        )
        assert "None" not in message

    def test_cuda_graphs_with_accumulation_that_begins_in_a_later_epoch(self) -> None:
        model = seeded(Quiet)
        later = GradientAccumulationScheduler({0: 1, 2: 4})
        callback = hot(backend="inductor", mode="reduce-overhead")
        with pytest.raises(ConfigError, match="accumulate_grad_batches=4"):
            fit(model, [later, callback])
        assert model.steps_begun == 0

    def test_cuda_graphs_with_manual_optimization_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = seeded(Quiet)
        model.automatic_optimization = False
        for device, asked_for in (("cpu", "max-autotune"), ("cuda", "max-autotune-no-cudagraphs")):
            monkeypatch.setattr(preflight.trainer_facts, "device_type", lambda _, device=device: device)
            preflight._refuse_graphs_of_steps_by_hand(HotCompileConfig(mode=asked_for), model)
        with pytest.raises(ConfigError, match=r"mode='reduce-overhead' records CUDA graphs.*manual optim"):
            preflight._refuse_graphs_of_steps_by_hand(HotCompileConfig(mode="reduce-overhead"), model)
        with pytest.raises(ConfigError, match=r"backend='cudagraphs' records CUDA graphs.*manual optim"):
            preflight._refuse_graphs_of_steps_by_hand(HotCompileConfig(backend="cudagraphs"), model)

    @pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs"])
    def test_modes_without_cuda_graphs_may_accumulate(self, mode: str) -> None:
        model = seeded(Quiet)
        callback = hot(backend="inductor", mode=mode, threshold=10_000)
        fit(model, [callback], accumulate_grad_batches=2, max_epochs=1)
        assert model.steps_begun == 12

    def test_an_unknown_backend_has_near_names(self) -> None:
        refused(ConfigError, "backend='inducto'", "did you mean 'inductor'", backend="inducto")

    def test_an_unknown_option_of_inductor(self) -> None:
        refused(ConfigError, "max_autotun", "options=", backend="inductor", options={"max_autotun": True})

    def test_step_scope_under_manual_optimization(self) -> None:
        model = seeded(Quiet)
        model.automatic_optimization = False
        with pytest.raises(PlanError, match=r"manual optimization.*scope='regions'"):
            fit(model, [hot(scope="step")])
        assert model.steps_begun == 0


class DeepSpeedStrategy(SingleDeviceStrategy):
    """Only the name of the real one, which needs a GPU and a package of its own."""


class TestDeclined:
    """Training goes on as if the callback were not there."""

    def test_a_module_under_torch_compile(self) -> None:
        plain, model, callback = seeded(Quiet), seeded(Quiet), hot()
        fit(plain, max_epochs=2)
        torch.manual_seed(1)
        trainer = make_trainer([callback], max_epochs=2)
        trainer.fit(torch.compile(model, backend="eager"), loader())
        assert trainer.global_step == 24
        declined(callback, "compiled by the user already", "torch.compile(model)")
        assert_same(plain, model)

    def test_a_module_compiled_in_place(self) -> None:
        plain, model, callback = seeded(Quiet), seeded(Quiet), hot()
        fit(plain, max_epochs=2)
        model.compile(backend="eager")
        theirs = model._compiled_call_impl
        trainer = fit(model, [callback], max_epochs=2)
        assert trainer.global_step == 24
        declined(callback, "compiled by the user already", "model.compile()")
        assert model._compiled_call_impl is theirs
        assert_same(plain, model)

    @pytest.mark.parametrize("subclass", [False, True])
    def test_a_strategy_with_an_engine_of_its_own(self, subclass: bool) -> None:
        kind = type("Mine", (DeepSpeedStrategy,), {}) if subclass else DeepSpeedStrategy
        model, callback = seeded(Quiet), hot()
        trainer = fit(model, [callback], strategy=kind(device=torch.device("cpu")), max_epochs=1)
        assert trainer.global_step == model.steps_begun == 12
        declined(callback, "DeepSpeedStrategy", "engine of its own")

    def test_switched_off_by_the_environment(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOTCOMPILE", "off")
        model, callback = seeded(Quiet), hot()
        trainer = fit(model, [callback], max_epochs=1)
        assert trainer.global_step == 12
        declined(callback, "HOTCOMPILE=off")

    def test_nothing_to_compile(self) -> None:
        model, callback = seeded(Quiet), hot(scope="regions", keep_eager=["inp", "blocks.*", "head"])
        fit(model, [callback], max_epochs=1)
        declined(callback, "nothing to compile in Quiet", "scope regions", steps=12)

    def test_the_reason_is_in_the_log(self, caplog: pytest.LogCaptureFixture) -> None:
        strategy = DeepSpeedStrategy(device=torch.device("cpu"))
        with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
            fit(seeded(Quiet), [hot()], strategy=strategy, max_epochs=1)
        assert "HotCompile: declined: DeepSpeedStrategy" in caplog.text


class TestTwoOfThem:
    def test_the_second_stands_aside(self) -> None:
        first, second, model = hot(), hot(threshold=5), seeded(Quiet)
        trainer = make_trainer([first, second])
        trainer.fit(model, loader())
        assert first.report.phase == "steady", first.report.reason
        declined(second, "another HotCompile")
