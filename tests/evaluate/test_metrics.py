"""Scores, worked out by hand."""

from __future__ import annotations

import math

import pytest

from kvzap_sglang.evaluate.agreement import kl_divergence, token_match
from kvzap_sglang.evaluate.metrics import score


@pytest.mark.parametrize(
    ("metric", "answer", "answers", "expected"),
    [
        ("contains_all", "it is 12, or 34", ["12", "34", "56"], 2 / 3),
        ("contains_any", "The PARIS one", ["Lyon", "Paris"], 1.0),
        ("contains_any", "nowhere", ["Lyon", "Paris"], 0.0),
        ("f1", "The red house.", ["a red car", "blue"], 0.5),
        ("f1", "", ["x"], 0.0),
        ("rouge_l", "a b c d", ["a c e d"], 0.75),
        ("rouge_l", "a a a a b", ["a b"], 1.0),
        ("rouge_l", "", ["a"], 0.0),
        ("rouge_l_first_line", "\n\na b\nc d", ["a b"], 1.0),
        ("classification_first_line", "Food\nOther", ["Food", "Food", "Other"], 1.0),
        ("classification", "Food", ["Food", "Food", "Other"], 1.0),
        ("classification", "Food or Other", ["Food", "Food", "Other"], 0.5),
        ("classification", "Date of birth", ["Date of birth", "Date", "Date of birth"], 1.0),
        ("classification", "none", ["Food", "Food"], 0.0),
        ("paragraph_number", "Paragraph 12, not 3", ["Paragraph 12"], 0.5),
        ("count", "There are 7.", ["7"], 1.0),
        ("count", "many", ["7"], 0.0),
        ("code_similarity", "\n# why\nreturn x\nmore", ["return x"], 1.0),
        ("code_similarity", "# only a comment", ["return x"], 0.0),
        ("boxed", r"\boxed{1} and then \boxed{ 42 }", ["42"], 1.0),
        ("boxed", "42", ["42"], 0.0),
    ],
)
def test_metrics(metric: str, answer: str, answers: list[str], expected: float) -> None:
    assert score(metric, answer, answers) == pytest.approx(expected, abs=1e-6)


def test_token_match() -> None:
    assert token_match([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert token_match([1, 2], [1, 2, 3]) == 1.0
    assert token_match([1, 2], [1]) == 0.5
    assert token_match([], []) == 1.0


def test_divergence_is_the_true_one_where_the_lists_are_whole() -> None:
    p, q = {1: 0.5, 2: 0.3, 3: 0.2}, {1: 0.25, 2: 0.25, 3: 0.5}
    logs = [{token: math.log(value) for token, value in each.items()} for each in (p, q)]
    expected = sum(p[token] * math.log(p[token] / q[token]) for token in p)
    assert kl_divergence([logs[0]], [logs[1]]) == pytest.approx(expected, abs=1e-9)
    assert kl_divergence([logs[0]], [logs[0]]) == 0.0


def test_divergence_of_cut_lists_is_a_lower_bound() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.25), 3: math.log(0.5)}
    # Token 1 and all the rest: 0.5 ln 2 + 0.5 ln(0.5 / 0.75).
    assert kl_divergence([p], [q]) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75))
