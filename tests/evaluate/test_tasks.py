"""What is asked: lengths, answers that stand in the context, and the same examples from the same seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example, render
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.metrics import score
from kvzap_sglang.evaluate.tasks import GENERATED, Sizes, TaskFiles, find_task
from tests.servers import model_path

HANDBOOK = Path(__file__).parents[2] / "examples" / "handbook.md"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path("SmolLM2-135M-Instruct"))


@pytest.mark.parametrize("name", GENERATED)
@pytest.mark.parametrize("length", [700, 2500])
@pytest.mark.parametrize("prose", [True, False])
def test_generated_tasks(tokenizer: Any, name: str, length: int, prose: bool) -> None:
    haystack = Haystack([HANDBOOK] if prose else [])
    examples = GENERATED[name].examples(tokenizer, Sizes(length, 2, 3, seed=5), haystack)
    assert examples == GENERATED[name].examples(tokenizer, Sizes(length, 2, 3, seed=5), haystack)
    assert examples != GENERATED[name].examples(tokenizer, Sizes(length, 2, 3, seed=6), haystack)
    assert len({example.key for example in examples}) == len(examples)
    assert len({example.context for example in examples}) == 2
    for example in examples:
        assert all(answer in example.context for answer in example.answers)
        assert score(example.metric, f" {', '.join(example.answers)}.", example.answers) == 1.0
        assert score(example.metric, "nothing", example.answers) == 0.0
        assert length * 0.95 <= len(render(tokenizer, example).context_ids) <= length * 1.02


def test_needles_are_where_they_are_said_to_be(tokenizer: Any) -> None:
    sizes = Sizes(1500, 2, 6, seed=1)
    for example in GENERATED["needle-multikey"].examples(tokenizer, sizes, Haystack([HANDBOOK])):
        assert example.depth is not None
        assert abs(example.context.index(example.answers[0]) / len(example.context) - example.depth) < 0.1


def test_needles_stay_between_the_depths_asked_for(tokenizer: Any) -> None:
    sizes = Sizes(1500, 3, 8, seed=1, depths=(0.2, 0.5))
    examples = GENERATED["needle-multikey"].examples(tokenizer, sizes, Haystack([HANDBOOK]))
    depths = [example.depth for example in examples if example.depth is not None]
    assert len(depths) == len(examples)
    assert 0.15 < min(depths) < 0.27 and 0.43 < max(depths) < 0.51
    last = [
        max(example.context.index(each.answers[0]) for each in examples if each.context == example.context)
        for example in examples
    ]
    assert all(place / len(example.context) < 0.55 for place, example in zip(last, examples, strict=True))


def test_variables_follow_their_chain(tokenizer: Any) -> None:
    """Executing the assignments in the order of the text gives the answer."""
    for example in GENERATED["variable-tracking"].examples(tokenizer, Sizes(1200, 1, 4, seed=1), Haystack()):
        values: dict[str, str] = {}
        for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", example.context):
            values[name] = values.get(source, source)
        asked = re.search(r"\d{5}", example.question)
        assert asked is not None
        assert {name for name, value in values.items() if value == asked[0]} == set(example.answers)


def test_common_words_are_the_most_common(tokenizer: Any) -> None:
    for name in ("common-words", "frequent-words"):
        (example,) = GENERATED[name].examples(tokenizer, Sizes(2000, 1, 1, seed=2), Haystack())
        words = example.context.split("\n\n")[1].split()
        ranked = sorted(set(words), key=words.count, reverse=True)
        assert set(ranked[: len(example.answers)]) == set(example.answers)
        assert words.count(ranked[len(example.answers) - 1]) > words.count(ranked[len(example.answers)])


def test_the_prompt_is_the_templates_with_the_answer_begun(tokenizer: Any) -> None:
    example = Example("k", "t", "A context.", " A question?", ("x",), "contains_all", 5, answer_prefix="It is")
    prompt = render(tokenizer, example)
    text = tokenizer.decode([*prompt.context_ids, *prompt.question_ids])
    messages = [{"role": "user", "content": "A context. A question?"}]
    assert text == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) + "It is"
    assert tokenizer.decode(prompt.context_ids).endswith("A context.")


def test_too_short_is_refused(tokenizer: Any) -> None:
    for name in ("needle-multikey", "variable-tracking", "common-words"):
        with pytest.raises(EvaluationError, match=r"--length 100, task .*Give a longer one"):
            GENERATED[name].examples(tokenizer, Sizes(100, 1, 10, 0), Haystack())


def write(file: Path, *rows: dict[str, Any]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
    return file


def test_paragraphs(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        {"paragraph": f"Fact {i} is {i * 17}. " * 10, "question": f"Fact {i}?", "answers": [str(i * 17)]}
        for i in range(9)
    ]
    task = find_task("qa", TaskFiles(qa=write(tmp_path / "qa.jsonl", *rows)))
    examples = task.examples(tokenizer, Sizes(900, 2, 3, 0), Haystack())
    assert len(examples) == 6 and len({example.context for example in examples}) == 2
    for example in examples:
        assert example.answers[0] in example.context
        assert len(render(tokenizer, example).context_ids) <= 900


def test_longbench(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "config").mkdir()
    prompts = {"trec": "Types. {context}\n{input}", "qasper": "Article: {context}\nQ: {input}\nA:"}
    (tmp_path / "config" / "dataset2prompt.json").write_text(json.dumps(prompts))
    (tmp_path / "config" / "dataset2maxlen.json").write_text(json.dumps({"trec": 64, "qasper": 128}))
    row = {"input": "the question", "context": "the context", "answers": ["Food"], "all_classes": ["Food", "Other"]}
    for name in prompts:
        write(tmp_path / "data" / f"{name}.jsonl", row, row)
    files = TaskFiles(longbench=tmp_path)
    (trec,) = find_task("longbench:trec", files).examples(tokenizer, Sizes(0, 1, 1, 0), Haystack())
    assert trec.context + trec.question == "Types. the context\nthe question"
    assert (trec.answers, trec.metric, trec.max_new_tokens, trec.chat) == (
        ("Food", "Food", "Other"),
        "classification_first_line",
        64,
        False,
    )
    qasper = find_task("longbench:qasper", files).examples(tokenizer, Sizes(0, 5, 1, 0), Haystack())
    (short,) = find_task("longbench:qasper", TaskFiles(longbench=tmp_path, longest=2)).examples(
        tokenizer, Sizes(0, 1, 1, 0), Haystack()
    )
    assert short.context == "Article: the context" and score("f1_first_line", "\nred\nblue", ["red"]) == 1.0
    assert len(qasper) == 2 and qasper[0].metric == "f1" and qasper[0].question == "\nQ: the question\nA:"


def test_aime25_and_own(tokenizer: Any, tmp_path: Path) -> None:
    problems = write(tmp_path / "aime.jsonl", {"problem": "1 + 1?", "answer": 2})
    (example,) = find_task("aime25", TaskFiles(aime25=problems)).examples(tokenizer, Sizes(0, 9, 1, 0), Haystack())
    assert score(example.metric, r"so \boxed{3}, no, \boxed{2}", example.answers) == 1.0
    prompts = write(tmp_path / "own.jsonl", {"prompt": "Hello"}, {"prompt": "there", "context": "Over"})
    first, second = find_task("own", TaskFiles(own=prompts, new_tokens=7)).examples(
        tokenizer, Sizes(0, 1, 2, 0), Haystack()
    )
    assert (first.context, second.context, first.max_new_tokens) == ("", "Over", 7)


def test_own_messages_are_a_history_and_a_question(tokenizer: Any, tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("user", "Who?"), ("assistant", "Ada."), ("user", "When?")]
    messages = [{"role": role, "content": content} for role, content in said]
    file = write(tmp_path / "own.jsonl", {"messages": messages}, {"messages": messages[-1:]})
    first, second = find_task("own", TaskFiles(own=file)).examples(tokenizer, Sizes(500, 1, 1, 0), Haystack())
    ids = render(tokenizer, first)
    whole = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [*ids.context_ids, *ids.question_ids] == whole and first.caches
    assert tokenizer.decode(ids.question_ids).startswith("When?")
    assert first.context_name != second.context_name and not second.caches


@pytest.mark.parametrize(
    "row",
    [
        {"text": "Hello"},
        {"messages": []},
        {"messages": ["Hello"]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": "Hello"}], "context": "Over"},
    ],
)
def test_own_rows_that_say_nothing(tokenizer: Any, tmp_path: Path, row: dict[str, Any]) -> None:
    file = write(tmp_path / "own.jsonl", {"prompt": "fine"}, row)
    with pytest.raises(EvaluationError, match=r"--own .*row 2: "):
        find_task("own", TaskFiles(own=file)).examples(tokenizer, Sizes(500, 1, 1, 0), Haystack())


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("needles", TaskFiles(), "--task needles: unknown"),
        ("qa", TaskFiles(), "--task qa reads --qa, which is missing"),
        ("own", TaskFiles(own=Path("/absent")), "reads --own, which /absent does not exist"),
    ],
)
def test_unknown_tasks_and_missing_files(name: str, files: TaskFiles, message: str) -> None:
    with pytest.raises(EvaluationError, match=message):
        find_task(name, files)


def test_files_that_are_not_what_they_should_be(tokenizer: Any, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for content, message in (("{", "line 1: not JSON"), ('{"question": 1}', "line 1: no paragraph, answers")):
        bad.write_text(content)
        with pytest.raises(EvaluationError, match=f"^--qa .*{message}"):
            find_task("qa", TaskFiles(qa=bad)).examples(tokenizer, Sizes(900, 1, 1, 0), Haystack())
    with pytest.raises(EvaluationError, match=r"dataset2prompt.json cannot be read"):
        find_task("longbench:trec", TaskFiles(longbench=tmp_path)).examples(tokenizer, Sizes(0, 1, 1, 0), Haystack())
    with pytest.raises(EvaluationError, match="longbench:none: unknown set"):
        find_task("longbench:none", TaskFiles(longbench=tmp_path)).examples(tokenizer, Sizes(0, 1, 1, 0), Haystack())
