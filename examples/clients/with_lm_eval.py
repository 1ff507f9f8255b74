"""lm-evaluation-harness: words judged by their log likelihood, and texts that are written, by its model
local-completions. A task is a dict here, and its questions are a file: nothing is fetched.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
import lm_eval
from lm_eval.tasks import TaskManager

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1"
MODEL = {
    "model": "storyteller",
    "base_url": f"{base_url}/completions",
    "tokenizer": str(Path(__file__).parents[2] / "engine" / "zoo" / "storyteller"),
    "max_length": 1024,
    "num_concurrent": 4,
}
QUESTIONS = [
    {"begins": "Once upon a time, there was a little", "words": [" girl", " taxes"], "right": 0},
    {"begins": "The dog was happy. He wagged his", "words": [" window", " tail"], "right": 1},
    {"begins": "Lily and Tom went to the park to", "words": [" play", " banana"], "right": 0},
    {"begins": "It was raining, so Ben was wet and", "words": [" sad", " Tuesday"], "right": 0},
]


def task(name: str, questions: Path, **more) -> dict:
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(questions)}}}
    asked = {"task": name, "test_split": "test", "doc_to_text": "{{begins}}", "target_delimiter": ""}
    return data | asked | more


with tempfile.TemporaryDirectory() as folder:
    questions = Path(folder) / "questions.jsonl"
    questions.write_text("".join(f"{json.dumps(question)}\n" for question in QUESTIONS))
    word = task(
        "word",
        questions,
        output_type="multiple_choice",
        doc_to_choice="{{words}}",
        doc_to_target="right",
        metric_list=[{"metric": "acc"}],
    )
    text = task(
        "text",
        questions,
        output_type="generate_until",
        doc_to_target="{{words[right]}}",
        generation_kwargs={"until": ["."], "max_gen_toks": 20, "temperature": 0},
        metric_list=[{"metric": "exact_match"}],
    )
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=MODEL,
        tasks=[word, text],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )

scores = results["results"]
print("accuracy:", scores["word"]["acc,none"], "exact match:", scores["text"]["exact_match,none"])
for sample in sorted(results["samples"]["word"], key=lambda sample: sample["doc_id"]):
    likelihoods = [round(float(likelihood), 3) for ((likelihood, _),) in sample["resps"]]
    print("log likelihoods:", json.dumps(dict(zip(sample["doc"]["words"], likelihoods))))
for sample in sorted(results["samples"]["text"], key=lambda sample: sample["doc_id"]):
    print("text:", json.dumps(sample["doc"]["begins"] + sample["resps"][0][0]))
