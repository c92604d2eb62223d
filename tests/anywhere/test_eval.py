"""`inkling-portable eval`: its questions, what it takes for right, and its table."""

import http.server
import json
import random
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import binomtest

from benchmarks.nano import message
from inkling_portable.commands import eval as command
from inkling_portable.commands import eval_media
from inkling_portable.commands import eval_tasks as tasks
from inkling_portable.commands.eval_words import pieces
from training.conversations import Transcript, batch, case_ids
from training.tokenizer import encode, special_ids, vocabulary_size, write

CASES = [tasks.case(task, index) for task in tasks.TASKS for index in range(12)]
CASES += [eval_media.case(task, index) for task in eval_media.TASKS for index in range(4)]


def as_answer(message: dict[str, Any]) -> dict[str, Any]:
    return {"content": None, "reasoning": None, "tool_calls": None, **message}


def test_right_answers_are_right() -> None:
    for case in CASES:
        assert tasks.is_right(case, as_answer(case.wanted)), case.wanted


def test_other_answers_are_wrong() -> None:
    """The right answer of another question, no answer, and a call too many, few or bent."""
    for case, other in zip(CASES, CASES[1:] + CASES[:1], strict=True):
        if as_answer(other.wanted)["content"] != as_answer(case.wanted)["content"]:
            assert not tasks.is_right(case, as_answer(other.wanted)), (case.wanted, other.wanted)
        assert not tasks.is_right(case, as_answer({"content": ""}))
        call = tasks.calling(tasks.Use("get_time", "", {"city": "quito"}, "", ""))["tool_calls"]
        assert not tasks.is_right(case, as_answer(case.wanted | {"tool_calls": call * 2}))
    (call,) = tasks.case("tool call", 0).wanted["tool_calls"]
    for key, value in (("arguments", "{"), ("arguments", "{}"), ("name", "get")):
        bent = call | {"function": call["function"] | {key: value}}
        assert not tasks.is_right(tasks.case("tool call", 0), as_answer({"tool_calls": [bent]}))
    thought = tasks.case("think", 0)
    assert not tasks.is_right(thought, as_answer(thought.wanted | {"reasoning": " "}))


def test_answers_of_an_engine_are_read_like_those_of_a_server() -> None:
    """What `benchmarks.nano` makes of the text that a right answer is generated as."""
    names = {index: token for token, index in special_ids().items()}
    words = {256 + i: piece for i, piece in enumerate(pieces())}
    for case in CASES:
        ids, start = case_ids(case)
        text = "".join(names.get(i) or words.get(i) or chr(i) for i in ids[start:])
        assert tasks.is_right(case, message(text)), text
        assert not tasks.is_right(case, message(text.replace("<|content_", "<|unused_")))
    broken = message('get<|content_invoke_tool_json|>{"name":<|end_message|>')
    assert broken["tool_calls"] == [{"function": {"name": "", "arguments": '{"name":'}}]


def test_distances_are_what_the_rows_say() -> None:
    """Tokens from the planted word to the one whose successor has to be it."""
    bounds = {
        "retrieve inside window": (0, tasks.WINDOW - 1),
        "retrieve inside extent": (tasks.WINDOW, tasks.EXTENT - 1),
        "retrieve at 1x extent": (tasks.EXTENT, tasks.EXTENT + 16),
        "retrieve at 4x extent": (4 * tasks.EXTENT, 4 * tasks.EXTENT + 16),
        "retrieve at 16x extent": (16 * tasks.EXTENT, 16 * tasks.EXTENT + 16),
    }
    for case in CASES:
        if case.task in bounds:
            ids, _ = case_ids(case)
            sentence = encode(" " + case.wanted["content"])[1:-1]
            starts = [i for i in range(len(ids)) if ids[i : i + len(sentence)] == sentence]
            assert len(starts) == 2
            asked_at = starts[1] + len(sentence) - 2
            distance = asked_at - (starts[0] + len(sentence) - 1)
            low, high = bounds[case.task]
            assert low <= distance <= high, case.task


def test_no_question_occurs_in_training() -> None:
    rng, makers = random.Random(1), (tasks.arithmetic, tasks.chain, tasks.copying, tasks.tool_call)
    few = ("turn_on", "turn_off", "call_person")
    for make in makers:
        seen = {json.dumps(make(rng, "train").messages[-1]) for _ in range(3000)}
        for _ in range(300):
            held_out = make(rng, "eval")
            if not held_out.tools or held_out.tools[0] not in few:
                assert json.dumps(held_out.messages[-1]) not in seen
    planted = {tasks.secret(rng, "train") for _ in range(3000)}
    assert planted.isdisjoint(tasks.secret(rng, "eval") for _ in range(3000))
    made = batch(0, 3, 512)
    assert made.ids.shape == made.weights.shape == (3, 512)
    assert set(made.weights.flat) > {0.0, 1.0}


def test_the_written_tokenizer_cuts_as_the_trainer_does(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write(tmp_path, 100)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == vocabulary_size()
    texts = [m["content"] for case in CASES for m in case.messages]
    texts = [text for text in texts if isinstance(text, str)]
    texts += [json.dumps(case.tools, separators=(",", ":")) for case in CASES]
    texts += ["Übergrößen, naïve: 12.5 %\n\n  x", "", " the  secret"]
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert ids == encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    known = set(special_ids().values())
    assert known.isdisjoint(encode("".join(special_ids())))


def test_a_conversation_continues() -> None:
    """The next turn of a conversation begins where the one before ended."""
    first = Transcript()
    first.add(tasks.user("hello"))
    first.answer(tasks.assistant("hello, i am portable nano."))
    longer = first.copy()
    longer.add(tasks.user("who are you?"))
    assert longer.ids[: len(first.ids)] == first.ids != longer.ids
    assert (
        sum(weight == 1 for weight in first.weights)
        == len(encode(" hello, i am portable nano.")) + 3
    )


@pytest.mark.parametrize(("right", "asked"), [(0, 17), (17, 17), (16, 17), (981, 1000), (1, 3)])
def test_intervals_are_wilson_s(right: int, asked: int) -> None:
    wanted = binomtest(right, asked).proportion_ci(method="wilson")
    assert command.wilson(right, asked) == pytest.approx((wanted.low, wanted.high), abs=1e-4)


# --- against a server -----------------------------------------------------------------------------

Reply = Callable[[dict[str, Any]], dict[str, Any] | None]


@pytest.fixture
def serve() -> Iterator[Callable[[Reply], str]]:
    """Starts servers that answer chat requests by a function, None being an error."""
    running = []

    def start(reply: Reply) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def send(self, status: int, content: dict[str, Any]) -> None:
                body = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                models = [{"id": "stub", "object": "model", "created": 0, "owned_by": "us",
                           "max_model_len": 900}]  # fmt: skip
                self.send(200, {"object": "list", "data": models})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                message = reply(asked)
                if message is None:
                    self.send(500, {"error": {"message": "broken"}})
                    return
                choice = {"index": 0, "finish_reason": "stop", "message": message}
                tokens = sum(len(encode(str(m["content"] or ""))) for m in asked["messages"])
                usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens}
                self.send(200, {"id": "x", "object": "chat.completion", "created": 0,
                                "model": "stub", "choices": [choice], "usage": usage})  # fmt: skip

            def log_message(self, *given: Any) -> None:
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        running.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in running:
        server.shutdown()
        server.server_close()


def knows_everything(count: int, seed: int = 1) -> Reply:
    known = {}
    for task in (*tasks.TASKS, *eval_media.TASKS):
        for i in range(count):
            (question,) = command.task_questions([task], i + 1, seed)[i:]
            case = question.case
            known[json.dumps(case.asked)] = case.wanted
    return lambda asked: {"role": "assistant", **known[json.dumps(asked["messages"])]}


def test_all_right(
    serve: Callable[[Reply], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "report.json"
    url = serve(knows_everything(3))
    assert command.main([url, "--count", "3", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"retrieve at 16x extent +3/3 +100.0% +43.8% to 100.0% +>= 98%", printed)
    report = json.loads(file.read_text())
    assert [row["task"] for row in report["rows"]] == list(tasks.TASKS)
    assert all(row["right"] == row["asked"] == 3 for row in report["rows"])
    assert report["wrong"] == []
    assert command.main([url, "--count", "3", "--suite", "vision"]) == 0
    assert re.search(r"place of a shape +3/3 .*>= 95%", capsys.readouterr().out)


def test_some_wrong(serve: Callable[[Reply], str], capsys: pytest.CaptureFixture[str]) -> None:
    url = serve(lambda asked: {"role": "assistant", "content": "42"})
    assert command.main([url, "--suite", "tools", "--count", "2"]) == 1
    assert re.search(r"tool call +0/2 +0.0%", capsys.readouterr().out)


def test_needles_reach_the_limit(
    serve: Callable[[Reply], str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A reader that looks the sentence up finds all; lengths and depths are as announced."""
    lengths = []

    def reply(asked: dict[str, Any]) -> dict[str, Any]:
        text = asked["messages"][-1]["content"]
        lengths.append(len(encode(text)))
        name = re.search(r"what is the secret of (\w+ \w+)\?", text)
        found = re.search(rf"the secret of {name[1]} is \w+\.", text) if name else None
        return {"role": "assistant", "content": found[0] if found else "none"}

    assert command.main([serve(reply), "--real", "--count", "3"]) == 0
    printed = capsys.readouterr().out
    for length in (256, 512, 900):
        assert re.search(rf"needle in {length} tokens +3/3 .* as the reference", printed)
    assert 640 < max(lengths) < 900
    assert command.stated("needle in 525,312 tokens") == "within 1 point"
    assert command.stated("needle in 1,048,576 tokens") == "none stated"


def test_what_cannot_be_evaluated_is_a_sentence(
    serve: Callable[[Reply], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([serve(lambda asked: None), "--suite", "tools", "--count", "1"]) == 2
    wanted = (
        "no request was answered; of the last one, it answered with status 500 (Error code: 500"
    )
    error = capsys.readouterr().err
    assert wanted in error and error.endswith("; see the server's log for the reason\n")
    assert command.main([str(tmp_path)]) == 2
    assert "is neither: it has no config.json" in capsys.readouterr().err
    url = serve(lambda asked: {"role": "assistant", "content": "42"})
    assert command.main([url, "--model", "other"]) == 2
    assert "serves stub, not other; name one that it serves with" in capsys.readouterr().err


def silent(listener: socket.socket) -> None:
    """Nothing answers."""


def slams(listener: socket.socket) -> None:
    listener.accept()[0].close()


def page(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<html></html>")
    connection.close()


def is_no_api(listener: socket.socket) -> None:
    connection, _ = listener.accept()
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
    connection.close()


@pytest.mark.parametrize(
    ("server", "cause"),
    [
        (None, "it did not answer ([Errno 111] Connection refused)"),
        (silent, "it did not answer in time (--timeout)"),
        (slams, "it did not answer ("),
        (is_no_api, "it answered with status 404 ("),
        (page, "it answered with no list of them"),
    ],
    ids=["nobody", "silent", "slams", "no API", "a page"],
)
def test_a_dead_url_is_one_sentence(
    server: Callable[[socket.socket], None] | None, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cause and remedy, whatever answers there or does not."""
    listener = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with listener:
        if server is None:
            listener.close()
        else:
            threading.Thread(target=server, args=(listener,), daemon=True).start()
        assert command.main([url, "--timeout", "0.5"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    start = (f"inkling-portable eval: needs an OpenAI-compatible server at {url}; asked for its "
             f"models, {cause}")  # fmt: skip
    assert line.startswith(start), line
    assert line.endswith("; start one there, or give the URL that one listens on")
