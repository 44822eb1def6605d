"""Server arguments: one dataclass makes the command line, and refuses what cannot work."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from sgl_jax.core.command_line import add_arguments, parse_server_args
from sgl_jax.core.server_args import ServerArgs


def test_every_field_is_a_flag_with_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    text = parser.format_help()
    for setting in dataclasses.fields(ServerArgs):
        assert "--" + setting.name.replace("_", "-") in text
        assert setting.metadata["help"]


def test_the_command_line_without_options_is_the_defaults() -> None:
    assert parse_server_args(["--model-path", "m"]) == ServerArgs(model_path="m")


def test_flags_have_the_types_of_their_fields() -> None:
    args = parse_server_args(
        "--model-path m --page-size 32 --mem-fraction-static 0.5 --max-total-tokens 640 "
        "--context-length 128 --disable-radix-cache --schedule-policy fcfs --tp-size 2 "
        "--dp-size 3 --served-model-name name --schedule-conservativeness 1.5".split()
    )
    assert args.page_size == 32
    assert args.mem_fraction_static == 0.5
    assert args.max_total_tokens == 640
    assert args.context_length == 128
    assert args.disable_radix_cache is True
    assert args.disable_overlap_schedule is False
    assert args.schedule_policy == "fcfs"
    assert args.served_model_name == "name"
    assert args.schedule_conservativeness == 1.5
    assert args.num_devices == 6


REFUSED = [
    ({"page_size": -1}, r"--page-size must be in \[0, \d+\], got -1"),
    ({"page_size": 12}, "--page-size must be a power of two, got 12"),
    ({"tp_size": 0}, r"--tp-size must be in \[1, \d+\], got 0"),
    ({"dp_size": -1}, r"--dp-size must be in \[1, \d+\], got -1"),
    ({"max_queued_requests": 0}, r"--max-queued-requests must be in \[1, \d+\], got 0"),
    ({"max_running_requests": -1}, r"--max-running-requests must be in \[0, \d+\], got -1"),
    ({"chunked_prefill_size": -1}, r"--chunked-prefill-size must be in \[0, \d+\], got -1"),
    ({"mem_fraction_static": 0.0}, r"--mem-fraction-static must be in \[0.05, 0.98\], got 0.0"),
    ({"mem_fraction_static": 1.0}, r"--mem-fraction-static must be in \[0.05, 0.98\], got 1.0"),
    ({"port": -1}, r"--port must be in \[0, 65535\], got -1"),
    ({"port": 70000}, r"--port must be in \[0, 65535\], got 70000"),
    ({"schedule_conservativeness": float("nan")}, r"in \[0.0, 10.0\], got nan"),
    ({"watchdog_timeout": 0.0}, r"--watchdog-timeout must be in \[1.0, 86400.0\], got 0.0"),
    ({"drain_timeout": -1.0}, r"--drain-timeout must be in \[0.0, 86400.0\], got -1.0"),
    (
        {"page_size": 16, "max_total_tokens": 8},
        "--max-total-tokens must be at least one page of 16 tokens, got 8",
    ),
    (
        {"page_size": 16, "context_length": 8},
        "--context-length must be at least one page of 16 tokens, got 8",
    ),
    ({"context_length": 0}, "--context-length must be at least 1, got 0"),
    (
        {"schedule_low_priority_values_first": True},
        "--schedule-low-priority-values-first needs --enable-priority-scheduling",
    ),
    (
        {"priority_scheduling_preemption_threshold": -1},
        r"--priority-scheduling-preemption-threshold must be in \[0, 2147483647\], got -1",
    ),
    ({"schedule_policy": "sjf"}, "--schedule-policy must be one of fcfs, lpm, got 'sjf'"),
    ({"kv_cache_scales": "f"}, "--kv-cache-scales needs --kv-cache-dtype fp8_e4m3, got auto"),
    (
        {"check_memory": "maybe"},
        "--check-memory must be one of off, idle, background, busy, got 'maybe'",
    ),
]


@pytest.mark.parametrize(("values", "words"), REFUSED, ids=lambda part: str(part)[:40])
def test_values_that_cannot_work_are_refused_by_their_flag(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ServerArgs(model_path="m", **values)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--model-path"),
        (["--model-path", "m", "--page-size", "3"], "must be a power of two"),
        (["--model-path", "m", "--page-size", "big"], "invalid int value"),
        (["--model-path", "m", "--schedule-policy", "sjf"], "invalid choice"),
        (["--model-path", "m", "--no-such-flag"], "unrecognized arguments"),
    ],
    ids=lambda part: str(part)[:40],
)
def test_a_bad_command_line_ends_with_usage(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(argv)
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


RETRACT = {
    "SGLANG_TEST_RETRACT": "true",
    "SGLANG_TEST_RETRACT_INTERVAL": "5",
    "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "7",
}


def test_the_environment_gives_the_defaults_of_some_flags() -> None:
    args = parse_server_args(["--model-path", "m"], RETRACT)
    assert args.test_retract
    assert args.test_retract_interval == 5
    assert args.test_retract_no_prefill_bs == 7
    assert not parse_server_args(["--model-path", "m"], {"SGLANG_TEST_RETRACT": "0"}).test_retract


def test_a_flag_wins_over_the_environment() -> None:
    words = "--model-path m --no-test-retract --test-retract-interval 2".split()
    args = parse_server_args(words, RETRACT)
    assert not args.test_retract
    assert args.test_retract_interval == 2
    assert args.test_retract_no_prefill_bs == 7


def test_arguments_made_in_python_ask_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TEST_RETRACT", "1")
    assert not ServerArgs(model_path="m").test_retract
    assert parse_server_args(["--model-path", "m"]).test_retract


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SGLANG_TEST_RETRACT", "perhaps", "SGLANG_TEST_RETRACT must be 1 or 0, got 'perhaps'"),
        ("SGLANG_TEST_RETRACT_INTERVAL", "two", "must be int, got 'two'"),
        ("SGLANG_TEST_RETRACT_INTERVAL", "0", r"--test-retract-interval must be in"),
    ],
)
def test_a_bad_variable_ends_with_usage(
    variable: str, value: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_server_args(["--model-path", "m"], {variable: value})
    assert caught.value.code == 2
    assert words in capsys.readouterr().err


def write_config(folder: Path, text: str) -> list[str]:
    """The flags of a config file with this text, without the program's."""
    file = folder / "config.yaml"
    file.write_text(text)
    return ["--config", str(file)]


def test_a_config_file_gives_flags_by_their_names(tmp_path: Path) -> None:
    text = """
    model-path: /models/a
    max_running_requests: 7
    mem-fraction-static: 0.5
    disable-radix-cache: true
    enable_priority_scheduling: false
    api-key: null
    served-model-name: 4
    """
    args = parse_server_args(write_config(tmp_path, text), {})
    assert args == ServerArgs(
        model_path="/models/a",
        max_running_requests=7,
        mem_fraction_static=0.5,
        disable_radix_cache=True,
        served_model_name="4",
    )


def test_the_command_line_wins_over_the_file_and_the_file_over_the_environment(
    tmp_path: Path,
) -> None:
    text = "{model-path: a, test-retract: false, test-retract-interval: 5, port: 1}"
    argv = [*write_config(tmp_path, text), "--port", "2", "--model-path=b"]
    environment = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
    args = parse_server_args(argv, environment)
    assert (args.model_path, args.port) == ("b", 2)
    assert (args.test_retract, args.test_retract_interval) == (False, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model-path: a\nprot: 1", "'prot' is the name of no flag: did you mean port?"),
        ("model-path: a\nzzzzzz: 1", "'zzzzzz' is the name of no flag"),
        ("model-path: a\nport: [1]", "port must be one value"),
        ("model-path: a\nport: true", "port must be one value"),
        ("model-path: a\ndisable-radix-cache: 1", "must be true or false"),
        ("model-path: a\nport: many", "--port: invalid int value: 'many'"),
        ("- model-path", "must map the names of flags to values"),
        ("a: [", "expected"),
    ],
)
def test_a_wrong_config_file_ends_with_usage(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_server_args(write_config(tmp_path, text), {})
    assert message in capsys.readouterr().err


def test_a_config_file_that_is_not_there_ends_with_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_server_args(["--config", str(tmp_path / "none")], {})
    assert "No such file" in capsys.readouterr().err
