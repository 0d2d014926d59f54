"""What the user, or the environment, has told torch's compiler to leave alone."""

from __future__ import annotations

import os

from torch._dynamo import config, eval_frame

_COMPILES_NOTHING = frozenset(["force_eager", "eager_on_recompile", "fail_on_recompile"])


def stance_against_compiling() -> str | None:
    """The user's stance of ``torch.compiler``, if a compile is not done in it, or is an error."""
    stance: str = eval_frame._stance.stance
    return stance if stance in _COMPILES_NOTHING else None


def why_off() -> str | None:
    """What switches Dynamo off in this process, ``None`` if it is on."""
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1"
    if config.disable:
        return "torch._dynamo.config.disable (TORCH_COMPILE_DISABLE=1 sets it)"
    return None


def is_forced_eager() -> bool:
    """Whether the user has set the stance ``force_eager``, in which no compiled code runs."""
    return eval_frame._stance.stance == "force_eager"
