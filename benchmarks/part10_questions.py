"""Twenty questions of multiple choice: is the model's answer the one with the best sum, or the best mean?

    python -m benchmarks.part10_questions      # counts, and times nothing

storyteller writes no word. Each answer is scored behind its question: the sum of its tokens' log
probabilities, and their mean. Answers are of unlike lengths; the first is the right one.
"""

import torch

from benchmarks.part10_surprise import MODEL, make_engine, run
from benchmarks.record import record, show
from engine.core.llm_engine import LLMEngine
from engine.decoding.params import SamplingParams

QUESTIONS = {  # the right answer first
    "The sun was hot, so Mia put on her": (" hat.", " warm winter coat.", " fish."),
    "Ben fell and hurt his knee. He started to": (" cry.", " sing a happy song.", " fly."),
    "At night, the stars shine in the": (" sky.", " box.", " big bowl of soup."),
    "The dog was hungry, so it ate the": (" food in its bowl.", " car.", " moon."),
    "It was raining, so Lily took her": (" umbrella.", " bed.", " swimming pool."),
    "Tom was very tired, so he went to": (" bed.", " the park to play with his friends.", " run."),
    "The baby bird could not fly because its wings were too": (" small.", " loud.", " yellow and sweet."),
    "Sue broke her mom's vase. She felt": (" sad and said she was sorry.", " hungry.", " tall."),
    "The cat saw a mouse and began to": (" run after it.", " read.", " swim."),
    "Max wanted to cross the road, so he looked": (" left and right.", " blue.", " in the fridge."),
    "The ice cream was in the sun, so it": (" melted.", " barked.", " went to school with Tom."),
    "Anna gave her friend a gift, and her friend said": (' "thank you".', ' "good night".', " no."),
    "The fish lives in the": (" water.", " tree.", " top of a very tall tower."),
    "The box was too heavy for Tim, so he asked his dad to": (" help him carry it.", " cry.", " sleep."),
    "On her birthday, Lucy got a big": (" cake.", " storm.", " hole in the road."),
    "The knife is sharp. If you touch it, you may get": (" hurt.", " a new friend.", " wet."),
    "The room was dark, so he turned on the": (" light.", " dog.", " old brown chair."),
    "When you plant a seed and give it water, it will": (" grow into a flower.", " run.", " sing."),
    "The boy did not share his toys, so the others were": (" angry.", " green.", " very happy to play."),
    "The bear sleeps in the winter in a": (" cave.", " shoe.", " red car with four wheels."),
}


def scores_of(engine: LLMEngine, question: str, answer: str) -> tuple[float, float]:
    """(sum, mean) of the log probabilities of the answer's tokens behind the question."""
    start = len(engine.tokenizer.encode(question))
    output = run(engine, question + answer, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    logprobs = [scores.logprob for scores in output.prompt_logprobs[start:]]
    return sum(logprobs), sum(logprobs) / len(logprobs)


def main() -> None:
    torch.set_num_threads(1)
    engine = make_engine()
    rows, right = [], [0, 0]
    for question, answers in QUESTIONS.items():
        scores = [scores_of(engine, question, answer) for answer in answers]
        chosen = [max(range(len(answers)), key=lambda i: scores[i][by]) for by in (0, 1)]
        right = [count + (choice == 0) for count, choice in zip(right, chosen, strict=True)]
        rows.append([question, *(answers[choice].strip() for choice in chosen)])
    figures = {"questions": len(QUESTIONS), "right_by_sum": right[0], "right_by_mean": right[1]}
    tables = {"answers": {"columns": ["question", "best sum", "best mean"], "rows": rows}}
    path = record("part10_questions", __doc__.splitlines()[0], {"model": MODEL}, figures, tables)
    show(path, tables)
    print(figures)


if __name__ == "__main__":
    main()
