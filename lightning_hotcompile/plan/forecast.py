"""Is compiling worth it: what it costs, what it saves, and a reason in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_hotcompile.plan.prior import PRIOR, OpStatistics
from lightning_hotcompile.plan.scopes import Region

CHEAP = 0.01
"""Share of the time that is left which may be spent to find out, whatever the expected gain.

Also what it may cost that a child process compiles, so that training does not stand still.
"""

WARM_SHARE = 0.15
"""Compile time with a full compiler cache over that with an empty one (a GPT of 4 blocks: 1.5 s of 10)."""

LENT = 0.2
"""Share of the time that is left by which a run may become longer, so that the runs after it are shorter."""

LENT_UNASKED = 0.05
"""The same of a first run: nobody knows whether there will be others."""

MOST_UNASKED = 64
"""Steps after which a run of unknown length asks again at the latest."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Whether to compile (``wait``: not yet; ``inline``: in the step, although a child could), and why."""

    go: bool
    reason: str
    wait: bool = False
    again_in: int = 0
    """Steps of this kind after which to ask again, where it waits."""

    inline: bool = False
    expected_cost_s: float | None = None
    expected_saving_s: float | None = None

    @property
    def pays(self) -> bool:
        """Whether the run itself is expected to become shorter."""
        return self.net_s is not None and self.net_s > 0

    def ahead_of(self, other: Decision) -> float:
        """Seconds by which the run is expected to become shorter than with the other one."""
        return (self.net_s or 0.0) - (other.net_s or 0.0)

    @property
    def net_s(self) -> float | None:
        """Seconds by which the run is expected to become shorter; ``None`` where its length is not known."""
        if self.expected_cost_s is None or self.expected_saving_s is None:
            return None
        return self.expected_saving_s - self.expected_cost_s


@dataclass(frozen=True, kw_only=True)
class Child:
    """A child process that compiles while training goes on."""

    seconds: float
    """Until it is done."""

    slowed: float = 0.0
    """Share of these seconds by which training falls behind, since it has a thread less."""


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What compiling takes in seconds, and what it gains as eager time / compiled time."""

    compile_s: float
    speedup: float
    measured: bool = False
    """Whether an earlier run has measured the gain."""

    child: Child | None = None
    """The child process that would compile, if one would."""

    forgone_s: float = 0.0
    """Seconds that compiled code would have saved in earlier runs of the same step, all of which declined."""

    is_lasting: bool = False
    """Whether later runs would find the code, and nothing is known of earlier ones."""

    share: float = 1.0
    """Part of the steps that are left which become faster: those of one kind, where others come between."""

    start_s: float = 0.0
    """Seconds that the first flip of a process takes more, whether its code is in a cache or not."""

    @property
    def cost_s(self) -> float:
        """Seconds by which compiling makes the run longer; after a child the code is only loaded."""
        if self.child is None:
            return self.start_s + self.compile_s
        return self.start_s + WARM_SHARE * self.compile_s + self.child.slowed * self.child.seconds

    @property
    def wait_s(self) -> float:
        """Seconds of eager steps before anything is gained: those in which a child process compiles."""
        return self.child.seconds if self.child is not None else 0.0


def expected_speedup(
    regions: Sequence[Region],
    step_s: float | None,
    ops: OpStatistics | None = None,
    *,
    fused: bool = True,
) -> float:
    """Eager time / compiled time that these regions are expected to give, by the prior.

    Args:
        regions: of a plan.
        step_s: seconds of an eager step, ``None`` if not known, or not on a CPU.
        ops: of its forward and backward, ``None`` if they were not recorded.
        fused: whether an optimizer that is none of the regions is taken to be torch's fused kernel, as it
            mostly is.
    """
    kinds = {region.kind for region in regions}
    if "step" not in kinds:
        return PRIOR["regions+optimizer"].speedup(step_s, ops)
    others = "step+fused" if fused else "step"
    return PRIOR["step+optimizer" if "optimizer" in kinds else others].speedup(step_s, ops)


def forecast(
    *,
    remaining_steps: int | None,
    step_s: float | None,
    expected: Expectation,
    spent_s: float = 0.0,
    or_inline: bool = True,
) -> Decision:
    """Weigh the time that compiling saves in the steps that are left against what it costs.

    If the number of steps left is unknown, the rule is that of renting or buying skis: compile once
    the run has taken as long as compiling costs. Whatever the length turns out to be, that takes at
    most about twice the time of the better choice. By the same rule runs that are too short one by one
    compile once they would have saved together what compiling costs; the first one does if it loses
    little by it, and one more like it would save more.

    Where a child process would take too long, the step itself compiles: a child has the core that is left,
    and nothing is gained until it is done. That training goes on meanwhile is worth so much that the run
    may become longer by a hundredth of what is left than it would be with a compile in the step.

    Args:
        remaining_steps: steps that are left, ``None`` if unknown.
        step_s: seconds of an eager step, ``None`` if not measured yet.
        expected: cost and gain.
        spent_s: seconds that this run has spent in steps so far.
        or_inline: whether the step itself may compile where a child process would not pay.
    """
    if step_s is None:
        return Decision(go=False, wait=True, reason="waits until a step was measured")
    if remaining_steps is None:
        return _of_unknown_length(step_s, expected.share * spent_s, expected)
    decision = _weighed(remaining_steps, step_s, expected)
    if expected.child is None or not or_inline:
        return decision
    inline = _weighed(remaining_steps, step_s, replace(expected, child=None))
    if not inline.go or (decision.go and not inline.pays):
        return decision
    if decision.pays and inline.ahead_of(decision) <= CHEAP * remaining_steps * step_s:
        return decision
    reason = f"{inline.reason}; a child process would take about {expected.child.seconds:.0f} s"
    return replace(inline, inline=True, reason=reason)


def too_short(*, remaining_steps: int | None, step_s: float | None, load_s: float) -> Decision | None:
    """The decision against compiling where too little is left for any gain; ``None`` where there is more.

    That is half of what loading compiled code takes, the least that it costs; half, as machines differ.

    Args:
        remaining_steps: steps that are left, ``None`` if unknown.
        step_s: seconds of an eager step, ``None`` if not measured yet.
        load_s: seconds that loading compiled code is assumed to take.
    """
    if remaining_steps is None or step_s is None or remaining_steps * step_s > load_s / 2:
        return None
    reason = (
        f"not worth it: {remaining_steps:,} steps of {_ms(step_s)} are left, in all "
        f"{remaining_steps * step_s:.2g} s, and loading compiled code alone takes about {load_s:.1f} s"
    )
    return Decision(go=False, reason=reason)


def _weighed(remaining_steps: int, step_s: float, expected: Expectation) -> Decision:
    cost, left_s = expected.cost_s, remaining_steps * step_s
    saving = expected.share * max(0.0, left_s - expected.wait_s) * (1 - 1 / expected.speedup)
    facts = _facts(remaining_steps, step_s, expected, saving)
    go, words = saving > cost, "worth it" if saving > cost else "not worth it"
    lent = cost - saving
    if not go and 0 < saving > cost - expected.forgone_s and lent < LENT * left_s:
        go, words = True, "worth it for the runs to come"
        facts += f"; earlier runs that declined would have saved {expected.forgone_s:.1f} s"
    one_more_s = forgone_s(expected.share * left_s, expected)
    if not go and expected.is_lasting and saving > 0 and lent < min(LENT_UNASKED * left_s, one_more_s):
        go, words = True, "worth it for the runs to come"
        facts += f"; one more run like this would save {one_more_s:.1f} s"
    if not go and not expected.measured and cost < CHEAP * left_s:
        go, words = True, f"worth finding out, since it costs less than {CHEAP:.0%} of what is left"
    return Decision(go=go, reason=f"{words}: {facts}", expected_cost_s=cost, expected_saving_s=saving)


def _facts(remaining_steps: int, step_s: float, expected: Expectation, saving: float) -> str:
    left, left_s = f"{remaining_steps:,} steps of {_ms(step_s)}", remaining_steps * step_s
    if left_s <= expected.wait_s > 0 and expected.speedup > 1:
        return (
            f"{left} are left, in all {left_s:.1f} s, and a child process would compile for about "
            f"{expected.wait_s:.0f} s"
        )
    if expected.share < 1:
        left = f"{int(expected.share * remaining_steps):,} steps of this kind, {_ms(step_s)} each,"
    gain = f"{'the measured' if expected.measured else 'an assumed'} speed-up of {expected.speedup:.2f}x"
    saves = f"saves about {saving:.1f} s" if saving >= 0.05 else "saves nothing"
    return f"{left} are left, at {gain} compiling {saves} and costs about {expected.cost_s:.0f} s"


def forgone_s(eager_s: float, expected: Expectation) -> float:
    """Seconds that a run would have saved, had its compiled code been in the compiler's cache.

    Args:
        eager_s: seconds that its steps took.
        expected: cost and gain; the cost is that of an empty cache.
    """
    return max(0.0, eager_s * (1 - 1 / expected.speedup) - WARM_SHARE * expected.compile_s - expected.start_s)


def _of_unknown_length(step_s: float, spent_s: float, expected: Expectation) -> Decision:
    cost, steps = expected.cost_s, "steps" if expected.share == 1 else "steps of this kind"
    facts = (
        f"the number of steps left is unknown, a step takes {_ms(step_s)}; the run has spent "
        f"{spent_s:.1f} s in {steps}, compiling costs about {cost:.0f} s"
    )
    go = spent_s >= cost
    words = "worth the risk" if go else "waits until it has spent as much"
    half = 0 if go else (cost - spent_s) / max(step_s, 1e-9) / 2  # steps may take longer from now on
    again_in = int(min(MOST_UNASKED, half))
    return Decision(go=go, wait=not go, again_in=again_in, reason=f"{words}: {facts}", expected_cost_s=cost)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
