"""`inkling-portable demo`: a tiny random Inkling answers through `vllm serve` on this machine.

Writes a checkpoint, starts the server, chats with it through the OpenAI SDK, in words, with a
picture and a clip, and with a tool's result; shows which kernels were chosen, measures, and stops.
Exits non-zero when any step fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from inkling_portable.commands import demo_media
from inkling_portable.commands._server import Server, ServerError, memory_arguments
from inkling_portable.commands.demo_media import DemoError

QUESTION = "What is a short convolution good for?"
SERVE_ARGUMENTS = [
    *("--tokenizer-mode", "inkling"),
    *("--reasoning-parser", "inkling"),
    *("--tool-call-parser", "inkling"),
    "--enable-auto-tool-choice",
]
# What a tiny model on a CPU needs beside the arguments of a real one.
TINY_ARGUMENTS = [
    *("--dtype", "float32"),
    *("--max-model-len", "1024"),
    *("--max-num-seqs", "16"),
    *("--block-size", "16"),
]


def announce(title: str) -> None:
    """Prints the heading of a step."""
    print(f"\n--- {title}", flush=True)


class Progress:
    """One line that grows on a terminal, and a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self.printed = 0.0

    def __call__(self, seconds: float) -> None:
        """Shows that `seconds` have passed."""
        if sys.stdout.isatty():
            print(f"\rwaiting for the server: {seconds:3.0f} s", end="", flush=True)
        elif seconds - self.printed >= 10:
            self.printed = seconds
            print(f"waiting for the server: {seconds:3.0f} s", flush=True)

    def end(self) -> None:
        """Moves on to the next line of a terminal."""
        if sys.stdout.isatty():
            print()


def run_own_command(*arguments: str) -> None:
    """Runs `python -m inkling_portable ...` and lets it print; raises DemoError when it fails."""
    done = subprocess.run([sys.executable, "-m", "inkling_portable", *arguments], check=False)
    if done.returncode:
        raise DemoError(f"`inkling-portable {' '.join(arguments)}` ended with {done.returncode}")


def token_id(checkpoint: Path, content: str) -> int:
    """The id of a special token, from the checkpoint's own tokenizer."""
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == content:
            return int(token["id"])
    raise DemoError(f"the tokenizer in {checkpoint} has no token {content}")


def streamed_chat(client: Any, model: str, tokens: int, text_marker: int) -> None:
    """Sends one streamed chat, prints what goes out and what comes in, and checks its end.

    text_marker: id of the token after which the parser shows text; random weights would hardly
    ever choose it by themselves, and nothing would be shown before the end.
    """
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": QUESTION},
    ]
    for message in messages:
        print(f"sent      {message['role']:7} {message['content']}")
    print("received  ", end="", flush=True)
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=tokens,
        temperature=1.0,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
        logit_bias={str(text_marker): 6},
        extra_body={"ignore_eos": True},
    )
    chunks, first, usage, finish = 0, None, None, None
    for chunk in stream:
        chunks += 1
        first = first or time.monotonic() - started
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            text = getattr(choice.delta, "reasoning", None) or choice.delta.content or ""
            # Random bytes would upset a terminal.
            print(repr(text)[1:-1], end="", flush=True)
    print()
    if usage is None or finish is None or usage.completion_tokens != tokens:
        raise DemoError(
            f"the stream should have ended after {tokens} tokens with a reason and a count; it "
            f"ended after {chunks} chunks with reason {finish} and {usage}"
        )
    print(
        f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {chunks} chunks, finish "
        f"reason {finish}, first chunk after {first:.2f} s"
    )
    print(
        "The weights are random, so the words are nonsense and only the machinery is real. (The "
        "request asks for all its tokens and pushes the model towards the text marker.)"
    )


def tokens_per_second(client: Any, model: str, tokens: int, requests: int) -> float:
    """Tokens generated per second of wall time with `requests` requests at once."""

    def one(index: int) -> int:
        answer = client.completions.create(
            model=model,
            prompt=f"{index} {QUESTION}",
            max_tokens=tokens,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )
        return int(answer.usage.completion_tokens)

    started = time.monotonic()
    with ThreadPoolExecutor(requests) as pool:
        total = sum(pool.map(one, range(requests)))
    return total / (time.monotonic() - started)


def use(server: Server, tokens: int, text_marker: int, media: tuple[int, int]) -> None:
    """All that the demo does with a server that is ready."""
    from openai import OpenAI

    print(server.plugin_line())
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0)
    announce("a streamed chat through the OpenAI SDK")
    streamed_chat(client, server.name, tokens, text_marker)
    announce("a picture and a clip in one prompt")
    demo_media.picture_and_clip(client, server.name, media)
    announce("a conversation that holds a tool call and its result")
    demo_media.tool_result(client, server.name)
    announce("which kernel each operation uses on this machine, and why")
    run_own_command("explain")
    announce("speed and memory")
    for requests in (1, 8):
        speed = tokens_per_second(client, server.name, 2 * tokens, requests)
        print(f"{requests} request{'s' if requests > 1 else ' '}: {speed:6.1f} tokens/s")
    sizes = server.memory_gib()
    print(f"memory: {sum(sizes.values()):.2f} GiB in {len(sizes)} processes")
    for name, size in sizes.items():
        print(f"  {size:5.2f} GiB  {name}")
    if not server.is_healthy():
        raise DemoError(f"the server no longer answers; the end of its log:\n{server.log_tail()}")


def run(folder: Path, limit_s: float, tokens: int) -> None:
    """The demo, with its files in `folder`; raises DemoError or ServerError."""
    started = time.monotonic()
    announce("a tiny checkpoint with random weights")
    checkpoint = folder / "checkpoint"
    run_own_command("tiny", str(checkpoint), "--preset", "omni")
    arguments = [*SERVE_ARGUMENTS, *TINY_ARGUMENTS, *memory_arguments("256M")]
    server = Server(checkpoint, arguments, folder / "server.log")
    announce("the server")
    print("$ vllm", *server.command[1:], flush=True)
    with server:
        marker, media = (
            token_id(checkpoint, "<|content_text|>"),
            demo_media.media_tokens(checkpoint),
        )
        progress = Progress()
        try:
            ready_s = server.wait_until_ready(limit_s, progress)
        finally:
            progress.end()
        print(f"ready after {ready_s:.0f} s")
        use(server, tokens, marker, media)
        announce("stopping")
    print(f"the server has stopped; the demo took {time.monotonic() - started:.0f} s")


def main(argv: list[str]) -> int:
    """`inkling-portable demo [--keep DIR] [--timeout S] [--tokens N]`."""
    parser = argparse.ArgumentParser(prog="inkling-portable demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep checkpoint and log in DIR")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds the start may take"
    )
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="length of the answer")
    options = parser.parse_args(argv)
    try:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
            run(options.keep, options.timeout, options.tokens)
        else:
            with tempfile.TemporaryDirectory(prefix="inkling-demo-") as folder:
                run(Path(folder), options.timeout, options.tokens)
    except (DemoError, ServerError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # The SDK raises many kinds; each is a failed step.
        print(f"demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
