"""Reading the schedules that the TPU's compiler dumps; the text here is as it writes them."""

import os

from benchmarks.kernels.schedule import UNITS, read_schedules, request_dumps

BUNDLES = """
= control target key start
LB: loop body
     0   :  { %s1 = smov 0 }
 0x1 LB: > { %s2 = sphi %s1, %s3 }
 0x2   : > { %5 = dma.hbm_to_vmem [thread:$0] %s2 }
 0x3 LB: >> { %v1 = vld [vmem:%s2] }
 0x4   :  {}
 0x5   : > { %v2 = vmatmul %v1 }
 0x6   : >> { %v2 = vmatmul %v1  ;;  %s3 = sadd.s32 %s2, 1 }
 0x7 PF: > { %v3 = vst %v2 }
 0x8 LB: >> { %v1 = vld [vmem:%s2] }
 0x9   : > { %s4 = smov 1 }
 0xa   :  { %s4 = smov 2 }
"""
MXU, SPILL, SALU = UNITS.index("MXU"), UNITS.index("SPILL"), UNITS.index("SALU")


def uses(*columns):
    """A line of the other file for each bundle, of the units that it uses."""
    header = "== UTILIZATION:\n"
    lines = [" ".join(str(int(i in used)) for i in range(len(UNITS))) for used in columns]
    return header + "\n".join(lines)


def write_dump(folder):
    prefix = "123-paged_decode.1"
    (folder / f"{prefix}-02-final_bundles.txt").write_text(BUNDLES)
    (folder / f"{prefix}-01-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")
    (folder / f"{prefix}-00-final_hlo-static-per-bundle-utilization.txt").write_text(
        uses([], [SALU], [], [SPILL], [], [MXU], [MXU, SALU], [], [], [], [])
    )


def test_loops_are_found_with_their_bundles_transfers_and_units(tmp_path):
    write_dump(tmp_path)
    (schedule,) = read_schedules(tmp_path)
    assert (schedule.kernel, schedule.bundles) == ("paged_decode", 11)
    outer, first, second = schedule.loops
    assert (outer.depth, outer.bundles, outer.dmas) == (1, 4, 1)
    assert (second.depth, second.bundles) == (2, 1)
    assert schedule.hot_loops[0] is first


def test_bundles_marked_as_outside_belong_to_the_loop_that_goes_on_after_them(tmp_path):
    """Empty bundles, and those whose instructions were moved, lose their marks."""
    write_dump(tmp_path)
    first = read_schedules(tmp_path)[0].loops[1]
    assert (first.depth, first.bundles, first.units["MXU"], first.spills) == (2, 4, 2, 1)


def test_dumps_are_asked_for_beside_other_flags(tmp_path, monkeypatch):
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other=1")
    request_dumps(tmp_path)
    assert os.environ["LIBTPU_INIT_ARGS"].startswith(f"--other=1 --xla_jf_dump_to={tmp_path} ")
