"""Bytes that one decode step must move, and that our kernels move, counted from the shape alone.

    python -m benchmarks.gpu_check.counted [--markdown FILE]

Nothing here is measured. What the kernels move counts every array once per launch that reads or writes it; caches can make
that less (`req_to_token` is read again for every layer), partly used transactions more. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu_check.shapes import BATCHES, BYTES, CONTEXTS, KEPT, MODELS, Model

CHUNK = 512
"""Positions of a list, as in the server (`kvzap_sglang/attention/device_lists.py`)."""
REQUIRED, REQUIRED_KEPT = 0.05, 0.33
"""The requirement: lists and table are at most this share of the kept K and V bytes, at this kept fraction."""
H200_BYTES = 141e9
BEGIN, END = "<!-- counted: begin -->", "<!-- counted: end -->"


@dataclass(frozen=True)
class Traffic:
    """Bytes of one decode step, all layers.

    kv_rows: K and V of the visible pairs. lists_written, lists_read: cells and counts of the visible lists. table_read: the
    cell table, an entry per (position, head) whether kept or not. slots_read: `req_to_token`, once per layer. partials: of
    the chunks, written and read. new_tokens: what `write_cells` reads and writes. queries: q read, output and lse written.
    bookkeeping: cells taken and settled, and the report.
    """

    kv_rows: int
    lists_written: int
    lists_read: int
    table_read: int
    slots_read: int
    partials: int
    new_tokens: int
    queries: int
    bookkeeping: int

    @property
    def total(self) -> int:
        return self.kv_rows + self.lists_and_table + self.partials + self.new_tokens + self.queries + self.bookkeeping

    @property
    def lists_and_table(self) -> int:
        """What finding the kept pairs costs."""
        return self.lists_written + self.lists_read + self.table_read + self.slots_read

    @property
    def overhead(self) -> float:
        """Lists and table over the K and V bytes."""
        return self.lists_and_table / self.kv_rows


def decode_traffic(model: Model, batch: int, context: int, kept: float, chunk: int = CHUNK) -> Traffic:
    """Of a batch of requests of `context` positions, of which `kept` are visible. bf16."""
    tokens, heads = batch * context, model.kv_heads
    pairs = round(tokens * heads * kept)
    lists = batch * -(-context // chunk) * heads
    new_pairs = batch * heads
    condemned = round(new_pairs * (1 - kept))
    layers = model.layers
    return Traffic(
        kv_rows=layers * 2 * BYTES * model.dim * pairs,
        lists_written=layers * 4 * (pairs + lists),
        # Attention reads the counts twice: its chunks, and their merge.
        lists_read=layers * 4 * (pairs + 2 * lists),
        table_read=layers * 4 * tokens * heads,
        slots_read=layers * 4 * tokens,
        partials=layers * 2 * 4 * lists * model.group * (model.dim + 1),
        new_tokens=layers * new_token_bytes(model, batch, condemned),
        queries=layers * batch * model.q_heads * (2 * BYTES * model.dim + 4),
        bookkeeping=bookkeeping_bytes(layers, batch, heads, condemned),
    )


def new_token_bytes(model: Model, batch: int, condemned: int) -> int:
    """Of one layer: K and V read and written; table entry, score, kept bit; slot and limit of each token."""
    pair = 4 * BYTES * model.dim + 4 + BYTES + 1
    return batch * model.kv_heads * pair + batch * (8 + 4) + 4 * condemned


def bookkeeping_bytes(layers: int, batch: int, heads: int, condemned: int) -> int:
    """Of one step: a cell taken per pair (stack read, table written), condemned ones settled, kept bits packed."""
    pairs = layers * batch * heads
    taken, settled = 8 * pairs, 4 * pairs + 8 * layers * condemned
    report = pairs + batch * -(-layers * heads // 8) + 2 * 32
    return taken + settled + report + 2 * 8 * batch


def floor_bytes(model: Model, traffic: Traffic) -> int:
    """The least that a decode step can move: weights, visible K and V, and the lists that name them."""
    weights = model.weight_bytes + model.surrogate_bytes
    return weights + traffic.kv_rows + traffic.lists_written + traffic.lists_read


def dense_bytes(model: Model, batch: int, context: int) -> int:
    """The least of a decode step without pruning: weights, all K and V."""
    return model.weight_bytes + decode_traffic(model, batch, context, 1.0).kv_rows


def requirement_holds(model: Model) -> bool:
    """For every batch and context."""
    shapes = ((batch, context) for batch in BATCHES for context in CONTEXTS)
    return all(decode_traffic(model, *shape, REQUIRED_KEPT).overhead <= REQUIRED for shape in shapes)


def table() -> str:
    """Markdown: a line per model, batch, context and kept fraction."""
    lines = [
        "| model | batch x context | kept | K/V read, GB | lists + table, GB | of K/V | partials | the rest | kernels move, GB | floor with weights, GB | at most faster than dense |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for model in MODELS:
        for batch in BATCHES:
            lines += [_line(model, batch, context, kept) for context in CONTEXTS for kept in KEPT]
    return "\n".join(lines)


def _line(model: Model, batch: int, context: int, kept: float) -> str:
    traffic = decode_traffic(model, batch, context, kept)
    rest = traffic.new_tokens + traffic.queries + traffic.bookkeeping
    floor, dense = floor_bytes(model, traffic), dense_bytes(model, batch, context)
    mark = "*" if dense > H200_BYTES else ""
    cells = [
        model.name, f"{batch} x {context // 1024}K", f"{kept:g}", f"{traffic.kv_rows / 1e9:.2f}",
        f"{traffic.lists_and_table / 1e9:.3f}", f"{traffic.overhead:.1%}", f"{traffic.partials / traffic.kv_rows:.1%}",
        f"{rest / traffic.kv_rows:.1%}", f"{traffic.total / 1e9:.2f}", f"{floor / 1e9:.1f}", f"{dense / floor:.2f}x{mark}",
    ]  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def summary() -> str:
    """The table, and whether the requirement holds."""
    worst = max(decode_traffic(m, b, c, REQUIRED_KEPT).overhead for m in MODELS for b in BATCHES for c in CONTEXTS)
    answer = "holds" if all(requirement_holds(model) for model in MODELS) else "does NOT hold"
    return (
        f"{table()}\n\n`*`: the dense cache and the weights exceed the {H200_BYTES / 1e9:.0f} GB of one H200: dense cannot run there.\n\n"
        f"Lists and table at most {REQUIRED:.0%} of the kept K and V at {REQUIRED_KEPT:.0%} kept, head dim 128: "
        f"**{answer}**, {worst:.2%} at worst."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--markdown", type=Path, help="replace the table between the markers in this file")
    args = parser.parse_args()
    print(summary())
    if args.markdown:
        head, rest = args.markdown.read_text().split(BEGIN)
        tail = rest.split(END)[1]
        args.markdown.write_text(f"{head}{BEGIN}\n{summary()}\n{END}{tail}")


if __name__ == "__main__":
    main()
