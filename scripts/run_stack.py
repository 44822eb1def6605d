"""Run the services of deploy/compose.yaml as plain processes.

    python scripts/run_stack.py [NAME ...]

Each runs with its command from the file, once the services that it depends on are healthy. All end
with Ctrl-C, or when one ends.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
FILE = ROOT / "deploy" / "compose.yaml"
_VARIABLE = re.compile(r"\$\{(\w+):-([^}]*)\}")
_POLL_S = 0.5
_STOP_TIMEOUT_S = 180.0


def services(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the file's services by name; `environment` replaces the variables."""

    def value(match: re.Match[str]) -> str:
        return environment.get(match[1]) or match[2]

    found: dict[str, dict[str, Any]] = yaml.safe_load(_VARIABLE.sub(value, FILE.read_text()))
    return found["services"]


def command_of(service: Mapping[str, Any]) -> list[str]:
    """Return the service's program and arguments; [] if only its image names them."""
    words = [*service.get("entrypoint", []), *service.get("command", [])]
    return [sys.executable, *words[1:]] if words[:1] == ["python"] else words


def _is_healthy(service: Mapping[str, Any]) -> bool:
    check = {"command": service["healthcheck"]["test"][1:]}
    ran = subprocess.run(command_of(check), cwd=ROOT, stderr=subprocess.DEVNULL)
    return ran.returncode == 0


def _run(chosen: Mapping[str, dict[str, Any]]) -> int:
    """Run the services until a process ends; return its exit code."""
    waiting, running = dict(chosen), dict[str, subprocess.Popen[bytes]]()
    try:
        while True:
            for name, service in list(waiting.items()):
                needed = [each for each in service.get("depends_on", {}) if each in chosen]
                if all(each in running and _is_healthy(chosen[each]) for each in needed):
                    print(f"run_stack: starting {name}", flush=True)
                    running[name] = subprocess.Popen(command_of(waiting.pop(name)), cwd=ROOT)
            for name, process in running.items():
                if process.poll() is not None:
                    print(f"run_stack: {name} ended with {process.returncode}", flush=True)
                    return process.returncode
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in reversed(running.values()):  # the router before its engines
            process.terminate()
        for name, process in running.items():
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                print(f"run_stack: {name} did not end, and is killed", flush=True)
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="run_stack.py")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all that can run")
    names = parser.parse_args().names
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as data:
        every = services({"PROMETHEUS_DATA": data, **os.environ})
        if unknown := [name for name in names if name not in every]:
            parser.error(f"no such services: {', '.join(unknown)}")
        chosen = {}
        for name in names or every:
            command = command_of(every[name])
            if command and shutil.which(command[0]):
                chosen[name] = every[name]
            else:
                print(f"run_stack: {name} is left out: its program is not here", flush=True)
        if not chosen:
            parser.error("no service can run here")
        code = _run(chosen)
    sys.exit(code)


if __name__ == "__main__":
    main()
