"""A step's decisions on their way through SGLang's own objects: the forward batch, then the batch's result."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvzap_sglang.runtime import StepDecisions

_ATTRIBUTE = "_kv_press_decisions"


def carry_decisions(carrier: Any, decisions: StepDecisions) -> None:
    """Attach a step's decisions to the object that goes where they are needed."""
    setattr(carrier, _ATTRIBUTE, decisions)


def carried_decisions(carrier: Any) -> StepDecisions | None:
    """What `carry_decisions` attached, None without a press."""
    return getattr(carrier, _ATTRIBUTE, None)
