"""What a user can put right."""

from __future__ import annotations


class CalibrationError(ValueError):
    """A calibration cannot be run as asked. The text is one line that names the flag and the remedy."""
