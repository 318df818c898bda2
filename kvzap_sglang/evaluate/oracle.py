"""The pruning rule, computed the slow and obvious way: what any engine built on it must reproduce.

A plain transformers model (Llama or Qwen3) runs once over the whole token sequence, teacher forced and
without a cache. In every layer the scores come from the very hidden states that enter attention, and
attention is masked per KV head by those scores. There is no pool, no cell and no kernel here, and nothing
is imported from the parts under test.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from kvzap_sglang.presses.surrogate import Surrogate

ScoreFn = Callable[[int, Tensor], Tensor]
"""`(layer, hidden [n, hidden_size]) -> scores [n, KV heads]`; row i is position i of the sequence."""

_ATTENTION = "kvzap_oracle"
_ARCHITECTURES = ("LlamaForCausalLM", "Qwen3ForCausalLM")
_QUERY_BLOCK = 256  # query rows at once: bounds the attention weights to heads x block x n
_LOGIT_BLOCK = 256  # rows at once through the output layer: [n, vocabulary] is never held


@dataclass(frozen=True)
class Turn:
    """One request over the growing sequence; every length is an absolute position.

    `prompt_len`: end of the prompt, its cached prefix included. `hit`: length of the cached prefix. `end`:
    end of the tokens this turn holds, `prompt_len` plus the generated tokens that went through the model. A
    request resumed after a retraction keeps its `prompt_len`; its `hit` may lie anywhere before `end`.
    """

    prompt_len: int
    hit: int
    end: int


@dataclass(frozen=True)
class OracleResult:
    """What one run saw. n positions, L layers, H KV heads.

    `scores` float32 `[n, L, H]`; `kept` bool `[n, L, H]`; `token_logprobs` float32 `[n]`, the log-probability
    (natural) of `tokens[i + 1]` after position i, NaN where that token was not given; `argmax` int64 `[n]`;
    `margins` float32 `[n]`, the difference of the two highest logits.
    """

    scores: Tensor
    kept: Tensor
    token_logprobs: Tensor
    argmax: Tensor
    margins: Tensor

    def pruned_counts(self, length: int, window: int) -> Tensor:
        """int64 `[L, H]`: cells pruned after the step of position `length - 1` (condemned, age >= window).

        For a dense prompt the figure holds once the whole prompt is in (`length >= prompt_len`).
        """
        return (~self.kept[: max(0, length - window)]).sum(dim=0)


@torch.no_grad()
def run_oracle(
    model: Any,
    scorer: Surrogate | ScoreFn,
    tokens: Sequence[int],
    turns: Sequence[Turn],
    *,
    threshold: float,
    window: int,
    sinks: int = 0,
    prefill: Literal["dense", "sparse"] = "dense",
    decode: Literal["prune", "keep"] = "prune",
) -> OracleResult:
    """Run the rule of DESIGN, "Semantics", over one sequence of turns.

    `model` is a transformers Llama or Qwen3 in eval mode on the CPU; `tokens` holds at least
    `turns[-1].end` ids. Positions `[hit, end)` belong to a turn unless a later turn recomputed them, so the
    result is what the *last* turn saw; to check an earlier one, pass the turns up to it. A cell is kept iff
    not `score < threshold` (natural log), or its position < `sinks`, or it was generated and `decode` is "keep".
    `window` counts positions. Raises ValueError for turns that cannot follow each other or a model this module does
    not know.
    """
    _check_model(model)
    _check_turns(turns, len(tokens))
    if window < 0 or sinks < 0 or math.isnan(threshold) or prefill not in ("dense", "sparse"):
        raise ValueError(f"bad rule: {threshold=}, {window=}, {sinks=}, {prefill=}")
    protected = torch.arange(turns[-1].end) < sinks
    for turn in turns if decode == "keep" else ():
        protected[turn.prompt_len : turn.end] = True
    edges = window_edges(turns, window=window, prefill=prefill)
    score: ScoreFn = scorer.score if isinstance(scorer, Surrogate) else scorer
    rule = _Rule(score, threshold, protected, edges)
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    n = turns[-1].end
    with _masked_by(model, rule):
        hidden = model.base_model(input_ids=ids[None, :n], use_cache=False).last_hidden_state[0]
    scores, kept = torch.stack(rule.scores, dim=1), torch.stack(rule.kept, dim=1)
    return OracleResult(scores, kept, *_read_logits(model, hidden, ids[1 : n + 1]))


def window_edges(turns: Sequence[Turn], *, window: int, prefill: Literal["dense", "sparse"]) -> Tensor:
    """int64 `[n]`: the first key position a query sees whatever its score; it sees all later ones too.

    That is `t - window` by the decode rule. A dense prompt's own tokens share the window as it stood at the
    hit, so for them it is `hit - window`: own tokens all visible, of the cached prefix the window or what
    was kept.
    """
    edges = torch.arange(turns[-1].end) - window
    for turn in turns:
        edges[turn.hit : turn.end] = torch.arange(turn.hit, turn.end) - window
        if prefill == "dense":
            edges[turn.hit : turn.prompt_len] = turn.hit - window
    return edges


class _Rule:
    """The rule for one run; collects the scores of each layer on the way. protected: bool `[n]`, positions that are kept."""

    def __init__(self, score: ScoreFn, threshold: float, protected: Tensor, edges: Tensor) -> None:
        self.score, self.threshold, self.protected, self.edges = score, threshold, protected, edges
        self.scores: list[Tensor] = []
        self.kept: list[Tensor] = []

    def decide(self, layer: int, hidden: Tensor) -> Tensor:
        """Scores one layer's tokens (`[n, hidden_size]`) and returns the kept bits, bool `[n, H]`."""
        if layer != len(self.scores):
            raise RuntimeError(f"layer {layer} ran when layer {len(self.scores)} was due")
        scores = self.score(layer, hidden).float()
        kept = ~(scores < self.threshold)
        kept[self.protected] = True
        self.scores.append(scores)
        self.kept.append(kept)
        return kept

    def visible(self, kept: Tensor, start: int, stop: int) -> Tensor:
        """bool `[H, stop - start, stop]`: which keys the queries `start <= t < stop` see."""
        key = torch.arange(stop)
        query = torch.arange(start, stop)[:, None]
        in_window = key >= self.edges[start:stop, None]
        return (in_window | kept[:stop].T[:, None, :]) & (key <= query)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    kvzap_rule: _Rule,
    kvzap_kept: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention call: q `[1, Hq, n, D]`, k and v `[1, H, n, D]` -> `[1, n, Hq, D]`."""
    heads, n, dim = key.shape[1:]
    grouped = query[0].view(heads, -1, n, dim)
    out = torch.empty_like(grouped)
    for start in range(0, n, _QUERY_BLOCK):
        stop = min(start + _QUERY_BLOCK, n)
        visible = kvzap_rule.visible(kvzap_kept, start, stop)[:, None]
        logits = grouped[:, :, start:stop] @ key[0, :, None, :stop].transpose(-1, -2) * scaling
        weights = logits.float().masked_fill(~visible, -math.inf).softmax(dim=-1).to(value.dtype)
        out[:, :, start:stop] = weights @ value[0, :, None, :stop]
    return out.view(1, -1, n, dim).transpose(1, 2), None


def _before_attention(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, rule: _Rule, layer: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    # What layer l may see depends on layer l's own input. self_attn hands its extra kwargs on to _attend.
    kept = rule.decide(layer, kwargs["hidden_states"][0])
    return args, {**kwargs, "kvzap_rule": rule, "kvzap_kept": kept}


@contextmanager
def _masked_by(model: Any, rule: _Rule) -> Iterator[None]:
    """Within the block, every layer of `model` attends by `rule`; afterwards the model is as before."""
    AttentionInterface.register(_ATTENTION, _attend)
    before = model.config._attn_implementation
    hooks = [
        layer.self_attn.register_forward_pre_hook(partial(_before_attention, rule=rule, layer=index), with_kwargs=True)
        for index, layer in enumerate(model.base_model.layers)
    ]
    try:
        model.set_attn_implementation(_ATTENTION)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(before)


def _read_logits(model: Any, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of the following token, argmax and top-2 margin, each `[n]`."""
    n = len(hidden)
    logprobs, argmax, margins = torch.full((n,), math.nan), torch.empty(n, dtype=torch.int64), torch.empty(n)
    for start in range(0, n, _LOGIT_BLOCK):
        logits = model.get_output_embeddings()(hidden[start : start + _LOGIT_BLOCK]).float()
        stop = start + len(logits)
        top = logits.topk(2, dim=-1)
        argmax[start:stop] = top.indices[:, 0]
        margins[start:stop] = top.values[:, 0] - top.values[:, 1]
        given = following[start:stop]
        chosen = logits[: len(given)].gather(1, given[:, None])[:, 0]
        logprobs[start : start + len(given)] = chosen - logits[: len(given)].logsumexp(dim=-1)
    return logprobs, argmax, margins


def _check_model(model: Any) -> None:
    name = type(model).__name__
    if name not in _ARCHITECTURES:
        raise ValueError(f"the oracle knows {', '.join(_ARCHITECTURES)}, not {name}")
    kinds = set(getattr(model.config, "layer_types", None) or ["full_attention"])
    if kinds != {"full_attention"}:
        raise ValueError(f"the oracle knows full attention only, the model has layers of type {sorted(kinds)}")
    if model.training:
        raise ValueError("the model is in training mode: call model.eval()")


def _check_turns(turns: Sequence[Turn], tokens: int) -> None:
    if not turns:
        raise ValueError("no turns")
    computed = 0
    for index, turn in enumerate(turns):
        if not (0 <= turn.hit <= computed and turn.hit < turn.end and 1 <= turn.prompt_len <= turn.end):
            raise ValueError(f"turn {index} cannot follow {computed} computed positions: {turn}")
        computed = turn.end
    if computed > tokens:
        raise ValueError(f"the turns end at {computed}, but there are {tokens} tokens")
