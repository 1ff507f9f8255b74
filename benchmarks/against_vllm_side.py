"""One engine in a process of its own, for against_vllm.py: the same lines for vLLM and for this engine.

    python benchmarks/against_vllm_side.py vllm '{"model": "FOLDER", "dtype": "float32"}'

The first argument is the package to import, the second the options of its `LLM`. A line of JSON on stdout
says that the model is loaded. Each line on stdin, {"jobs": [[token ids, output tokens], ...]}, is generated
as one call, greedy and past every end of sequence, and answered by {"seconds": ..., "ids": [...]}. The
process ends with its stdin. Knows nothing of this repository: it runs in vLLM's environment, too.
"""

import importlib
import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine prints is no answer
    package = importlib.import_module(sys.argv[1])
    start = time.perf_counter()
    llm = package.LLM(**json.loads(sys.argv[2]))
    import torch

    ready = {"load_seconds": time.perf_counter() - start, "threads": torch.get_num_threads()}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        jobs = json.loads(line)["jobs"]
        prompts = [{"prompt_token_ids": ids} for ids, _ in jobs]
        params = [
            package.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True) for _, tokens in jobs
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": seconds, "ids": ids}), file=answers, flush=True)


if __name__ == "__main__":
    main()
