"""Compilation beside the engine's loop: on a thread, in order, ended early, counted apart."""

import os
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest

from sgl_jax.core.progress import Progress
from sgl_jax.executor.compile_watch import BackgroundCompilation, CompileWatch
from tests.support.waiting import until


def run_all(*jobs):
    """Until they have ended."""
    background = BackgroundCompilation(jobs, CompileWatch(), Progress())
    until(lambda: background.is_done, "the jobs end")
    background.close()
    return background


def test_jobs_run_in_order_on_another_thread():
    ran = []
    background = run_all(*(lambda i=i: ran.append((i, threading.get_ident())) for i in range(3)))
    assert [number for number, _ in ran] == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in ran}
    assert background.error is None


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities of threads")
def test_jobs_have_the_priority_of_the_loop():
    """At a lower one a job would hold the interpreter while steps take all cores."""
    ran = []
    run_all(lambda: ran.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
    assert ran == [os.getpriority(os.PRIO_PROCESS, 0)]


def test_the_first_failure_is_reported_and_the_others_run():
    ran = []
    background = run_all(lambda: 1 // 0, lambda: [].pop(), lambda: ran.append(1))
    assert background.error == "ZeroDivisionError: integer division or modulo by zero"
    assert ran == [1]


def test_closed_it_neither_begins_another_job_nor_waits_for_the_one_that_runs():
    progress = Progress()
    begun, may_end, ran = threading.Event(), threading.Event(), []

    def first():
        begun.set()
        assert may_end.wait(60)
        ran.append("first")

    background = BackgroundCompilation(
        [first, lambda: ran.append("second")], CompileWatch(), progress
    )
    assert begun.wait(60)
    report = progress.report
    assert (report.phase, report.done, report.total) == ("compiling_in_background", 0, 2)
    background.close()
    assert not ran
    may_end.set()
    until(lambda: background.is_done, "the first job ends")
    assert ran == ["first"]
    assert background.error is None


def test_a_program_that_ends_without_a_close_waits_only_for_the_job_that_runs():
    lines = (
        "import threading",
        "from sgl_jax.core.progress import Progress",
        "from sgl_jax.executor.compile_watch import BackgroundCompilation, CompileWatch",
        "jobs = [lambda: print('job', flush=True) or threading.main_thread().join()] * 5",
        "BackgroundCompilation(jobs, CompileWatch(), Progress())",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "job\n"


def test_engines_whose_compilations_overlap_restore_the_switch_interval():
    usual_s = sys.getswitchinterval()
    begun, may_end = threading.Event(), threading.Event()

    def first():
        begun.set()
        assert may_end.wait(60)

    earlier = BackgroundCompilation([first], CompileWatch(), Progress())
    assert begun.wait(60)
    assert sys.getswitchinterval() < usual_s
    later = BackgroundCompilation([lambda: earlier._thread.join(60)], CompileWatch(), Progress())
    until(lambda: later._progress.report is not None, "the later begins")
    time.sleep(0.05)
    may_end.set()
    until(lambda: later.is_done, "both end")
    assert sys.getswitchinterval() == usual_s


def test_compilations_are_counted_by_when_and_where_they_happen():
    def compile_one(number):
        jax.jit(lambda x: x * number)(np.ones(3))

    watch = CompileWatch()
    compile_one(3.5)
    watch.arm()
    background = BackgroundCompilation([lambda: compile_one(4.5)], watch, Progress())
    until(lambda: background.is_done, "the job ends")
    with watch.paused():
        compile_one(5.5)
    assert (watch.num_at_start, watch.num_beside_loop, watch.num_in_loop) == (1, 1, 0)
    other = BackgroundCompilation([lambda: compile_one(6.5)], CompileWatch(), Progress())
    until(lambda: other.is_done, "another engine's job ends")
    assert (watch.num_at_start, watch.num_beside_loop, watch.num_in_loop) == (1, 1, 0)
    compile_one(7.5)
    assert (watch.num_at_start, watch.num_beside_loop, watch.num_in_loop) == (1, 1, 1)
