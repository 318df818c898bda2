"""The press without a server: `KVPressEngine` takes SGLang's engine arguments and the press options.

python examples/python_api.py --model-path Qwen/Qwen3-8B
python examples/python_api.py --model-path models/SmolLM2-135M-Instruct --kv-press-model SURROGATE --device cpu
"""

from __future__ import annotations

import argparse

from kvzap_sglang.engine import KVPressEngine

# SGLang starts its scheduler with `spawn`, which imports this file again: hence main().


def main() -> None:
    """Generate twice over one long prefix and print what the cache kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--kv-press-model", help="surrogate; may be left out for models with a published one")
    parser.add_argument("--kv-press-threshold", type=float, default=-4.0)
    parser.add_argument("--device", default=None, help="cpu, or leave out for a GPU")
    args = parser.parse_args()

    prefix = "The tide table of Brae Island. " + " ".join(
        f"On day {day} high water is at {(day * 50 // 60) % 12 + 1} o'clock." for day in range(1, 61)
    )
    prompts = [f"{prefix}\nQuestion: {question}\nAnswer:" for question in ("Day 7?", "Day 21?")]
    with KVPressEngine(
        model_path=args.model_path,
        kv_press="kvzap",
        kv_press_model=args.kv_press_model,
        kv_press_threshold=args.kv_press_threshold,
        device=args.device,
        max_total_tokens=16384,
        max_running_requests=8,
    ) as engine:
        for prompt in prompts:
            reply = engine.generate(prompt, {"temperature": 0, "max_new_tokens": 24})
            meta = reply["meta_info"]
            press = meta["kv_press"]
            print(
                f"{meta['prompt_tokens']} prompt tokens, {meta['cached_tokens']} from the cache, "
                f"{press['kept_cells']} of {press['dense_cells']} cells kept: {reply['text'].strip()!r}"
            )


if __name__ == "__main__":
    main()
