"""Recorded traffic: reading it, the oracles, the prefix cache alone, and the command."""

import json

import numpy as np
import pytest

from sgl_jax.bench.trace.cache_only import (
    FarthestUseBlocks,
    GhostListBlocks,
    LruBlocks,
    hit_rate,
    num_distinct_blocks,
    oracle_hit_rates,
    tree_hit_rate,
)
from sgl_jax.bench.trace.command import main
from sgl_jax.bench.trace.reading import (
    BLOCK_TOKENS,
    VOCAB_SIZE,
    TracedRequest,
    TraceError,
    block_tokens,
    prompt_tokens,
    read_trace,
)
from tests.bench.traced import EXCERPT, request

LINE = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [3, 4]}


@pytest.fixture(scope="module")
def excerpt():
    return read_trace(EXCERPT)


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    words = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(words) + "\n")
    return path


# -- reading --------------------------------------------------------------------------------------


def test_a_line_becomes_a_request(tmp_path):
    requests = read_trace(write(tmp_path, LINE, "", LINE | {"timestamp": 6}))
    assert requests == [TracedRequest(5, 600, 7, (3, 4)), TracedRequest(6, 600, 7, (3, 4))]


def test_only_the_first_requests_are_read(tmp_path):
    assert len(read_trace(write(tmp_path, LINE, LINE, "not read"), num_requests=2)) == 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2: Input data was truncated"),
        ("[1]", "line 2: Expected `object`, got `array`"),
        (LINE | {"timestamp": 4}, "line 2: timestamp 4 is before 5"),
        (LINE | {"timestamp": True}, "line 2: Expected `int`, got `bool` - at `$.timestamp`"),
        (LINE | {"output_length": 0}, "line 2: Expected `int` >= 1 - at `$.output_length`"),
        (LINE | {"input_length": "9"}, "line 2: Expected `int`, got `str` - at `$.input_length`"),
        (LINE | {"input_length": 512}, "line 2: input_length 512 makes 1 blocks of 512 tokens"),
        (LINE | {"hash_ids": [3, -4]}, "line 2: Expected `int` >= 0 - at `$.hash_ids[1]`"),
        (LINE | {"hash_ids": None}, "line 2: Expected `array`, got `null` - at `$.hash_ids`"),
        (LINE | {"hash_ids": [9, 4]}, "line 2: block 4 stands behind block 9 here and behind"),
        (LINE | {"hash_ids": [4, 3]}, "line 2: block 4 stands first here and behind block 3"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong(tmp_path, line, reason):
    with pytest.raises(TraceError) as error:
        read_trace(write(tmp_path, LINE, line))
    assert reason in str(error.value)


def test_a_file_without_requests_is_refused(tmp_path):
    with pytest.raises(TraceError, match="has no requests"):
        read_trace(write(tmp_path, ""))


def test_the_same_block_id_has_the_same_tokens_wherever_it_stands():
    tokens = block_tokens([7, 2**40, 8])
    assert tokens.dtype == np.int32
    assert (tokens[BLOCK_TOKENS : 2 * BLOCK_TOKENS] == block_tokens([2**40])).all()
    assert tokens.min() >= 0
    assert tokens.max() < VOCAB_SIZE


def test_different_blocks_differ_in_their_first_page():
    first_pages = block_tokens(range(10_000)).reshape(-1, BLOCK_TOKENS)[:, :16]
    assert len(np.unique(first_pages, axis=0)) == 10_000


def test_a_prompt_is_cut_to_its_length():
    tokens = prompt_tokens(request(7, 8, input_len=700))
    assert (tokens == block_tokens([7, 8])[:700]).all()
    assert len(tokens) == 700


# -- oracles --------------------------------------------------------------------------------------


def blocks_hit(trace, cache, capacity):
    rate = hit_rate(trace, cache, capacity)
    return round(rate * sum(r.input_len for r in trace) / BLOCK_TOKENS, 6)


def test_lru_forgets_a_prefix_over_a_scan_that_farthest_use_sees_through():
    scan = [request(1, 2), request(10, 11), request(20, 21), request(30, 31), request(1, 2)]
    assert blocks_hit(scan, LruBlocks(4), 4) == 0
    assert blocks_hit(scan, FarthestUseBlocks(scan, 4), 4) == 2


def test_a_ghost_list_keeps_over_a_scan_what_was_used_twice():
    trace = [request(1, 2), request(1, 2), request(10, 11), request(20, 21), request(1, 2)]
    assert blocks_hit(trace, LruBlocks(4), 4) == 2
    assert blocks_hit(trace, GhostListBlocks(4), 4) == 4


def test_a_ghost_list_keeps_what_returns_after_its_eviction():
    # Block 1 returns as a ghost after the first scan, and is still there after the second.
    first, second = [request(i) for i in (10, 11, 12, 13)], [request(i) for i in (20, 21, 22, 23)]
    trace = [request(1), *first, request(1), *second, request(1)]
    assert blocks_hit(trace, LruBlocks(4), 4) == 0
    assert blocks_hit(trace, GhostListBlocks(4), 4) == 1


def test_lru_lets_the_end_of_a_prefix_go_first():
    trace = [request(1, 2, 3), request(9, 8), request(1, 2, 3)]
    assert blocks_hit(trace, LruBlocks(4), 4) == 2


def test_farthest_use_evicts_the_prefix_that_is_used_again_last():
    trace = [request(1, 2), request(3, 4), request(5), request(3, 4), request(1, 2)]
    # Room for five with 5 in it, but only for four of the first two prompts beside it.
    assert blocks_hit(trace, FarthestUseBlocks(trace, 4), 4) == 3


def test_farthest_use_keeps_the_prompt_that_has_just_come():
    trace = [request(1), request(2), request(1)]
    assert blocks_hit(trace, FarthestUseBlocks(trace, 1), 1) == 0


def test_a_partial_block_is_worth_the_tokens_it_has():
    trace = [request(1, 2, input_len=600), request(1, 2, input_len=600)]
    assert hit_rate(trace, LruBlocks(2), 2) == 0.5


def test_a_prompt_larger_than_the_cache_changes_nothing():
    trace = [request(1), request(2, 3, 4), request(1)]
    assert blocks_hit(trace, LruBlocks(2), 2) == 1
    assert tree_hit_rate(trace, 2, page_size=512, policy="lru") == pytest.approx(1 / 5)


# -- the prefix cache alone -----------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "page_size"), [(300, 512), (300, 64), (3000, 512)])
def test_the_tree_serves_exactly_what_lru_on_blocks_does(excerpt, capacity, page_size):
    tree = tree_hit_rate(
        excerpt, capacity, page_size=page_size, policy="lru", check_each_request=True
    )
    assert tree == oracle_hit_rates(excerpt, capacity)["LRU"]


def test_without_a_limit_all_caches_serve_the_same(excerpt):
    capacity = num_distinct_blocks(excerpt)
    rates = oracle_hit_rates(excerpt, capacity)
    assert len(set(rates.values())) == 1
    assert tree_hit_rate(excerpt, capacity, page_size=512, policy="lru") == rates["LRU"]


def test_a_page_must_divide_a_block(excerpt):
    with pytest.raises(ValueError, match="must divide 512"):
        tree_hit_rate(excerpt, 300, page_size=1024, policy="lru")


# -- the command ----------------------------------------------------------------------------------


def test_the_command_prints_the_cache_alone_beside_the_oracles(capsys):
    words = [str(EXCERPT), "--num-requests", "100", "--cache-only", "--capacity-blocks", "300"]
    assert main(words) == 0
    table = capsys.readouterr().out
    assert "100 requests" in table
    for name in ("tree, lru", "LRU", "ghost list", "farthest use", "no limit"):
        assert name in table
    longest = sum(len(each.block_ids) > 20 for each in read_trace(EXCERPT, 100))
    assert main([*words[:-1], "20"]) == 0
    assert f"{longest:,} longer prompts skipped" in capsys.readouterr().out


def test_the_command_serves_and_reports_as_json(capsys):
    words = [str(EXCERPT), "--num-requests", "20", "--json", "--dp-size", "2", "--check-memory"]
    assert main([*words, "--max-total-tokens", "131072"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["finished"] == 20
    assert values["engine"]["pool_pages"] == [1 + 131072 // 128]
    assert values["hit_rate"] <= values["oracle_hit_rates"]["no limit"]


def test_the_command_draws_the_run(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.svg"
    assert main([str(EXCERPT), "--num-requests", "20", "--plot", str(picture)]) == 0
    drawn = picture.read_text()
    for label in ("running", "cached, evictable", "since the start", "p99"):
        assert f"<!-- {label} -->" in drawn


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--num-requests", "0"], "--num-requests must be at least 1"),
        (["--page-size", "0", "--cache-only"], "--page-size must be at least 1"),
        (["--page-size", "48", "--cache-only"], "must divide 512"),
        (["--dp-size", "0"], "--dp-size must be in"),
        (["--speedup", "0"], "--speedup must be positive"),
        (["--kv-ns-per-token", "-1"], "--kv-ns-per-token must not be negative"),
        (["--step-base-ms", "0"], "--step-base-ms must be positive"),
        (["--topology", "v6e-8"], "--planner-model and --topology go together"),
        (
            ["--overlap-prefill", "--planner-model", "llama-3.1-8b", "--topology", "v6e-8"],
            "--overlap-prefill belongs to linear costs",
        ),
        (["--cache-only", "--plot", "x.svg"], "--plot shows a served run"),
        (["--plot", "x.txt"], "--plot must end in one of"),
        (["--plot", "no/such/folder.svg"], "there is no folder 'no/such'"),
        (["--page-size", "48"], "--page-size must be a power of two"),
    ],
)
def test_bad_arguments_end_with_a_reason(words, reason, capsys):
    assert main([str(EXCERPT), *words]) == 2
    assert reason in capsys.readouterr().err


def test_a_missing_file_ends_with_a_reason(capsys):
    assert main(["no-such-file.jsonl"]) == 2
    assert "no-such-file.jsonl" in capsys.readouterr().err
