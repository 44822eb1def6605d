"""Namespaces: equal tokens of two of them share no page, no node and no lock."""

import json

import numpy as np
import pytest

from sgl_jax.mem_cache.dump import dump_rank
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger import audit
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.release import release_kv_cache
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree_node import TreeNode
from tests.mem_cache.test_release import array, make_memory, write_kv

TOKENS = np.arange(1, 25, dtype=np.int32)


def keep(memory: RankMemory, tokens: np.ndarray, namespace: str) -> None:
    """A request of the namespace computes `tokens` and ends."""
    lease = memory.open_lease(tokens[:-1], namespace)
    write_kv(memory, lease, len(tokens))
    release_kv_cache(memory, lease, tokens, insert=True)
    audit(memory)


def found(memory: RankMemory, tokens: np.ndarray, namespace: str) -> list[int]:
    match = memory.cache.match_prefix(tokens, namespace)
    if match.node is not None:
        memory.cache.unlock(match.node)
    return match.pages[0].tolist()


def top_nodes(memory: RankMemory) -> list[TreeNode]:
    cache = memory.cache
    assert isinstance(cache, RadixCache)
    return list(cache.tree.root.children.values())


def test_equal_tokens_of_two_namespaces_are_computed_and_kept_twice() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:16], "red")
    for other in ("", "blue", "re", "red ", "Red"):
        assert memory.cache.peek(TOKENS, other) == 0
        assert memory.cache.match_prefix(TOKENS, other).node is None
        assert found(memory, TOKENS, other) == []
    lease = memory.open_lease(TOKENS[:16], "blue")
    assert lease.kv_committed_len == 0
    release_kv_cache(memory, lease, TOKENS[:0], insert=True)
    keep(memory, TOKENS[:16], "blue")
    keep(memory, TOKENS[:16], "")
    pages = [found(memory, TOKENS, namespace) for namespace in ("red", "blue", "")]
    assert [len(each) for each in pages] == [4, 4, 4]
    assert len({page for each in pages for page in each}) == 12
    assert memory.view().cached_pages == 12


def test_a_namespace_finds_what_it_kept() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:16], "red")
    lease = memory.open_lease(TOKENS, "red")
    assert lease.cache_protected_len == 16
    assert lease.node is not None
    assert lease.node.namespace == lease.namespace == "red"
    audit(memory)


def test_a_name_that_looks_like_tokens_opens_no_other_path() -> None:
    """The key of an edge has the bytes of a page, then those of the namespace."""
    memory = make_memory(1)
    page = array(ord("a") * 0x01010101)
    keep(memory, page, "aaaa")
    keep(memory, np.concatenate([page, page]), "")
    assert [node.namespace for node in top_nodes(memory)] == ["aaaa", ""]
    assert found(memory, page, "aaaaaaaa") == []
    assert len({*found(memory, page, ""), *found(memory, page, "aaaa")}) == 2


def test_a_split_stays_in_its_namespace() -> None:
    memory = make_memory(4)
    for namespace in ("red", "blue"):
        keep(memory, TOKENS[:20], namespace)
    before = {name: found(memory, TOKENS, name) for name in ("red", "blue")}
    branch = np.concatenate([TOKENS[:8], array(90, 91, 92, 93)])
    keep(memory, branch, "red")
    assert {name: found(memory, TOKENS, name) for name in ("red", "blue")} == before
    assert memory.cache.peek(branch, "red") == 12
    assert memory.cache.peek(branch, "blue") == 8
    red, blue = top_nodes(memory)
    assert (red.namespace, red.end, len(red.children)) == ("red", 8, 2)
    assert (blue.namespace, blue.end, len(blue.children)) == ("blue", 20, 0)
    assert {child.namespace for child in red.children.values()} == {"red"}
    # A split in one must not renew the other's age, nor lock it.
    assert blue.locks == [0]
    audit(memory)


def test_eviction_takes_a_path_of_one_namespace_and_leaves_the_equal_path_of_another() -> None:
    memory = make_memory(4)
    for namespace in ("red", "blue"):
        keep(memory, TOKENS[:16], namespace)
    blue = found(memory, TOKENS, "blue")
    memory.cache.evict(4)
    assert found(memory, TOKENS, "red") == []
    assert found(memory, TOKENS, "blue") == blue
    assert [node.namespace for node in top_nodes(memory)] == ["blue"]
    memory.cache.evict(2)
    assert found(memory, TOKENS, "blue") == blue[:2]
    audit(memory)
    keep(memory, TOKENS[:16], "red")
    assert not set(found(memory, TOKENS, "red")) & set(found(memory, TOKENS, "blue"))


def test_a_lock_of_one_namespace_keeps_nothing_of_another() -> None:
    memory = make_memory(4)
    for namespace in ("red", "blue"):
        keep(memory, TOKENS[:16], namespace)
    lease = memory.open_lease(TOKENS, "red")
    assert memory.cache.num_protected[0] == 4
    assert memory.cache.evict(99) == 4
    assert found(memory, TOKENS, "blue") == []
    assert len(found(memory, TOKENS, "red")) == 4
    release_kv_cache(memory, lease, TOKENS[:16], insert=True)


def test_what_a_lease_publishes_in_chunks_stays_in_the_namespace_it_was_opened_with() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:8], "")
    lease = memory.open_lease(TOKENS[:4], "red")
    write_kv(memory, lease, 24)
    release_kv_cache(memory, lease, TOKENS, insert=True)
    assert memory.cache.peek(TOKENS, "red") == 24
    assert memory.cache.peek(TOKENS, "") == 8
    assert memory.cache.peek(TOKENS, "blue") == 0


def test_the_audit_finds_a_lease_on_a_path_of_another_namespace() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:16], "red")
    lease = memory.open_lease(TOKENS, "red")
    lease.namespace = "blue"
    with pytest.raises(LedgerError, match="locked a path of another namespace") as caught:
        audit(memory)
    assert "red" not in str(caught.value)
    assert "blue" not in str(caught.value)


def test_the_audit_finds_a_node_that_lookups_of_another_namespace_reach() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:16], "red")
    (node,) = top_nodes(memory)
    node.namespace = "blue"
    with pytest.raises(LedgerError, match="is not where lookups"):
        audit(memory)


def test_the_audit_finds_a_path_that_changes_its_namespace() -> None:
    memory = make_memory(4)
    keep(memory, TOKENS[:16], "red")
    keep(memory, np.concatenate([TOKENS[:8], array(90, 91, 92, 93)]), "red")
    (top,) = top_nodes(memory)
    next(iter(top.children.values())).namespace = "blue"
    with pytest.raises(LedgerError, match="another namespace than its parent"):
        audit(memory)


def test_a_dump_tells_namespaces_apart_without_their_names() -> None:
    memory = make_memory(4)
    for namespace in ("a secret salt", "another", ""):
        keep(memory, TOKENS[:16], namespace)
    memory.open_lease(TOKENS, "a secret salt")
    dump = dump_rank(memory)
    assert "salt" not in json.dumps(dump)
    hashes = [node["namespace"] for node in dump["tree"]["nodes"]]
    assert len(set(hashes)) == 3
    assert "" in hashes
    assert {len(each) for each in hashes} == {0, 8}
    assert dump["leases"][0]["namespace"] in hashes
