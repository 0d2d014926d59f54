"""Whether one more plan is tried, in a run that has one already."""

from __future__ import annotations

from lightning_hotcompile.plan.forecast import Decision

GAIN_OF_ONE_MORE = 1.05
"""Assumed gain of another scope over the one by rule, where it has any (4 to 12% in the suite ``scopes``)."""

GAIN_OVER_KERNEL = 1.01
"""The same of a compiled optimizer over torch's fused kernel (up to 2% by hand in suite ``steady``)."""


def worth_one_more(
    *,
    plan: str,
    remaining_steps: int | None,
    step_s: float,
    cost_s: float,
    spent_s: float,
    gain: float = GAIN_OF_ONE_MORE,
) -> Decision:
    """Whether one more plan is tried in a run that has one already, or has none that helped.

    It is taken to gain little. In a run of unknown length as much as it has taken so far is taken to be left.

    Args:
        plan: its name.
        remaining_steps: steps that are left, ``None`` if unknown.
        step_s: seconds of a step as it is now.
        cost_s: seconds that compiling the plan takes.
        spent_s: seconds that this run has spent in steps so far.
        gain: that it is taken to have over the present step.
    """
    left_s = spent_s if remaining_steps is None else remaining_steps * step_s
    saving = left_s * (1 - 1 / gain)
    facts = (
        f"scope {plan} costs about {cost_s:.0f} s to compile, and if it gains "
        f"{100 * (gain - 1):.0f}% it saves {saving:.0f} s in what is left"
    )
    go = saving > cost_s
    words = "one more plan is tried" if go else "no other plan is tried"
    return Decision(go=go, reason=f"{words}: {facts}", expected_cost_s=cost_s, expected_saving_s=saving)
