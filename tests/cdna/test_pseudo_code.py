"""Every instruction that AMD's documents give pseudo-code for does what that says, bit by bit."""

import re
from functools import cache

import numpy as np
import pytest

from ci.cdna import launch  # noqa: F401  (it registers the instructions)
from ci.cdna.machine import HANDLERS
from tests.cdna.hand_written import execute
from tests.cdna.pseudo_code import Cell, MemoryCell, as_bits, evaluate, text_of

LANES = 64
# Evaluated in float64 and rounded: hardware is within one unit of the last place.
APPROXIMATE = ("v_exp", "v_log", "v_rcp", "v_rsq", "v_sqrt")
# gfx950's own; everything else exists on both chips.
NEW = ("v_cvt_pk_bf16_f32", "v_cvt_pk_f16_f32", "v_cvt_f32_bf16", "v_bitop3", "v_permlane",
       "v_maximum3", "v_minimum3", "v_cvt_scalef32", "v_prng", "v_ashr_pk")  # fmt: skip
# What the text says in another way than the assembler or leaves to other tests, with the reason.
APART = {
    "v_bitop3_b16": "its truth table is in fields of the encoding",
    "v_bitop3_b32": "its truth table is in fields of the encoding",
    "v_div_scale_f32": "the six instructions of a division are tested together",
    "v_div_fmas_f32": "the text's factor of 2**32 makes no quotient right",
    "v_div_fixup_f32": "the six instructions of a division are tested together",
    "v_readlane_b32": "about lanes", "v_readfirstlane_b32": "about lanes",
    "v_writelane_b32": "about lanes", "v_permlane16_swap_b32": "about lanes",
    "v_permlane32_swap_b32": "about lanes", "ds_bpermute_b32": "about lanes",
    "ds_swizzle_b32": "about lanes",
    "v_mbcnt_lo_u32_b32": "about lanes", "v_mbcnt_hi_u32_b32": "about lanes",
    "v_pk_mov_b32": "op_sel chooses the words",
    "v_rndne_f32": "the text adds a half, which is inexact for large numbers",
}  # fmt: skip
_MEMORY = ("buffer_", "global_", "flat_", "ds_")


def _usable(name: str) -> bool:
    text = text_of(name)
    return (
        text is not None and name not in APART
        and not name.startswith(("v_mfma", "s_cbranch", "s_branch", "s_load", "v_cvt_scalef32"))
        and not re.search(r"nop|SDWA|HwReg|BYTE_PERMUTE|lambda|_to_fp8|_to_bf8|SIMM16|sleep", text)
    )  # fmt: skip


NAMES = [name for name in sorted(HANDLERS) if _usable(name)]
VECTOR = [n for n in NAMES if n.startswith("v_")]
SCALAR = [n for n in NAMES if n.startswith("s_")]
MEMORY = [n for n in NAMES if n.startswith(_MEMORY)]
TESTED = {*VECTOR, *SCALAR, *MEMORY}


def _sources(text: str) -> list[int]:
    """Widths of S0, S1, ... as far as the text reads them."""
    found = []
    for k in range(3):
        here = re.findall(rf"\bS{k}(?:\.|\[)[^;]*?", text)
        if not here:
            break
        wide = re.search(rf"\bS{k}\.[uibf]64|\bS{k}\[63", text)
        found.append(64 if wide else 32)
    return found


@cache
def _data(kind: str, seed: int) -> np.ndarray:
    """Six registers of 64 lanes: edges of the type, and numbers of every size."""
    random = np.random.default_rng(seed)
    if kind == "f32":
        edges = [0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x007FFFFF,
                 0x7F7FFFFF, 0x3F800000, 0xBF000000, 0x4F000000, 0xCF000000]  # fmt: skip
        bits = random.integers(100 << 23, 150 << 23, (6, LANES), dtype=np.uint32)
        bits |= random.integers(0, 2, bits.shape, dtype=np.uint32) << np.uint32(31)
    elif kind == "f16":
        edges = [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 1, 0x03FF, 0x7BFF, 0x3C00, 0xBC00]
        edges = [a | b << 16 for a, b in zip(edges, reversed(edges), strict=True)]
        bits = random.integers(0x2000, 0x5000, (6, LANES), dtype=np.uint32)
        bits |= random.integers(0x2000, 0x5000, (6, LANES), dtype=np.uint32) << np.uint32(16)
    else:
        edges = [0, 1, 0xFFFFFFFF, 0x7FFFFFFF, 0x80000000, 31, 32, 0xFF, 0xFFFF, 0x8000, 0x10001]
        bits = random.integers(0, 1 << 32, (6, LANES), dtype=np.uint32)
        bits >>= random.integers(0, 32, bits.shape, dtype=np.uint32)
    for row in bits:
        row[random.permutation(LANES)[: len(edges)]] = np.array(edges, np.uint32)
    return bits


def _kind(text: str) -> str:
    return next((k for k in ("f32", "f16") if re.search(rf"S\d[^;]*?\.{k}", text)), "u32")


def _same(got: int, want: int, kind: str, close: bool) -> bool:
    """Equal bits; any NaN is one, and an approximated number may be the neighbour."""
    if got == want:
        return True
    if kind not in ("f32", "f16"):
        return False
    width = {"f32": np.uint32, "f16": np.uint16}[kind]
    number = np.float32 if kind == "f32" else np.float16
    a, b = (np.array(x, width).view(number) for x in (got, want))
    if np.isnan(a) and np.isnan(b):
        return True
    return close and abs(got - want) <= 1


@pytest.mark.parametrize("name", VECTOR)
def test_vector_instruction(name: str) -> None:
    text = text_of(name)
    assert text is not None
    chip = "gfx950" if name.startswith(NEW) else "gfx942"
    widths, kind = _sources(text), _kind(text)
    wide_result = bool(re.search(r"\bD0\.[uibf]64\b(?!\[laneId)|\bD0\[63|D0\.b64", text))
    data = _data(kind, sum(map(ord, name)))
    if name.startswith("v_ldexp"):
        data = data.copy()
        data[1] = np.arange(LANES, dtype=np.uint32) * 5 - 160
    # Sources are in v10, v11, ...; pairs take two of them.
    place, operands, values = 10, [], []
    for width in widths:
        place += place % 2 if width == 64 else 0  # pairs start at even registers
        row = place - 10
        operands.append(f"v{place}" if width == 32 else f"v[{place}:{place + 1}]")
        low = data[row].astype(np.uint64)
        values.append(
            low if width == 32 else low | data[row + 1].astype(np.uint64) << np.uint64(32)
        )
        place += width // 32
    carry = "VCC" in text
    mask = int(data[5][0]) | int(data[5][1]) << 32
    target = "v[2:3]" if wide_result else "v2"
    plain = name.startswith(("v_fmaak", "v_fmamk", "v_accvgpr"))
    code, before = "", 0x3F801234
    if name.startswith("v_cmp"):
        code = f"{name}_e64 s[8:9], {', '.join(operands)}"
    elif name == "v_cndmask_b32":
        code = f"v_cndmask_b32_e64 v2, {', '.join(operands)}, s[8:9]"
    elif "_co_" in name:
        taken = ", s[8:9]" if "addc" in name or "subb" in name else ""
        code = f"{name}_e64 v2, s[8:9], {', '.join(operands)}{taken}"
    elif name.startswith("v_mad_") and "64" in name:
        code = f"{name} v[2:3], s[8:9], {', '.join(operands)}"
    elif name == "v_fmaak_f32":
        code = f"v_fmaak_f32 v2, {operands[0]}, {operands[1]}, 0x40490fdb"
    elif name == "v_fmamk_f32":
        code = f"v_fmamk_f32 v2, {operands[0]}, 0x40490fdb, {operands[1]}"
    elif name == "v_swap_b32":
        code = f"v_swap_b32 v2, {operands[0]}"
    else:
        suffix = "" if plain or takes_no_suffix(name) else "_e64"
        code = f"{name}{suffix} {target}, {', '.join(operands)}"
    loads = "".join(f"buffer_load_dword v{10 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n"
                    for k in range(6))  # fmt: skip
    body = (
        f"{loads}s_waitcnt vmcnt(0)\ns_mov_b32 s8, {hex(mask & 0xFFFFFFFF)}\n"
        f"s_mov_b32 s9, {hex(mask >> 32)}\nv_mov_b32 v2, {hex(before)}\nv_mov_b32 v3, 0\ns_nop 4\n"
        f"{code}\ns_nop 4\nv_cndmask_b32_e64 v4, 0, 1, s[8:9]\n"
        + "".join(f"buffer_store_dword v{2 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n"
                  for k in range(3))
    )  # fmt: skip
    found = execute(body, data, chip=chip)[:3]
    close = name.startswith(APPROXIMATE)
    for lane in range(LANES):
        # VCC is s[8:9] here.
        state = {f"S{k}": Cell(int(v[lane]), w) for k, (v, w) in
                 enumerate(zip(values, widths, strict=True))}  # fmt: skip
        state |= {"D0": Cell(before), "D1": Cell(), "VCC": Cell(mask), "laneId": Cell(lane),
                  "SIMM32": Cell(0x40490FDB, 32), "EXEC": Cell(2**64 - 1)}  # fmt: skip
        evaluate(text, state)
        if name.startswith("v_cmp"):
            assert found[2][lane] == state["D0"].bits >> lane & 1, (lane, values[0][lane])
            continue
        if carry and name != "v_cndmask_b32":
            assert found[2][lane] == state["VCC"].bits >> lane & 1, lane
        if "D1." in text:
            assert found[2][lane] == state["D1"].bits & 1, lane
        result = re.search(r"D0(?:\[[^\]]*\])?\.([uibf])(\d+)", text)
        if name.startswith("v_pk_") and kind == "f16":
            pairs = [(int(found[0][lane]) >> s & 0xFFFF, state["D0"].bits >> s & 0xFFFF, "f16")
                     for s in (0, 16)]  # fmt: skip
        elif name == "v_cvt_pk_bf16_f32":
            pairs = [(int(found[0][lane]) << s & 0xFFFF0000, state["D0"].bits << s & 0xFFFF0000,
                      "f32") for s in (0, 16)]  # fmt: skip
        elif wide_result:
            pairs = [(int(found[k][lane]), state["D0"].bits >> 32 * k & 0xFFFFFFFF, kind)
                     for k in (0, 1)]  # fmt: skip
        else:
            kind_out = "".join(result.groups()) if result and result[1] == "f" else "u32"
            bits = 16 if result and result[2] == "16" and "[" not in result[0] else 32
            pairs = [(int(found[0][lane]) & (1 << bits) - 1,
                      as_bits(state["D0"].bits, bits), kind_out)]  # fmt: skip
        tiny = name.startswith(("v_log", "v_exp")) and (
            0 < int(values[0][lane]) & 0x7FFFFFFF < 1 << 23
            or 0 < state["D0"].bits & 0x7FFFFFFF < 1 << 23
        )
        for got, want, how in pairs if not tiny else []:  # where hardware flushes subnormals
            assert _same(got, want, how, close), (
                f"lane {lane}: {[hex(int(v[lane])) for v in values]} gives {got:#x}, not {want:#x}"
            )


_ONE_ENCODING = re.compile(
    r"_pk_|3_|_lshl|_(?:lshl|and)_or_b32$|_bfe_|_bfi_|_fma_|_mad_|_alignbit|_perm|_xad|_mul_lo_u32|"
    r"_mul_hi|rev_b64|rev_i64|_bcnt|_pack|_med3|_ldexp_f32"
)


def takes_no_suffix(name: str) -> bool:
    """Whether an instruction has one encoding only."""
    return _ONE_ENCODING.search(name) is not None


@pytest.mark.parametrize("name", SCALAR)
def test_scalar_instruction(name: str) -> None:
    """Ten pairs of sources, with SCC set and not."""
    text = text_of(name)
    assert text is not None
    widths = _sources(text)
    wide_result = bool(re.search(r"\bD0\.[uib]64 =", text))
    data = _data("u32", sum(map(ord, name)))
    short = name.startswith(("s_movk", "s_addk", "s_mulk", "s_cmpk"))
    compares = name.startswith(("s_cmp", "s_bitcmp"))
    saves = "saveexec" in name
    code, cases = "", []
    for turn in range(10):
        words = [int(data[k][turn]) for k in range(4)]
        scc = turn % 2
        code += f"s_mov_b32 s20, {scc}\n"
        code += "".join(f"s_mov_b32 s{8 + k}, {hex(w)}\n" for k, w in enumerate(words))
        code += f"s_mov_b32 s16, {hex(words[3])}\ns_mov_b32 s17, 0\ns_cmp_eq_u32 s20, 1\n"
        values, operands, at = [], [], 0
        for width in widths:
            values.append(words[at] | (words[at + 1] << 32 if width == 64 else 0))
            operands.append(f"s{8 + at}" if width == 32 else f"s[{8 + at}:{9 + at}]")
            at += width // 32
        # Constants of 16 bits are printed signed, or for unsigned comparisons as they are.
        constant = words[1] & 0xFFFF
        if short:
            signed = constant - 65536 if constant >> 15 else constant
            printed = str(constant if name.endswith("u32") and compares else signed)
            if compares:
                operands, values[1] = [operands[0], printed], constant
            else:
                operands, values = [printed], [constant]
        target = "s[16:17]" if wide_result else "s16"
        code += f"{name} {', '.join([*([] if compares else [target]), *operands])}\n"
        if saves:
            code += "s_mov_b64 s[18:19], exec\ns_mov_b64 exec, -1\n"
        code += "s_cselect_b32 s21, 1, 0\n"
        code += "".join(f"v_writelane_b32 v{30 + k}, s{r}, {turn}\n"
                        for k, r in enumerate((16, 17, 21)))  # fmt: skip
        if saves:
            code += f"v_writelane_b32 v33, s18, {turn}\nv_writelane_b32 v34, s19, {turn}\n"
        cases.append((values, scc, words[3]))
    start = "".join(f"v_mov_b32 v{30 + k}, 0\n" for k in range(5))
    stores = "".join(f"buffer_store_dword v{30 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n"
                     for k in range(5))  # fmt: skip
    found = execute(start + code + stores, data)[:5]
    for turn, (values, scc, before) in enumerate(cases):
        state = {f"S{k}": Cell(v, 64) for k, v in enumerate(values)}
        state |= {"D0": Cell(before), "SCC": Cell(scc), "EXEC": Cell(2**64 - 1)}
        evaluate(text, state)
        assert found[2][turn] == state["SCC"].bits & 1, f"SCC of {[hex(v) for v in values]}"
        if not compares:
            got = int(found[0][turn]) | (int(found[1][turn]) << 32 if wide_result else 0)
            assert got == as_bits(state["D0"].bits, 64 if wide_result else 32), (
                f"{[hex(v) for v in values]}")  # fmt: skip
        if saves:
            assert int(found[3][turn]) | int(found[4][turn]) << 32 == state["EXEC"].bits


@pytest.mark.parametrize("name", MEMORY)
def test_memory_instruction(name: str) -> None:
    """Each lane at a place of its own, in global memory or LDS."""
    text = text_of(name)
    assert text is not None
    random = np.random.default_rng(sum(map(ord, name)))
    lds, store = name.startswith("ds_"), "store" in name or "write" in name
    atomic = "atomic" in name or name.startswith("ds_add")
    # 0 .. 2047: memory of the operation; then the lanes' data registers.
    data = random.integers(0, 1 << 32, (32, LANES), dtype=np.uint32)
    if "f32" in name:
        data = random.standard_normal((32, LANES)).astype(np.float32).view(np.uint32)
    room, unit = 2048, {"ds_write2st64_b32": 4, "ds_write2st64_b64": 8}.get(name, 16)
    data[28] = random.permutation(LANES).astype(np.uint32) * unit
    offset, pair = 16, re.search(r"\d?st64|read2|write2", name)
    body = "".join(f"buffer_load_dword v{10 + k}, v1, s[4:7], 0 offen offset:{256 * (20 + k)}\n"
                   if 256 * (20 + k) < 4096 else
                   f"buffer_load_dword v{10 + k}, v1, s[4:7], s20 offen offset:{256 * (k + 4)}\n"
                   for k in range(9))  # fmt: skip
    body = "s_movk_i32 s20, 0x1000\n" + body + "s_waitcnt vmcnt(0)\n"
    where = "v18"
    registers = "v[10:13]" if re.search(r"x4|128|2(st64)?_b64", name) else (
        "v[10:12]" if re.search(r"x3|96", name) else
        "v[10:11]" if re.search(r"x2|b64|2(st64)?_b32", name) else "v10")  # fmt: skip
    two = re.search(r"(write)2", name)
    if lds:
        # LDS gets a copy of the first 1024 bytes.
        body += "".join(f"buffer_load_dword v{40 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n"
                        for k in range(16)) + "s_waitcnt vmcnt(0)\n"  # fmt: skip
        body += "".join(f"ds_write_b32 v1, v{40 + k} offset:{256 * k}\n" for k in range(16))
        body += "s_waitcnt lgkmcnt(0)\ns_barrier\n"
        room = 4096
        offsets = "offset0:1 offset1:2" if pair else f"offset:{offset}"
        if two:
            parts = "v[10:11], v[12:13]" if name.endswith("b64") else "v10, v11"
            body += f"{name} {where}, {parts} {offsets}\n"
        elif store or atomic:
            body += f"{name} {where}, {registers} {offsets}\n"
        else:
            body += f"{name} {registers}, {where} {offsets}\n"
        body += "s_waitcnt lgkmcnt(0)\ns_barrier\n"
        if store or atomic:
            body += "".join(f"ds_read_b32 v{40 + k}, v1 offset:{256 * k}\n" for k in range(16))
            body += "s_waitcnt lgkmcnt(0)\n"
            body += "".join(f"buffer_store_dword v{40 + k}, v1, s[4:7], 0 offen offset:{256 * k}\n"
                            for k in range(16))  # fmt: skip
    elif name.startswith("buffer"):
        back = " sc0" if atomic else ""
        body += f"{name} {registers}, {where}, s[4:7], 0 offen offset:{offset}{back}\n"
    elif name.startswith("global"):
        if atomic:
            body += f"{name} v10, {where}, v10, s[4:5] offset:{offset} sc0\n"
        elif store:
            body += f"{name} {where}, {registers}, s[4:5] offset:{offset}\n"
        else:
            body += f"{name} {registers}, {where}, s[4:5] offset:{offset}\n"
    else:
        body += "v_mov_b32 v21, s5\nv_add_co_u32_e64 v20, vcc, s4, v18\n"
        body += "v_addc_co_u32_e64 v21, vcc, v21, 0, vcc\n"
        parts = f"v[20:21], {registers}" if store else f"{registers}, v[20:21]"
        body += f"{name} {parts} offset:{offset}\n"
    body += "s_waitcnt vmcnt(0) lgkmcnt(0)\n"
    if not store:
        body += "".join(f"buffer_store_dword v{10 + k}, v1, s[4:7], s20 offen offset:{256 * k}\n"
                        for k in range(4))  # fmt: skip
    found = execute(body, data, lds=4096)
    memory = bytearray(data.tobytes()[:room])
    for lane in range(LANES):
        own = [int(data[20 + k][lane]) for k in range(4)]
        wide = sum(word << 32 * k for k, word in enumerate(own))
        place = int(data[28][lane])
        base = place if lds and "OFFSET0.b32" not in text else place + offset
        state = {"MEM": MemoryCell(memory), "addr": Cell(base), "ADDR": Cell(base + lds * offset),
                 "OFFSET": Cell(offset), "OFFSET0": Cell(1), "OFFSET1": Cell(2)}  # fmt: skip
        for register in ("VDATA", "DATA", "RETURN_DATA"):
            state[register] = Cell(wide, 128)
        state["DATA2"] = Cell(wide >> (64 if name.endswith("b64") else 32), 128)
        lines = [line for line in text.splitlines() if "Calc" not in line]
        kept = state["VDATA" if "VDATA" in text else "RETURN_DATA"]
        evaluate("\n".join(lines), state)
        if not store and "ds_add" not in name:
            words = [int(found[16 + k][lane]) for k in range(4)]
            bits = sum(word << 32 * k for k, word in enumerate(words))
            # A type alone says how much of the register is written.
            count = max([int(x) for x in re.findall(r"DATA\[(\d+) :", text)] or [31]) // 32 + 1
            mask = (1 << 32 * count) - 1
            assert bits & mask == kept.bits & mask, f"lane {lane}"
    if store or atomic:
        whole = np.frombuffer(bytes(memory), np.uint32)
        np.testing.assert_array_equal(found.ravel()[: room // 4], whole)
