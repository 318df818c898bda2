"""What a user can put right."""

from __future__ import annotations


class EvaluationError(ValueError):
    """An evaluation cannot be run as asked. The text is one line that names the flag and the remedy."""
