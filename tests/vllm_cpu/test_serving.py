"""A server under load: any company leaves answers as they are, nothing leaks, and it ends well.

One small server with everything on takes all of it: pictures, sounds, adapters, tools, formats, and
a cache that is too small for the requests it runs. The last test ends it.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import struct
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from benchmarks import soak
from inkling_portable.commands._server import SERVE_ARGUMENTS, Server, memory_arguments
from inkling_portable.commands.tiny import write_tiny
from tests.vllm_cpu.conftest import AS_A_USER
from tests.vllm_cpu.test_multimodal_http import adapter

SECONDS, DISTINCT, TOKENS = 30.0, 28, 24
CACHE = "3M"
"""Enough for a request of `LIMIT` tokens, too little for 24 of a hundred."""
DRAIN_S = 30
LIMIT = 768


@dataclass
class Service:
    """The server, its model names, and what follows `ASKED` when nobody else is served."""

    server: Server
    names: list[str]

    def post(self, body: dict[str, Any], timeout: float = 60.0) -> tuple[int, dict[str, Any]]:
        """Status and answer of a completion."""
        asked = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps({"model": self.names[0], "temperature": 0.0} | body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")

    def late(self, body: dict[str, Any]) -> str | None:
        """Why a request ended without a token; None for one that was not taken at all."""
        try:
            status, answer = self.post(body, timeout=10.0)
        except (urllib.error.URLError, ConnectionError):
            return None
        if status >= 500:
            return None
        return answer["choices"][0]["finish_reason"] if not answer["choices"][0]["text"] else "ran"

    def metric(self, name: str) -> float:
        return asyncio.run(soak.Client(self.server.url).metric(name))


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder, scratch = tmp_path_factory.mktemp("omni"), tmp_path_factory.mktemp("scratch")
    write_tiny(folder, preset="omni", dtype="float32", force=True)
    adapters = {name: adapter(scratch / name, rank=rank) for name, rank in (("a", 4), ("b", 8))}
    arguments = [
        *memory_arguments(CACHE), *SERVE_ARGUMENTS, "--dtype", "float32", "--max-model-len",
        str(LIMIT), "--block-size", "16", "--max-num-seqs", "24", "--max-num-batched-tokens", "128",
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules",
        *(f"{name}={path}" for name, path in adapters.items()),
        "--shutdown-timeout", str(DRAIN_S),
        "--mm-processor-kwargs", '{"max_image_tokens": 100, "max_audio_tokens": 40}',
        "--limit-mm-per-prompt", '{"image": 3, "audio": 3}',
    ]  # fmt: skip
    with Server(folder, arguments, scratch / "server.log", AS_A_USER) as server:
        server.wait_until_ready(300, lambda seconds: None)
        yield Service(server, [server.name, *adapters])


def test_random_requests_in_company(service: Service) -> None:
    """Whatever comes beside a request, its greedy tokens are those that it gets alone."""
    rng = random.Random(5)
    requests = [
        soak.draw_request(rng, service.names, 400, True, 440, TOKENS) for _ in range(DISTINCT)
    ]
    assert len({request.kind.split()[0] for request in requests}) == 6
    assert any("adapter" in request.kind for request in requests)
    memory = lambda: sum(service.server.memory_gib().values())  # noqa: E731

    async def all_of_it() -> soak.Outcome:
        client = soak.Client(service.server.url)
        await soak.answer_alone(client, requests)
        outcome = await soak.soak(client, requests, 2000, SECONDS, 24, rng, memory)
        await client.settle()
        return outcome

    outcome = asyncio.run(all_of_it())
    print(outcome)
    assert outcome.wrong == []
    assert outcome.right.total() > 60 and outcome.left.total() > 5
    assert sum(len(request.alone) for request in requests) > TOKENS / 2 * len(requests)
    assert outcome.preemptions > 0, "the cache was not too small"
    before, after = outcome.memory_gib
    assert after < before + 0.3
    assert service.server.is_healthy()


def test_the_soak_sees_a_wrong_token(service: Service) -> None:
    """A request whose solo answer is made wrong by one id is reported, with itself."""

    async def one() -> soak.Outcome:
        client = soak.Client(service.server.url)
        body = {"model": service.names[0], "temperature": 0.0, "max_tokens": TOKENS,
                "prompt": [7, 8, 9], "logprobs": 2, "ignore_eos": True,
                "return_token_ids": True}  # fmt: skip
        requests = [soak.Request("completion", "completions", body)]
        await soak.answer_alone(client, requests)
        requests[0].alone[0] ^= 1
        return await soak.soak(client, requests, 3, 60.0, 1, random.Random(3))

    assert asyncio.run(one()).wrong[0].startswith("completion: [[")


def test_a_client_that_vanishes_gives_its_blocks_back(service: Service) -> None:
    """No goodbye: the connection is reset in the middle of an answer that is not streamed."""
    body = json.dumps({"model": service.names[0], "prompt": [5] * 300, "max_tokens": 400,
                       "ignore_eos": True}).encode()  # fmt: skip
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n" \
           "Content-Type: application/json\r\n\r\n"  # fmt: skip
    with socket.create_connection(("127.0.0.1", service.server.port)) as link:
        link.sendall(head.encode() + body)
        end = time.monotonic() + 20
        while service.metric("vllm:kv_cache_usage_perc") == 0:
            assert time.monotonic() < end, "the request never held a block"
            time.sleep(0.1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    asyncio.run(soak.Client(service.server.url).settle(15.0))


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5, 6], "max_tokens": 10**9},
        {"prompt": [5, 6], "n": 10**6},
        {"prompt": [[5, 6]] * 3, "max_tokens": 4, "logprobs": 10**4},
        {"prompt": [10**9], "max_tokens": 4},
        {"prompt": "word " * 10**6, "max_tokens": 4},
    ],
    ids=["tokens", "answers", "logprobs", "id", "megabytes"],
)
def test_too_much_is_the_clients_error(service: Service, body: dict[str, Any]) -> None:
    status, answer = service.post(body)
    assert 400 <= status < 500, answer
    assert service.post({"prompt": [5, 6], "max_tokens": 4})[0] == 200


def test_sigterm_lets_answers_end(service: Service) -> None:
    """What runs ends as it would have, what comes then is refused, and the status is 0."""
    process, body = service.server.process, {"max_tokens": 150, "ignore_eos": True,
                                             "return_token_ids": True}  # fmt: skip
    assert process is not None
    prompts = [[5 + i] * 20 for i in range(3)]
    alone = [service.post(body | {"prompt": ids})[1]["choices"][0]["token_ids"] for ids in prompts]
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(service.post, body | {"prompt": ids}) for ids in prompts]
        end = time.monotonic() + 20
        while service.metric("vllm:num_requests_running") < 3:
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        asked = time.monotonic()
        time.sleep(0.3)
        late = service.late(body | {"prompt": [9]})
        found = [future.result() for future in running]
    assert late in (None, "abort"), "a request that came after SIGTERM was served"
    assert [status for status, _ in found] == [200] * 3
    assert [answer["choices"][0]["token_ids"] for _, answer in found] == alone
    assert process.wait(timeout=DRAIN_S + 10) == 0
    assert time.monotonic() - asked < DRAIN_S + 10
