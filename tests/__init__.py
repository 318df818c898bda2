"""Helpers of the tests are rewritten by pytest as the tests are: their asserts hold under `python -O` too."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_HELPERS = [p for p in _HERE.rglob("*.py") if not p.name.startswith(("test_", "conftest", "__init__"))]
pytest.register_assert_rewrite(*(".".join((__name__, *p.relative_to(_HERE).with_suffix("").parts)) for p in _HELPERS))
