"""The rule once more, as a story: one token at a time, one KV head at a time, with a list of visible keys.

`Replay` runs the turns one after another as a server would live through them, where the oracle computes one
masked forward. It shares with the oracle only the model's own modules (projections, norms, rotary, MLP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from kvzap_sglang.evaluate.oracle import Turn


@dataclass
class Replay:
    """State after the turns run so far; `logits[t]` is `[vocabulary]`, `scores[t][l]` is `[H]`.

    With `physical` a key is visible iff it is still in a set from which condemned keys are removed at the
    moment DESIGN frees their cells; without, visibility is worked out from ages and kept bits. The first is
    possible only while every hit ends where the turn before ended: a shorter one finds its window gone.
    """

    model: Any
    score: Callable[[int, Tensor], Tensor]
    threshold: float
    window: int
    sinks: int
    sparse: bool
    physical: bool
    logits: list[Tensor] = field(default_factory=list)
    scores: list[list[Tensor]] = field(default_factory=list)
    kept: list[list[list[bool]]] = field(default_factory=list)  # [t][l][h]
    keys: list[list[Tensor]] = field(default_factory=list)  # [t][l] -> [H, D]
    values: list[list[Tensor]] = field(default_factory=list)
    alive: dict[tuple[int, int], set[int]] = field(default_factory=dict)

    def run(self, tokens: Sequence[int], turns: Sequence[Turn]) -> None:
        for turn in turns:
            if self.physical and turn.hit != len(self.logits):
                raise ValueError("the physical replay needs exact-end hits")
            for per_token in (self.logits, self.scores, self.kept, self.keys, self.values):
                del per_token[turn.hit :]
            for t in range(turn.hit, turn.end):
                self._step(t, tokens[t], turn)
                self._free(t, turn)

    def _step(self, t: int, token: int, turn: Turn) -> None:
        body = self.model.base_model
        x = body.embed_tokens(torch.tensor([token]))
        cos_sin = body.rotary_emb(x[None], torch.tensor([[t]]))
        for per_token in (self.scores, self.kept, self.keys, self.values):
            per_token.append([])
        for index, layer in enumerate(body.layers):
            x = x + self._attention(index, layer.self_attn, layer.input_layernorm(x), cos_sin, t, turn)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        self.logits.append(self.model.lm_head(body.norm(x))[0])

    def _attention(self, index: int, attn: Any, x: Tensor, cos_sin: Any, t: int, turn: Turn) -> Tensor:
        q = attn.q_proj(x).view(-1, attn.head_dim)
        k = attn.k_proj(x).view(-1, attn.head_dim)
        if hasattr(attn, "q_norm"):
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = apply_rotary_pos_emb(q[None, :, None], k[None, :, None], *cos_sin)
        q, k = q[0, :, 0], k[0, :, 0]
        self.keys[t].append(k)
        self.values[t].append(attn.v_proj(x).view(-1, attn.head_dim))
        self.scores[t].append(self.score(index, x)[0])
        self.kept[t].append([t < self.sinks or not s < self.threshold for s in self.scores[t][index].tolist()])
        keys = torch.stack([per_layer[index] for per_layer in self.keys])
        values = torch.stack([per_layer[index] for per_layer in self.values])
        outputs = []
        for head in range(len(k)):
            seen = torch.tensor(self._visible(index, head, t, turn))
            for query in q.view(len(k), -1, attn.head_dim)[head]:
                weights = (keys[seen, head] @ query * attn.scaling).softmax(dim=0)
                outputs.append(weights @ values[seen, head])
        return attn.o_proj(torch.cat(outputs))[None]

    def _visible(self, layer: int, head: int, t: int, turn: Turn) -> list[int]:
        if self.physical:
            alive = self.alive.setdefault((layer, head), set())
            alive.add(t)
            return sorted(alive)
        seen = []
        for i in range(t + 1):
            if t < turn.prompt_len and not self.sparse:
                in_window = i >= turn.hit or i >= turn.hit - self.window
            else:
                in_window = t - i <= self.window
            if in_window or self.kept[i][layer][head]:
                seen.append(i)
        return seen

    def _free(self, t: int, turn: Turn) -> None:
        if t < turn.prompt_len - 1 and not self.sparse:
            return  # a dense prompt is pruned once, when its last token is done
        for (layer, head), alive in self.alive.items():
            for i in [i for i in alive if t - i >= self.window]:
                if not self.kept[i][layer][head]:
                    alive.remove(i)
