"""`kvzap-sglang ablate`: the KVzip+ oracle, fixed top-k, windows and sinks, beside thresholds and baselines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvzap_sglang.calibrate.errors import CalibrationError
from kvzap_sglang.calibrate.prompts import repeat_prompt
from kvzap_sglang.calibrate.targets import repeat_targets
from kvzap_sglang.config import BASELINE_SINKS
from kvzap_sglang.evaluate import metrics
from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example, render
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.methods import DEFAULT_WINDOW
from kvzap_sglang.evaluate.offline import policies
from kvzap_sglang.evaluate.offline.answer import answer
from kvzap_sglang.evaluate.offline.context import Context, compute_context
from kvzap_sglang.evaluate.report import markdown, summarise, write_tables
from kvzap_sglang.evaluate.results import FULL, Results, Row, Setting
from kvzap_sglang.evaluate.tasks import GENERATED, Sizes, TaskFiles, find_task
from kvzap_sglang.presses.surrogate import Surrogate, SurrogateError, check_fits, load_surrogate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder or hub id; run in float32 on the CPU")
    parser.add_argument(
        "--surrogate", action="append", required=True, help="folder or hub id, may be given several times"
    )
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--thresholds", type=float, nargs="+", default=[-4.0, -3.0])
    parser.add_argument("--windows", type=int, nargs="+", default=[DEFAULT_WINDOW])
    parser.add_argument("--sinks", type=int, nargs="+", default=[0])
    parser.add_argument(
        "--kvzip", action="store_true", help="also the KVzip+ scores themselves (another pass of twice the length)"
    )
    parser.add_argument("--task", default="needle-multikey", choices=sorted(GENERATED))
    parser.add_argument("--length", type=int, default=1200)
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--questions", type=int, default=10)
    parser.add_argument("--haystack", type=Path, nargs="+", default=[])
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 after a line that says what to change."""
    try:
        ablate(args)
    except (EvaluationError, CalibrationError, SurrogateError) as error:
        print(f"kvzap-sglang ablate: {error}", file=sys.stderr)
        return 2
    return 0


def ablate(args: argparse.Namespace) -> None:
    """Raises EvaluationError, CalibrationError and SurrogateError before anything is written."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        raise EvaluationError(
            f"--model {args.model}: cannot be opened ({' '.join(str(error).split())[:300]})."
        ) from error
    surrogates = {Path(name).name: _surrogate(name, model) for name in args.surrogate}
    sizes = Sizes(args.length, args.contexts, args.questions, args.seed)
    examples = find_task(args.task, TaskFiles()).examples(tokenizer, sizes, Haystack(args.haystack))
    settings = {name: repr(value) for name, value in sorted(vars(args).items()) if name not in ("out", "command")}
    digests = {name: surrogate.digest for name, surrogate in surrogates.items()}
    results = Results(args.out, settings, digests, {example.key: example.digest for example in examples})
    groups = [list(group) for _, group in groupby(examples, key=lambda example: example.context)]
    for group in tqdm(groups, desc="contexts", unit="context"):
        if not all(results.has(_setting(FULL), example.key) for example in group):
            _run_context(args, model, tokenizer, surrogates, group, results)
    lines = summarise(results.rows)
    write_tables(args.out, lines, results.rows)
    print(markdown(lines), flush=True)


def _run_context(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    surrogates: dict[str, Surrogate],
    group: list[Example],
    results: Results,
) -> None:
    context_ids = render(tokenizer, group[0]).context_ids
    context = compute_context(model, context_ids)
    scores = {name: _scores(surrogate, context) for name, surrogate in surrogates.items()}
    if args.kvzip:
        scores["KVzip+"] = _oracle_scores(model, tokenizer, group[0], context_ids)
    kept = dict(_policies(args, scores))
    stacked = torch.stack(list(kept.values()))
    removed = (~stacked).double().mean(dim=(1, 2, 3)).tolist()
    for example in group:
        question = render(tokenizer, example).question_ids
        found = answer(model, context, stacked, question, example.max_new_tokens, {tokenizer.eos_token_id})
        # The full cache last: it marks the context as done.
        for index in reversed(range(len(kept))):
            setting = _setting(list(kept)[index])
            if results.has(setting, example.key):
                continue  # of a run that ended within this context
            text = tokenizer.decode(found[index])
            results.add(
                Row(
                    key=example.key,
                    task=example.task,
                    length=example.length,
                    setting=setting,
                    context=example.context_name,
                    context_tokens=len(context_ids),
                    answer=text,
                    score=metrics.score(example.metric, text, example.answers),
                    removed=round(removed[index], 5),
                    cached_tokens=len(context_ids),
                    prompt_tokens=len(context_ids) + len(question),
                    depth=example.depth,
                    output_ids=found[index],
                )
            )


def _policies(args: argparse.Namespace, scores: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(label, kept) of every policy, the full cache first."""
    shape = next(iter(scores.values())).shape
    yield FULL, torch.ones(shape, dtype=torch.bool)
    for name, values in scores.items():
        for threshold in args.thresholds:
            for window in args.windows:
                for sinks in args.sinks:
                    label = f"{name} {threshold:g}, window {window}, sinks {sinks}"
                    kept = policies.with_protected(policies.by_threshold(values, threshold), window, sinks)
                    yield label, kept
            window = args.windows[0]
            removed = (
                1.0
                - policies.with_protected(policies.by_threshold(values, threshold), window, 0).double().mean().item()
            )
            kept = policies.with_protected(policies.by_top_k(values, removed, window), window, 0)
            yield f"{name} top-k as {threshold:g}", kept
            if name == next(iter(scores)):
                generator = torch.Generator().manual_seed(args.seed)
                chance = policies.by_chance(shape, removed, window, BASELINE_SINKS, generator)
                yield f"random as {name} {threshold:g}", policies.with_protected(chance, window, BASELINE_SINKS)
                yield f"streaming as {name} {threshold:g}", policies.by_recency(shape, removed, BASELINE_SINKS)


def _setting(label: str) -> Setting:
    setting = Setting(label, "dense", "keep", "offline")
    return setting.full if label == FULL else setting


def _surrogate(name: str, model: Any) -> Surrogate:
    surrogate = load_surrogate(name, dtype=torch.float32, device="cpu")
    config = model.config
    sizes = {"hidden_size": config.hidden_size, "num_layers": config.num_hidden_layers}
    check_fits(surrogate.config, **sizes, num_kv_heads=config.num_key_value_heads, source=name)
    return surrogate


def _scores(surrogate: Surrogate, context: Context) -> Tensor:
    return torch.stack([surrogate.score(layer, hidden).T.float() for layer, hidden in enumerate(context.hidden)])


def _oracle_scores(model: Any, tokenizer: Any, example: Example, context_ids: list[int]) -> Tensor:
    """KVzip+ scores at the context's positions; the template's tokens around the text have none and stay."""
    prompt = repeat_prompt(tokenizer, example.context)
    same = next((i for i, (a, b) in enumerate(zip(context_ids, prompt.ids, strict=False)) if a != b), len(context_ids))
    targets = repeat_targets(model, prompt).permute(1, 2, 0)
    scores = torch.full((*targets.shape[:2], len(context_ids)), torch.inf)
    stop = min(same, prompt.context.stop)
    scores[..., prompt.context.start : stop] = targets[..., : stop - prompt.context.start]
    return scores
