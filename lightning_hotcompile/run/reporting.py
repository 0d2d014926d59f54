"""Everything that a fit has to tell, gathered into one Report."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_hotcompile.config import HotCompileConfig
from lightning_hotcompile.machine import Phase, State
from lightning_hotcompile.plan.forecast import Decision
from lightning_hotcompile.plan.planner import CompilePlan
from lightning_hotcompile.receipt.event_kinds import Event
from lightning_hotcompile.receipt.events import event_to_dict
from lightning_hotcompile.receipt.metrics import PHASE_NUMBER
from lightning_hotcompile.receipt.report import RegionProof, Report, printed_later
from lightning_hotcompile.run.judge import SETTLING_CONFIDENCE
from lightning_hotcompile.run.session import Session
from lightning_hotcompile.run.trainer_facts import versions
from lightning_hotcompile.swap.gate import Gate
from lightning_hotcompile.swap.graphs.graph import Graph
from lightning_hotcompile.swap.installation import Proof
from lightning_hotcompile.swap.tracing.breaks import GraphBreak
from lightning_hotcompile.view.run import Run

NOTHING_COMPARED = "nothing was compiled"

MUCH_WAITING = 0.25
"""From this share of the time between the steps on, a note says so."""


BREAKS_IN_FULL = 5
"""So many graph breaks are told with their places; a model that has more has the same one in many layers."""

REPEATABLE = "cost_gate=False, min_speedup=0, prewarm=False, fused_optimizer=False"
"""Options with which nothing is decided by the clock."""


def empty_report(
    phase: str, reason: str, events: Sequence[Event] = (), plan: CompilePlan | None = None
) -> Report:
    """The report of a callback that has not watched any step."""
    return Report(
        phase=phase,
        reason=reason,
        scope=plan.name if plan else "",
        plan=printed_later(plan or ""),
        plan_digest=plan.digest if plan else "",
        decision="",
        steps=0,
        compile_s=0.0,
        stall_s=0.0,
        recompiles=0,
        graph_breaks=0,
        parity=NOTHING_COMPARED,
        versions=versions(),
        events=tuple(event_to_dict(e) for e in events),
    )


def build_report(session: Session, events: Sequence[Event], notes: Sequence[str] = ()) -> Report:
    """What is known now; it can be asked for at any time."""
    ledger, installation, tracks = session.ledger, session.flip.installation, session.watch.tracks
    ledger.pairs = tracks.main_pairs  # another signature may have overtaken the one before
    decision = session.rounds.now.judge.decision
    proofs = installation.proofs() if tracks.flipped() else []
    graphs = installation.witness.graphs
    return Report(
        phase=str(tracks.main_state.phase),
        reason=_reason(tracks.main_state, decision),
        scope=session.plan.name,
        plan=printed_later(session.plan),
        plan_digest=session.plan.digest,
        decision=decision.reason if decision else "",
        steps=session.steps,
        compile_s=session.rounds.compile_s,
        stall_s=ledger.stall_s,
        recompiles=session.story.recompiles,
        graph_breaks=len(installation.graph_breaks) if tracks.flipped() else 0,
        parity=_parity_text(graphs),
        parity_error=max(
            (g.parity.error for g in graphs if g.parity and g.parity.error is not None), default=None
        ),
        eager_ms=ledger.eager_ms,
        compiled_ms=ledger.compiled_ms,
        speedup=ledger.pairs.ratio(SETTLING_CONFIDENCE),
        break_even_step=ledger.break_even_step,
        saved_s=ledger.saved_s,
        total_speedup=ledger.total_speedup,
        regions=tuple(map(_region_proof, proofs)),
        fused=session.side.report(),
        tried=dict(session.rounds.tried),
        eager_parts=installation.taken_back,
        peak_memory_mb=session.flip.peak_memory_mb(),
        overhead_us=ledger.own_us,
        wait_share=ledger.wait_share,
        phases=ledger.phases(),
        notes=(
            *notes,
            *session.plan.notes,
            *_unproven_notes(proofs),
            *(_failure_notes(installation.gate, proofs) if tracks.flipped() else ()),
            *notes_on_breaks(installation.graph_breaks if tracks.flipped() else ()),
            *_notes_of(session),
        ),
        versions=versions(),
        events=tuple(event_to_dict(e) for e in events),
        samples=ledger.samples.samples(),
    )


def _reason(state: State, decision: Decision | None) -> str:
    """Why a run that waits does so: its step may have come back often enough long ago."""
    waits = state.phase is Phase.OBSERVING and decision is not None and decision.wait
    return decision.reason if waits and decision is not None else state.reason


def scalars(report: Report) -> dict[str, float | None]:
    """The report's numbers under the names that they have in the loggers."""
    measured: dict[str, Any] = {
        "phase": PHASE_NUMBER.get(report.phase),
        "eager_ms": report.eager_ms and report.eager_ms.median,
        "compiled_ms": report.compiled_ms and report.compiled_ms.median,
        "speedup": report.speedup and report.speedup.value,
        "saved_s": report.saved_s,
        "total_speedup": report.total_speedup,
        "break_even_step": report.break_even_step,
        "parity_error": report.parity_error,
    }
    if report.regions:
        measured |= {
            "compile_s": report.compile_s,
            "stall_s": report.stall_s,
            "recompiles": report.recompiles,
            "graph_breaks": report.graph_breaks,
        }
    peak = report.peak_memory_mb
    return measured | {"peak_memory_mb": max(peak.values()) if peak else None}


def timeline_image(report: Report, events: Sequence[Event], name: str) -> Any | None:
    """The steps of a run as a picture, uint8 of shape (height, width, 3).

    None without matplotlib, or where no step was timed.
    """
    if not report.samples:
        return None
    try:  # optional, and half a second to import: only where a logger takes the picture
        picture = importlib.import_module("lightning_hotcompile.view.picture")
    except ModuleNotFoundError:
        return None
    return picture.timeline_image([Run(name=name, report=report, events=tuple(events))])


def _region_proof(proof: Proof) -> RegionProof:
    return RegionProof(
        name=proof.region.name,
        kind=proof.region.kind,
        members=proof.region.members,
        graphs=proof.graphs,
        runs=proof.runs,
        compile_s=proof.compile_s,
        proven=proof.proven,
        note=_note(proof),
    )


def _note(proof: Proof) -> str:
    if proof.proven and proof.taken_back:
        return f"eager again: {proof.taken_back}"
    if proof.mostly_eager:
        return f"compiled code ran in {proof.runs} of {proof.calls} calls; the others did not fit it"
    return "" if proof.proven else proof.error or "its compiled code did not run"


def _parity_text(graphs: Sequence[Graph]) -> str:
    """How many graphs agree with eager, and why others were not compared.

    Dynamo throws compiled code away where it cannot make guards for it.
    """
    if not graphs:
        return NOTHING_COMPARED
    agree = [g.parity for g in graphs if g.parity is not None and g.parity.agrees]
    wrong = [g for g in graphs if g.parity is not None and g.parity.failed]
    others = [g.parity.reason for g in graphs if g.parity is not None and g.parity.agrees is None]
    text = f"{len(agree)} of {len(graphs)} graphs agree with eager"
    errors = [p.error for p in agree if p.error is not None]
    text += f", largest difference {max(errors):.2g}" if errors else ""
    same = sum(p.stochastic and not p.other_numbers for p in agree)
    noisy = sum(p.other_numbers for p in agree)
    text += f"; {same} of them random, with eager's own numbers" if same else ""
    text += f"; {noisy} of them random, held against eager's own noise" if noisy else ""
    unwatched = [g.unwatched for g in graphs if g.parity and g.parity.agrees and g.unwatched]
    text += "".join(f"; {r}" for r in dict.fromkeys([*(p.reason for p in agree if p.reason), *unwatched]))
    text += "".join(f"; {g.region} is NOT right: {g.parity.reason}" for g in wrong if g.parity)
    idle = sum(g.parity is None and g.error is None and not g.runs for g in graphs)
    text += f"; {idle} have not run" if idle else ""
    return text + "".join(f"; {reason}" for reason in dict.fromkeys(others))


def notes_on_repeating(session: Session, config: HotCompileConfig) -> list[str]:
    """For a training that asked for deterministic algorithms and had steps that the clock has chosen."""
    asked_for = torch.are_deterministic_algorithms_enabled() and not config.is_repeatable
    if not asked_for or not (session.watch.tracks.flipped() or session.side.has_kernels):
        return []
    return [
        "deterministic algorithms are on, but the clock has decided which steps ran compiled or with torch's "
        f"fused kernel: the same training again may differ in its last digits; HotCompile({REPEATABLE}) "
        "leaves nothing to the clock"
    ]


def _unproven_notes(proofs: Sequence[Proof]) -> list[str]:
    return [
        f"region {p.region.name} did not run compiled: {p.error or _why_eager(p)}"
        for p in proofs
        if not p.proven and p.taken_back is None
    ]


def _failure_notes(gate: Gate, proofs: Sequence[Proof]) -> list[str]:
    """Errors for which parts of regions run eagerly, each once: Dynamo tells some again within another."""
    failures = gate.failures
    bare = [f for f in dict.fromkeys(failures) if not any(f != e and f.endswith(e) for e in failures)]
    untold = [f for f in bare if not any(_tells(proof, f) for proof in proofs)]
    return [f"a part of the step runs eagerly: {f}{','.join(gate.failed_at[f])}" for f in untold]


def _tells(proof: Proof, failure: str) -> bool:
    """Whether it is why this region is not used; that of wrong code names the region first."""
    name, reasons = proof.region.name, [why for why in (proof.error, proof.taken_back) if why]
    return any(why.endswith(failure) or (name in failure and failure.endswith(why)) for why in reasons)


def notes_on_breaks(found: Sequence[GraphBreak]) -> Iterator[str]:
    """Where what was compiled falls apart into several graphs, or is not compiled, and why."""
    yield from map(str, found[:BREAKS_IN_FULL])
    if len(found) > BREAKS_IN_FULL:
        yield f"{len(found) - BREAKS_IN_FULL} more graph breaks; hotcompile explain tells all of them"


def _why_eager(proof: Proof) -> str:
    """Of a region in which nothing failed."""
    is_optimizer = proof.region.kind == "optimizer"
    if not proof.calls:
        alone = "the optimizer made no step while it was in place"
        return alone if is_optimizer else "it was never called through its module"
    if not proof.could_compile:
        return "it was first called when nothing was compiled any longer"
    if proof.graphs:
        return "its compiled code did not run"
    if is_optimizer:
        return "whenever it could be compiled its learning rate was 0, or its state was yet to be made"
    return "no graph was captured in its calls"


def _notes_of(session: Session) -> Iterator[str]:
    graph, share = session.watch.op_graph, session.ledger.wait_share
    if share is not None and share >= MUCH_WAITING:
        yield (
            f"{share:.0%} of the time went by between the steps (loading data, logging, other callbacks): "
            "compiling cannot shorten that; more num_workers in the DataLoader may"
        )
    if len(session.rounds.tried) > 1:
        results = ", ".join(f"{scope} {speedup:.2f}x" for scope, speedup in session.rounds.tried.items())
        turns = "".join(f"; {words}" for words in session.rounds.turns)
        yield f"scopes that were tried: {results}{turns}; {session.plan.name} is in use"
    yield from session.side.in_words()
    yield from session.flip.ahead.in_words()
    if graph is not None:
        yield f"one step runs {graph.n_ops} operations: {graph.sequence_text(10)}"
