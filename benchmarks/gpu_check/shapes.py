"""The models, and the decode shapes in the order of their importance."""

from __future__ import annotations

from dataclasses import dataclass

BYTES = 2
"""Of one bf16 number."""


@dataclass(frozen=True)
class Model:
    """Sizes of a model. units: of the hidden layer of its published surrogate, 0 for a linear one."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    units: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def weight_bytes(self) -> int:
        """bf16 weights that a decode step reads: linear layers and output embedding."""
        attention = self.hidden * self.dim * (2 * self.q_heads + 2 * self.kv_heads)
        feed_forward = 3 * self.hidden * self.intermediate
        return BYTES * (self.layers * (attention + feed_forward) + self.hidden * self.vocabulary)

    @property
    def surrogate_bytes(self) -> int:
        """bf16 weights of the surrogate."""
        first = (self.hidden + 1) * (self.units or self.kv_heads)
        second = (self.units + 1) * self.kv_heads if self.units else 0
        return BYTES * self.layers * (first + second)


QWEN3_8B = Model("Qwen3-8B", 36, 32, 8, 128, 4096, 12288, 151936, 512)
LLAMA_8B = Model("Llama-3.1-8B", 32, 32, 8, 128, 4096, 14336, 128256, 0)
QWEN3_32B = Model("Qwen3-32B", 64, 64, 8, 128, 5120, 25600, 151936, 640)
MODELS = (QWEN3_8B, LLAMA_8B, QWEN3_32B)
TINY = Model("tiny", 2, 4, 2, 64, 256, 512, 1000, 32)

BATCHES, CONTEXTS, KEPT = (1, 8, 32, 64), (8192, 32768), (1.0, 0.5, 0.33, 0.25)
CHUNKS = (512, 1024)


@dataclass(frozen=True)
class Layer:
    """What decode attention of one layer sees of a model: models of equal layers are measured once."""

    q_heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def models(self) -> list[str]:
        """The models whose layers are like this."""
        return [model.name for model in (*MODELS, TINY) if layer_of(model) == self]


def layer_of(model: Model) -> Layer:
    return Layer(model.q_heads, model.kv_heads, model.dim)


@dataclass(frozen=True)
class DecodeShape:
    """One decode step of one layer: `batch` requests of `context` positions each."""

    layer: Layer
    batch: int
    context: int

    @property
    def kv_rows(self) -> int:
        """(position, KV head) pairs when everything is kept."""
        return self.batch * self.context * self.layer.kv_heads

    @property
    def kv_bytes(self) -> int:
        """K and V of them, bf16."""
        return 2 * BYTES * self.layer.dim * self.kv_rows


def decode_shapes(tiny: bool) -> list[DecodeShape]:
    """Every shape, the most important first: an 8B model where pruning should help, then the rest."""
    if tiny:
        return [DecodeShape(layer_of(TINY), 2, 192)]
    order = [(32, 8192), (8, 32768), (8, 8192), (64, 8192), (32, 32768), (1, 32768), (1, 8192), (64, 32768)]
    return [DecodeShape(layer_of(model), *size) for model in (QWEN3_8B, QWEN3_32B) for size in order]
