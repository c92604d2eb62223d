"""Vector memory instructions: buffer, global and flat accesses, and those of LDS."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ci.cdna import integers
from ci.cdna.machine import HANDLERS, LANES, Counters, Machine, handles
from ci.cdna.parse import M0, Instruction, Operand

Array = np.ndarray[Any, Any]
_BYTES = {"ubyte": 1, "sbyte": 1, "byte": 1, "ushort": 2, "sshort": 2, "short": 2, "dword": 4,
          "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}  # fmt: skip
_ACCESS = re.compile(r"(?:buffer|global|flat)_(load|store)_([a-z]+(?:x\d)?)(_d16)?(_hi)?$")
_KNOWN = {"offen", "offset", "sc0", "sc1", "nt", "lds"}
_LANE = np.arange(LANES)


def _addresses(m: Machine, i: Instruction, operands: Sequence[Operand], width: int
               ) -> tuple[Array, Array]:  # fmt: skip
    """(uint64 addresses [n, 64], lanes that access memory) of address operands."""
    if set(i.modifiers) - _KNOWN:
        raise m.fault(f"modifier {sorted(set(i.modifiers) - _KNOWN)[0]} is not supported")
    if i.name.startswith("buffer"):
        return _buffer(m, i, operands, width)
    vector, *scalar = operands
    offset = np.uint64(i.number("offset") & (1 << 64) - 1)
    if scalar and scalar[0].kind == "s":
        base = m.scalar64(scalar[0])[:, None] + offset
        return m.vector(vector.index).astype(np.uint64) + base, m.mask
    return integers.joined(m.vector(vector.index), m.vector(vector.index + 1)) + offset, m.mask


def _buffer(m: Machine, i: Instruction, operands: Sequence[Operand], width: int
            ) -> tuple[Array, Array]:  # fmt: skip
    vector, resource, scalar = operands[:3]
    words = [m.scalar(resource.index + w) for w in range(4)]
    if (words[1] >> 16).any() or (words[3] >> 23 & 1).any():
        raise m.fault("buffers with a stride or swizzle are not supported")
    base = integers.joined(words[0], words[1] & 0xFFFF)
    offset = np.full((m.count, LANES), i.number("offset"), np.uint64)
    if "offen" in i.modifiers:
        offset = offset + m.vector(vector.index)
    more = m.scalar32(scalar)[:, None].astype(np.uint64)
    size = words[2][:, None].astype(np.uint64)
    # Raw buffers: out of range when the offset without the scalar one passes what that leaves.
    inside = offset + np.uint64(width) + more <= size
    return base[:, None] + offset + more, m.mask & inside


def _owners(m: Machine, lanes: Array) -> tuple[Array, Array]:
    """(workgroup of this machine, wave) of each active lane."""
    waves = np.broadcast_to(np.arange(len(m.group))[m.waves, None], lanes.shape)[lanes]
    return m.group[waves], waves


def _fetch(m: Machine, i: Instruction, addresses: Array, lanes: Array, width: int) -> Array:
    """uint8 [k, width] from global memory for the active lanes."""
    groups = m.first_group + _owners(m, lanes)[0]
    return m.checked(m.memory.read, addresses[lanes], width, groups, "sc1" in i.modifiers)


def _words(m: Machine, lanes: Array, data: Array, width: int) -> Array:
    """Bytes [k, width] of the active lanes as uint32 [n, 64, words], zero elsewhere."""
    whole = np.zeros((m.count, LANES, max(4, width)), np.uint8)
    whole[lanes, :width] = data
    return whole.view(np.uint32)


def _receive(m: Machine, to: int, words: Array, counters: Counters) -> None:
    """Results of an operation [n, 64, words], usable once that has been waited for."""
    for word in range(words.shape[-1]):
        m.put_vector(to + word, words[..., word], by=counters)
        m.mark_loading("v", to + word, counters)


def _placed(m: Machine, to: int, words: Array, width: int, signed: bool, half: str | None,
            upper: str | None) -> Array:  # fmt: skip
    """Loaded words as the register gets them: sign-extended, or in one half beside the other."""
    if signed:
        words = integers.extended(words, 8 * width)
    if half:
        keep, shift = (0xFFFF, 16) if upper else (0xFFFF0000, 0)
        words = (words & np.uint32(0xFFFF)) << np.uint32(shift)
        words = words | (m.vector(to) & np.uint32(keep))[..., None]
    return words


def _content(m: Machine, start: int, width: int, upper: str | None, lanes: Array) -> Array:
    """What active lanes store, uint8 [k, width]."""
    words = np.stack([m.vector(start + w, lanes) for w in range(-(-width // 4))], axis=-1)
    return (words >> np.uint32(16 if upper else 0)).view(np.uint8)[..., :width][lanes]


def _transfer(m: Machine, i: Instruction) -> None:
    found = _ACCESS.match(i.name.replace("_lds_", "_"))
    assert found is not None
    width, to = _BYTES[found[2]], i.operands[0].index
    m.vm.issued[m.waves] += 1
    if "lds" in i.modifiers or "_lds_" in i.name:
        _load_to_lds(m, i, width)
    elif found[1] == "load":
        addresses, lanes = _addresses(m, i, i.operands[1:], width)
        words = _words(m, lanes, _fetch(m, i, addresses, lanes, width), width)
        signed = found[2] in ("sbyte", "sshort")
        _receive(m, to, _placed(m, to, words, width, signed, found[3], found[4]), m.vm)
    else:
        # The data of a global store stands between its address and its scalar base.
        buffer = i.name.startswith("buffer")
        data, *rest = i.operands if buffer else (i.operands[1], i.operands[0], *i.operands[2:])
        addresses, lanes = _addresses(m, i, rest, width)
        content = _content(m, data.index, width, found[4], lanes)
        groups = None if "sc1" in i.modifiers else m.first_group + _owners(m, lanes)[0]
        m.checked(m.memory.write, addresses[lanes], content, groups)
        if groups is None:
            m.published[m.waves] = m.vm.issued[m.waves]


def _load_to_lds(m: Machine, i: Instruction, width: int) -> None:
    """Each lane's bytes go to LDS at M0 + offset, lanes one after another."""
    addresses, lanes = _addresses(m, i, i.operands, width)
    base = m.scalar(M0)[:, None] & np.uint32(0xFFFF if m.chip == "gfx942" else 0x3FFFF)
    place = base.astype(np.int64) + i.number("offset") + _LANE * width
    data = np.zeros((m.count, LANES, width), np.uint8)
    data[lanes] = _fetch(m, i, addresses, lanes, width)
    active = m.mask
    groups, waves = _owners(m, active)
    m.checked(m.lds.write, groups, waves, place[active], data[active], m.vm.issued[waves])


_LOADS = ("ubyte sbyte ushort sshort dword dwordx2 dwordx3 dwordx4 ubyte_d16 ubyte_d16_hi "
          "sbyte_d16 sbyte_d16_hi short_d16 short_d16_hi")  # fmt: skip
_STORES = "byte short dword dwordx2 dwordx3 dwordx4 byte_d16_hi short_d16_hi"
for _kind, _sizes in (("load", _LOADS), ("store", _STORES)):
    for _space in ("buffer", "global", "flat"):
        HANDLERS |= {f"{_space}_{_kind}_{size}": _transfer for size in _sizes.split()}
HANDLERS |= {f"global_load_lds_{size}": _transfer for size in ("dword", "dwordx3", "dwordx4")}


@handles("buffer_atomic_add", "global_atomic_add", "buffer_atomic_add_f32", "global_atomic_add_f32")
def _atomic_add(m: Machine, i: Instruction) -> None:
    """Lane after lane, in what all workgroups share; with sc0 the value before is returned.

    Others take it as word that what was stored for them has arrived.
    """
    if (m.published > m.vm.done)[np.isin(m.group, m.group[m.waves])].any():
        raise m.fault("its workgroup's stores for others need s_waitcnt vmcnt(0) before it")
    back = "sc0" in i.modifiers
    names = i.operands
    if not i.name.startswith("buffer"):
        address, data, *rest = names[1:] if back else names
        names = (data, address, *rest)
    addresses, lanes = _addresses(m, i, names[1:], 4)
    kind = np.float32 if i.name.endswith("f32") else np.uint32
    values = m.vector(names[0].index, lanes)
    before = np.zeros((m.count, LANES), np.uint32)
    for wave, lane in zip(*np.nonzero(lanes), strict=True):
        place = addresses[wave, lane][None]
        old = m.checked(m.memory.read, place, 4, None)
        before[wave, lane] = old.view(np.uint32)[0, 0]
        new = old.view(kind) + values[wave, lane][None].view(kind)
        m.memory.write(place, new.view(np.uint8), None)
    m.vm.issued[m.waves] += 1
    if back:
        _receive(m, i.operands[0].index, before[..., None], m.vm)


@handles("buffer_wbl2", "buffer_inv")
def _caches(m: Machine, i: Instruction) -> None:
    """Only with sc1 other workgroups, on chips with other caches, are concerned."""
    if "sc1" in i.modifiers:
        groups = m.first_group + m.group[m.waves]
        (m.memory.release if i.name == "buffer_wbl2" else m.memory.acquire)(groups)
        if i.name == "buffer_wbl2":
            m.vm.issued[m.waves] += 1
            m.published[m.waves] = m.vm.issued[m.waves]


_DS_BYTES = {"b8": 1, "u8": 1, "i8": 1, "b16": 2, "u16": 2, "i16": 2, "b32": 4, "b64": 8,
             "b96": 12, "b128": 16}  # fmt: skip
_DS = re.compile(r"ds_(read|write)(2st64|2)?_([bui]\d+)(_d16)?(_hi)?$")


def _places(m: Machine, i: Instruction, operand: int, width: int, pair: str | None) -> list[Array]:
    """LDS offsets [n, 64] of the one or two accesses of an instruction."""
    base = m.vector(i.operands[operand].index).astype(np.int64)
    if pair is None:
        return [base + i.number("offset")]
    unit = width * (64 if pair == "2st64" else 1)
    return [base + i.number(name) * unit for name in ("offset0", "offset1")]


def _local(m: Machine, i: Instruction) -> None:
    found = _DS.match(i.name)
    assert found is not None
    width, to, lanes = _DS_BYTES[found[3]], i.operands[0].index, m.mask
    m.ds.issued[m.waves] += 1
    groups, waves = _owners(m, lanes)
    if found[1] == "write":
        for number, place in enumerate(_places(m, i, 0, width, found[2])):
            data = _content(m, i.operands[1 + number].index, width, found[5], lanes)
            m.checked(m.lds.write, groups, waves, place[lanes], data)
        return
    results = []
    for place in _places(m, i, 1, width, found[2]):
        data = m.checked(m.lds.read, groups, waves, place[lanes], width, m.vm.done)
        words = _words(m, lanes, data, width)
        results.append(_placed(m, to, words, width, found[3][0] == "i", found[4], found[5]))
    _receive(m, to, np.concatenate(results, axis=-1), m.ds)


_READS = "u8 i8 u16 i16 b32 b64 b96 b128 u8_d16 u8_d16_hi i8_d16 i8_d16_hi u16_d16 u16_d16_hi"
_WRITES = "b8 b16 b32 b64 b96 b128 b8_d16_hi b16_d16_hi"
for _kind, _sizes in (("read", _READS), ("write", _WRITES)):
    HANDLERS |= {f"ds_{_kind}_{size}": _local for size in _sizes.split()}
    HANDLERS |= {f"ds_{_kind}{pair}_{size}": _local for pair in ("2", "2st64")
                 for size in ("b32", "b64")}  # fmt: skip


@handles("ds_add_u32")
def _add(m: Machine, i: Instruction) -> None:
    lanes = m.mask
    place, values = _places(m, i, 0, 4, None)[0], m.vector(i.operands[1].index)
    m.ds.issued[m.waves] += 1
    m.checked(m.lds.add, *_owners(m, lanes), place[lanes], values[lanes])


@handles("ds_bpermute_b32", "ds_swizzle_b32")
def _permute(m: Machine, i: Instruction) -> None:
    """Each lane fetches the value of the lane it names, or of the one that a swizzle swaps with it;
    one that is switched off gives zero."""
    lanes = m.mask
    if i.name == "ds_swizzle_b32":
        swap = re.fullmatch(r"swizzle\(SWAP,(\d+)\)", i.modifiers.get("offset", ""))
        if swap is None:
            raise m.fault("this swizzle is not supported")
        index = np.broadcast_to(_LANE ^ int(swap[1]), lanes.shape)
    else:
        address = m.vector(i.operands[1].index) + np.uint32(i.number("offset"))
        index = (address >> 2 & 63).astype(np.int64)
    m.ds.issued[m.waves] += 1
    wave = np.arange(m.count)[:, None]
    needed = np.zeros_like(lanes)
    rows, columns = np.nonzero(lanes)
    needed[rows, index[rows, columns]] = True
    data = m.vector(i.operands[-1].index, needed & lanes)
    value = np.where(lanes[wave, index], data[wave, index], np.uint32(0))
    _receive(m, i.operands[0].index, value[..., None], m.ds)


@handles("ds_read_b64_tr_b16", "ds_read_b64_tr_b8")
def _transposed(m: Machine, i: Instruction) -> None:
    """Sixteen lanes read eight bytes each, rows of a matrix, and receive its columns.

    With n values a lane, a row is in 16 / n lanes: lane l receives, as its value j, value l % n of
    lane j * 16 / n + l // n.
    """
    if m.chip != "gfx950" or not m.mask.all():
        raise m.fault("needs gfx950 and all lanes active")
    place = _places(m, i, 1, 8, None)[0].ravel()
    m.ds.issued[m.waves] += 1
    data = m.checked(m.lds.read, *_owners(m, m.mask), place, 8, m.vm.done)
    each = 4 if i.name.endswith("b16") else 8
    values = data.view(np.uint16 if each == 4 else np.uint8).reshape(m.count, 4, 16, each)
    lane = np.arange(16)
    parts = [values[:, :, j * 16 // each + lane // each, lane % each] for j in range(each)]
    words = np.ascontiguousarray(np.stack(parts, axis=-1)).reshape(m.count, LANES, each)
    _receive(m, i.operands[0].index, words.view(np.uint32), m.ds)
