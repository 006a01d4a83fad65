"""Descent constraints inside the trainers that people already use; none of them is imported before it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cdt_fast.integrations.transformers_trainer import with_descent

if TYPE_CHECKING:
    from cdt_fast.integrations.lightning_callback import DescentCallback

__all__ = ["DescentCallback", "with_descent"]


def __getattr__(name: str) -> Any:
    if name == "DescentCallback":
        from cdt_fast.integrations.lightning_callback import DescentCallback

        return DescentCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
