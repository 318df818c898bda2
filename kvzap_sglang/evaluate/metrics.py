"""Scores of an answer against what is right, each in [0, 1]: RULER's, LongBench's and AIME's."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from difflib import SequenceMatcher

from kvzap_sglang.evaluate.errors import EvaluationError


def score(metric: str, answer: str, answers: Sequence[str]) -> float:
    """`metric`: a key of `METRICS`."""
    return METRICS[metric](answer, answers)


def contains_all(answer: str, answers: Sequence[str]) -> float:
    """Fraction of the strings that occur in the answer (RULER)."""
    return sum(each.lower() in answer.lower() for each in answers) / len(answers)


def contains_any(answer: str, answers: Sequence[str]) -> float:
    """Whether one of them does (RULER's question answering)."""
    return float(any(each.lower() in answer.lower() for each in answers))


def f1(answer: str, answers: Sequence[str]) -> float:
    """Best word F1 after normalisation (SQuAD, LongBench)."""
    return max(_f1(_normal_words(answer), _normal_words(each)) for each in answers)


def rouge_l(answer: str, answers: Sequence[str]) -> float:
    """Best ROUGE-L F-measure by the package `rouge`, as LongBench's script has it. Raises EvaluationError without it."""
    try:
        from rouge import Rouge
    except ImportError as error:
        raise EvaluationError("ROUGE-L needs the package rouge: pip install 'kvzap-sglang[evaluate]'") from error
    if not answer.strip(" .\n"):
        return 0.0
    return max(float(Rouge().get_scores([answer], [each], avg=True)["rouge-l"]["f"]) for each in answers)


def classification(answer: str, answers: Sequence[str]) -> float:
    """LongBench: `answers` is the right class followed by all classes; others named beside it share the point."""
    right, classes = answers[0], answers[1:]
    named = [each for each in classes if each in answer]
    # A class whose name is part of the right one's was not named by itself.
    named = [each for each in named if not (each in right and each != right)]
    return 1.0 / len(named) if right in named else 0.0


def paragraph_number(answer: str, answers: Sequence[str]) -> float:
    """LongBench retrieval: of the numbers in the answer, the fraction that is the paragraph's."""
    return max(_number_share(answer, (re.findall(r"\d+", each) or [""])[0]) for each in answers)


def count(answer: str, answers: Sequence[str]) -> float:
    """LongBench counting: of the numbers in the answer, the fraction that is right."""
    return max(_number_share(answer, each) for each in answers)


def code_similarity(answer: str, answers: Sequence[str]) -> float:
    """LongBench code: similarity of the first line that is neither comment nor fence."""
    lines = [
        line for line in answer.lstrip("\n").split("\n") if "`" not in line and "#" not in line and "//" not in line
    ]
    line = lines[0] if lines else ""
    return max(round(100 * SequenceMatcher(None, line, each).ratio()) / 100 for each in answers)


def boxed(answer: str, answers: Sequence[str]) -> float:
    r"""AIME: the last \boxed{} is exactly the answer."""
    found = re.findall(r"\\?boxed\{([^{}]*)\}", answer)
    return float(bool(found) and found[-1].strip() == answers[0].strip())


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {
    "contains_all": contains_all,
    "contains_any": contains_any,
    "f1": f1,
    "rouge_l": rouge_l,
    "classification": classification,
    "paragraph_number": paragraph_number,
    "count": count,
    "code_similarity": code_similarity,
    "boxed": boxed,
    "f1_first_line": lambda answer, answers: f1(_first_line(answer), answers),
    "rouge_l_first_line": lambda answer, answers: rouge_l(_first_line(answer), answers),
    "classification_first_line": lambda answer, answers: classification(_first_line(answer), answers),
}


def _first_line(answer: str) -> str:
    """What LongBench keeps of an answer to a prompt that holds examples."""
    return answer.lstrip("\n").split("\n")[0]


def _normal_words(text: str) -> list[str]:
    text = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def _f1(given: Sequence[str], right: Sequence[str]) -> float:
    common = sum((Counter(given) & Counter(right)).values())
    return 2 * common / (len(given) + len(right)) if common else 0.0


def _number_share(answer: str, right: str) -> float:
    numbers = re.findall(r"\d+", answer)
    return sum(number == right for number in numbers) / len(numbers) if numbers else 0.0
