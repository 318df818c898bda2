"""Hooks on the scheduler: launching, admitting, taking results."""

from __future__ import annotations

import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from kvzap_sglang.hooks.arguments import config_of
from kvzap_sglang.hooks.carried import carried_decisions, carry_decisions
from kvzap_sglang.memory.allocator import KVPressAllocator
from kvzap_sglang.request_options import OptionError, cache_namespace, check_options, parse_options
from kvzap_sglang.runtime import KVPressRuntime
from kvzap_sglang.sharing.turns import waits_for_its_branch

logger = logging.getLogger(__name__)


def runtime_of(scheduler: Any) -> KVPressRuntime | None:
    """The press of a scheduler process, None without one."""
    return getattr(scheduler.tp_worker.model_runner, "kv_press_runtime", None)


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Plan the step, run it, and keep its decisions with its result."""
    runtime = runtime_of(scheduler)
    if runtime is None or batch.forward_mode.is_idle():
        return original(scheduler, batch, *args, **kwargs)
    runtime.launch(batch)
    result = original(scheduler, batch, *args, **kwargs)
    carry_decisions(result, runtime.take_decisions())
    return result


def process_result(
    original: Callable[..., Any], processor: Any, batch: Any, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """Apply a step's decisions before SGLang checkpoints or releases its requests."""
    decisions = carried_decisions(result)
    if decisions is not None:
        if result.copy_done is not None:
            result.copy_done.synchronize()
        processor.model_worker.model_runner.kv_press_runtime.apply(decisions)
    return original(processor, batch, result, *args, **kwargs)


def add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Pass over a request that had better wait; fail one that can never fit, which would block the queue for ever."""
    allocator = adder.token_to_kv_pool_allocator
    if not isinstance(allocator, KVPressAllocator):
        return original(adder, req, *args, **kwargs)
    if req.to_finish is None:
        if waits_for_its_branch(adder.tree_cache, req, adder.can_run_list):
            from sglang.srt.managers.schedule_policy import AddReqResult

            return AddReqResult.CONTINUE  # not added: it stays in the queue, and those behind it are tried
        _refuse_what_never_fits(adder, allocator, req)
    adder.memory_budget.consider(_threshold(adder.tree_cache, req))
    return original(adder, req, *args, **kwargs)


def add_chunked_req(original: Callable[..., Any], adder: Any, req: Any) -> Any:
    """Charge the next chunk at the kept fraction of its request's class."""
    if isinstance(adder.token_to_kv_pool_allocator, KVPressAllocator):
        adder.memory_budget.consider(_threshold(adder.tree_cache, req))
    return original(adder, req)


def _threshold(tree: Any, req: Any) -> float:
    return parse_options(req.sampling_params.custom_params).threshold_for(tree.config)


def create_request(original: Callable[..., Any], scheduler: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """Share prefixes only between requests of the same effective threshold."""
    config = config_of(scheduler.server_args)
    if config is not None:
        params = recv_req.sampling_params.custom_params
        kwargs["extra_key"] = cache_namespace(kwargs.get("extra_key"), params, config)
    return original(scheduler, recv_req, *args, **kwargs)


def _refuse_what_never_fits(adder: Any, allocator: Any, req: Any) -> None:
    tree, layout = adder.tree_cache, allocator.cells.layout
    extend = len(req.full_untruncated_fill_ids) - req.prefix_len
    if tree.sparse_prefill and adder.rem_chunk_tokens is not None:
        # Pruned chunk by chunk: how much of the prompt will be kept is not known before.
        extend = min(extend, tree.window)
    room = layout.cells_total - tree.path_cells(req.last_node)
    need = allocator.cells_for(extend + 1)
    if need <= room:
        return
    req.set_finish_with_abort(
        f"The prompt's {extend} uncached tokens need {need} KV cells at once, {room} of {layout.cells_total} can be "
        f"free ({layout.physical_tokens} dense tokens): raise --max-total-tokens or --mem-fraction-static, or send "
        "a shorter prompt."
    )
    req.init_next_round_input(tree)


def next_prefill(
    original: Callable[..., Any], scheduler: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> Any:
    """Admit again as cells come free; abort a half-prefilled prompt that waits for cells nobody will free."""
    runtime = runtime_of(scheduler)
    if runtime is not None:
        # SGLang shuts admission until a running request leaves; pruning frees cells while all of them stay.
        running_batch.batch_is_full = False
    batch, running = original(
        scheduler, prefill_delayer_single_pass=prefill_delayer_single_pass, running_batch=running_batch
    )
    waiting = scheduler.chunked_req
    if runtime is None or waiting is None or batch is not None:
        return batch, running
    if running.is_empty() and runtime.allocator.ledger.idle:
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        layout = runtime.cells.layout
        waiting.discard_output_reason = FINISH_ABORT(
            f"The KV cells ran out in the middle of this prompt ({layout.physical_tokens} dense tokens in all) "
            "and nothing else is running that could free some: raise --max-total-tokens or "
            "--mem-fraction-static, or send a shorter prompt.",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )
        scheduler._pending_chunked_abort_req = waiting
    return batch, running


def update_running(original: Callable[..., Any], scheduler: Any, batch: Any) -> Any:
    """A half-prefilled prompt gives its cells to the last running request, which SGLang would fail instead."""
    waiting = scheduler.chunked_req
    if runtime_of(scheduler) is None or waiting is None or batch.batch_size() != 1:
        return original(scheduler, batch)
    if scheduler._reqs_finishing_inflight(batch) or batch.check_decode_mem():
        return original(scheduler, batch)
    if waiting.inflight_middle_chunks > 0:
        # Its last chunk has not reported yet; until then nothing of it can be taken back.
        return None
    from sglang.srt.managers.schedule_batch import retract_all

    retract_all(
        reqs=[waiting],
        req_to_token_pool=scheduler.req_to_token_pool,
        token_to_kv_pool_allocator=scheduler.token_to_kv_pool_allocator,
        tree_cache=scheduler.tree_cache,
        hisparse_coordinator=None,
        offload_kv=False,
    )
    scheduler.chunked_req = None
    scheduler._add_request_to_queue(waiting, is_retracted=True)
    logger.warning("KV cells are out: a half-prefilled prompt goes back to the queue. #retracted_reqs: 1")
    return original(scheduler, batch)


def validate_request(original: Callable[..., Any], manager: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer a request whose press options cannot be honoured with a 400 (tokenizer process)."""
    config = config_of(manager.server_args)
    if config is not None:
        params = getattr(obj, "sampling_params", None)
        if isinstance(params, dict):
            if (params.get("beam_width") or 1) > 1:
                raise OptionError("beam_width: beam search is not supported with --kv-press")
            check_options(parse_options(params.get("custom_params")), config)
    return original(manager, obj, *args, **kwargs)


_WEIGHT_MESSAGE = (
    "refused: the server runs with --kv-press, whose surrogate belongs to the weights it was trained on. "
    "Restart the server with the new --model-path and a surrogate for it (--kv-press-model)."
)


def refuse_weight_update(original: Callable[..., Any], updater: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    """A surrogate is trained on fixed weights: with new ones it would silently score wrongly."""
    if runtime_of(updater) is None:
        return original(updater, recv_req, *args, **kwargs)
    from sglang.srt.managers import io_struct

    output = type(recv_req).__name__.replace("ReqInput", "ReqOutput")
    return getattr(io_struct, output)(success=False, message=_WEIGHT_MESSAGE)
