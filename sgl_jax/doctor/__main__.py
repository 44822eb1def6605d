"""The command `sgl-jax doctor`: checks a machine with the flags of `sgl-jax serve`."""

import argparse
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sgl_jax.checkpoint.gguf.folder import model_folder
from sgl_jax.core.command_line import add_arguments
from sgl_jax.core.log_lines import log_to_terminal
from sgl_jax.core.server_args import ServerArgs
from sgl_jax.doctor.machine import describe_machine, measure_bandwidth
from sgl_jax.doctor.planned_steps import PlannedSteps, slice_of
from sgl_jax.doctor.report import Redaction, Section, as_json, private_texts, summary
from sgl_jax.doctor.served import ServedChecks, choose_load
from sgl_jax.executor.devices import make_mesh, platform_of, set_compilation_cache
from sgl_jax.executor.weights import stored_model

CHECKS = ("bandwidth", "kernels", "steps", "conversation")
_DEADLINE_S = 480.0


@dataclass(frozen=True)
class DoctorRequest:
    args: ServerArgs
    checks: tuple[str, ...]
    input_len: int | None
    deadline_s: float
    json: bool


def parse_doctor_request(argv: Sequence[str] | None = None) -> DoctorRequest:
    """Read the command line; invalid arguments exit with the usage."""
    parser = argparse.ArgumentParser(
        prog="sgl-jax doctor",
        description="Check this machine and each kernel that the model uses, and print a report "
        "without private data. Also takes the flags of sgl-jax serve.",
    )
    parser.add_argument(
        "--checks", default=",".join(CHECKS), help="checks to run, by commas (%(default)s)"
    )
    parser.add_argument("--input-len", type=int, help="tokens of each prompt of the load")
    parser.add_argument(
        "--deadline", type=float, default=_DEADLINE_S, help="seconds for all checks (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_arguments(parser)
    words: dict[str, Any] = vars(parser.parse_args(argv))
    checks = tuple(words.pop("checks").split(","))
    input_len, deadline_s, as_json = (words.pop(name) for name in ("input_len", "deadline", "json"))
    try:
        if unknown := set(checks) - set(CHECKS):
            raise ValueError(f"--checks are {', '.join(CHECKS)}, got {', '.join(sorted(unknown))}")
        if input_len is not None and input_len < 1:
            raise ValueError(f"--input-len must be at least 1, got {input_len}")
        if not deadline_s > 0:
            raise ValueError(f"--deadline must be positive, got {deadline_s}")
        args = ServerArgs(**words)
        if args.num_hosts > 1:
            raise ValueError("sgl-jax doctor checks one host: run it on each, without --nnodes")
        args = replace(args, model_path=model_folder(args.model_path))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return DoctorRequest(args, checks, input_len, deadline_s, as_json)


class _Run:
    """Runs the checks one after another; a failed check does not stop the next."""

    def __init__(self, request: DoctorRequest, show: Callable[[str], None]) -> None:
        self.sections: list[Section] = []
        self.current = "machine"
        self._request, self._show = request, show
        self._redact = Redaction(private_texts(request.args.model_path))

    def __call__(self) -> None:
        """Run the checks; without a device or a model, skip those that depend on it."""
        args = self._request.args
        mesh = None

        def find_devices() -> Section:
            nonlocal mesh
            mesh = make_mesh(args)
            set_compilation_cache(args.compilation_cache_dir)
            return describe_machine(mesh, self._redact)

        self._add("machine", find_devices)
        if mesh is None:
            return
        checks = self._request.checks
        if "bandwidth" in checks:
            self._add("bandwidth", partial(measure_bandwidth, mesh))
        if {"kernels", "steps", "conversation"} & set(checks):
            self._serve(mesh)

    def _serve(self, mesh: Any) -> None:
        args, platform, checks = self._request.args, platform_of(mesh), self._request.checks
        served = planned = None

        def prepare() -> Section:
            nonlocal served, planned
            model, _ = stored_model(args.model_path, args.load_format, args)
            own, load = choose_load(args, model, platform, self._request.input_len)
            topology = slice_of(mesh.devices.flat[0].device_kind, mesh.size)
            if "steps" in checks and topology is not None:
                planned = PlannedSteps(own, topology, load.input_len, load.output_len)
            served = ServedChecks(own, model, platform, load, planned, self._redact)
            facts = {
                "architecture": model.architecture,
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "quantization": model.quantization and model.quantization.scheme_names,
                "load": load._asdict(),
            }
            line = f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}; "
            text = f"{load.num_requests} requests of {load.input_len} tokens at once"
            return Section("model", [line + text], facts)

        self._add("model", prepare)
        if served is None:
            return
        runs = {
            "kernels": served.check_kernels,
            "steps": served.time_steps,
            "conversation": served.converse,
        }
        for name, run in runs.items():
            if name in checks:
                self._add(name, run)
        if planned is not None:
            planned.close()
        served.close()

    def _add(self, name: str, run: Callable[[], Section]) -> None:
        self.current = name
        begin = time.monotonic()
        try:
            section = run()
        except Exception as error:  # is what the command looks for
            section = Section(name, failures=[self._redact.of_error(error)])
        section.seconds = time.monotonic() - begin
        self.sections.append(section)
        self._show(section.as_text())


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine; return the exit code: 0, 1 if a check fails, 2 for bad arguments."""
    request = parse_doctor_request(argv)
    log_to_terminal("error", request.args.log_format)

    def show(text: str) -> None:
        if not request.json:
            print(text, flush=True)

    show("sgl-jax doctor")
    run = _Run(request, show)
    thread = threading.Thread(target=run, name="doctor", daemon=True)
    thread.start()
    thread.join(request.deadline_s)
    is_late = thread.is_alive()
    sections = list(run.sections)
    if is_late:
        advice = f"did not end within --deadline {request.deadline_s:g}"
        sections.append(Section(run.current, failures=[advice], seconds=request.deadline_s))
        show(sections[-1].as_text())
    print(as_json(sections) if request.json else summary(sections), flush=True)
    code = int(any(section.failures for section in sections))
    if is_late:
        os._exit(code)  # a device that hangs would also hang an ordinary exit
    return code


if __name__ == "__main__":
    sys.exit(main())
