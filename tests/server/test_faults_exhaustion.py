"""One request that needs more cells than there are: it ends with a message, the server goes on."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvzap_sglang.observe import unpack_kept
from tests.servers import Server, model_path, serve
from tests.streams import Call
from tests.surrogates import tiny_press
from tests.workloads import tokens

pytestmark = pytest.mark.server

ROOM = 400
CHUNK = 64
SECONDS = 300
"""A request that gets no answer within this is stuck: these take seconds."""


@dataclass
class Tight:
    """A server with 400 dense tokens of room. Prompts of one repeated token have the same score at every
    position: `keeper` and `other` are tokens of which every pair is kept, `fleeting` one of which none is."""

    server: Server
    prefill: str
    keeper: int
    other: int
    fleeting: int

    def check(self) -> None:
        """Nothing is lost, and another request is served."""
        info = self.server.wait_idle()
        self.server.check_healthy()
        self.server.flush()
        assert self.server.press_info()["cells_free"] == info["cells_total"]
        answer = self.server.generate(tokens(random.Random(1), 100), 40, timeout=SECONDS)
        assert len(answer["output_ids"]) == 40

    def expect_pruning(self) -> None:
        """Prompts that prune nearly all, until admission plans with less than a third."""
        for _ in range(40):
            if self.server.press_info()["kept_fraction_estimate"] < 0.3:
                return
            self.server.flush()
            self.server.generate([self.fleeting] * 300, 1, timeout=SECONDS)
        raise AssertionError("the estimate does not follow what is pruned")


def kept_share(server: Server, token: int) -> float:
    """Share of a repeated token's pairs that are kept."""
    stats = server.generate([token] * 8, 1, custom={"return_kept": True}, timeout=SECONDS)["meta_info"]["kv_press"]
    return float(unpack_kept(stats)[:8].mean())


def find(server: Server, share: float, first: int = 1000) -> int:
    """A token from `first` on of whose pairs `share` is kept (there are 4 pairs: one token in 16 has all or none)."""
    return next(token for token in range(first, first + 400) if kept_share(server, token) == share)


@pytest.fixture(scope="module", params=["dense", "sparse"])
def tight_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tight]:
    folder = tmp_path_factory.mktemp(request.param)
    flags = ("--dtype", "float32", "--chunked-prefill-size", str(CHUNK), "--max-running-requests", "4")
    flags += ("--max-total-tokens", str(ROOM), "--kv-press-prefill", request.param)
    with serve(model_path("tiny-llama-random"), folder / "server.log", *flags, *tiny_press(folder / "s")) as server:
        keeper = find(server, 1.0)
        yield Tight(server, request.param, keeper, find(server, 1.0, keeper + 1), find(server, 0.0))


@pytest.fixture
def tight(tight_server: Tight) -> Iterator[Tight]:
    yield tight_server
    tight_server.check()


@pytest.mark.parametrize("expected", ["all kept", "little kept"])
@pytest.mark.parametrize("prompt_tokens", [10, 300])
def test_answer_longer_than_the_room(tight: Tight, expected: str, prompt_tokens: int) -> None:
    """1200 new tokens, all of them kept, on 400 tokens of room, whatever admission plans with."""
    if expected == "little kept":
        tight.expect_pruning()
    with pytest.raises(RuntimeError, match="Out of memory"):
        tight.server.generate(
            [tight.keeper] * prompt_tokens, 1200, timeout=SECONDS, logit_bias={str(tight.keeper): 1000.0}
        )


@pytest.mark.parametrize("expected", ["all kept", "little kept"])
def test_prompt_of_three_times_the_room(tight: Tight, expected: str) -> None:
    """Every pair of it is kept. Dense: refused before it starts. Sparse: it runs into the end of the pool."""
    if expected == "little kept":
        tight.expect_pruning()
    message = "uncached tokens need" if tight.prefill == "dense" else "ran out in the middle of this prompt"
    with pytest.raises(RuntimeError, match=f"{message}.*--max-total-tokens"):
        tight.server.generate([tight.keeper] * 3 * ROOM, 4, timeout=SECONDS)


def test_prompt_of_three_times_the_room_that_prunes(tight: Tight) -> None:
    """Sparse prefill serves it: nothing but the window and a chunk is ever in memory."""
    if tight.prefill == "dense":
        pytest.skip("a dense prompt has to fit")
    answer = tight.server.generate([tight.fleeting] * 3 * ROOM, 4, timeout=SECONDS)
    assert len(answer["output_ids"]) == 4


def test_two_prompts_that_do_not_fit_together(tight: Tight) -> None:
    """Twice two thirds of the room at once: one waits for the other, both are answered in full."""
    tight.expect_pruning()
    prompts = [[tight.keeper] * 260, [tight.other] * 260, tokens(random.Random(2), 260)]
    answers = tight.server.generate_all([{"input_ids": p, "max_new_tokens": 20, "timeout": SECONDS} for p in prompts])
    assert [len(answer["output_ids"]) for answer in answers] == [20] * 3


def test_a_prompt_gives_way_to_a_decode(tight: Tight) -> None:
    """A prompt that keeps more than expected takes what a running answer still needs: it starts again later."""
    tight.expect_pruning()
    forced = {str(tight.keeper): 1000.0}
    with Call(tight.server, [tight.keeper] * 100, 250, logit_bias=forced) as decoding:
        assert decoding.read(5)
        answer = tight.server.generate([tight.other] * 340, 10, timeout=SECONDS)
        decoding.read(1 << 30)
    assert len(answer["output_ids"]) == 10
    assert decoding.last is not None and len(decoding.last["output_ids"]) == 250
    if tight.prefill == "sparse":
        assert "a half-prefilled prompt goes back to the queue" in tight.server.log()
