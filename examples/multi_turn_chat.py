"""Two conversations over one cached system prompt, and what the pruned KV cache holds after each turn.

    python examples/multi_turn_chat.py --base-url http://127.0.0.1:30000

Needs a running server (`make serve`, or `make demo` to have one started and stopped). An ordinary OpenAI client: the
figures come from `"return_meta_info": true`, which SGLang's chat endpoint takes in a request that does not stream.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import requests

HANDBOOK = Path(__file__).with_name("handbook.md")
CONVERSATIONS = {
    "A": (
        "Who is the island's nurse and where does she live?",
        "How do I reach her at night?",
        "How long does the rescue boat from the mainland need?",
    ),
    "B": (
        "When is breakfast served?",
        "Can I have it earlier if I take the first ferry?",
        "What happens if the wind is too strong for the ferry?",
    ),
}


@dataclass(frozen=True)
class Turn:
    """One answer and what it cost. The three KV figures are None when the server runs without a press."""

    answer: str
    prompt_tokens: int
    cached_tokens: int
    tokens_per_second: float  # generated tokens over wall time, prefill included
    kept_fraction: float | None
    kept_cells: int | None
    dense_cells: int | None


def server_root(base_url: str) -> str:
    """`base_url` without a trailing slash or `/v1`."""
    return base_url.rstrip("/").removesuffix("/v1")


def bytes_per_cell(root: str) -> int | None:
    """Bytes of one cell (the K and the V row of a token in one layer and KV head); None without a press."""
    reply = requests.get(f"{root}/server_info", timeout=30)
    reply.raise_for_status()
    press = reply.json()["internal_states"][0].get("kv_press")
    return None if press is None else int(press["bytes_per_cell"])


def ask(client: openai.OpenAI, model: str, messages: list[Any], max_tokens: int) -> Turn:
    """Send the conversation so far and read the answer and its figures."""
    start = time.monotonic()
    reply = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_meta_info": True},
    )
    seconds = time.monotonic() - start
    choice = reply.choices[0]
    meta: dict[str, Any] = (choice.model_extra or {}).get("meta_info") or {}
    press: dict[str, Any] = meta.get("kv_press") or {}
    return Turn(
        answer=choice.message.content or "",
        prompt_tokens=int(meta.get("prompt_tokens", 0)),
        cached_tokens=int(meta.get("cached_tokens", 0)),
        tokens_per_second=int(meta.get("completion_tokens", 0)) / seconds,
        kept_fraction=press.get("kept_fraction"),
        kept_cells=press.get("kept_cells"),
        dense_cells=press.get("dense_cells"),
    )


def table_row(label: str, number: int, turn: Turn, cell_bytes: int | None) -> str:
    """One line under `HEADER`; a dash for what a server without a press cannot say."""
    kept, held, dense = "-", "-", "-"
    if turn.kept_fraction is not None:
        kept = f"{turn.kept_fraction:.1%}"
    if cell_bytes is not None and turn.kept_cells is not None and turn.dense_cells is not None:
        held = f"{turn.kept_cells * cell_bytes / 2**20:.1f}"
        dense = f"{turn.dense_cells * cell_bytes / 2**20:.1f}"
    return (
        f"{label:>4} {number:>4} {turn.prompt_tokens:>8} {turn.cached_tokens:>8} {kept:>7} "
        f"{held:>12} {dense:>10} {turn.tokens_per_second:>9.1f}"
    )


HEADER = (
    f"{'talk':>4} {'turn':>4} {'prompt':>8} {'cached':>8} {'kept':>7} "
    f"{'KV held MiB':>12} {'dense MiB':>10} {'tokens/s':>9}"
)


def run(base_url: str, max_tokens: int) -> dict[str, list[Turn]]:
    """Hold both conversations, printing the table as it grows; the turns of each."""
    root = server_root(base_url)
    client = openai.OpenAI(base_url=f"{root}/v1", api_key="none", timeout=600)
    model = client.models.list().data[0].id
    cell_bytes = bytes_per_cell(root)
    system = {"role": "system", "content": HANDBOOK.read_text(encoding="utf-8")}
    turns: dict[str, list[Turn]] = {}
    print(HEADER, flush=True)
    for label, questions in CONVERSATIONS.items():
        messages: list[Any] = [system]
        turns[label] = []
        for number, question in enumerate(questions, 1):
            messages.append({"role": "user", "content": question})
            turn = ask(client, model, messages, max_tokens)
            messages.append({"role": "assistant", "content": turn.answer})
            turns[label].append(turn)
            print(table_row(label, number, turn, cell_bytes), flush=True)
    print_answers(turns)
    print_summary(turns)
    return turns


def print_answers(turns: dict[str, list[Turn]]) -> None:
    """Every question with its answer."""
    for label, questions in CONVERSATIONS.items():
        print()
        for question, turn in zip(questions, turns[label], strict=True):
            print(f"{label} guest: {question}\n{label} desk:  {' '.join(turn.answer.split())}")


def print_summary(turns: dict[str, list[Turn]]) -> None:
    """What was reused and what was kept, or why nothing was pruned."""
    first = turns["B"][0]
    print(
        f"\nConversation B found {first.cached_tokens} of its first {first.prompt_tokens} prompt tokens in the cache: "
        "the handbook was computed once, by A."
    )
    last = [talk[-1] for talk in turns.values()]
    kept = [turn.kept_fraction for turn in last if turn.kept_fraction is not None]
    if len(kept) == len(last):
        print(f"At the end the two conversations keep {' and '.join(f'{k:.0%}' for k in kept)} of their KV cache.")
    else:
        print(
            "This server prunes nothing: start it with --kv-press kvzap (see `make serve`) to fill the other columns."
        )


def main() -> int:
    """Command line; 1 with a message when the server cannot be reached or refuses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:30000", help="the server, with or without /v1")
    parser.add_argument("--max-tokens", type=int, default=64, help="longest answer")
    args = parser.parse_args()
    try:
        run(args.base_url, args.max_tokens)
    except openai.APIConnectionError:
        print(f"no server answers at {args.base_url}: start one with `make serve`", file=sys.stderr)
        return 1
    except (openai.APIError, requests.RequestException) as error:
        print(f"the server at {args.base_url} failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
