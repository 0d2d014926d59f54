"""What was learned about one plan on one machine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from lightning_hotcompile.store import checked
from lightning_hotcompile.store.checked import InvalidRecord
from lightning_hotcompile.store.hardware import Machine, as_tuple, digest_of

FORMAT = 2
KIND = "hotcompile profile"
MOST_BYTES = 64 * 1024
_MOST_REASON = 2000
_CLOCK_IS_WRONG = timedelta(days=1)

_SECONDS = checked.maybe(checked.number(0, 1e7))
_RATIO = checked.maybe(checked.number(0, 1e6))
_LINE = checked.line()
_NAME = checked.line(least=1)


def utc_now() -> str:
    """The present moment in the form of :attr:`Profile.when`."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _clean(reason: str) -> str:
    return checked.printable(reason, _MOST_REASON)


@dataclass(frozen=True, kw_only=True)
class ProfileKey:
    """For what a profile holds: another value of any field is another profile.

    Args:
        plan: digest of the plan, the model's structure included.
        signature: digest of the step signature.
        machine: where it ran.
        torch: version of PyTorch.
        package: version of this package.

    Raises:
        InvalidRecord: a field is empty, too long or of a wrong type.
    """

    plan: str
    signature: str
    machine: Machine
    torch: str
    package: str

    def __post_init__(self) -> None:
        checked.check(self, _KEY_RULES)

    @property
    def digest(self) -> str:
        """Thirty-two hexadecimal digits, the name of the profile's file."""
        return digest_of({**vars(self), "machine": vars(self.machine)}, size=16)

    @classmethod
    def from_dict(cls, data: object) -> ProfileKey:
        """Read what ``dataclasses.asdict`` gave.

        Raises:
            InvalidRecord: fields are missing, unknown or not allowed.
        """
        fields = checked.exact_fields(data, cls)
        return cls(**{**fields, "machine": Machine.from_dict(fields["machine"])})


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What was learned about one plan: whether compiling paid, and what it cost.

    Args:
        key: for what this holds.
        verdict: ``good`` (kept), ``bad`` (measured and taken back), ``unknown`` (the run ended before it was
            measured), ``declined`` (by the forecast, or the run ended before anything was known).
        reason: why, in words; cut to 2000 characters.
        scope: name of the plan that was kept.
        eager_parts: parts of the plan that were left eager, since the step is faster without them.
        tried: names of the plans that were measured in the run that judged.
        speedup: eager time / compiled time, with the ends of its interval; all three or none.
        speedup_low: lower end of the interval.
        speedup_high: upper end of the interval.
        pairs: pairs of an eager and a compiled unit behind the speed-up.
        eager_s: seconds of an eager step.
        compiled_s: seconds of a compiled step.
        compile_s: seconds of compiling with an empty compiler cache.
        warm_compile_s: seconds of compiling with a full one.
        forgone_s: seconds that compiled code would have saved in runs that declined; of ``declined`` only,
            or of a plan whose code is gone. 0 says that a run has compiled in vain, and that those before
            it do not count any longer.
        when: UTC in ISO 8601, see :func:`utc_now`.
        runs: runs that this profile stands for.

    Raises:
        InvalidRecord: a field has a wrong type or is out of range.
    """

    key: ProfileKey
    verdict: str
    reason: str
    scope: str
    when: str
    eager_parts: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    pairs: int = 0
    eager_s: float | None = None
    compiled_s: float | None = None
    compile_s: float | None = None
    warm_compile_s: float | None = None
    forgone_s: float | None = None
    runs: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.reason, str):
            object.__setattr__(self, "reason", _clean(self.reason))
        checked.check(self, _RULES)
        interval = (self.speedup_low, self.speedup, self.speedup_high)
        known = [x for x in interval if x is not None]
        if len(known) not in (0, 3) or known != sorted(known):
            raise InvalidRecord(
                f"the speed-up with its interval is {interval}: give low <= value <= high, or none"
            )

    def to_bytes(self) -> bytes:
        """The content of the profile's file."""
        return checked.wrap(dataclasses.asdict(self), kind=KIND, version=FORMAT)

    @classmethod
    def from_bytes(cls, data: bytes) -> Profile:
        """Read the content of a file.

        Raises:
            InvalidRecord: it is no valid profile.
            NewerFormat: a later version of the package wrote it.
        """
        fields = checked.exact_fields(checked.unwrap(data, kind=KIND, version=FORMAT), cls)
        tuples = {name: as_tuple(fields[name]) for name in ("eager_parts", "tried")}
        return cls(**{**fields, **tuples, "key": ProfileKey.from_dict(fields["key"])})


_WEIGHT = {"good": 2, "bad": 2, "unknown": 1, "declined": 0}
"""How much a verdict says, by its name."""

_KEY_RULES = {
    "plan": _NAME,
    "signature": _NAME,
    "machine": checked.of_type(Machine),
    "torch": _NAME,
    "package": _NAME,
}

_RULES = {
    "key": checked.of_type(ProfileKey),
    "verdict": checked.one_of(*_WEIGHT),
    "reason": checked.already(_clean),
    "scope": _LINE,
    "when": checked.utc_time(),
    "eager_parts": checked.many(_NAME, 16),
    "tried": checked.many(_NAME, 16),
    "speedup": _RATIO,
    "speedup_low": _RATIO,
    "speedup_high": _RATIO,
    "pairs": checked.whole(0, 1_000_000_000),
    "eager_s": _SECONDS,
    "compiled_s": _SECONDS,
    "compile_s": _SECONDS,
    "warm_compile_s": _SECONDS,
    "forgone_s": _SECONDS,
    "runs": checked.whole(1, 1_000_000_000),
}

_JUDGEMENT = (
    "verdict", "reason", "scope", "eager_parts", "tried",
    "speedup", "speedup_low", "speedup_high", "pairs",
)  # fmt: skip
_COSTS = ("eager_s", "compiled_s", "compile_s", "warm_compile_s")


def merged(one: Profile, other: Profile, *, now: str, adds: bool = True) -> Profile:
    """Two profiles of the same key as one: the newer wins, and what only the older knows is kept.

    A judgement is taken over as a whole, and a run that ended too early to judge replaces none; one that
    compiled nothing does not replace one that did. What runs have forgone adds up until one compiles, unless
    ``adds`` is false: then both profiles may tell of the same runs, and the larger sum is kept. A profile
    from more than a day after ``now`` (a wrong clock) counts as the older one.
    """
    older, newer = sorted((one, other), key=lambda p: _age_key(p, now))
    judge = max(newer, older, key=lambda p: _WEIGHT[p.verdict])  # of two with the same weight the newer
    fields = {name: getattr(judge, name) for name in _JUDGEMENT}
    of_plan = [p for p in (newer, older) if p.scope == judge.scope]  # what another has cost says nothing
    for name in _COSTS:
        fields[name] = next((cost for p in of_plan if (cost := getattr(p, name)) is not None), None)
    fields["forgone_s"] = _forgone_s(older, newer, adds) if newer.verdict == "declined" else None
    runs = min(one.runs + other.runs, 1_000_000_000)
    return dataclasses.replace(newer, **fields, runs=runs)


def _forgone_s(older: Profile, newer: Profile, adds: bool) -> float:
    before, now = older.forgone_s or 0.0, newer.forgone_s or 0.0
    if now == 0:
        return 0.0
    return min(before + now, 1e7) if adds else max(before, now)


def _age_key(profile: Profile, now: str) -> datetime:
    when = datetime.fromisoformat(profile.when)
    is_wrong = when > datetime.fromisoformat(now) + _CLOCK_IS_WRONG
    return datetime.min.replace(tzinfo=timezone.utc) if is_wrong else when
