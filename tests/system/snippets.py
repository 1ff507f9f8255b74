"""Lines that users of vLLM write offline, with another import and another model: SNIPPETS is the one list."""

import re
from dataclasses import dataclass
from textwrap import dedent

SETTING = """
from engine import LLM, AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, LoRARequest, SamplingParams
from functools import partial
from tqdm import tqdm
import asyncio
greedy = SamplingParams(temperature=0, max_tokens=8)
messages = [{"role": "user", "content": "Tell me a story about a dog."}]
MODEL = "storyteller-draft"
"""


@dataclass(frozen=True)
class Snippet:
    """Lines of a script written for vLLM. They run with `llm` and the names of SETTING."""

    shown: str  # as the table shows it
    code: str
    holds: str = ""  # what is true afterwards
    refusal: str = ""  # the words of the error, in which `code` ends; empty: it runs

    def __str__(self) -> str:
        return re.sub(r"\W+", "_", self.shown)[:50].strip("_")


def runs(shown: str, code: str, holds: str) -> Snippet:
    return Snippet(shown, dedent(code), holds)


def refused(shown: str, code: str, words: str) -> Snippet:
    return Snippet(shown, dedent(code), refusal=words)


SNIPPETS = [
    runs(
        "`llm.generate(prompts, sampling_params)`",
        'found = llm.generate(["Once upon a time", "The cat"], greedy)',
        "[o.prompt for o in found] == ['Once upon a time', 'The cat'] and found[0].outputs[0].text",
    ),
    runs(
        "`llm.chat(messages, params)`, and with a list of conversations",
        "found = llm.chat(messages, greedy) + llm.chat([messages] * 2, greedy)",
        "len(found) == 3 and len({o.outputs[0].text for o in found}) == 1",
    ),
    runs(
        "a list of `SamplingParams`, one for each prompt",
        "found = llm.generate(['a', 'b'], [greedy, SamplingParams(temperature=0, max_tokens=2)])",
        "len(found[0].outputs[0].token_ids) == 8 and len(found[1].outputs[0].token_ids) == 2",
    ),
    runs(
        '`{"prompt": …}`, `{"prompt_token_ids": …}` as prompts',
        'found = llm.generate([{"prompt": "a"}, {"prompt_token_ids": [67]}], greedy)',
        "found[0].outputs[0].text == found[1].outputs[0].text",
    ),
    runs(
        "`logprobs=3, prompt_logprobs=1`",
        """
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, prompt_logprobs=1)
        (o,) = llm.generate("The cat", params)
        """,
        "o.prompt_logprobs[0] is None and all(len(each) == 3 for each in o.outputs[0].logprobs)"
        " and o.outputs[0].logprobs[0][o.outputs[0].token_ids[0]].rank == 1",
    ),
    runs(
        "`n=3, seed=7`",
        """
        params = SamplingParams(n=3, seed=7, max_tokens=6)
        first, second = llm.generate("The dog", params) + llm.generate("The dog", params)
        """,
        "[c.text for c in first.outputs] == [c.text for c in second.outputs]"
        " and len({c.text for c in first.outputs}) > 1",
    ),
    runs(
        "`max_tokens=None`: until the model's end",
        "(o,) = LLM(MODEL, max_model_len=40).generate('a', SamplingParams(max_tokens=None, ignore_eos=True))",
        "len(o.prompt_token_ids) + len(o.outputs[0].token_ids) == 40",
    ),
    runs(
        "`max_tokens` that the prompt leaves no room for",
        """
        other = LLM(MODEL, max_model_len=40)
        (o,) = other.generate([67] * 30, SamplingParams(max_tokens=20, ignore_eos=True))
        """,
        "len(o.outputs[0].token_ids) == 10 and o.outputs[0].finish_reason == 'length'",
    ),
    runs("`llm.generate([])`", "found = llm.generate([], greedy)", "found == []"),
    runs(
        "`use_tqdm=partial(tqdm, …)`",
        "found = llm.generate('a', greedy, use_tqdm=partial(tqdm, disable=True))",
        "found[0].finished",
    ),
    runs(
        "`params = llm.get_default_sampling_params(); params.temperature = 0`",
        """
        params = llm.get_default_sampling_params()
        params.temperature = 0
        params.max_tokens = 8
        found = llm.generate("The cat", params)
        """,
        "found[0].outputs[0].text == llm.generate('The cat', greedy)[0].outputs[0].text",
    ),
    runs(
        "`SamplingParams(stop=None, stop_token_ids=None, bad_words=None)`",
        "found = llm.generate('a', SamplingParams(stop=None, stop_token_ids=None, bad_words=None))",
        "found[0].finished",
    ),
    runs(
        "`LLM(m, tensor_parallel_size=1, pipeline_parallel_size=1, trust_remote_code=False, seed=0, "
        'revision="main", tokenizer_mode="auto", enable_chunked_prefill=True, kv_cache_dtype="auto", '
        'disable_log_stats=True, dtype="float", enforce_eager=True)`',
        """
        other = LLM(
            MODEL, tensor_parallel_size=1, pipeline_parallel_size=1, trust_remote_code=False, seed=0,
            revision="main", tokenizer_mode="auto", enable_chunked_prefill=True, kv_cache_dtype="auto",
            disable_log_stats=True, dtype="float", enforce_eager=True,
        )
        found = other.generate("a", greedy)
        """,
        "found[0].finished",
    ),
    runs(
        '`LLM(m, generation_config="vllm")`',
        "params = LLM(MODEL, generation_config='vllm').get_default_sampling_params()",
        "params == SamplingParams()",
    ),
    runs(
        "`LLM(m, seed=1)`: unseeded requests draw the same in every run",
        """
        params = SamplingParams(temperature=1, max_tokens=12)
        found = [LLM(MODEL, seed=seed).generate("a", params)[0].outputs[0].text for seed in (1, 1, 2)]
        """,
        "found[0] == found[1] != found[2]",
    ),
    refused(
        "`LLM(m, trust_remote_code=True)`",
        "LLM(MODEL, trust_remote_code=True)",
        "trust_remote_code=True: False is accepted: no code of a model's is run here",
    ),
    refused(
        "`LLM(m, max_logprobs=50)`",
        "LLM(MODEL, max_logprobs=50)",
        "max_logprobs=50: 20 is accepted: a request may ask for 0 to 20 log probabilities a token",
    ),
    refused(
        '`LLM(m, logprobs_mode="processed_logprobs")`',
        'LLM(MODEL, logprobs_mode="raw_logprobs")\nLLM(MODEL, logprobs_mode="processed_logprobs")',
        "logprobs_mode='processed_logprobs': 'raw_logprobs' is accepted: log probabilities are the model's, "
        "before temperature and penalties",
    ),
    refused(
        "`LLM(m, logits_processors=[…])`, and in `SamplingParams`",
        "SamplingParams(logits_processors=None)\nLLM(MODEL, logits_processors=['mine:Processor'])",
        "logits_processors=['mine:Processor']: None and [] are accepted: a step is a record of numbers that "
        "any process can compute, and a function is none",
    ),
    runs(
        "`llm.chat(messages, params, False)`: `use_tqdm` by position",
        "found = llm.chat(messages, greedy, False) + llm.generate('a', greedy, False)",
        "len(found) == 2",
    ),
    runs(
        "`llm.chat(…, chat_template_kwargs=…, continue_final_message=True, tools=None)`",
        """
        begun = [*messages, {"role": "assistant", "content": "Max was"}]
        (o,) = llm.chat(
            begun, greedy, chat_template_kwargs={"enable_thinking": False}, tools=None,
            add_generation_prompt=False, continue_final_message=True,
        )
        """,
        "o.prompt.endswith('Max was')",
    ),
    runs(
        "`from engine.inputs import TextPrompt, TokensPrompt`",
        """
        from engine.inputs import TextPrompt, TokensPrompt
        found = llm.generate([TokensPrompt(prompt_token_ids=[67]), TextPrompt(prompt="a")], greedy)
        """,
        "found[0].outputs[0].text == found[1].outputs[0].text",
    ),
    runs(
        "`from engine.sampling_params import SamplingParams`",
        "from engine.sampling_params import SamplingParams as theirs",
        "theirs is SamplingParams",
    ),
    runs(
        "`from engine.sampling_params import StructuredOutputsParams`",
        """
        from engine.sampling_params import StructuredOutputsParams
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
        """,
        "asked.structured_outputs.choice == ['yes', 'no']",
    ),
    refused(
        "`from engine.sampling_params import GuidedDecodingParams`",
        "from engine.sampling_params import GuidedDecodingParams",
        "GuidedDecodingParams: vLLM's newer name for it is accepted, StructuredOutputsParams",
    ),
    runs(
        "`FlexibleArgumentParser`, `EngineArgs.add_cli_args(parser)`, `LLM(**vars(args))`",
        """
        from engine.utils.argparse_utils import FlexibleArgumentParser
        parser = FlexibleArgumentParser()
        EngineArgs.add_cli_args(parser)
        parser.set_defaults(model=MODEL)
        args = vars(parser.parse_args(["--max_model_len=64", "--no-enable-prefix-caching", "--seed", "3"]))
        other = LLM(**args)
        """,
        "other.args == EngineArgs(model=MODEL, max_model_len=64, enable_prefix_caching=False, seed=3)",
    ),
    runs(
        "`llm.llm_engine.model_config.max_model_len`",
        "found = LLM(MODEL, max_model_len=64).llm_engine.model_config.max_model_len",
        "found == 64",
    ),
    runs(
        "`llm.get_tokenizer().apply_chat_template(…)`",
        """
        tokenizer = llm.get_tokenizer()
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        (o,) = llm.chat(messages, greedy)
        """,
        "(text, ids) == (o.prompt, o.prompt_token_ids)",
    ),
    runs(
        '`tokenizer("Hi").input_ids`, `encode`, `decode`, `eos_token_id`',
        """
        tokenizer = llm.get_tokenizer()
        ids = tokenizer("Hi there").input_ids
        several = tokenizer(["Hi there", "a"])["input_ids"]
        """,
        "ids == tokenizer.encode('Hi there') == several[0] and tokenizer.decode(ids) == 'Hi there'"
        " and tokenizer.decode(tokenizer.eos_token_id) == '<|endoftext|>'",
    ),
    runs(
        "`SamplingParams(bad_words=[…])`, `allowed_token_ids=[…]`",
        """
        told = llm.generate("Once upon a time", greedy)[0].outputs[0].text
        word = next(word for word in told.split() if word.isalpha())
        without = llm.generate(
            "Once upon a time", SamplingParams(temperature=0, max_tokens=8, bad_words=[word])
        )[0].outputs[0].text
        only = llm.generate("a", SamplingParams(temperature=0, max_tokens=4, allowed_token_ids=[67]))
        """,
        "word in told and word not in without and only[0].outputs[0].token_ids == [67] * 4",
    ),
    runs(
        "`SamplingParams(detokenize=False)`, `spaces_between_special_tokens=True`, `extra_args=None`",
        "(o,) = llm.generate('a', SamplingParams("
        "max_tokens=4, detokenize=False, spaces_between_special_tokens=True, extra_args=None))",
        "o.outputs[0].text == '' and o.outputs[0].token_ids",
    ),
    runs(
        "`SamplingParams(2)` (n first), `.clone()`",
        "params = SamplingParams(2)\ncopy = params.clone()",
        "params.n == 2 and copy == params and copy is not params",
    ),
    refused(
        "`SamplingParams(structured_outputs={…})`",
        "SamplingParams(structured_outputs={'choice': ['yes', 'no']})",
        "structured_outputs",
    ),
    refused(
        "`SamplingParams(logprob_token_ids=[…])`",
        "SamplingParams(logprob_token_ids=[5])",
        "logprob_token_ids",
    ),
    runs(
        "`SamplingParams(skip_special_tokens=False)`: the token that ends the output is not shown",
        "(o,) = llm.generate(messages[0]['content'], SamplingParams("
        "temperature=0, max_tokens=400, skip_special_tokens=False))",
        "o.outputs[0].finish_reason == 'stop' and '<|endoftext|>' not in o.outputs[0].text",
    ),
    refused(
        "`llm.embed`, `encode`, `score`",
        "llm.embed('a')",
        "has no attribute 'embed': models here generate text, and give no vectors or scores of texts",
    ),
    refused(
        "`llm.sleep()`, `wake_up()`",
        "llm.sleep(level=1)",
        "has no attribute 'sleep': an engine keeps its memory until the process ends",
    ),
    refused(
        "`llm.collective_rpc(…)`",
        "llm.collective_rpc('reload_weights')",
        "has no attribute 'collective_rpc': a rank takes steps and adapters, and runs no function of yours",
    ),
    runs(
        "`llm.reset_prefix_cache()`",
        """
        prompt = "The dog and the cat went to the park, where the sun was warm and the grass was green."
        cached = [llm.generate(prompt, greedy)[0].num_cached_tokens for _ in range(2)]
        done = llm.reset_prefix_cache()
        cached.append(llm.generate(prompt, greedy)[0].num_cached_tokens)
        """,
        "done is True and cached[1] > 0 and cached[2] == 0",
    ),
    runs(
        "`LLM(m, disable_log_stats=False).get_metrics()`",
        """
        other = LLM(MODEL, disable_log_stats=False)
        other.generate(["a", "b"], greedy)
        found = {metric.name: metric for metric in other.get_metrics()}
        lengths = found["vllm:request_generation_tokens"]
        """,
        "found['vllm:generation_tokens'].value == 16 and (lengths.count, lengths.sum) == (2, 16)"
        " and lengths.buckets['+Inf'] == 2 and found['vllm:num_requests_running'].value == 0",
    ),
    runs(
        "`LLMEngine.from_engine_args(EngineArgs(…))`, `add_request`, `step`",
        """
        llm_engine = LLMEngine.from_engine_args(EngineArgs(model=MODEL))
        llm_engine.add_request("0", "The cat", greedy)
        while llm_engine.has_unfinished_requests():
            found = llm_engine.step()
        """,
        "found[0].finished and found[0].outputs[0].text",
    ),
    runs(
        "`AsyncLLMEngine.from_engine_args(…)`, `generate`, `abort`, `check_health`, `shutdown`",
        """
        async def last():
            engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL))
            await engine.check_health()
            async for output in engine.generate("The cat", greedy, "0"):
                pass
            await engine.abort("0")
            engine.shutdown()
            return output

        found = asyncio.run(last())
        """,
        "found.finished and found.outputs[0].text",
    ),
    runs(
        "`output.metrics`, `output.lora_request`, `completion.finished()`",
        "(o,) = llm.generate('a', greedy)",
        "o.metrics is o.stats and o.lora_request is None and o.outputs[0].finished()",
    ),
    runs(
        "`print(output)`: one short line, however long the output is",
        """
        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        short, long = (repr(llm.generate("Once upon a time", params)[0]) for params in (greedy, long))
        """,
        "len(short) < 700 and len(long) < len(short) + 100",
    ),
    runs(
        "`LoRARequest(name, 1, path).name`, `.adapter_id`",
        "lora = LoRARequest('poetry', 1, 'adapters/poetry')",
        "(lora.name, lora.adapter_id) == ('poetry', 1)",
    ),
    runs(
        'nano-vllm\'s `LLM(path, enforce_eager=True, tensor_parallel_size=1)`, `outputs[0]["text"]`',
        """
        other = LLM(MODEL, enforce_eager=True, tensor_parallel_size=1)
        outputs = other.generate(["Hello."], SamplingParams(temperature=0.6, max_tokens=256))
        """,
        # Without a seed the answer may be an end at once: ids it has always, a text nearly always.
        'outputs[0]["text"] == outputs[0].outputs[0].text'
        ' and outputs[0]["token_ids"] == outputs[0].outputs[0].token_ids != []',
    ),
]
