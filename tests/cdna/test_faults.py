"""What hardware hides is reported: planted faults in small kernels, each beside its repair."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from ci.cdna.launch import run_launch, run_program
from ci.cdna.memory import Memory
from ci.cdna.parse import CodeError, program
from ci.cross_compile import recorded
from inkling_portable.backends.triton._common import launching_for
from inkling_portable.backends.triton.norm import rms_norm
from inkling_portable.target import Target
from tests.cdna.hand_written import execute

STORE = "buffer_store_dword v2, v1, s[4:7], 0 offen\n"
SHARE = "ds_write_b32 v1, v1\ns_waitcnt lgkmcnt(0)\n{barrier}\nv_xor_b32_e32 v3, 0x100, v1\n" \
        "ds_read_b32 v2, v3\ns_waitcnt lgkmcnt(0)\n" + STORE  # fmt: skip
# name: (right code, wrong code, part of the report, waves)
FAULTS = {
    "load used too soon": (
        "buffer_load_dword v2, v1, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\n" + STORE,
        "buffer_load_dword v2, v1, s[4:7], 0 offen\n" + STORE,
        "v2 is read before the s_waitcnt", 1,
    ),
    "one load of two waited for": (
        "buffer_load_dword v3, v1, s[4:7], 0 offen\nbuffer_load_dword v2, v1, s[4:7], 0 offen\n"
        "s_waitcnt vmcnt(0)\n" + STORE,
        "buffer_load_dword v3, v1, s[4:7], 0 offen\nbuffer_load_dword v2, v1, s[4:7], 0 offen\n"
        "s_waitcnt vmcnt(1)\n" + STORE,
        "v2 is read before the s_waitcnt", 1,
    ),
    "a second load and a move into a register that is being loaded": (
        "buffer_load_dword v2, v1, s[4:7], 0 offen\nbuffer_load_dword v2, v1, s[4:7], 0 offen\n"
        "s_waitcnt vmcnt(0)\n" + STORE,
        "buffer_load_dword v2, v1, s[4:7], 0 offen\nv_mov_b32_e32 v2, 1\n",
        "v2 is written before the s_waitcnt", 1,
    ),
    "scalar load used too soon": (
        "s_load_dword s8, s[0:1], 0x0\ns_waitcnt lgkmcnt(0)\nv_mov_b32_e32 v2, s8\n" + STORE,
        "s_load_dword s8, s[0:1], 0x0\ns_waitcnt lgkmcnt(1)\nv_mov_b32_e32 v2, s8\n" + STORE,
        "s8 is read before the s_waitcnt", 1,
    ),
    "write outside": (
        "v_mov_b32_e32 v2, 1\n" + STORE,
        "v_mov_b32_e32 v2, 1\nbuffer_store_dword v2, v1, s[4:7], 0 offen offset:260\n",
        "writes 4 bytes outside every buffer, at byte 260 of buffer 0", 1,
    ),
    "unwritten register": (
        "v_mov_b32_e32 v3, 1\nv_add_u32_e32 v2, v3, v3\n" + STORE,
        "v_add_u32_e32 v2, v3, v3\n" + STORE,
        "v2 is read before it is written", 1,
    ),
    "register written in some lanes": (
        "v_mov_b32_e32 v2, 0\ns_mov_b64 exec, 1\nv_mov_b32_e32 v2, 1\ns_mov_b64 exec, -1\n" + STORE,
        "s_mov_b64 exec, 1\nv_mov_b32_e32 v2, 1\ns_mov_b64 exec, -1\n" + STORE,
        "v2 is read before it is written", 1,
    ),
    "unwritten LDS": (
        SHARE.format(barrier="s_barrier"),
        "ds_read_b32 v2, v1 offset:256\ns_waitcnt lgkmcnt(0)\n" + STORE,
        "reads LDS that was never written", 2,
    ),
    "race": (
        SHARE.format(barrier="s_barrier"),
        # Wave 1 runs ahead of wave 0, or behind it: either way no barrier stands between.
        SHARE.format(barrier="s_nop 0"),
        "another wave wrote since the last barrier", 2,
    ),
    "LDS outside": (
        SHARE.format(barrier="s_barrier"),
        "ds_write_b32 v1, v1 offset:900\n",
        "writes LDS outside its 1024 bytes", 2,
    ),
    "barrier in one wave": (
        "v_mov_b32_e32 v2, 0\ns_barrier\n" + STORE,
        "v_readfirstlane_b32 s8, v0\ns_cmp_eq_u32 s8, 0\ns_cbranch_scc1 .Lend\ns_barrier\n.Lend:\n",
        "do not meet at one barrier", 2,
    ),
    "endless loop": (
        "s_mov_b32 s8, 0\n.Lhead:\ns_add_u32 s8, s8, 1\ns_cmp_lt_u32 s8, 9\n"
        "s_cbranch_scc1 .Lhead\nv_mov_b32_e32 v2, s8\n" + STORE,
        ".Lhead:\ns_branch .Lhead\n",
        "the budget of 2000 steps is used up", 1,
    ),
    "unknown instruction": (
        "v_sqrt_f32_e32 v2, v1\n" + STORE,
        "v_sin_f32_e32 v2, v1\n" + STORE,
        "instruction v_sin_f32 is not supported", 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_and_its_repair_is_not(name: str) -> None:
    right, wrong, report, waves = FAULTS[name]
    data = np.zeros(64 * waves, np.uint32)
    execute(right, data, waves)
    with pytest.raises(CodeError, match=report):
        execute(wrong, data, waves)


# Workgroup 0 stores, then counts up a flag; workgroup 1 comes later and reads what was stored.
PASS = """
v_mov_b32_e32 v2, 7
v_mov_b32_e32 v4, 0x200
s_cmp_eq_u32 s2, 0
s_cbranch_scc0 .Lreader
buffer_store_dword v2, v1, s[4:7], 0 offen {scope}
{release}
{stored}
buffer_atomic_add v2, v4, s[4:7], 0 offen
s_branch .Lend
.Lreader:
buffer_atomic_add v2, v4, s[4:7], 0 offen sc0
s_waitcnt vmcnt(0)
{acquire}
buffer_load_dword v2, v1, s[4:7], 0 offen {fresh}
s_waitcnt vmcnt(0)
buffer_store_dword v2, v1, s[4:7], 0 offen offset:256
.Lend:
"""


def _passed(release: str = "", acquire: str = "", scope: str = "", fresh: str = "",
            stored: str = "s_waitcnt vmcnt(0)") -> np.ndarray:  # fmt: skip
    body = PASS.format(release=release, acquire=acquire, scope=scope, fresh=fresh, stored=stored)
    return execute(body, np.zeros(192, np.uint32), groups=2)[64:128]


def test_data_between_workgroups_needs_release_and_acquire() -> None:
    """Write back and invalidate at agent scope, or accesses that pass by the caches."""
    ways = ({"release": "buffer_wbl2 sc1", "acquire": "buffer_inv sc1"},
            {"scope": "sc1", "acquire": "buffer_inv sc1"},
            {"scope": "sc1", "fresh": "sc1"})  # fmt: skip
    for way in ways:
        assert (_passed(**way) == 7).all()
        with pytest.raises(CodeError, match=r"stores for others need s_waitcnt vmcnt\(0\) before"):
            _passed(**way, stored="s_nop 0")
    with pytest.raises(CodeError, match="workgroup 0 stored in the same launch and did not rele"):
        _passed(acquire="buffer_inv sc1")
    with pytest.raises(CodeError, match="did not release"):
        _passed(release="buffer_wbl2 sc0", acquire="buffer_inv sc1")
    with pytest.raises(CodeError, match="without an acquire at agent scope"):
        _passed(release="buffer_wbl2 sc1")
    with pytest.raises(CodeError, match="without an acquire at agent scope"):
        _passed(release="buffer_wbl2 sc1", acquire="buffer_inv sc0")


def test_a_barrier_does_not_complete_the_stores_of_the_other_wave() -> None:
    """Wave 1 stores past the caches, wave 0 counts: only wave 1 can wait for what it stored."""
    code = "v_mov_b32_e32 v2, 7\nv_mov_b32_e32 v4, 0x200\nv_readfirstlane_b32 s8, v0\n" \
           "s_cmp_eq_u32 s8, 0\ns_cbranch_scc1 .Lfirst\n" \
           "buffer_store_dword v2, v1, s[4:7], 0 offen sc1\n{}\n.Lfirst:\ns_barrier\n" \
           "s_cbranch_scc0 .Lend\nbuffer_atomic_add v2, v4, s[4:7], 0 offen\n.Lend:\n"  # fmt: skip
    assert (
        execute(code.format("s_waitcnt vmcnt(0)"), np.zeros(192, np.uint32), 2)[64:128] == 7
    ).all()
    with pytest.raises(CodeError, match="stores for others need s_waitcnt"):
        execute(code.format("s_nop 0"), np.zeros(192, np.uint32), 2)


@pytest.mark.parametrize(
    "merge",
    [
        "s_or_b64 s[8:9], s[8:9], exec",
        "s_andn2_b64 s[10:11], s[8:9], exec\ns_not_b64 s[8:9], s[10:11]",
    ],
)
def test_a_mask_of_lanes_may_be_built_on_what_was_never_written(merge: str) -> None:
    """Under EXEC only: of its other lanes nothing is known, as little as of a whole copy."""
    code = f"s_mov_b64 exec, 0xff\n{merge}\ns_and_b64 s[8:9], s[8:9], exec\n" \
           "s_mov_b64 exec, -1\nv_mov_b32_e32 v2, s8\n" + STORE  # fmt: skip
    assert (execute(code, np.zeros(64, np.uint32)) == 0xFF).all()
    with pytest.raises(CodeError, match="s8 is read before it is written"):
        execute(code.replace("s[8:9], exec", "s[8:9], s[8:9]", 1), np.zeros(64, np.uint32))


def test_workgroups_that_store_one_place_must_agree() -> None:
    same = "v_mov_b32_e32 v2, 7\n" + STORE
    assert (execute(same, np.zeros(64, np.uint32), groups=2) == 7).all()
    with pytest.raises(CodeError, match="two workgroups store different values"):
        execute("v_mov_b32_e32 v2, s2\n" + STORE, np.zeros(64, np.uint32), groups=2)


def test_bytes_pass_between_waves() -> None:
    """The value each thread stored comes back to the thread of the other wave."""
    found = execute(SHARE.format(barrier="s_barrier"), np.zeros(128, np.uint32), 2)
    assert (found == (np.arange(128) * 4 ^ 256)).all()


def test_out_of_range_of_the_resource_is_no_fault() -> None:
    """Masked lanes have offsets beyond the resource: they load zero and store nothing."""
    body = (
        "v_mov_b32_e32 v4, 0x80000000\nv_mov_b32_e32 v2, 7\n"
        "buffer_store_dword v2, v4, s[4:7], 0 offen\n"
        "buffer_load_dword v2, v4, s[4:7], 0 offen\ns_waitcnt vmcnt(0)\n" + STORE
    )
    assert (execute(body, np.full(64, 5, np.uint32)) == 0).all()


def test_bad_input_is_refused_with_a_sentence() -> None:
    """Wrong code, chip, arguments, grid and memory."""
    code = '.amdgcn_target "amdgcn-amd-amdhsa--{}"\n.amdhsa_kernel k\ns_endpgm\n'
    for text in (".text\ns_endpgm\n", b"\x7fELF"):
        with pytest.raises(CodeError, match="needs assembly of one kernel; found 0"):
            program(text)  # type: ignore[arg-type]
    with pytest.raises(CodeError, match=r"line 3: 'bra \$L1' is not understood"):
        program(".amdhsa_kernel k\n.text\nbra $L1\n")
    right, memory = program(code.format("gfx942")), Memory([np.zeros(8, np.uint8)])
    run_program(right, memory, bytes(8), (1,), 1, 0, "gfx942")
    refusals = {
        "needs code for gfx950; found code for gfx942": (bytes(8), (1,), 1, 0, "gfx950"),
        "needs gfx942 or gfx950 .* found gfx90a": (bytes(8), (1,), 1, 0, "gfx90a"),
        "at most 65536 bytes of LDS; found gfx942 and 70000": (bytes(8), (1,), 1, 70000, "gfx942"),
        "grid without zeros; found 1, ": (bytes(8), (0,), 1, 0, "gfx942"),
        "1 to 16 waves .* found 17": (bytes(8), (1,), 17, 0, "gfx942"),
    }
    for sentence, arguments in refusals.items():
        with pytest.raises(CodeError, match=sentence):
            run_program(right, memory, *arguments)
    right.kernarg_bytes = 16
    with pytest.raises(CodeError, match="needs 16 bytes of arguments, in the last buffer too"):
        run_program(right, memory, bytes(8), (1,), 1, 0, "gfx942")


def test_arguments_of_a_launch_are_checked() -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with launching_for(Target.parse("mi300x")), recorded() as launches:
        rms_norm(x, x[0], 1e-6, None)
        rms_norm(x.to("meta"), x[0].to("meta"), 1e-6, None)
    run_launch(launches[0], "gfx942")
    with pytest.raises(CodeError, match="needs tensors in the CPU's memory"):
        run_launch(launches[1], "gfx942")
    few = replace(launches[0], args=launches[0].args[:-1])
    with pytest.raises(Exception, match="argument"):
        run_launch(few, "gfx942")
