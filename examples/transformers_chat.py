"""Two processes continue one conversation: what one has computed, the other loads.

    python -m examples.transformers_chat                      a tiny model, made here, and a pool
    python -m examples.transformers_chat --model Qwen/Qwen3-0.6B --say "Hello!" --say "And now?"
    python -m examples.transformers_chat --masters HOST:7450  a pool that runs already

For each turn it prints the tokens that were computed and loaded. Turns alternate between two
processes, neither of which has a cache of its own; at the end the same questions without a pool.
Needs `pip install 'kvpool[transformers]'`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

QUESTIONS = (
    "You are a careful guide to the rivers of this country. Which one is the longest, and why?",
    "Which towns does it pass on its way to the sea?",
    "And if it froze, how would people travel?",
    "Tell me all of that again, in one sentence.",
)


def answer_lines(model_path: str, masters: str, tokens: int, source: IO[str]) -> None:
    """One process of the chat: a line of JSON with the conversation in, one with the answer out."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from kvpool_transformers import PooledCache

    transformers.utils.logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    # A tiny model computes faster than any pool answers; with `auto` nothing would be loaded.
    with PooledCache(masters or None, model, load="always") as cache:
        print("ready", flush=True)
        for line in source:
            prompt = tokenizer.apply_chat_template(
                json.loads(line), add_generation_prompt=True, tokenize=False
            )
            ids = tokenizer(prompt, add_special_tokens=False).input_ids
            whole = cache.generate(ids, max_new_tokens=tokens, do_sample=False)
            told = cache.last
            cache.settle()
            said = {
                "text": tokenizer.decode(whole[len(ids) :], skip_special_tokens=True),
                "prompt": len(ids),
                "loaded": told.loaded,
                "computed": told.computed,
                "seconds": told.seconds,
            }
            print(json.dumps(said), flush=True)


@contextmanager
def chatting(arguments: argparse.Namespace, model: str, masters: str) -> Iterator[Any]:
    """A process of the chat; a function that asks it."""
    command = [sys.executable, "-m", "examples.transformers_chat", "--answer", "--model", model]
    command += ["--masters", masters, "--tokens", str(arguments.tokens)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        if stdout.readline().strip() != "ready":
            raise SystemExit("a process of the chat did not start")

        def ask(conversation: list[dict[str, str]]) -> dict[str, Any]:
            print(json.dumps(conversation), file=stdin, flush=True)
            said: dict[str, Any] = json.loads(stdout.readline())
            return said

        try:
            yield ask
        finally:
            stdin.close()


@contextmanager
def own_pool() -> Iterator[str]:
    command = [sys.executable, "-m", "kvpool", "dev", "--capacity", "256MiB"]
    with subprocess.Popen(
        [*command, "--bind", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True
    ) as pool:
        assert pool.stdout is not None
        try:
            yield pool.stdout.readline().rpartition(" ")[2].strip()
        finally:
            pool.terminate()


def play(questions: list[str], processes: dict[str, Any]) -> tuple[list[str], int, int]:
    """The conversation, turn by turn in the next process; the answers, tokens computed, loaded."""
    conversation: list[dict[str, str]] = []
    answers, computed, loaded = [], 0, 0
    names = list(processes)
    for turn, question in enumerate(questions):
        name = names[turn % len(names)]
        conversation.append({"role": "user", "content": question})
        said = processes[name](conversation)
        conversation.append({"role": "assistant", "content": said["text"]})
        answers.append(said["text"])
        computed += said["computed"]
        loaded += said["loaded"]
        print(
            f"turn {turn + 1}, {name}: {said['prompt']} tokens, {said['loaded']} loaded, "
            f"{said['computed']} computed, {said['seconds'] * 1000:.0f} ms"
        )
    return answers, computed, loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="", help="a name or a directory; default: made here")
    parser.add_argument("--masters", default="", help="HOST:PORT of a master; default: a pool here")
    parser.add_argument("--tokens", type=int, default=24, help="of each answer, at most")
    parser.add_argument("--say", action="append", help="a question; several times, for turns")
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        return answer_lines(arguments.model, arguments.masters, arguments.tokens, sys.stdin)
    questions = arguments.say or list(QUESTIONS)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model
        if not model:
            from examples import tiny_model

            model = str(tiny_model.make(Path(folder) / "model"))
        with (
            nullcontext(arguments.masters) if arguments.masters else own_pool() as masters,
            chatting(arguments, model, masters) as first,
            chatting(arguments, model, masters) as second,
        ):
            answers, computed, loaded = play(questions, {"process A": first, "process B": second})
        with chatting(arguments, model, "") as alone:
            expected, without, _ = play(questions, {"no pool": alone})
    print(f"with the pool: {computed} computed, {loaded} loaded; without: {without} computed")
    print(f"the same answers: {answers == expected}")


if __name__ == "__main__":
    main()
