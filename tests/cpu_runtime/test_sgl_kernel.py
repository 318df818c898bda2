"""The stand-in for SGLang's kernel package: the two functions that do something, and the refusals."""

from __future__ import annotations

import pytest
import torch

sgl_kernel = pytest.importorskip("sgl_kernel")
if not sgl_kernel.__version__.endswith("+cpu"):
    pytest.skip("the real sgl_kernel is installed here", allow_module_level=True)

SPECULATIVE = (
    "rotate_input_ids_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "verify_tree_greedy_cpu",
)


def assign(start: list[int], end: list[int], slots: int, pool_len: int = 8) -> torch.Tensor:
    table = torch.full((4, pool_len), -1, dtype=torch.int32)
    sgl_kernel.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]),
        table,
        torch.tensor(start),
        torch.tensor(end),
        torch.arange(100, 100 + slots),
        pool_len,
    )
    return table


def test_slots_are_handed_out_in_order() -> None:
    table = assign([1, 5], [3, 8], slots=5)
    expected = torch.full((4, 8), -1, dtype=torch.int32)
    expected[2, 1:3] = torch.tensor([100, 101], dtype=torch.int32)
    expected[0, 5:8] = torch.tensor([102, 103, 104], dtype=torch.int32)
    assert torch.equal(table, expected)


@pytest.mark.parametrize(("start", "end", "slots"), [([1, 5], [3, 8], 4), ([3, 0], [1, 0], 5), ([0, 0], [2, 9], 11)])
def test_lengths_that_do_not_fit_are_refused(start: list[int], end: list[int], slots: int) -> None:
    with pytest.raises(ValueError, match="cannot place slots"):
        assign(start, end, slots)


def test_rows_move_in_every_buffer_even_when_they_overlap() -> None:
    buffers = [torch.arange(24, dtype=torch.float32).view(6, 4), torch.arange(12, dtype=torch.int16).view(6, 2)]
    expected = [buffer.clone() for buffer in buffers]
    source, target = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 5])
    for buffer in expected:
        buffer[target] = buffer[source].clone()
    sgl_kernel.copy_all_layer_kv_cache_cpu(
        torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64),
        torch.tensor([b.stride(0) * b.element_size() for b in buffers]),
        target,
        source,
    )
    for buffer, want in zip(buffers, expected, strict=True):
        assert torch.equal(buffer, want)


@pytest.mark.parametrize("name", SPECULATIVE)
def test_speculative_decoding_is_refused_by_name(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name}.*--speculative"):
        getattr(sgl_kernel, name)()


def test_no_operator_makes_sglang_believe_in_amx_kernels() -> None:
    assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
