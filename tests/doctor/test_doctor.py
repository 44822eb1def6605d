"""The report of `sgl-jax doctor`: what it has, what it never has, and its exit codes."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sgl_jax.core.server_args import ServerArgs
from sgl_jax.doctor import served
from sgl_jax.doctor.__main__ import CHECKS, main, parse_doctor_request
from sgl_jax.doctor.planned_steps import PlannedSteps, slice_of
from sgl_jax.doctor.report import Redaction, Section, as_json, private_texts, summary
from sgl_jax.planner.topology import has_tpu_compiler

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "models" / "demo")
SMALL = ("--device", "cpu", "--context-length", "256", "--max-running-requests", "4")


@pytest.fixture
def doctor(capsys, pytestconfig):
    """A function of flags: the exit code and the report of the demonstration model."""

    def run(*flags):
        cache = ("--compilation-cache-dir", str(pytestconfig.cache.mkdir("xla")))
        code = main(["--model-path", DEMO, *SMALL, *cache, *flags, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_demonstration_model_passes_every_check_and_the_report_has_no_path(doctor):
    code, report = doctor()
    sections = report["sections"]
    assert (code, report["passed"]) == (0, True)
    assert list(sections) == ["machine", *CHECKS[:1], "model", *CHECKS[1:]]
    assert sections["kernels"]["attend"]["num_compared"] > 0
    assert sections["kernels"]["attend"]["is_reference"]
    assert sections["steps"]["decode"]["seconds"] > 0
    assert sections["steps"]["decode"]["tokens"] == 4
    assert sections["steps"]["prefill"]["tokens"] > 4
    talk = sections["conversation"]
    assert talk["num_retracts"] == 3
    assert talk["num_equal"] == talk["num_tokens"] > 0
    text = json.dumps(report)
    assert str(ROOT) not in text
    assert str(Path.home()) + "/" not in text


def test_tokens_that_a_retract_changes_fail_unless_they_tie(doctor, monkeypatch):
    real, calls = served._answers, []

    def changed(engine, expected):
        answers = real(engine, expected)
        calls.append(expected)
        if expected is None:
            return answers
        wrong = [(token + 1) % 100 for token in answers[1].output_ids]
        return [answers[0], dataclasses.replace(answers[1], output_ids=wrong), answers[2]]

    monkeypatch.setattr(served, "_answers", changed)
    code, report = doctor("--checks", "conversation")
    (failure,) = report["sections"]["conversation"]["failures"]
    assert code == 1
    assert "tokens differ after a retract" in failure


def test_a_check_that_raises_fails_and_the_next_one_runs(doctor, monkeypatch):
    def broken(mesh):
        raise RuntimeError(f"no memory in {DEMO}/weights")

    monkeypatch.setattr("sgl_jax.doctor.__main__.measure_bandwidth", broken)
    code, report = doctor("--checks", "bandwidth,conversation")
    assert code == 1
    assert report["sections"]["bandwidth"]["failures"] == [
        "RuntimeError: no memory in <model>/weights"
    ]
    assert report["sections"]["conversation"]["failures"] == []


def test_a_check_that_hangs_is_named_when_the_deadline_passes(monkeypatch, capsys):
    ended, released = [], threading.Event()

    def hang(mesh):
        assert released.wait(60)
        return Section("bandwidth")

    monkeypatch.setattr("sgl_jax.doctor.__main__.measure_bandwidth", hang)
    monkeypatch.setattr(os, "_exit", ended.append)
    flags = ["--model-path", DEMO, *SMALL, "--checks", "bandwidth", "--deadline", "3"]
    assert main(flags) == 1
    assert ended == [1]
    text = capsys.readouterr().out
    assert "[bandwidth] FAILED" in text
    assert "did not end within --deadline 3" in text
    assert text.endswith("Result: failed: bandwidth\n")
    (thread,) = [each for each in threading.enumerate() if each.name == "doctor"]
    released.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--checks", "kernel"), "--checks are bandwidth, kernels, steps, conversation"),
        (("--input-len", "0"), "--input-len must be at least 1"),
        (("--deadline", "0"), "--deadline must be positive"),
        (("--nnodes", "2", "--dp-size", "2"), "checks one host"),
    ],
)
def test_bad_flags_end_with_one_line_and_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_doctor_request(["--model-path", DEMO, *flags])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_private_text_is_replaced():
    redact = Redaction({"/home/anna": "<home>", "/data/secret-model": "<model>"})
    text = "in /data/secret-model/config.json, /home/anna/x, /etc/hosts; 3/4 GB/s"
    assert redact(text) == "in <model>/config.json, <home>/x, <path>; 3/4 GB/s"
    assert redact.of_error(ValueError("a\n  b")) == "ValueError: a b"
    assert private_texts("models/x")["models/x"] == "<model>"


def test_the_report_of_a_failure():
    sections = [Section("machine", ["cpu"]), Section("kernels", failures=["attend differs"])]
    assert summary(sections) == "Result: failed: kernels"
    assert sections[1].as_text() == "[kernels] FAILED, 0.0 s\n  FAILED: attend differs"
    assert not json.loads(as_json(sections))["passed"]


def test_a_slice_is_known_by_its_devices():
    assert slice_of("TPU v6 lite", 1).name == "v6e-1"
    assert slice_of("TPU v6 lite", 6).name == "v6e-8"
    assert slice_of("TPU7x", 8).name == "tpu7x-8"
    assert slice_of("NVIDIA H100", 1) is None


@pytest.mark.long
@pytest.mark.skipif(not has_tpu_compiler(), reason="libtpu is not installed")
@pytest.mark.parametrize("length", [64, 100_000])
def test_the_planner_estimates_both_steps_or_says_why_not(length):
    args = ServerArgs(model_path=DEMO, max_running_requests=4)
    planned = PlannedSteps(args, slice_of("TPU v6 lite", 1), length, 8)
    steps = planned.wait()
    if length == 64:
        assert 0 < steps["decode"] < steps["prefill"] < 1
        assert planned.problem == ""
    else:
        assert steps == {}
        assert "context limit" in planned.problem


@pytest.mark.long
def test_eight_devices_with_four_for_each_rank():
    done = subprocess.run(
        [
            *(sys.executable, "-m", "sgl_jax.launch_server", "doctor", "--model-path", DEMO),
            *(*SMALL, "--tp-size", "4", "--dp-size", "2", "--json"),
        ],
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8"},
        stdout=subprocess.PIPE,
        timeout=500,
        check=False,
    )
    report = json.loads(done.stdout)
    assert (done.returncode, report["passed"]) == (0, True)
    machine, rates = report["sections"]["machine"], report["sections"]["bandwidth"]
    assert machine["mesh"] == {"data": 2, "tensor": 4}
    assert rates["all_reduce_data"]["bytes_per_s"] > 0
    assert rates["all_reduce_tensor"]["bytes_per_s"] > 0
