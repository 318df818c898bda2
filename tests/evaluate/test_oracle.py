"""The oracle on tiny random models: against the plain model, and against a token-by-token replay."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from kvzap_sglang.evaluate import oracle
from kvzap_sglang.evaluate.oracle import OracleResult, Turn, run_oracle, window_edges
from kvzap_sglang.presses.surrogate import Surrogate, load_surrogate
from tests.evaluate.replay import Replay
from tests.surrogates import make_surrogate

HIDDEN, LAYERS, HEADS, VOCABULARY, WINDOW = 32, 2, 2, 61, 5
TOKENS = torch.randint(VOCABULARY, (48,), generator=torch.Generator().manual_seed(5)).tolist()
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "initializer_range": 0.3,
}
COLD = [Turn(20, 0, 47)]
EXACT_END = [Turn(12, 0, 17), Turn(30, 17, 36), Turn(41, 36, 47)]
TURNS = {
    "cold": COLD,
    "exact-end hits": EXACT_END,
    "hits inside the generated tokens and the prompt": [Turn(12, 0, 20), Turn(30, 16, 36), Turn(41, 7, 47)],
    "resumed after a retraction, twice": [Turn(20, 0, 33), Turn(20, 11, 40), Turn(20, 26, 47)],
    "a prompt shorter than the window": [Turn(3, 0, 3), Turn(40, 3, 47)],
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    if request.param == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12)).eval()


@pytest.fixture(scope="module")
def surrogate(tmp_path_factory: pytest.TempPathFactory) -> Surrogate:
    folder = make_surrogate(tmp_path_factory.mktemp("surrogate"), HIDDEN, LAYERS, HEADS, seed=2)
    return load_surrogate(str(folder), dtype=torch.float32, device="cpu")


def run(model: Any, scorer: Any, turns: list[Turn] = COLD, **rule: Any) -> OracleResult:
    return run_oracle(model, scorer, TOKENS, turns, **{"threshold": 0.0, "window": WINDOW, **rule})


def expect_logits(result: OracleResult, logits: torch.Tensor) -> None:
    """`logits` `[n, vocabulary]` must give what the oracle reports of them."""
    following = torch.tensor(TOKENS[1 : len(logits) + 1])
    logprobs = logits.log_softmax(dim=-1).gather(1, following[:, None])[:, 0]
    torch.testing.assert_close(result.token_logprobs, logprobs, atol=1e-5, rtol=0)
    top = logits.topk(2, dim=-1).values
    torch.testing.assert_close(result.margins, top[:, 0] - top[:, 1], atol=2e-5, rtol=0)
    clear = result.margins > 1e-4
    assert clear.sum() > len(logits) // 2
    assert torch.equal(result.argmax[clear], logits.argmax(dim=-1)[clear])


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
def test_minus_infinity_is_the_plain_model(model: Any, surrogate: Surrogate, prefill: str) -> None:
    result = run(model, surrogate, EXACT_END, threshold=-math.inf, window=0, prefill=prefill)
    with torch.no_grad():
        plain = model(input_ids=torch.tensor([TOKENS[:47]])).logits[0]
    expect_logits(result, plain)
    assert result.kept.all() and result.kept.shape == (47, LAYERS, HEADS)


def test_scores_are_of_the_attention_input(model: Any, surrogate: Surrogate) -> None:
    """Layer 0's attention input is the normed embedding, whatever is pruned."""
    embedded = model.base_model.embed_tokens(torch.tensor(TOKENS[:47]))
    normed = model.base_model.layers[0].input_layernorm(embedded)
    torch.testing.assert_close(run(model, surrogate).scores[:, 0], surrogate.score(0, normed).detach())


@pytest.mark.parametrize("turns", TURNS.values(), ids=TURNS.keys())
@pytest.mark.parametrize("prefill", ["dense", "sparse"])
@pytest.mark.parametrize(("window", "sinks"), [(WINDOW, 2), (0, 0)])
@torch.no_grad()
def test_equals_the_logical_replay(
    model: Any, surrogate: Surrogate, turns: list[Turn], prefill: str, window: int, sinks: int
) -> None:
    replay = Replay(model, surrogate.score, 0.0, window, sinks, prefill == "sparse", physical=False)
    replay.run(TOKENS, turns)
    check_replay(run(model, surrogate, turns, window=window, sinks=sinks, prefill=prefill), replay)


@pytest.mark.parametrize("prefill", ["dense", "sparse"])
@pytest.mark.parametrize("window", [0, WINDOW])
@torch.no_grad()
def test_equals_the_replay_that_frees(model: Any, surrogate: Surrogate, prefill: str, window: int) -> None:
    """With exact-end hits, freeing at age w and at the prompt's end loses nothing the rule shows."""
    replay = Replay(model, surrogate.score, 0.0, window, 0, prefill == "sparse", physical=True)
    replay.run(TOKENS, EXACT_END)
    result = run(model, surrogate, EXACT_END, window=window, prefill=prefill)
    check_replay(result, replay)
    for layer in range(LAYERS):
        for head in range(HEADS):
            freed = 47 - len(replay.alive[layer, head])
            assert result.pruned_counts(47, window)[layer, head] == freed
    assert result.pruned_counts(47, window).min() > 0


def check_replay(result: OracleResult, replay: Replay) -> None:
    expect_logits(result, torch.stack(replay.logits))
    scores = torch.stack([torch.stack(per_layer) for per_layer in replay.scores])
    torch.testing.assert_close(result.scores, scores, atol=1e-4, rtol=0)
    assert result.scores.abs().min() > 1e-4, "a score this near the threshold makes the comparison a coin toss"
    expected = ~(scores < replay.threshold)
    expected[: replay.sinks] = True
    assert torch.equal(result.kept, expected)


def test_the_choices_matter(model: Any, surrogate: Surrogate) -> None:
    """The cases above differ from each other, so agreeing with the replay says something."""
    cold, hits = run(model, surrogate), run(model, surrogate, EXACT_END)
    variants = [cold, hits, run(model, surrogate, prefill="sparse"), run(model, surrogate, window=WINDOW + 1)]
    variants += [run(model, surrogate, threshold=-math.inf), run(model, surrogate, sinks=2)]
    for i, one in enumerate(variants):
        for other in variants[:i]:
            assert (one.token_logprobs - other.token_logprobs).abs().max() > 1e-3
    assert 0.2 < cold.kept.float().mean() < 0.8


def test_sparse_is_a_function_of_the_prefix(model: Any, surrogate: Surrogate) -> None:
    cold, hits = (run(model, surrogate, turns, prefill="sparse") for turns in (COLD, EXACT_END))
    assert torch.equal(cold.token_logprobs, hits.token_logprobs)


def test_blocks_do_not_change_the_result(model: Any, surrogate: Surrogate, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(model, surrogate, EXACT_END)
    monkeypatch.setattr(oracle, "_QUERY_BLOCK", 7)
    monkeypatch.setattr(oracle, "_LOGIT_BLOCK", 10)
    parts = run(model, surrogate, EXACT_END)
    torch.testing.assert_close(parts.token_logprobs, whole.token_logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(parts.margins, whole.margins, atol=1e-5, rtol=0)


def test_a_score_at_the_threshold_is_kept(model: Any) -> None:
    result = run(model, lambda layer, hidden: torch.full((len(hidden), HEADS), 0.0))
    assert result.kept.all()
    below = run(model, lambda layer, hidden: torch.full((len(hidden), HEADS), -1e-30))
    assert not below.kept.any()


def test_pruned_counts_by_hand(model: Any) -> None:
    """All condemned but head 1's even positions: after n tokens, positions <= n - 1 - w are pruned."""

    def score(layer: int, hidden: torch.Tensor) -> torch.Tensor:
        scores = torch.full((len(hidden), HEADS), -1.0)
        scores[::2, 1] = 1.0
        return scores

    result = run(model, score)
    assert result.pruned_counts(47, WINDOW).tolist() == [[42, 21]] * LAYERS
    assert result.pruned_counts(WINDOW, WINDOW).tolist() == [[0, 0]] * LAYERS
    assert result.pruned_counts(3, WINDOW).tolist() == [[0, 0]] * LAYERS


def test_window_edges_by_hand() -> None:
    turns = [Turn(4, 0, 6), Turn(9, 6, 10)]
    assert window_edges(turns, window=2, prefill="dense").tolist() == [-2, -2, -2, -2, 2, 3, 4, 4, 4, 7]
    assert window_edges(turns, window=2, prefill="sparse").tolist() == [i - 2 for i in range(10)]


def test_last_logprob_needs_the_next_token(model: Any, surrogate: Surrogate) -> None:
    assert not run(model, surrogate).token_logprobs.isnan().any()
    short = run_oracle(model, surrogate, TOKENS[:47], COLD, threshold=0.0, window=WINDOW)
    assert short.token_logprobs[:-1].isfinite().all() and short.token_logprobs[-1].isnan()


def test_the_model_is_left_as_it_was(model: Any, surrogate: Surrogate) -> None:
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        before = model(input_ids=ids).logits
        implementation = model.config._attn_implementation
        run(model, surrogate)
        with pytest.raises(ZeroDivisionError):
            run(model, lambda layer, hidden: 1 / 0)
        assert model.config._attn_implementation == implementation
        assert torch.equal(model(input_ids=ids).logits, before)


@pytest.mark.parametrize(
    "turns",
    [
        [],
        [Turn(20, 1, 47)],
        [Turn(20, 0, 19)],
        [Turn(0, 0, 5)],
        [Turn(20, 0, 49)],
        [Turn(20, 0, 30), Turn(40, 31, 47)],
        [Turn(20, 0, 30), Turn(20, 30, 30)],
        [Turn(20, 0, 30), Turn(20, -1, 40)],
    ],
    ids=repr,
)
def test_impossible_turns_are_refused(model: Any, surrogate: Surrogate, turns: list[Turn]) -> None:
    with pytest.raises(ValueError, match="turn"):
        run(model, surrogate, turns)


@pytest.mark.parametrize("rule", [{"window": -1}, {"sinks": -1}, {"threshold": math.nan}, {"prefill": "other"}])
def test_bad_rules_are_refused(model: Any, surrogate: Surrogate, rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="bad rule"):
        run(model, surrogate, **rule)


def test_unknown_models_are_refused(surrogate: Surrogate) -> None:
    with pytest.raises(ValueError, match="not MistralForCausalLM"):
        run(MistralForCausalLM(MistralConfig(**SIZES)).eval(), surrogate)
    sliding = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=4, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding_attention"):
        run(Qwen3ForCausalLM(sliding).eval(), surrogate)
    with pytest.raises(ValueError, match="training mode"):
        run(LlamaForCausalLM(LlamaConfig(**SIZES)).train(), surrogate)


def test_independent_of_what_it_checks() -> None:
    source = Path(oracle.__file__).read_text()
    imported = {line for line in source.splitlines() if line.startswith(("from kvzap", "import kvzap"))}
    assert imported == {"from kvzap_sglang.presses.surrogate import Surrogate"}
