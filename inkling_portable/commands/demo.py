"""`inkling-portable demo`: a small trained Inkling answers through `vllm serve` on this machine.

Serves portable-nano, which comes with this package, and asks it through the OpenAI SDK: for a word
planted in a text, for a thought and its answer, for a tool call and what to make of its result,
for the colour of a shape and the note of a tone. Every answer is checked. Then it shows which
kernels were chosen, measures, and stops. Exits non-zero when any step fails.
"""

import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from inkling_portable.commands import eval_media, eval_tasks
from inkling_portable.commands._options import OptionParser, positive
from inkling_portable.commands._server import (
    SERVE_ARGUMENTS,
    TINY_ARGUMENTS,
    Server,
    ServerError,
    memory_arguments,
)
from inkling_portable.commands.eval_tasks import Case
from inkling_portable.commands.eval_words import PORTABLE_NANO

QUESTION = "there was a old tower beside the river."
SHOWN = 160
"""Characters of a message that are printed, its end."""


class DemoError(Exception):
    """A sentence: which step failed and what was seen."""


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


def shown(message: dict[str, Any]) -> str:
    """A message in one line."""
    content = message.get("content") or ""
    if isinstance(content, list):
        names = {"image_url": "[picture]", "input_audio": "[sound]"}
        content = " ".join(names.get(part["type"]) or part["text"] for part in content)
    parts = [content if len(content) <= SHOWN else f"... {content[-SHOWN:]}"]
    if message.get("reasoning"):
        parts.insert(0, f"(thinks: {message['reasoning']})")
    for call in message.get("tool_calls") or ():
        parts.append(f"calls {call['function']['name']} with {call['function']['arguments']}")
    return " ".join(part for part in parts if part)


def ask(client: Any, model: str, case: Case) -> dict[str, Any]:
    """Streams the answer to a case, prints it, and returns it as a message.

    Raises DemoError when the answer is not right or the stream does not end as it should.
    """
    started = time.monotonic()
    stream = client.chat.completions.create(
        model=model,
        messages=case.asked,
        max_tokens=96,
        temperature=0.0,
        stream=True,
        stream_options={"include_usage": True},
        **({"tools": case.tools} if case.tools else {}),
    )
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning": ""}
    calls: dict[int, dict[str, Any]] = {}
    chunks, first, usage, finish = 0, None, None, None
    for chunk in stream:
        chunks += 1
        first = first or time.monotonic() - started
        usage = chunk.usage or usage
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for part in choice.delta.tool_calls or ():
                new = {"type": "function", "function": {"name": "", "arguments": ""}}
                call = calls.setdefault(part.index, new)
                call["id"] = part.id or call.get("id")
                call["function"]["name"] += part.function.name or ""
                call["function"]["arguments"] += part.function.arguments or ""
    message["tool_calls"] = list(calls.values())
    print(f"received  model   {shown(message)}")
    if not eval_tasks.is_right(case, message):
        raise DemoError(f"the right answer was: {shown(case.wanted)}; it was: {shown(message)}")
    if usage is None or finish not in ("stop", "tool_calls"):
        raise DemoError(f"the stream ended with reason {finish} and count {usage} after the answer")
    print(
        f"          right; {usage.prompt_tokens} tokens in, {usage.completion_tokens} out, "
        f"{chunks} chunks, the first after {first:.2f} s"
    )
    return message


def converse(client: Any, model: str, case: Case) -> None:
    """Asks what a case asks, turn by turn: what stands for the model in it is its own."""
    messages: list[dict[str, Any]] = []
    for message in case.messages:
        if message["role"] == "assistant":
            answer = ask(client, model, Case(case.task, [*messages, message], case.tools))
            # A server gives each call an identity, to which its result refers.
            messages.append({k: v for k, v in answer.items() if v})
            continue
        print(f"sent      {message['role']:7} {shown(message)}")
        if message["role"] == "tool":
            message = message | {"tool_call_id": messages[-1]["tool_calls"][0]["id"]}
        messages.append(message)


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


def use(server: Server, tokens: int) -> None:
    """All that the demo does with a server that is ready."""
    from openai import OpenAI

    print(server.plugin_line())
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120.0)
    announce("a word planted 256 tokens before the question")
    converse(client, server.name, eval_tasks.case("retrieve at 4x extent", 0))
    announce("a thought, then an answer")
    converse(client, server.name, eval_tasks.case("think", 0))
    announce("a tool call, and what to make of its result")
    converse(client, server.name, eval_tasks.case("tool result", 1))
    announce("three pictures and two sounds")
    for task, count in (("colour of a shape", 2), ("place of a shape", 1), ("note of a tone", 2)):
        for index in range(count):
            converse(client, server.name, eval_media.case(task, index))
    announce("which kernel each operation uses on this machine, and why")
    run_own_command("explain")
    announce("speed and memory")
    for requests in (1, 8):
        speed = tokens_per_second(client, server.name, tokens, requests)
        print(f"{requests} request{'s' if requests > 1 else ' '}: {speed:6.1f} tokens/s")
    sizes = server.memory_gib()
    print(f"memory: {sum(sizes.values()):.2f} GiB in {len(sizes)} processes")
    for name, size in sizes.items():
        print(f"  {size:5.2f} GiB  {name}")
    if not server.is_healthy():
        raise DemoError(f"the server no longer answers; the end of its log:\n{server.log_tail()}")


def run(folder: Path, limit_s: float, tokens: int) -> None:
    """The demo, with its log in `folder`; raises DemoError or ServerError."""
    started = time.monotonic()
    arguments = [*SERVE_ARGUMENTS, *TINY_ARGUMENTS, *memory_arguments("256M")]
    server = Server(PORTABLE_NANO, arguments, folder / "server.log", name="portable-nano")
    announce("the server")
    print("$ vllm", *server.command[1:], flush=True)
    with server:
        progress = Progress()
        try:
            ready_s = server.wait_until_ready(limit_s, progress)
        finally:
            progress.end()
        print(f"ready after {ready_s:.0f} s")
        use(server, tokens)
        announce("stopping")
    print(f"the server has stopped; the demo took {time.monotonic() - started:.0f} s")


def main(argv: list[str]) -> int:
    """`inkling-portable demo [--keep DIR] [--timeout S] [--tokens N]`."""
    parser = OptionParser(prog="inkling-portable demo", description=__doc__)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the log in DIR")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="S", help="seconds the start may take"
    )
    parser.add_argument(
        "--tokens",
        type=positive,
        default=96,
        metavar="N",
        help="length of the answers that are timed",
    )
    options = parser.parse_args(argv)
    try:
        if options.keep is not None:
            options.keep.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--keep needs a folder that can be written; {error}")
    try:
        if options.keep is not None:
            run(options.keep, options.timeout, options.tokens)
        else:
            with tempfile.TemporaryDirectory(prefix="inkling-demo-") as folder:
                run(Path(folder), options.timeout, options.tokens)
    except (DemoError, ServerError) as error:
        print(f"inkling-portable demo: {error}", file=sys.stderr)
        return 1
    except Exception as error:  # The SDK raises many kinds; each is a failed step.
        print(f"inkling-portable demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
