"""The engine step by step, while requests arrive. In vLLM: other imports, and another model."""

from engine import EngineArgs, LLMEngine, SamplingParams
from engine.utils.argparse_utils import FlexibleArgumentParser

waiting = [
    ("One day, a little bird", SamplingParams(temperature=0.0, logprobs=1)),
    ("To be kind is", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
    ("What did Lily find?", SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1)),
]


def parse_args():
    parser = FlexibleArgumentParser(description="Use LLMEngine itself")
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="storyteller")
    return parser.parse_args()


def process_requests(engine: LLMEngine):
    request_id = 0
    while waiting or engine.has_unfinished_requests():
        if waiting:  # one more request arrives before each step
            prompt, sampling_params = waiting.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        for output in engine.step():
            if output.finished:
                print(output.request_id, [completion.text for completion in output.outputs])
                print("-" * 60)


def main():
    engine_args = EngineArgs.from_cli_args(parse_args())
    engine = LLMEngine.from_engine_args(engine_args)
    process_requests(engine)


if __name__ == "__main__":
    main()
