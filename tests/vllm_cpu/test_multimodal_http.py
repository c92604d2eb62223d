"""The server as clients meet it: images and audio in many forms, streams, adapters, bad starts.

Everything that the server has to refuse is a sentence, and it goes on answering.
"""

from __future__ import annotations

import base64
import io
import json
import shutil
import struct
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from inkling_portable import plugin
from inkling_portable.commands._server import Server, ServerError, memory_arguments
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.model.preprocess import AudioSettings, ImageSettings
from tests.media import picture, tone
from tests.vllm_cpu.conftest import AS_A_USER

PIXELS = picture(31, 45)
IMAGE_TOKENS = ImageSettings(patch_size=16).tokens(45, 31)

ENVIRONMENT = {**AS_A_USER, "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


class Service:
    """A client of `vllm serve` on the omni preset, and a folder whose files it may read."""

    def __init__(self, server: Server, files: Path) -> None:
        self.server, self.files = server, files
        self.client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def prompt_tokens(self, *content: dict[str, Any]) -> int:
        """Tokens of a prompt with this content, as the server counts them."""
        answer = self.client.chat.completions.create(
            model=self.server.name,
            messages=[{"role": "user", "content": list(content)}],  # type: ignore[list-item]
            max_tokens=2,
            temperature=0.0,
        )
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    def load_adapter(self, name: str, folder: Path) -> tuple[int, str]:
        """The status and the text with which the server answers to a new adapter."""
        asked = urllib.request.Request(
            f"{self.server.url}/v1/load_lora_adapter",
            json.dumps({"lora_name": name, "lora_path": str(folder)}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(asked, timeout=60) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())["error"]["message"]

    def prompt_logprobs(self, model: str, ids: list[int]) -> list[float]:
        """Log-probabilities of the tokens of a prompt behind its first one."""
        answer = self.client.completions.create(
            model=model, prompt=ids, max_tokens=1, temperature=0.0,
            extra_body={"prompt_logprobs": 0},
        )  # fmt: skip
        rows = answer.choices[0].model_dump()["prompt_logprobs"][1:]
        return [row[str(token)]["logprob"] for row, token in zip(rows, ids[1:], strict=True)]

    def metric(self, name: str) -> float:
        """A metric of the server, summed over its labels."""
        with urllib.request.urlopen(f"{self.server.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        values = [float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{")]
        assert values, name
        return sum(values)

    def wait_for_metric(self, name: str, value: float, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while self.metric(name) != value:
            assert time.monotonic() < end, f"{name} is {self.metric(name)} and not {value}"
            time.sleep(0.2)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("omni")
    files = tmp_path_factory.mktemp("media")
    write_tiny(folder, preset="omni", dtype="float32", force=True)
    arguments = [
        *memory_arguments("64M"), "--dtype", "float32", "--max-model-len", "2048",
        "--block-size", "16", "--tokenizer-mode", "inkling",
        "--allowed-local-media-path", str(files),
        "--mm-processor-kwargs", '{"max_image_tokens": 900, "max_audio_tokens": 100}',
        "--enable-lora", "--max-loras", "2", "--max-lora-rank", "8",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("log") / "server.log"
    with Server(folder, arguments, log, ENVIRONMENT) as server:
        server.wait_until_ready(300, lambda seconds: None)
        assert "InklingForConditionalGeneration" in server.plugin_line()
        yield Service(server, files)


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def image_url(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def image(data: bytes) -> dict[str, Any]:
    return image_url("data:image/png;base64," + base64.b64encode(data).decode())


def audio(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}


def png(pixels: np.ndarray = PIXELS) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def wav(wave: np.ndarray, rate: int = 16_000) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, wave, rate, format="WAV")
    return out.getvalue()


def test_an_image_adds_its_opener_its_patches_and_an_end(service: Service) -> None:
    # A part is a block of its own: role, opener, payload, end.
    bare = service.prompt_tokens(text("look"))
    assert service.prompt_tokens(text("look"), image(png())) == bare + 3 + IMAGE_TOKENS


def test_a_file_equals_a_data_url(service: Service) -> None:
    path = service.files / "picture.png"
    path.write_bytes(png())
    assert service.prompt_tokens(image_url(path.as_uri())) == service.prompt_tokens(image(png()))


@pytest.mark.parametrize(
    ("wave", "rate", "frames"),
    [
        (tone(12_345), 16_000, 16),
        # One second at another rate, and in two channels.
        (tone(44_100), 44_100, 20),
        (np.stack([tone(16_000), tone(16_000, seed=1)], axis=1), 16_000, 20),
    ],
    ids=["16 kHz", "44.1 kHz", "stereo"],
)
def test_audio_adds_its_opener_its_frames_and_two_ends(
    service: Service, wave: np.ndarray, rate: int, frames: int
) -> None:
    bare = service.prompt_tokens(text("hear"))
    assert service.prompt_tokens(text("hear"), audio(wav(wave, rate))) == bare + 4 + frames


def test_image_and_audio_in_one_prompt(service: Service) -> None:
    bare = service.prompt_tokens(text("both"))
    both = service.prompt_tokens(image(png()), text("both"), audio(wav(tone(8_000))), image(png()))
    assert both == bare + 2 * (3 + IMAGE_TOKENS) + 4 + AudioSettings().tokens(8_000)


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, format=kind, **options)
    return out.getvalue()


def turned() -> bytes:
    """A JPEG that is to be shown after a quarter turn."""
    exif = Image.Exif()
    exif[Image.ExifTags.Base.Orientation] = 6
    return encoded(Image.fromarray(PIXELS), "JPEG", exif=exif)


STILL = Image.fromarray(PIXELS)
FRAMES = [Image.fromarray(pixels) for pixels in (PIXELS[::-1], PIXELS[:, ::-1])]


@pytest.mark.parametrize(
    ("data", "size"),
    [
        (encoded(STILL.convert("CMYK"), "JPEG"), (45, 31)),
        (encoded(STILL.quantize(16), "PNG", transparency=3), (45, 31)),
        (encoded(STILL.convert("L"), "PNG"), (45, 31)),
        (encoded(STILL.convert("RGBA"), "WEBP"), (45, 31)),
        (encoded(STILL, "GIF", save_all=True, append_images=FRAMES), (45, 31)),
        (encoded(Image.new("RGB", (1, 1)), "BMP"), (1, 1)),
        (turned(), (31, 45)),
    ],
    ids=["CMYK", "palette", "grey", "WebP", "animated", "one pixel", "EXIF"],
)
def test_pictures_of_every_kind(service: Service, data: bytes, size: tuple[int, int]) -> None:
    """vLLM decodes: the first frame, in colours, and as the file says that it is to be shown."""
    bare = service.prompt_tokens(text("look"))
    expected = ImageSettings(patch_size=16).tokens(*size)
    assert service.prompt_tokens(text("look"), image(data)) == bare + 3 + expected


@pytest.mark.parametrize(
    "wave", [tone(1), np.zeros(800, np.float32)], ids=["one sample", "silence"]
)
def test_clips_with_next_to_nothing(service: Service, wave: np.ndarray) -> None:
    bare = service.prompt_tokens(text("hear"))
    assert service.prompt_tokens(text("hear"), audio(wav(wave))) == bare + 4 + 1


def bomb(side: int) -> bytes:
    """A small PNG of very many black pixels."""
    line = zlib.compressobj(9)
    data = b"".join(line.compress(bytes(1 + side // 8)) for _ in range(side)) + line.flush()
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    for name, part in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        out += struct.pack(">I", len(part)) + name + part
        out += struct.pack(">I", zlib.crc32(name + part))
    return out


def an_hour() -> bytes:
    out = io.BytesIO()
    with soundfile.SoundFile(out, "w", 16_000, 1, format="FLAC") as file:
        for _ in range(60):
            file.write(np.zeros(60 * 16_000, dtype=np.int16))
    return out.getvalue()


def test_files_that_unpack_to_gigabytes(service: Service) -> None:
    """Refused, and what was unpacked on the way does not add up."""
    parts = [image(bomb(20_000)), image(bomb(12_000)), audio(an_hour())]
    sizes = []
    for _ in range(3):
        for part in parts:
            with pytest.raises(openai.APIStatusError) as error:
                service.prompt_tokens(part)
            assert 400 <= error.value.status_code < 500, error.value.message
        sizes.append(sum(service.server.memory_gib().values()))
    assert service.prompt_tokens(image(png())) > IMAGE_TOKENS
    # A picture of 12,000x12,000 pixels is 0.4 GiB; allocators keep some of the first two rounds.
    assert sizes[-1] < sizes[1] + 0.3, sizes


def test_an_opener_in_text_is_text(service: Service) -> None:
    bare = service.prompt_tokens(text("look"), image(png()))
    assert service.prompt_tokens(text("look <|content_image|>"), image(png())) > bare + 5


def empty_png() -> bytes:
    """A well-formed file of 0x4 pixels, which libraries do not write."""
    out = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", 0, 4, 8, 2, 0, 0, 0)
    for name, data in ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")):
        out += struct.pack(">I", len(data)) + name + data
        out += struct.pack(">I", zlib.crc32(name + data))
    return out


def wav_of_rate(rate: int) -> bytes:
    """A WAV file whose header names a rate, whatever the library thinks of it."""
    data = bytearray(wav(tone(800)))
    struct.pack_into("<II", data, 24, rate, 2 * rate)
    return bytes(data)


NOT_A_NUMBER = np.full(800, np.nan, dtype=np.float32)


def float_wav(wave: np.ndarray) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, wave, 16_000, format="WAV", subtype="FLOAT")
    return out.getvalue()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (image(b"no picture"), None),
        (image(png()[:200]), None),
        (image(png(picture(480, 480))), "at most 900 tokens; 480x480 pixels take 3660"),
        (image(wav(tone(800))), None),
        (image(b""), "media need a whole file; found no bytes"),
        (image(empty_png()), None),
        (image_url("data:text/plain;base64,bm8gcGljdHVyZQ=="), None),
        (audio(b"no sound"), None),
        (audio(b""), None),
        (audio(wav(tone(800))[:30]), "audio needs a whole file"),
        (audio(wav_of_rate(0)), None),
        (audio(wav_of_rate(2)), "this clip takes 8000 (400 s)"),
        (audio(wav_of_rate(2**31 - 1)), "up to 768000 Hz; found 2147483647"),
        (audio(wav(tone(0))), None),
        (audio(png()), None),
        (audio(wav(tone(16_000 * 6))), "at most 100 tokens (5 s); this clip takes 120 (6 s)"),
        (audio(float_wav(NOT_A_NUMBER)), "audio needs finite samples"),
        (image_url("file:///etc/hostname"), None),
        (image_url("data:image/png,hello"), "a data: URL needs base64"),
        (image_url("http://127.0.0.1:9/picture.png"), "--allowed-media-domains; send a data: URL"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, None),
    ],
    ids=["not an image", "cut image", "large image", "audio as image", "no bytes of image",
         "no pixels", "text as image", "not audio", "no bytes of audio", "cut audio", "rate 0",
         "rate 2", "rate 2147483647", "no samples", "image as audio", "long audio", "NaN audio",
         "file outside", "data without base64", "another host", "video"],
)  # fmt: skip
def test_bad_media_is_the_clients_error(
    service: Service, content: dict[str, Any], sentence: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        service.prompt_tokens(text("here"), content, image(png()))
    assert 400 <= error.value.status_code < 500, error.value.message
    assert sentence is None or sentence in error.value.message
    assert service.prompt_tokens(image(png())) > IMAGE_TOKENS


def test_no_file_is_read_where_no_folder_was_named() -> None:
    """The server above names one; vLLM answers 500 where none is."""
    from vllm.multimodal.media import audio, connector  # noqa: F401  (what a server has imported)

    plugin._register_media_answers()
    with pytest.raises(ValueError, match="started without --allowed-local-media-path; send a data"):
        connector.MediaConnector().fetch_image("file:///etc/hostname")


def test_a_stream_that_the_client_closes_stops_its_request(service: Service) -> None:
    running, generated = "vllm:num_requests_running", "vllm:generation_tokens_total"
    before, asked = service.metric(generated), 1900
    stream = service.client.completions.create(
        model=service.server.name, prompt=[1, 2, 3], max_tokens=asked, temperature=0.0, stream=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    for _ in range(4):
        next(stream)
    service.wait_for_metric(running, 1, 20)
    stream.close()
    service.wait_for_metric(running, 0, 20)
    assert 4 <= service.metric(generated) - before < asked
    assert service.prompt_tokens(text("still here")) > 0


def test_too_long_a_prompt_is_the_clients_error(service: Service) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        service.prompt_tokens(text("word " * 700))
    assert "maximum context length is 2048 tokens" in error.value.message
    assert service.prompt_tokens(text("still here")) > 0


Q = "model.llm.layers.0.attn.wq_du"


def adapter(folder: Path, name: str = Q, rows: int = 128, rank: int = 4) -> Path:
    """An adapter of one module as trainers save it, with random weights."""
    dice = torch.Generator().manual_seed(rank)
    a, b = (torch.randn(shape, generator=dice) * 0.3 for shape in ((rank, 128), (rows, rank)))
    folder.mkdir()
    save_file({f"base_model.model.{name}.lora_A.weight": a,
               f"base_model.model.{name}.lora_B.weight": b},
              folder / "adapter_model.safetensors")  # fmt: skip
    config = {"r": rank, "lora_alpha": rank, "target_modules": [name.rpartition(".")[2]],
              "peft_type": "LORA"}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("changes", "status", "sentence"),
    [
        ({"name": "model.llm.layers.9.attn.wq_du"}, 400, "the adapter changes model.layers.9.attn"),
        ({"name": "model.llm.layers.0.attn.k_sconv"}, 400, "layers.0.attn.k_sconv"),
        ({"rows": 127}, 400, "lora_B of model.layers.0.attn.wq_du needs shape [128, 4]; found"),
        ({"rank": 16}, 400, "LoRA rank 16 is greater than max_lora_rank 8"),
        (None, 404, "No adapter found"),
    ],
    ids=["unknown layer", "unknown module", "wrong shape", "large rank", "no folder"],
)
def test_a_bad_adapter_is_the_clients_error(
    service: Service, tmp_path: Path, changes: dict[str, Any] | None, status: int, sentence: str
) -> None:
    folder = tmp_path / "bad"
    if changes is not None:
        adapter(folder, **changes)
    found, message = service.load_adapter("bad", folder)
    assert (found, sentence in message) == (status, True), message
    assert service.prompt_tokens(image(png())) > IMAGE_TOKENS
    with pytest.raises(openai.NotFoundError):
        service.prompt_logprobs("bad", [1, 2])


def test_prompts_of_several_adapters_at_once(service: Service, tmp_path: Path) -> None:
    for name, rank in (("four", 4), ("eight", 8)):
        assert service.load_adapter(name, adapter(tmp_path / name, rank=rank))[0] == 200
    models, ids = [service.server.name, "four", "eight"], list(range(10, 50))
    asked = [(model, ids[:n]) for n in (40, 6, 20) for model in models]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = list(pool.map(lambda one: service.prompt_logprobs(*one), asked))
    alone = {model: service.prompt_logprobs(model, ids) for model in models}
    assert max(abs(a - b) for a, b in zip(alone["four"], alone["eight"], strict=True)) > 0.01
    for (model, prompt), logprobs in zip(asked, found, strict=True):
        assert logprobs == pytest.approx(alone[model][: len(prompt) - 1], abs=1e-4)


def failed_start(folder: Path, tmp_path: Path, *arguments: str) -> str:
    """The first line that is said of a server that cannot start."""
    small = ["--max-model-len", "256", "--block-size", "16"]
    with (
        Server(folder, [*memory_arguments("64M"), *small, *arguments], tmp_path / "server.log",
               ENVIRONMENT) as server,
        pytest.raises(ServerError, match=r"the server ended with status [1-9]") as error,
    ):  # fmt: skip
        server.wait_until_ready(300, lambda seconds: None)
    return str(error.value).splitlines()[0]


def test_a_start_with_a_bad_adapter_says_why(checkpoint: Path, tmp_path: Path) -> None:
    bad = adapter(tmp_path / "bad", rows=127)
    sentence = failed_start(
        checkpoint, tmp_path, "--enable-lora", "--lora-modules", f"mine={bad}",
    )  # fmt: skip
    assert "lora_B of model.layers.0.attn.wq_du needs shape [128, 4]; found [127, 4]" in sentence


def test_a_start_that_fails_names_tensor_and_file(checkpoint: Path, tmp_path: Path) -> None:
    folder, file = tmp_path / "spoilt", "model.safetensors"
    shutil.copytree(checkpoint, folder)
    tensors = load_file(folder / file)
    name = "model.llm.layers.2.attn.k_norm.weight"
    del tensors[name]
    save_file(tensors, folder / file)
    wanted = f"tensor {name} is missing from the checkpoint (its neighbours are in {file})"
    assert wanted in failed_start(folder, tmp_path)
