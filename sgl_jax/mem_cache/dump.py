"""A JSON dump of the memory records of an engine's ranks, to explain a defect.

It works on inconsistent records: an unreadable part is replaced by the error. It omits tokens,
because prompts are private, and hashes namespaces, because they may be secrets.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from sgl_jax.core.private_files import open_private
from sgl_jax.mem_cache.ledger_walk import find_defects
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator, describe_owner, each_page
from sgl_jax.mem_cache.pages.pool_records import FREE
from sgl_jax.mem_cache.rank_memory import RankMemory


def write_dump(
    path: Path, memories: Sequence[RankMemory], reason: str, context: dict[str, Any]
) -> None:
    """Write the dump of all ranks to `path`, readable only by this user.

    `reason` is the error's text; `context` holds further facts about it. Raise OSError if the file
    exists or cannot be written.
    """
    dump = {"reason": reason, "context": context, "ranks": [dump_rank(each) for each in memories]}
    with open(path, "x", opener=open_private) as file:
        json.dump(dump, file)


def dump_rank(memory: RankMemory) -> dict[str, Any]:
    """Return all memory records of one rank as JSON values, and the defects found by a walk."""
    parts: dict[str, Callable[[RankMemory], Any]] = {
        "view": lambda memory: memory.view().as_dict(),
        "findings": lambda memory: [
            {"what": what, "pages": pages.tolist(), "pool": pool}
            for what, pages, pool in find_defects(memory)
        ],
        "leases": _leases,
        "sessions": _sessions,
        "rows": _rows,
        "free_rows": lambda memory: memory.row_pool.free_rows().tolist(),
        "tree": _tree,
        "pools": lambda memory: [_pool(allocator) for allocator in memory.allocators],
    }
    return {name: _guarded(part, memory) for name, part in parts.items()}


def _guarded(part: Callable[[RankMemory], Any], memory: RankMemory) -> Any:
    try:
        return part(memory)
    except Exception as error:  # reading inconsistent records may raise anything
        return f"cannot be read: {type(error).__name__}: {error}"


def _leases(memory: RankMemory) -> list[dict[str, Any]]:
    return [
        {
            "row": lease.row,
            "listed_for_row": row,
            "released": lease.released,
            "namespace": namespace_hash(lease.namespace),
            "node": None if lease.node is None else lease.node.node_id,
        }
        for row, lease in memory.leases.items()
    ]


def _sessions(memory: RankMemory) -> list[dict[str, Any]]:
    sessions = memory.sessions
    return [
        {"session_id": session_id, "row": lease.row, "idle": lease.session_id is None}
        for session_id, lease in chain(sessions.idle(), sessions.checked_out())
    ]


def _rows(memory: RankMemory) -> list[dict[str, Any]]:
    """List each row if it is held, or free but not clean."""
    rows = memory.rows
    held = set(memory.row_pool.held_rows().tolist())
    return [
        {
            "row": row,
            "held": row in held,
            "epoch": int(rows.epoch[row]),
            "cache_protected_len": int(rows.cache_protected_len[row]),
            "kv_committed_len": int(rows.kv_committed_len[row]),
            "kv_allocated_len": int(rows.kv_allocated_len[row]),
            "first_pages": rows.first_pages[:, row].tolist(),
            "state_lens": rows.state_lens[:, row].tolist(),
            "state_drafts": rows.state_drafts[:, row].tolist(),
            "state_half": int(rows.state_half[row]),
            "resumed_len": int(rows.resumed_len[row]),
            # By cache group.
            "pages": [[page for page in table if page] for table in rows.pages[row].tolist()],
        }
        for row in range(rows.num_rows)
        if row in held or rows.lengths[:, row].any() or rows.pages[row].any()
    ]


def _tree(memory: RankMemory) -> dict[str, Any]:
    cache = memory.cache
    return {
        "num_evictable": cache.num_evictable,
        "num_protected": cache.num_protected,
        "num_locks": cache.num_locks,
        "num_locked_tokens": cache.num_locked_tokens,
        "nodes": [
            {
                "id": node.node_id,
                "parent": None if node.parent is None else node.parent.node_id,
                "namespace": namespace_hash(node.namespace),
                "start": node.end - len(node.key),
                "end": node.end,
                "children": [child.node_id for child in node.children.values()],
                # By cache group, FULL first. Window locks are counted by page.
                "locks": [np.asarray(locks).tolist() for locks in node.locks],
                "pages": [pages.tolist() for pages in node.values],
                "last_access": node.last_access,
            }
            for node in cache.nodes()
        ],
    }


def namespace_hash(namespace: str) -> str:
    """Return the first eight hex digits of the SHA-256; "" for the default namespace."""
    return hashlib.sha256(namespace.encode()).hexdigest()[:8] if namespace else ""


def _pool(allocator: PageAllocator) -> dict[str, Any]:
    """Return the pages of each owner, the free pages, and the latest moves, oldest first. At tick
    `clock`, each owner performed the action on its page."""
    owners: dict[str, list[int]] = {}
    for page, owner in enumerate(allocator.owners().tolist()):
        if owner != FREE:
            owners.setdefault(describe_owner(owner), []).append(page)
    transitions = [
        {
            "clock": move.clock,
            "action": move.action,
            "pages": [[describe_owner(owner), page] for page, owner in each_page(move)],
        }
        for move in allocator.transitions()
    ]
    free_pages = allocator.free_pages().tolist()
    return {"owners": owners, "free_pages": free_pages, "transitions": transitions}
