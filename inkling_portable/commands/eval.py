"""`inkling-portable eval`: how often a served model answers right, with counts and intervals.

Asks portable-nano's questions, or needles in haystacks up to the context limit, or tool calls, or
about pictures and sounds, of any OpenAI-compatible server, or of a checkpoint folder that it serves
for that time: portable-nano itself, when none is named.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inkling_portable.commands import eval_media as media
from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands._options import OptionParser, positive
from inkling_portable.commands._server import (
    SERVE_ARGUMENTS,
    TINY_ARGUMENTS,
    Server,
    ServerError,
    memory_arguments,
)
from inkling_portable.commands.eval_words import PORTABLE_NANO

SUITES = ("nano", "niah", "tools", *media.SUITES)
ANSWER_TOKENS = 96
LENGTHS = (256, 512, 1024, 4096, 16384, 65536, 131072, 226304, 525312, 1048576)
"""Prompt tokens of the needle suite, as far as the server's limit; the last is the limit itself."""
SAME_UNTIL, NEAR_UNTIL = 226304, 525312
"""221K and 513K tokens, where the launch documents' statements on needles end."""
MARGIN = 160
"""Tokens of a prompt beside its filler, its answer, and what counting by sentences may miss."""


class EvalError(Exception):
    """A sentence: what cannot be evaluated, and why."""


@dataclass(frozen=True)
class Question:
    """A case and the row of the table that it belongs to."""

    row: str
    case: tasks.Case


@dataclass
class Row:
    """One line of the table."""

    task: str
    right: int = 0
    asked: int = 0
    wanted: str = ""
    """The share that is asked for, or what the launch documents state, in words."""
    low: float = 0.0
    high: float = 1.0


def wilson(right: int, asked: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share of which `right` of `asked` were seen."""
    if not asked:
        return 0.0, 1.0
    share, spread = right / asked, z * z / asked
    middle = share + spread / 2
    reach = z * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return max(0.0, (middle - reach) / (1 + spread)), min(1.0, (middle + reach) / (1 + spread))


def what_failed(error: Exception) -> str:
    """A clause on what a server did, from what the SDK raised and what lies behind that."""
    import openai

    if isinstance(error, openai.APITimeoutError):
        return "it did not answer in time (--timeout)"
    if isinstance(error, openai.APIStatusError):
        return f"it answered with status {error.status_code} ({error.message.splitlines()[0]})"
    behind = error.__cause__ or error
    return f"it did not answer ({str(behind).rstrip('.') or type(behind).__name__})"


class Client:
    """The chat endpoint of a server, through the OpenAI SDK."""

    def __init__(self, url: str, model: str | None, timeout_s: float) -> None:
        from openai import OpenAI, OpenAIError

        base = url.rstrip("/")
        base = base if base.endswith("/v1") else f"{base}/v1"
        self.api = OpenAI(base_url=base, api_key="none", max_retries=0, timeout=timeout_s)
        try:
            served = self.api.models.list().data
        except (OpenAIError, AttributeError) as error:
            page = isinstance(error, AttributeError)  # The SDK hands a web page over as text.
            found = "it answered with no list of them" if page else what_failed(error)
            raise EvalError(
                f"needs an OpenAI-compatible server at {url}; asked for its models, {found}; "
                f"start one there, or give the URL that one listens on"
            ) from error
        names = [entry.id for entry in served]
        if not names or (model is not None and model not in names):
            raise EvalError(
                f"{url} serves {', '.join(names) or 'nothing'}, not {model or 'any model'}; name "
                f"one that it serves with --model, or give the URL of another server"
            )
        self.model = model or names[0]
        entry = served[names.index(self.model)]
        self.limit: int | None = getattr(entry, "max_model_len", None)

    def _create(self, messages: list[Any], tools: list[Any], tokens: int) -> Any:
        more: dict[str, Any] = {"tools": tools, "tool_choice": "auto"} if tools else {}
        return self.api.chat.completions.create(
            model=self.model, messages=messages, temperature=0.0, max_tokens=tokens, **more
        )

    def prompt_tokens(self, messages: list[Any]) -> int:
        """Tokens of a prompt, as the server counts them."""
        return int(self._create(messages, [], 1).usage.prompt_tokens)

    def answer(self, case: tasks.Case, tokens: int = ANSWER_TOKENS) -> dict[str, Any]:
        """The assistant's message."""
        message = self._create(case.asked, case.tools, tokens).choices[0].message
        found: dict[str, Any] = message.model_dump()
        found["reasoning"] = found.get("reasoning") or found.get("reasoning_content")
        return found


# --- what is asked --------------------------------------------------------------------------------


def task_questions(names: Sequence[str], count: int, seed: int) -> list[Question]:
    """`count` questions of each task."""
    return [
        Question(name, (tasks.case if name in tasks.TASKS else media.case)(name, i, seed))
        for name in names
        for i in range(count)
    ]


def needle_questions(client: Client, count: int, seed: int, limit: int) -> list[Question]:
    """Needles at evenly spread depths, in prompts of all `LENGTHS` below `limit`, and of that.

    The server's own tokenizer counts: a prompt of filler alone says what a sentence takes.
    """
    rng = random.Random(f"{seed}:sentences")
    sample = [tasks.filler(rng) for _ in range(24)]
    long = client.prompt_tokens([tasks.user(" ".join(sample))])
    short = client.prompt_tokens([tasks.user(sample[0])])
    each = (long - short) / (len(sample) - 1)
    lengths = [length for length in LENGTHS if length < limit] + [limit]
    questions = []
    for length in lengths:
        sentences = max(1, int((length - MARGIN) / each))
        for i in range(count):
            rng = random.Random(f"{seed}:{length}:{i}")
            depth = i / max(1, count - 1)
            case = tasks.needle(rng, sentences, depth)
            questions.append(Question(f"needle in {length:,} tokens", case))
    return questions


def wanted_share(row: str) -> float:
    """What portable-nano is held to in a row, 0 where nothing is."""
    return media.WANTED if row in media.TASKS else tasks.THRESHOLDS.get(row, 0.0)


def stated(row: str) -> str:
    """What the launch documents state about a row of the real suites."""
    if not row.startswith("needle"):
        return "none stated"
    length = int(row.split()[2].replace(",", ""))
    if length <= SAME_UNTIL:
        return "as the reference"
    return "within 1 point" if length <= NEAR_UNTIL else "none stated"


def ask(client: Client, questions: list[Question], requests: int) -> Iterator[tuple[Question, Any]]:
    """Every question with its answer, as they come; a request that fails is no answer."""
    with ThreadPoolExecutor(requests) as pool:
        waiting = {pool.submit(client.answer, question.case): question for question in questions}
        for done in as_completed(waiting):
            error = done.exception()
            yield waiting[done], done.result() if error is None else error


def evaluate(
    client: Client,
    questions: list[Question],
    requests: int,
    wanted: Callable[[str], str],
    show: Callable[[], None] = lambda: None,
) -> tuple[list[Row], list[dict[str, Any]]]:
    """The table, and every wrong answer beside the right one.

    Raises EvalError when every request fails.
    """
    rows = {question.row: Row(question.row, wanted=wanted(question.row)) for question in questions}
    wrong: list[dict[str, Any]] = []
    failed: Exception | None = None
    answered = 0
    for question, answer in ask(client, questions, requests):
        row = rows[question.row]
        row.asked += 1
        if isinstance(answer, Exception):
            failed = answer
            found, right = {"error": f"{type(answer).__name__}: {answer}"}, False
        else:
            answered += 1
            found = {k: answer.get(k) for k in ("content", "reasoning", "tool_calls")}
            right = tasks.is_right(question.case, answer)
        row.right += right
        if not right:
            last = str(question.case.asked[-1]["content"])[-200:]
            wrong.append({"task": question.row, "asked": last, "wanted": question.case.wanted,
                          "found": found})  # fmt: skip
        show()
    if failed is not None and not answered:
        raise EvalError(
            f"no request was answered; of the last one, {what_failed(failed)}; see the server's "
            f"log for the reason"
        ) from failed
    for row in rows.values():
        row.low, row.high = wilson(row.right, row.asked)
    return list(rows.values()), wrong


# --- the command ----------------------------------------------------------------------------------


def table(rows: list[Row], heading: str) -> str:
    """The rows as text."""
    width = max(len(row.task) for row in rows)
    lines = [f"{'task':{width}}   right/asked   share   95 % interval   {heading}"]
    for row in rows:
        share = row.right / max(row.asked, 1)
        lines.append(
            f"{row.task:{width}}   {row.right:5}/{row.asked:<5}  {share:6.1%}   "
            f"{row.low:5.1%} to {row.high:6.1%}   {row.wanted}"
        )
    return "\n".join(lines)


@contextmanager
def served(target: str, options: argparse.Namespace) -> Iterator[str]:
    """The URL of a server: the one named, or one started for a checkpoint folder."""
    if target.startswith(("http://", "https://")):
        yield target
        return
    folder = Path(target)
    if not (folder / "config.json").exists():
        raise EvalError(
            f"needs the URL of a server or a checkpoint folder; {target} is neither: it has "
            f"no config.json"
        )
    import torch

    arguments = list(SERVE_ARGUMENTS)
    if not torch.cuda.is_available():
        arguments += [*TINY_ARGUMENTS, *memory_arguments("256M")]
    with tempfile.TemporaryDirectory(prefix="inkling-eval-") as scratch:
        server = Server(
            folder, [*arguments, *options.serve], Path(scratch) / "server.log", name=folder.name
        )
        with server:
            print("waiting for the server", file=sys.stderr, flush=True)
            seconds = server.wait_until_ready(options.timeout, lambda seconds: None)
            print(f"ready after {seconds:.0f} s", file=sys.stderr, flush=True)
            yield server.url


def run(options: argparse.Namespace) -> int:
    """The evaluation; 0 when every row reaches what is asked of it."""
    from tqdm import tqdm

    with served(options.target, options) as url:
        started = time.monotonic()
        client = Client(url, options.model, options.timeout)
        limit = options.limit or client.limit
        suites = ("niah", "tools") if options.real else (options.suite,)
        questions: list[Question] = []
        if "nano" in suites:
            questions += task_questions(tuple(tasks.TASKS), options.count, options.seed)
        if "niah" in suites:
            if not limit:
                raise EvalError(f"{url} does not say its context limit; pass --limit TOKENS")
            questions += needle_questions(client, options.count, options.seed, limit)
        if "tools" in suites:
            questions += task_questions(tasks.TOOL_TASKS, options.count, options.seed)
        for suite in set(suites) & set(media.SUITES):
            questions += task_questions(media.SUITES[suite], options.count, options.seed)

        def asked(row: str) -> str:
            share = wanted_share(row)
            return stated(row) if options.real or not share else f">= {share:.0%}"

        bar = tqdm(
            total=len(questions), unit="prompt", mininterval=1 if sys.stderr.isatty() else 20
        )
        with bar:
            rows, wrong = evaluate(client, questions, options.requests, asked, bar.update)
        seconds = time.monotonic() - started
    print(table(rows, "launch documents" if options.real else "wanted"))
    print(f"{len(questions)} prompts in {seconds:.0f} s, model {client.model}")
    below = [
        row.task
        for row in rows
        if not options.real and row.right < wanted_share(row.task) * row.asked
    ]
    for name in below:
        print(f"{name}: below what is wanted")
    if options.json:
        report = {
            "model": client.model,
            "suites": suites,
            "seed": options.seed,
            "seconds": round(seconds, 1),
            "rows": [asdict(row) for row in rows],
            "wrong": wrong,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 1 if below else 0


def main(argv: list[str]) -> int:
    """`inkling-portable eval DIR|URL [--suite S] [--count N] [--real] [--json FILE] [-- ARGS]`."""
    given, extra = argv, []
    if "--" in argv:
        split = argv.index("--")
        given, extra = argv[:split], argv[split + 1 :]
    parser = OptionParser(
        prog="inkling-portable eval", description=__doc__,
        epilog="What follows -- goes to `vllm serve` when a folder is served.",
    )  # fmt: skip
    parser.add_argument(
        "target", metavar="DIR|URL", nargs="?", default=str(PORTABLE_NANO),
        help="checkpoint folder or server; portable-nano if left out",
    )  # fmt: skip
    parser.add_argument("--suite", choices=SUITES, default="nano")
    parser.add_argument(
        "--real", action="store_true",
        help="needles up to the context limit and tools, beside what the launch documents state",
    )  # fmt: skip
    parser.add_argument("--count", type=positive, default=17, metavar="N", help="prompts per row")
    parser.add_argument("--seed", type=int, default=1, metavar="S", help="which questions")
    parser.add_argument(
        "--requests", type=positive, default=8, metavar="N", help="requests at once"
    )
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="context limit, if not the server's"
    )
    parser.add_argument("--model", metavar="NAME", help="model name, if the server has several")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="start, request")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and wrong answers")
    options = parser.parse_args(given)
    options.serve = extra
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json needs a file in a folder that exists; found {options.json}")
    try:
        return run(options)
    except (EvalError, ServerError) as error:
        print(f"inkling-portable eval: {error}", file=sys.stderr)
        return 2
    except Exception as error:  # The SDK raises many kinds; each means that the server failed.
        said = f"{type(error).__name__}: {error}; see the server's log"
        print(f"inkling-portable eval: {said}", file=sys.stderr)
        return 2
