"""The contracts against things we did not write: transformers, and vectors worked by hand."""

import math
from pathlib import Path

import pytest
import torch

from inkling_portable.backends.reference.attention import qkvr_prep, rel_attention
from inkling_portable.backends.reference.batch import make_batch
from inkling_portable.backends.reference.experts import route, swiglu
from inkling_portable.backends.reference.short_conv import causal_conv, conv_sources
from inkling_portable.commands.tiny import write_tiny
from inkling_portable.registry import Facts, resolve
from inkling_portable.target import Target
from tests import hf_oracle
from tests.plain_inkling import PlainInkling

OPS = resolve(Target.parse("cpu"), Facts())
# Lengths below and above the window (16) and the extent (32) of the tiny model.
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, 103)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny(path, preset="text", force=True)
    return path


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> dict[torch.dtype, torch.nn.Module]:
    return {d: hf_oracle.load(checkpoint, d)[0] for d in (torch.float32, torch.float64)}


def prompt(length: int) -> list[int]:
    return torch.randint(
        0, 256, (length,), generator=torch.Generator().manual_seed(length)
    ).tolist()


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


@torch.no_grad()
def test_whole_model_equals_transformers(checkpoint: Path, oracle: dict) -> None:
    """Twice transformers' own float32 error, and never above 1e-5."""
    for length in LENGTHS:
        ids = prompt(length)
        truth = logprobs(hf_oracle.logits(oracle[torch.float64], ids))
        theirs = logprobs(hf_oracle.logits(oracle[torch.float32], ids))
        model = PlainInkling(checkpoint, OPS, length=128)
        ours = logprobs(model.logits(model.forward([0], [ids])))
        assert ours.shape == truth[:, : ours.shape[1]].shape == truth.shape
        bound = min(1e-5, 2 * float((theirs - truth).abs().max()) + 1e-7)
        assert float((ours - truth).abs().max()) <= bound, length


@torch.no_grad()
def test_whole_model_in_float64_is_the_same_function(checkpoint: Path, oracle: dict) -> None:
    ids = prompt(70)
    truth = logprobs(hf_oracle.logits(oracle[torch.float64], ids))
    model = PlainInkling(checkpoint, OPS, torch.float64, length=128)
    ours = logprobs(model.logits(model.forward([0], [ids])))
    # transformers computes norms and the router in float32 even here.
    assert float((ours - truth).abs().max()) < 3e-6


@torch.no_grad()
@pytest.mark.parametrize(
    "cuts", [[1] * 70, [5, 3, 62], [7, 1, 12, 1, 49], [48, 22], [3] * 23 + [1]]
)
@pytest.mark.parametrize(("page", "conv_page"), [(16, 4), (128, 32), (5, 3)])
def test_any_split_of_a_prompt_gives_the_same_hidden_states(
    checkpoint: Path, cuts: list[int], page: int, conv_page: int
) -> None:
    ids = prompt(70)
    whole = PlainInkling(checkpoint, OPS, torch.float64, length=128).forward([0], [ids])
    model = PlainInkling(checkpoint, OPS, torch.float64, length=128, page=page, conv_page=conv_page)
    parts, at = [], 0
    for n in cuts:
        parts.append(model.forward([0], [ids[at : at + n]], padding=n % 3)[:n])
        at += n
    assert at == 70
    assert float((torch.cat(parts) - whole).abs().max()) < 1e-12


@torch.no_grad()
def test_a_request_does_not_see_its_neighbours(checkpoint: Path) -> None:
    prompts = [prompt(n) for n in (40, 1, 17, 3)]
    together = PlainInkling(checkpoint, OPS, torch.float64, requests=4, length=64)
    mixed = together.forward([2, 0, 3, 1], [prompts[2], prompts[0], prompts[3], prompts[1]])
    starts = [0, 17, 57, 60, 61]
    for at, i in enumerate((2, 0, 3, 1)):
        alone = PlainInkling(checkpoint, OPS, torch.float64, length=64).forward([0], [prompts[i]])
        assert float((mixed[starts[at] : starts[at + 1]] - alone).abs().max()) < 1e-12


@torch.no_grad()
def test_draft_depths_equal_the_formulas_of_the_spec(checkpoint: Path) -> None:
    """A dense, cache-free rendering of spec 4.2, written apart from the ops."""
    ids = prompt(60)
    model = PlainInkling(checkpoint, OPS, torch.float64, length=128)
    hidden = model.forward([0], [ids])
    assert model.config.mtp is not None
    for depth in range(model.config.mtp.num_depths):
        rows = len(ids) - 1 - depth
        tokens = ids[1 + depth :]
        ours = model.draft_hidden(depth, [0], hidden[:rows], [tokens], contexts=[0])
        dense = DenseDepth(model, depth).forward(hidden[:rows], torch.tensor(tokens))
        assert float((ours - dense).abs().max()) < 1e-11
        hidden = ours


class DenseDepth:
    """Spec 4.2 and 2.2 with full matrices: no cache, no paging, no op of the package."""

    def __init__(self, model: PlainInkling, depth: int) -> None:
        self.model, self.name = model, f"mtp.layers.{depth}"
        self.geometry = model.config.mtp_attention(depth)

    def forward(self, previous: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        m, n, g = self.model, self.name, self.geometry
        e = self.rms(m.w("llm.embed.weight")[tokens], m.w("llm.embed_norm.weight"))
        c = torch.cat([self.rms(previous, m.w(f"{n}.hidden_norm.weight")),
                       self.rms(e, m.w(f"{n}.embed_norm.weight"))], -1)  # fmt: skip
        x = c @ m.w(f"{n}.input_proj.weight").T
        b = f"{n}.transformer_block"
        rows, a = len(x), self.rms(x, m.w(f"{b}.attn_norm.weight"))
        q, k, v, r = (
            a @ m.w(f"{b}.attn.{p}.weight").T for p in ("wq_du", "wk_dv", "wv_dv", "wr_du")
        )
        k = self.conv(k, m.w(f"{b}.attn.k_sconv.weight"))
        v = self.conv(v, m.w(f"{b}.attn.v_sconv.weight"))
        q = self.rms(q.reshape(rows, g.heads, -1), m.w(f"{b}.attn.q_norm.weight"))
        k = self.rms(k.reshape(rows, g.kv_heads, -1), m.w(f"{b}.attn.k_norm.weight"))
        v = v.reshape(rows, g.kv_heads, -1)
        rel = r.reshape(rows, g.heads, -1) @ m.w(f"{b}.attn.rel_logits_proj.proj")
        out = torch.zeros(rows, g.heads, g.head_dim, dtype=x.dtype)
        for h in range(g.heads):
            kv = h // (g.heads // g.kv_heads)
            for p in range(rows):
                gain = 1.0
                if not g.window and m.text.log_floor:
                    gain = 1 + m.text.log_alpha * math.log(max((p + 1) / m.text.log_floor, 1))
                low = max(0, p - g.window + 1) if g.window else 0
                scores = torch.stack([
                    (q[p, h] * gain) @ k[j, kv] / g.head_dim
                    + (rel[p, h, p - j] * gain if p - j < rel.shape[-1] else 0.0)
                    for j in range(low, p + 1)
                ])  # fmt: skip
                out[p, h] = scores.softmax(0) @ v[low : p + 1, kv]
        o = out.flatten(1) @ m.w(f"{b}.attn.wo_ud.weight").T
        x = x + self.conv(o, m.w(f"{b}.attn_sconv.weight"))
        u = self.rms(x, m.w(f"{b}.mlp_norm.weight")) @ m.w(f"{b}.mlp.w13_dn.weight").T
        y = torch.nn.functional.silu(u[:, 0::2]) * u[:, 1::2]
        d = (y @ m.w(f"{b}.mlp.w2_md.weight").T) * m.w(f"{b}.mlp.global_scale")
        return x + self.conv(d, m.w(f"{b}.mlp_sconv.weight"))

    @staticmethod
    def rms(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w

    @staticmethod
    def conv(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        padded = torch.cat([x.new_zeros(w.shape[-1] - 1, x.shape[1]), x]).T[None]
        return x + torch.nn.functional.conv1d(padded, w, groups=x.shape[1])[0].T


# --- vectors of the spec's section 12, worked by hand


def test_conv_by_hand() -> None:
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0]])
    batch = make_batch([5], [0])
    state = torch.full((3, 4, 1, 1), float("nan"))
    table = torch.tensor([[2, 1]], dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 4])
    taps = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    sources = torch.empty(5, 3, dtype=torch.int64)
    conv_sources(batch.q_starts, batch.kv_lens, table, slots, 4, torch.zeros(12).int(), sources)
    assert sources.tolist() == [[-1, -1, -1], [-1, -1, 0], [-1, 0, 1], [0, 1, 2], [1, 2, 3]]
    y = causal_conv(x, taps, state, slots, sources)
    torch.testing.assert_close(y.flatten(), torch.tensor([1.4, 3.1, 5.0, 7.0, 9.0]))
    assert state[2].flatten().tolist() == [1, 2, 3, 4] and state[1, 0].item() == 5


def test_a_prefix_computed_in_the_same_step_is_taken_from_its_rows() -> None:
    """The engine shares a prefix between requests of one step; the state does not hold it yet."""
    batch = make_batch([4, 2], [0, 4])
    table = torch.tensor([[2, 0], [2, 1]], dtype=torch.int32)
    slots = torch.tensor([8, 9, 10, 11, 4, 5])
    stale = torch.full((12,), 3, dtype=torch.int32)
    sources = torch.empty(6, 3, dtype=torch.int64)
    conv_sources(batch.q_starts, batch.kv_lens, table, slots, 4, stale, sources)
    assert sources[4:].tolist() == [[1, 2, 3], [2, 3, 4]]
    alone = make_batch([2], [4])
    conv_sources(alone.q_starts, alone.kv_lens, table[1:], slots[4:], 4, stale, sources[:2])
    assert sources[:2].tolist() == [[-11, -12, -13], [-12, -13, 0]]


def test_gate_by_hand() -> None:
    logits = torch.tensor([[0.0, math.log(3), -math.log(3), 2.0, 0.0]])
    bias = torch.tensor([0.5, 0, 0, 0])
    weights, ids, gammas = route(logits, bias, torch.ones(1), 2, 8.0)
    assert ids.tolist() == [[0, 3]]
    torch.testing.assert_close(weights, torch.tensor([[2.12676, 3.74648]]), atol=1e-5, rtol=0)
    torch.testing.assert_close(gammas, torch.tensor([[2.12676]]), atol=1e-5, rtol=0)
    _, unbiased, _ = route(logits, torch.zeros(4), torch.ones(1), 2, 8.0)
    assert unbiased.tolist() == [[3, 1]]


def test_exact_ties_go_to_the_lowest_index() -> None:
    logits = torch.zeros(3, 10)
    logits[1, 5:8] = 1.0
    _, ids, _ = route(logits, torch.zeros(8), torch.ones(1), 3, 8.0)
    assert ids.tolist() == [[0, 1, 2], [5, 6, 7], [0, 1, 2]]


def test_routing_keeps_weights_that_a_biased_sum_would_cancel() -> None:
    """BL-006: logit -18 with bias 12 still has its share."""
    logits = torch.tensor([[-18.0, -40.0, -40.0, -40.0, -19.0, -40.0]])
    bias = torch.tensor([12.0, 0, 0, 0])
    weights, ids, gammas = route(logits, bias, torch.ones(1), 2, 8.0)
    total = torch.cat([weights, gammas], 1)
    assert ids[0, 0] == 0 and torch.isfinite(total).all()
    exact = torch.sigmoid(torch.tensor([-18.0, -40.0, -19.0, -40.0]).double())
    torch.testing.assert_close(total[0].double(), exact / exact.sum() * 8, rtol=1e-5, atol=1e-9)


def test_interleaved_gate_and_up_by_hand() -> None:
    y = swiglu(torch.tensor([[2.0, 3.0, -1.0, 4.0]]), True, None)
    torch.testing.assert_close(y, torch.tensor([[5.2848, -1.0758]]), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("p", "gain"), [(127_999, 1.0), (255_999, 1.0693147), (1_048_575, 1.2103158)]
)
def test_log_length_gain_by_hand(p: int, gain: float) -> None:
    d, taps = 4, torch.zeros(4, 4)
    empty = torch.zeros(1, 4, 1, d)
    none = torch.full((1,), -1)
    qkvr = torch.ones(1, 3 * d + 2)
    q, rel = qkvr_prep(
        qkvr, taps, taps, torch.ones(d), torch.ones(d), torch.ones(2, 3), 0.0, 128000.0, 0.1,
        empty, empty.clone(), none, torch.full((1, 3), -1), empty.clone(), empty.clone(), none,
        torch.tensor([p]),
    )  # fmt: skip
    torch.testing.assert_close(q.flatten(), torch.full((d,), gain), rtol=1e-6, atol=0)
    torch.testing.assert_close(rel.flatten(), torch.full((3,), 2 * gain), rtol=1e-6, atol=0)


def one_query(position: int, window: int, extent: int, bias: float) -> torch.Tensor:
    """Attention weights of one query over keys 0..position: values are one-hot in the key index."""
    n, width = position + 1, 16
    cache = torch.zeros(2, 16, 1, width)
    values = cache.clone()
    values[1, torch.arange(n), 0, torch.arange(n)] = 1
    out = torch.empty(1, 1, width)
    rel = torch.full((1, 1, extent), bias)
    rel_attention(
        torch.ones(1, 1, width), cache, values, rel, torch.tensor([[1]], dtype=torch.int32),
        torch.tensor([0, 1], dtype=torch.int32), torch.tensor([n], dtype=torch.int32),
        1, n, window, 1 / width, out,
    )  # fmt: skip
    return out.flatten()


def test_window_by_hand() -> None:
    weights = one_query(5, window=3, extent=3, bias=0.0)
    torch.testing.assert_close(weights[3:6], torch.full((3,), 1 / 3))
    assert weights[:3].abs().max() == 0


def test_bias_beyond_the_extent_is_zero_and_visible() -> None:
    weights = one_query(9, window=0, extent=4, bias=1.0)
    near, far = math.e / (4 * math.e + 6), 1 / (4 * math.e + 6)
    torch.testing.assert_close(weights[6:10], torch.full((4,), near))
    torch.testing.assert_close(weights[:6], torch.full((6,), far))
