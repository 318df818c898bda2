"""`kvzap-sglang evaluate`: what pruning costs on a model, through the real server."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from kvzap_sglang.calibrate.errors import CalibrationError
from kvzap_sglang.evaluate.client import Client, ServerFailure
from kvzap_sglang.evaluate.errors import EvaluationError
from kvzap_sglang.evaluate.example import Example
from kvzap_sglang.evaluate.grid import Grid, check_url
from kvzap_sglang.evaluate.haystack import Haystack
from kvzap_sglang.evaluate.methods import DEFAULT_WINDOW, SERVER
from kvzap_sglang.evaluate.plots import draw
from kvzap_sglang.evaluate.report import markdown, summarise, write_tables
from kvzap_sglang.evaluate.results import Results
from kvzap_sglang.evaluate.tasks import GENERATED, Sizes, TaskFiles, find_task
from kvzap_sglang.local_server import ServerError
from kvzap_sglang.presses.surrogate import SurrogateError, load_surrogate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--model", help="start servers of this model, one after the other")
    where.add_argument("--url", help="use this running server (full and kvzap only)")
    parser.add_argument("--tokenizer", help="with --url: folder or hub id (default: what the server says)")
    parser.add_argument(
        "--out",
        required=True,
        type=Path,
        help="folder of answers, tables and plots; a run taken up again goes on there",
    )
    parser.add_argument(
        "--surrogate", action="append", help="with --model: folder or hub id, may be given several times"
    )
    parser.add_argument(
        "--thresholds", type=float, nargs="+", default=[-5.0, -4.0, -3.0], help="of kvzap (default: -5 -4 -3)"
    )
    parser.add_argument(
        "--baseline",
        action="append",
        choices=("random", "streaming"),
        default=[],
        help="remove as much as the first surrogate does; may be given twice",
    )
    parser.add_argument(
        "--prefill", action="append", choices=("dense", "sparse"), help="may be given twice (default: dense)"
    )
    parser.add_argument(
        "--decode",
        action="append",
        choices=("prune", "keep"),
        help="what becomes of generated tokens; may be given twice (default: prune)",
    )
    parser.add_argument(
        "--reuse",
        action="append",
        choices=("hit", "branch", "cold"),
        help="hit (default): the context is cached and pruned, then asked about. branch: another request has passed its window before, which is pruned then (--kv-press-hit-window). cold: context and question are one prompt, which a dense prefill sees whole",
    )
    parser.add_argument("--window", type=int, default=DEFAULT_WINDOW, help="of the press (default: 128)")
    parser.add_argument(
        "--task",
        action="append",
        help=f"may be given several times (default: needle-multikey). {', '.join(GENERATED)}, qa, longbench:SET, aime25, own",
    )
    parser.add_argument("--length", type=int, nargs="+", default=[1200], help="tokens of a context (default: 1200)")
    parser.add_argument(
        "--contexts", type=int, default=10, help="per task and length; of a file's task: rows (default: 10)"
    )
    parser.add_argument(
        "--questions", type=int, default=10, help="of each context, where a task asks several (default: 10)"
    )
    parser.add_argument(
        "--depths",
        type=float,
        nargs=2,
        metavar=("LOW", "HIGH"),
        default=(0.0, 1.0),
        help="where needles and assignments are hidden, 0 the start of the text and 1 its end (default: 0 1)",
    )
    parser.add_argument(
        "--haystack",
        type=Path,
        nargs="+",
        default=[],
        help="text or JSONL files, or folders of them (default: a few repeated sentences)",
    )
    parser.add_argument("--qa", type=Path, help='JSONL of {"paragraph", "question", "answers"}')
    parser.add_argument("--longbench", type=Path, help="folder with LongBench's data/ and config/")
    parser.add_argument(
        "--longest",
        type=int,
        help="tokens of a LongBench context, whose middle is cut out if it has more (default: what the model takes)",
    )
    parser.add_argument("--aime25", type=Path, help='JSONL of {"problem", "answer"}')
    parser.add_argument(
        "--own", type=Path, help='JSONL of {"prompt"} and, if it is to be cached, {"context"}; or {"messages"}'
    )
    parser.add_argument("--new-tokens", type=int, help="of the tasks own (default: 64) and aime25 (default: 32000)")
    parser.add_argument("--parallel", type=int, default=2, help="contexts at once (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--server-flags", nargs=argparse.REMAINDER, default=[], help="last: everything after it goes to the servers"
    )


def run(args: argparse.Namespace) -> int:
    """Exit status: 0, or 2 after a line that says what to change."""
    try:
        evaluate(args)
    except (EvaluationError, CalibrationError, SurrogateError, ServerFailure, ServerError) as error:
        print(f"kvzap-sglang evaluate: {error}", file=sys.stderr)
        return 2
    return 0


def evaluate(args: argparse.Namespace) -> None:
    """Raises EvaluationError before anything is written, ServerFailure and ServerError while it runs."""
    _check_numbers(args)
    grid = _grid(args)
    check_url(grid)
    tokenizer = _tokenizer(args)
    examples = _examples(args, tokenizer)
    results = Results(args.out, _settings(args), _digests(args), {each.key: each.digest for each in examples})
    grid.run(examples, tokenizer, results)
    lines = summarise(results.rows)
    write_tables(args.out, lines, results.rows)
    print(markdown(lines), flush=True)
    if not draw(args.out, lines, results.rows):
        print("no plots: matplotlib is not installed (pip install 'kvzap-sglang[evaluate]')", flush=True)


def _grid(args: argparse.Namespace) -> Grid:
    names = [Path(surrogate).name for surrogate in args.surrogate or ()]
    if len(set(names)) < len(names):
        raise EvaluationError("--surrogate: two of one name, which the tables could not tell apart. Rename a folder.")
    if "own" in (args.task or ()) and "cold" in (args.reuse or ()):
        raise EvaluationError(
            "--reuse cold, task own: the forced answer is part of a prompt then, which a dense prefill sees whole. Leave it out."
        )
    return Grid(
        model=args.model,
        url=args.url,
        surrogates=tuple(args.surrogate or [None]),
        thresholds=tuple(args.thresholds),
        baselines=tuple(dict.fromkeys(args.baseline)),
        prefills=tuple(dict.fromkeys(args.prefill or ["dense"])),
        decodes=tuple(dict.fromkeys(args.decode or ["prune"])),
        reuses=tuple(dict.fromkeys(args.reuse or ["hit"])),
        window=args.window,
        parallel=args.parallel,
        server_flags=tuple(args.server_flags),
        logs=args.out,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    for flag, value, least in (
        ("--contexts", args.contexts, 1),
        ("--questions", args.questions, 1),
        ("--parallel", args.parallel, 1),
        ("--window", args.window, 0),
        ("--length", min(args.length), 100),
        ("--new-tokens", args.new_tokens, 1),
    ):
        if value is not None and value < least:
            raise EvaluationError(f"{flag} {value}: give at least {least}.")
    low, high = args.depths
    if not 0 <= low < high <= 1:
        raise EvaluationError(f"--depths {low:g} {high:g}: give two depths between 0 and 1, the lower one first.")
    if not all(map(math.isfinite, args.thresholds)):
        raise EvaluationError("--thresholds: give finite numbers (the full cache is always run).")


def _tokenizer(args: argparse.Namespace) -> Any:
    name = args.tokenizer or args.model or Client(args.url).model_path()
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        flag = "--model" if args.model else "--tokenizer"
        first = " ".join(str(error).split())[:300]
        raise EvaluationError(
            f"{flag} {name}: no tokenizer can be opened ({first}). Give a model's folder or hub id."
        ) from error


def _examples(args: argparse.Namespace, tokenizer: Any) -> list[Example]:
    files = TaskFiles(args.qa, args.longbench, args.aime25, args.own, args.new_tokens, args.longest)
    tasks = [find_task(name, files) for name in dict.fromkeys(args.task or ["needle-multikey"])]
    haystack = Haystack(args.haystack)
    examples: dict[str, Example] = {}
    for length in args.length:
        sizes = Sizes(length, args.contexts, args.questions, args.seed, tuple(args.depths))
        for task in tasks:
            examples |= {example.key: example for example in task.examples(tokenizer, sizes, haystack)}
    return list(examples.values())


def _digests(args: argparse.Namespace) -> dict[str, str]:
    """Of the surrogates, by the names that methods are labelled with."""
    if args.url:
        return {SERVER: Client(args.url).press()["digest"]}
    surrogates = [load_surrogate(name, dtype=torch.float32, device="cpu") for name in args.surrogate or ()]
    return {Path(name).name: each.digest for name, each in zip(args.surrogate or (), surrogates, strict=True)}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """What answers in a folder must share; methods, examples, prefills and so on may be added to it later."""
    return {"model": args.model or args.url, "window": args.window, "server_flags": args.server_flags}
