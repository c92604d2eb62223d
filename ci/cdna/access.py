"""Vector memory instructions: buffer, global and flat accesses, and those of LDS."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from ci.cdna.machine import HANDLERS, LANES, Machine, handles
from ci.cdna.parse import M0, CodeError, Instruction

Array = np.ndarray[Any, Any]
_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4,
          "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # fmt: skip
_ACCESS = re.compile(r"(?:buffer|global|flat)_(load|store)_([a-z]+(?:x\d)?)(_d16)?(_hi)?$")
_LANE = np.arange(LANES)


def _number(i: Instruction, name: str) -> int:
    return int(i.modifiers.get(name, "0"), 0)


def _addresses(m: Machine, i: Instruction, first: int, width: int) -> tuple[Array, Array]:
    """(uint64 addresses [n, 64], lanes that access memory); `first` is the address operand."""
    if i.name.startswith("buffer"):
        return _buffer(m, i, first, width)
    vector, scalar = i.operands[first], i.operands[first + 1 : first + 2]
    offset = np.uint64(_number(i, "offset") & (1 << 64) - 1)
    if scalar and scalar[0].kind == "s":
        base = m.scalar64(scalar[0])[:, None] + offset
        return m.vector(vector.index).astype(np.uint64) + base, m.mask
    low, high = m.vector(vector.index), m.vector(vector.index + 1)
    return (low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)) + offset, m.mask


def _buffer(m: Machine, i: Instruction, first: int, width: int) -> tuple[Array, Array]:
    known = {"offen", "offset", "sc0", "sc1", "nt", "lds"}
    if set(i.modifiers) - known:
        raise m.fault(f"modifier {sorted(set(i.modifiers) - known)[0]} is not supported")
    vector, resource, scalar = i.operands[first : first + 3]
    words = [m.scalar(resource.index + w) for w in range(4)]
    if (words[1] >> 16).any() or (words[3] >> 23 & 1).any():
        raise m.fault("buffers with a stride or swizzle are not supported")
    base = words[0].astype(np.uint64) | (words[1] & 0xFFFF).astype(np.uint64) << np.uint64(32)
    offset = np.full((m.count, LANES), _number(i, "offset"), np.uint64)
    if "offen" in i.modifiers:
        offset = offset + m.vector(vector.index)
    more = m.scalar32(scalar)[:, None].astype(np.uint64)
    size = words[2][:, None].astype(np.uint64)
    # Raw buffers: out of range when the offset without the scalar one passes what that leaves.
    inside = offset + np.uint64(width) + more <= size
    return base[:, None] + offset + more, m.mask & inside


def _transfer(m: Machine, i: Instruction) -> None:
    found = _ACCESS.match(i.name)
    assert found is not None
    if "lds" in i.modifiers or "_lds_" in i.name:
        _load_to_lds(m, i, _BYTES[found[2]])
    elif found[1] == "load":
        _load(m, i, found)
    else:
        _store(m, i, found)


def _load(m: Machine, i: Instruction, found: re.Match[str]) -> None:
    width = _BYTES[found[2]]
    addresses, lanes = _addresses(m, i, 1, width)
    data = np.zeros((m.count, LANES, max(4, width)), np.uint8)
    data[lanes, :width] = _checked(m, lambda: m.memory.read(addresses[lanes], width))
    words = data.view(np.uint32)
    to = i.operands[0].index
    if found[2] in ("sbyte", "sshort"):
        sign = np.uint32(1 << (8 * width - 1))
        words = (words ^ sign) - sign
    if found[3]:
        keep, shift = (0xFFFF, 16) if found[4] else (0xFFFF0000, 0)
        words = (words & np.uint32(0xFFFF)) << np.uint32(shift)
        words = words | (m.vector(to) & np.uint32(keep))[..., None]
    m.vm.issued[m.waves] += 1
    for word in range(words.shape[-1]):
        m.put_vector(to + word, words[..., word])
        m.mark_loading("v", to + word, m.vm)


def _store(m: Machine, i: Instruction, found: re.Match[str]) -> None:
    width = _BYTES[found[2]]
    buffer = i.name.startswith("buffer")
    data, first = (0, 1) if buffer else (1, 0)
    if buffer:
        addresses, lanes = _addresses(m, i, first, width)
    else:
        addresses, lanes = _addresses_around(m, i, width)
    start = i.operands[data].index
    words = np.stack([m.vector(start + w, lanes) for w in range(-(-width // 4))], axis=-1)
    if found[4]:
        words = words >> np.uint32(16)
    content = words.view(np.uint8)[..., :width]
    m.vm.issued[m.waves] += 1
    _checked(m, lambda: m.memory.write(addresses[lanes], content[lanes]))


def _addresses_around(m: Machine, i: Instruction, width: int) -> tuple[Array, Array]:
    """Addresses of a store, whose data stands between the address and the scalar base."""
    moved = (i.operands[0], *i.operands[2:3])
    return _addresses(m, Instruction(i.name, moved, i.modifiers, i.encoding, i.text, i.line), 0,
                      width)  # fmt: skip


def _load_to_lds(m: Machine, i: Instruction, width: int) -> None:
    """Each lane's bytes go to LDS at M0 + offset, lanes one after another."""
    addresses, lanes = _addresses(m, i, 0, width)
    base = (m.scalar(M0)[:, None] & np.uint32(0xFFFF if m.chip == "gfx942" else 0x3FFFF)).astype(
        np.int64
    )
    place = base + _number(i, "offset") + _LANE * width
    data = np.zeros((m.count, LANES, width), np.uint8)
    data[lanes] = _checked(m, lambda: m.memory.read(addresses[lanes], width))
    m.vm.issued[m.waves] += 1
    active = m.mask
    groups, waves = _owners(m, active)
    tickets = np.broadcast_to(m.vm.issued[m.waves][:, None], active.shape)[active]
    _checked(m, lambda: m.lds.write(groups, waves, place[active], data[active], tickets))


def _checked(m: Machine, act: Any) -> Any:
    try:
        return act()
    except CodeError as error:
        raise m.fault(str(error)) from None


def _owners(m: Machine, lanes: Array) -> tuple[Array, Array]:
    """(workgroup, wave) of each active lane."""
    waves = np.broadcast_to(m.wave_numbers()[:, None], lanes.shape)[lanes]
    return m.group[waves], waves


for _space in ("buffer", "global", "flat"):
    for _size in _BYTES:
        if _size != "byte":
            HANDLERS[f"{_space}_load_{_size}"] = _transfer
        if not _size.startswith(("u", "s")) or _size == "short":
            HANDLERS[f"{_space}_store_{_size}"] = _transfer
    for _size in ("ubyte", "sbyte", "short"):
        for _half in ("_d16", "_d16_hi"):
            HANDLERS[f"{_space}_load_{_size}{_half}"] = _transfer
    for _size in ("byte", "short"):
        HANDLERS[f"{_space}_store_{_size}_d16_hi"] = _transfer


@handles("buffer_atomic_add", "global_atomic_add", "buffer_atomic_add_f32", "global_atomic_add_f32")
def _atomic_add(m: Machine, i: Instruction) -> None:
    """Lane after lane; with sc0 the value before is returned."""
    back = "sc0" in i.modifiers
    if i.name.startswith("buffer"):
        data = 0
        addresses, lanes = _addresses(m, i, 1, 4)
    else:
        names = i.operands[1:] if back else i.operands
        inner = Instruction(i.name, names, i.modifiers, i.encoding, i.text, i.line)
        addresses, lanes = _addresses_around(m, inner, 4)
        data = 2 if back else 1
    kind = np.float32 if i.name.endswith("f32") else np.uint32
    values = m.vector(i.operands[data].index, lanes)
    before = np.zeros((m.count, LANES), np.uint32)
    for wave, lane in zip(*np.nonzero(lanes), strict=True):
        place = addresses[wave, lane][None]
        old = _checked(m, lambda place=place: m.memory.read(place, 4))
        before[wave, lane] = old.view(np.uint32)[0, 0]
        new = old.view(kind) + values[wave, lane][None].view(kind)
        m.memory.write(place, new.view(np.uint8))
    m.vm.issued[m.waves] += 1
    if back:
        m.put_vector(i.operands[0].index, before)
        m.mark_loading("v", i.operands[0].index, m.vm)


_DS_BYTES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8,
             "b96": 12, "b128": 16}  # fmt: skip
_DS = re.compile(r"ds_(read|write)(2st64|2)?_([bui]\d+)(_d16)?(_hi)?$")


def _places(m: Machine, i: Instruction, operand: int, width: int, pair: str | None) -> list[Array]:
    """LDS offsets [n, 64] of the one or two accesses of an instruction."""
    base = m.vector(i.operands[operand].index).astype(np.int64)
    if pair is None:
        return [base + _number(i, "offset")]
    unit = width * (64 if pair == "2st64" else 1)
    return [base + _number(i, name) * unit for name in ("offset0", "offset1")]


def _local(m: Machine, i: Instruction) -> None:
    found = _DS.match(i.name)
    assert found is not None
    width = _DS_BYTES[found[3]]
    m.ds.issued[m.waves] += 1
    lanes = m.mask
    groups, waves = _owners(m, lanes)
    if found[1] == "write":
        for number, place in enumerate(_places(m, i, 0, width, found[2])):
            of = i.operands[1 + number]
            words = np.stack([m.vector(of.index + w) for w in range(-(-width // 4))], axis=-1)
            if found[5]:
                words = words >> np.uint32(16)
            data = np.ascontiguousarray(words).view(np.uint8)[..., :width][lanes]
            _checked(m, lambda p=place, d=data: m.lds.write(groups, waves, p[lanes], d))
        return
    to = i.operands[0].index
    results = []
    for place in _places(m, i, 1, width, found[2]):
        data = np.zeros((m.count, LANES, max(4, width)), np.uint8)
        data[lanes, :width] = _checked(
            m, lambda p=place: m.lds.read(groups, waves, p[lanes], width, m.vm.done)
        )
        words = data.view(np.uint32)
        if found[3] in ("i8", "i16"):
            sign = np.uint32(1 << (8 * width - 1))
            words = (words ^ sign) - sign
        if found[4]:
            keep, shift = (0xFFFF, 16) if found[5] else (0xFFFF0000, 0)
            words = (words & np.uint32(0xFFFF)) << np.uint32(shift)
            words = words | (m.vector(to) & np.uint32(keep))[..., None]
        results.append(words)
    _receive(m, to, np.concatenate(results, axis=-1))


def _receive(m: Machine, to: int, words: Array) -> None:
    """Results of an LDS operation [n, 64, words], usable after lgkmcnt."""
    for word in range(words.shape[-1]):
        m.put_vector(to + word, words[..., word])
        m.mark_loading("v", to + word, m.ds)


for _size in _DS_BYTES:
    if (_size[0] == "b" and _size not in ("b8", "b16")) or _size[0] != "b":
        HANDLERS[f"ds_read_{_size}"] = _local
    if _size[0] == "b":
        HANDLERS[f"ds_write_{_size}"] = _local
for _size in ("u8_d16", "u8_d16_hi", "i8_d16", "i8_d16_hi", "u16_d16", "u16_d16_hi"):
    HANDLERS[f"ds_read_{_size}"] = _local
for _size in ("b8_d16_hi", "b16_d16_hi"):
    HANDLERS[f"ds_write_{_size}"] = _local
for _pair in ("2", "2st64"):
    for _size in ("b32", "b64"):
        HANDLERS[f"ds_read{_pair}_{_size}"] = _local
        HANDLERS[f"ds_write{_pair}_{_size}"] = _local


@handles("ds_add_u32")
def _add(m: Machine, i: Instruction) -> None:
    lanes = m.mask
    groups, waves = _owners(m, lanes)
    place = _places(m, i, 0, 4, None)[0]
    values = m.vector(i.operands[1].index)
    m.ds.issued[m.waves] += 1
    _checked(m, lambda: m.lds.add(groups, waves, place[lanes], values[lanes]))


@handles("ds_bpermute_b32")
def _permute(m: Machine, i: Instruction) -> None:
    """Each lane fetches the value of the lane it names; one that is switched off gives zero."""
    index = (m.vector(i.operands[1].index) + np.uint32(_number(i, "offset"))) >> 2 & 63
    index = index.astype(np.int64)
    lanes = m.mask
    m.ds.issued[m.waves] += 1
    wave = np.arange(m.count)[:, None]
    needed = np.zeros_like(lanes)
    rows, columns = np.nonzero(lanes)
    needed[rows, index[rows, columns]] = True
    data = m.vector(i.operands[2].index, needed & lanes)
    value = np.where(lanes[wave, index], data[wave, index], np.uint32(0))
    _receive(m, i.operands[0].index, value[..., None])


@handles("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
def _transposed(m: Machine, i: Instruction) -> None:
    """Sixteen lanes read eight bytes each, rows of a matrix, and receive its columns.

    With n values a lane, a row is in 16 / n lanes: lane l receives, as its value j, value l % n of
    lane j * 16 / n + l // n.
    """
    if m.chip != "gfx950" or not m.mask.all():
        raise m.fault("needs gfx950 and all lanes active")
    lanes = m.mask
    groups, waves = _owners(m, lanes)
    place = _places(m, i, 1, 8, None)[0]
    m.ds.issued[m.waves] += 1
    data = _checked(m, lambda: m.lds.read(groups, waves, place[lanes], 8, m.vm.done))
    each = 4 if i.name.endswith("b16") else 8
    values = data.view(np.uint16 if each == 4 else np.uint8).reshape(m.count, 4, 16, each)
    lane = np.arange(16)
    parts = [values[:, :, j * 16 // each + lane // each, lane % each] for j in range(each)]
    words = np.ascontiguousarray(np.stack(parts, axis=-1)).reshape(m.count, LANES, each)
    _receive(m, i.operands[0].index, words.view(np.uint32))
