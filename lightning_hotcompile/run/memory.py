"""What earlier runs have learned about this plan, and what this one adds."""

from __future__ import annotations

from dataclasses import replace

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import TOO_SLOW
from lightning_hotcompile.plan.compile_cost import assumed_compile_s, expected_compile_s
from lightning_hotcompile.plan.forecast import WARM_SHARE, Expectation, expected_speedup
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.plan.prior import OpStatistics
from lightning_hotcompile.receipt.report import Report
from lightning_hotcompile.run.fused_memory import FusedMemory
from lightning_hotcompile.run.plan_key import key_of, name_of
from lightning_hotcompile.run.store_in_use import StoreInUse
from lightning_hotcompile.store.hardware import digest_of
from lightning_hotcompile.store.profiles import Profile, utc_now
from lightning_hotcompile.store.samples import CompileSample
from lightning_hotcompile.watch.signature import StepSignature

_MOST_ASKED = 256  # step signatures: batches may be other ones in each step, for ever


class Memory:
    """The store, asked about one plan in one stage. Without a store, or a forecast, it knows nothing.

    A run without a forecast is told nothing, but what it has measured is kept for those with one.

    Args:
        in_use: the store of this user, and the compiler's cache in it.
        plan: what is compiled.
        config: the callback's options; those that change what is compiled are part of the key.
        stage: ``train`` or another stage of the Trainer.
    """

    def __init__(self, in_use: StoreInUse, plan: CompilePlan, config: HotCompileConfig, stage: str) -> None:
        self.begin_compiling = in_use.begin_compiling
        self.has_toolchain = in_use.has_toolchain
        self._holds_graphs = in_use.holds_graphs
        self._store = in_use.begin()
        self._asked = self._store if config.cost_gate else None
        self.of_optimizers = FusedMemory(self._store, reads=config.cost_gate)
        self._keeps_code = _keeps_code(config.backend)
        named, name = isinstance(config.backend, str), name_of(config.backend)
        self._backend = name if named else digest_of(name)  # a partial's may be long
        self._min_speedup = config.min_speedup
        self._mode = "max-autotune" if config.times_kernels else None  # or by an option of that name
        self._key = key_of(plan, config, stage)
        self._known: dict[StepSignature, Profile | None] = {}
        self._samples: tuple[CompileSample, ...] | None = None

    def of(self, signature: StepSignature) -> Profile | None:
        """What is known about compiled steps of this signature."""
        known = self._found(signature)
        return None if known is None or known.verdict == "declined" else known

    def forgone_s(self, signature: StepSignature) -> float:
        """Seconds that compiled code would have saved in earlier runs, none of which has compiled it.

        None where the next run would not find what this one compiles.
        """
        known = self._found(signature) if self._keeps_code else None
        return (known.forgone_s or 0.0) if known is not None else 0.0

    def is_lasting(self, signature: StepSignature) -> bool:
        """Whether this run is the first one of its step, and later ones would find what it compiles."""
        return self._asked is not None and self._keeps_code and self._found(signature) is None

    def _found(self, signature: StepSignature) -> Profile | None:
        """The disk is asked once for each, and no longer once so many were unknown: they never come back."""
        if self._asked is None:
            return None
        if signature in self._known:
            return self._known[signature]
        if len(self._known) >= _MOST_ASKED:
            return None
        key = self._asked.key(plan=self._key, signature=signature.digest)
        self._known[signature] = found = _judged_anew(self._asked.find(key), self._min_speedup)
        return found

    def has_code_of(self, signature: StepSignature, plan: str) -> bool:
        """Whether an earlier run has compiled this plan for this signature, and there is any compiled code.

        The compiler's folder is not searched for that of this plan.
        """
        known = self.of(signature)
        if known is None or known.verdict == "bad" or plan not in (known.scope, *known.tried):
            return False
        return self._keeps_code and self._holds_graphs()

    @property
    def has_lost_code(self) -> bool:
        """Whether what earlier runs have compiled is gone: a known plan costs a compile."""
        return self._keeps_code and not self._holds_graphs()

    def eager_parts(self, signature: StepSignature, plan: str) -> tuple[str, ...]:
        """Parts of the plan of this name without which an earlier run was faster."""
        known = self.of(signature)
        good = known is not None and known.verdict == "good" and known.scope == plan
        return known.eager_parts if good and known is not None else ()

    def expectation(
        self,
        plan: CompilePlan,
        known: Profile | None,
        step_s: float | None,
        ops: OpStatistics | None = None,
    ) -> Expectation:
        """Cost and gain of compiling a plan: as measured before, else as assumed for a step like this."""
        toolchain = self.has_toolchain()
        history = self._history(by_child=False)
        cold_s = expected_compile_s(
            plan.regions, history, has_toolchain=toolchain, mode=plan.mode or self._mode, ops=ops
        )
        assumed = expected_speedup(plan.regions, step_s, ops)
        if known is None:
            return Expectation(compile_s=cold_s, speedup=assumed)
        judged = known.verdict != "unknown" and known.speedup is not None
        seconds = known.compile_s or cold_s
        if self._keeps_code and self._holds_graphs():
            seconds = WARM_SHARE * seconds if known.warm_compile_s is None else known.warm_compile_s
        return Expectation(
            compile_s=seconds,
            speedup=(known.speedup if judged else None) or assumed,
            measured=judged,
        )

    def child_s(self, plan: CompilePlan, crowding: float, ops: OpStatistics | None = None) -> float:
        """Seconds that a child process is expected to take for a plan.

        Args:
            plan: with an empty compiler cache.
            crowding: time of a child beside this training / time of a compile that has all cores.
            ops: of the step, ``None`` if they were not recorded.
        """
        history = self._history(by_child=True) or self._history(by_child=False)
        return crowding * expected_compile_s(
            plan.regions, history, has_toolchain=self.has_toolchain(), ops=ops
        )

    def learn(
        self,
        signature: StepSignature,
        report: Report,
        plan: CompilePlan,
        *,
        compile_s: float,
        warm: bool | None,
        had_toolchain: bool = False,
        ops: OpStatistics | None = None,
        forgone_s: float | None = None,
    ) -> None:
        """Keep the verdict of a run that has ended, and what its compiling cost.

        Args:
            signature: the step that the report is about.
            report: of the run.
            plan: the one that the verdict is about.
            compile_s: seconds of compiling this plan alone.
            warm: whether the compiler found all of it in its cache; ``None`` if it found a part, which says
                nothing about either.
            had_toolchain: whether the compiler's toolchain had been started before.
            ops: of the step, ``None`` if they were not recorded.
            forgone_s: seconds that compiled code would have saved in a run that declined; 0 of one that has
                begun to compile and has no verdict, ``None`` if it would have saved nothing, or compiling
                was not weighed.
        """
        verdict = self._verdict(report)
        if self._store is None:
            return
        if verdict is None:
            self._learn_forgone(signature, report, forgone_s)
            return
        profile = self._profile(signature, report, verdict)
        if warm:
            profile = replace(profile, warm_compile_s=compile_s)
        elif warm is not None:
            profile = replace(profile, compile_s=compile_s)
        self._store.remember(profile)
        if compile_s > 0 and warm is False and (plan.mode or self._mode) is None:
            assumed = assumed_compile_s(plan.regions, has_toolchain=had_toolchain, ops=ops)
            self._add_sample(compile_s, assumed, by_child=False)

    def learn_child(
        self,
        plan: CompilePlan,
        seconds: float,
        crowding: float,
        *,
        had_toolchain: bool = False,
        ops: OpStatistics | None = None,
    ) -> None:
        """Keep what a child process took to compile a plan; see :meth:`child_s` and :meth:`learn`."""
        assumed = crowding * assumed_compile_s(plan.regions, has_toolchain=had_toolchain, ops=ops)
        self._add_sample(seconds, assumed, by_child=True)

    def _add_sample(self, seconds: float, assumed_s: float, *, by_child: bool) -> None:
        if self._store is not None:
            self._store.add_compile_sample(
                CompileSample(
                    assumed_s=assumed_s,
                    seconds=seconds,
                    by_child=by_child,
                    when=utc_now(),
                    backend=self._backend,
                )
            )

    def _learn_forgone(self, signature: StepSignature, report: Report, seconds: float | None) -> None:
        """With 0 seconds counting begins anew: else each run after this one would compile in vain as well."""
        if self._store is None or not self._keeps_code:
            return
        known = self.of(signature)
        if known is not None and report.scope in (known.scope, *known.tried) and self._holds_graphs():
            return
        if seconds is not None:
            profile = self._profile(signature, report, "declined")
            self._store.remember(replace(profile, forgone_s=seconds))

    def _verdict(self, report: Report) -> str | None:
        """``bad`` is what was measured too slow. What failed may be mended, so it is tried again.

        What was kept without a measurement is ``unknown``: it replaces nothing that was measured.
        """
        if report.phase == "steady":
            return "good" if report.speedup is not None else "unknown"
        if report.phase == "reverted":
            return "bad" if report.speedup is not None and TOO_SLOW in report.reason else None
        return "unknown" if report.phase in ("settling", "refining") else None

    def _profile(self, signature: StepSignature, report: Report, verdict: str) -> Profile:
        assert self._store is not None
        ratio, known = report.speedup, self.of(signature)
        tried = [*(known.tried if known is not None else ()), *report.tried]
        return Profile(
            key=self._store.key(plan=self._key, signature=signature.digest),
            verdict=verdict,
            reason=report.reason,
            scope=report.scope,
            when=utc_now(),
            eager_parts=report.eager_parts,
            tried=tuple(dict.fromkeys(tried)),
            speedup=None if ratio is None else ratio.value,
            speedup_low=None if ratio is None else ratio.low,
            speedup_high=None if ratio is None else ratio.high,
            pairs=0 if ratio is None else ratio.n,
            eager_s=None if report.eager_ms is None else 1e-3 * report.eager_ms.median,
            compiled_s=None if report.compiled_ms is None else 1e-3 * report.compiled_ms.median,
        )

    def _history(self, *, by_child: bool) -> list[tuple[float, float]]:
        """Compiles with an empty cache: seconds that would have been assumed, seconds that they took.

        By this backend only: ``eager``, say, takes next to none.
        """
        if self._samples is None:
            known = () if self._asked is None else self._asked.compile_samples()
            self._samples = tuple(each for each in known if each.backend == self._backend)
        return [(each.assumed_s, each.seconds) for each in self._samples if each.by_child is by_child]


def _judged_anew(known: Profile | None, min_speedup: float) -> Profile | None:
    """A verdict by what was measured: the run that came to it may have had another ``min_speedup``."""
    if known is None or known.speedup is None or known.verdict not in ("good", "bad"):
        return known
    is_slow = known.speedup < min_speedup
    if is_slow is (known.verdict == "bad"):
        return known
    if not is_slow:
        return replace(known, verdict="good")
    if known.speedup_high is not None and known.speedup_high >= min_speedup:
        # timed for long enough to keep it then, and not to say no now
        return replace(known, verdict="unknown", speedup=None, speedup_low=None, speedup_high=None, pairs=0)
    return replace(known, verdict="bad", reason=f"{known.reason}{TOO_SLOW}{min_speedup:g}")


def _keeps_code(backend: object) -> bool:
    """Whether what a run compiles is there for the next one."""
    return backend == "inductor"
