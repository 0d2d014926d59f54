"""The decorator that shields a forward from Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def no_torch_dynamo(recursive: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        disabled = torch._dynamo.disable(function, recursive=recursive)

        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return disabled(*args, **kwargs)

        return wrapper

    return decorator
