"""Snapshots of a scheduler's memory for people: every page, and all holders and waiters of pages.

This module only reads. A snapshot is a dictionary of builtins, with arrays as bytes, so that it is
copied quickly between two steps; `frames.py` makes frames of it elsewhere. Prompts are private: a
snapshot has tokens only with `has_tokens`, and hashes instead of namespaces.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

import numpy as np

from sgl_jax.core.calls import FoundOnRank, PageDescription, PageMove, PrefixFound
from sgl_jax.core.messages import DescribePage, FindPrefix, ReadMemory
from sgl_jax.core.request_limits import check_between
from sgl_jax.core.step_plan import BoolArray, Int32Array
from sgl_jax.mem_cache.dump import namespace_hash
from sgl_jax.mem_cache.errors import LedgerError
from sgl_jax.mem_cache.ledger import find_imbalance
from sgl_jax.mem_cache.ledger_walk import find_defects
from sgl_jax.mem_cache.offload.cpu_pool import CpuPool
from sgl_jax.mem_cache.pages.page_allocator import PageAllocator, describe_owner, each_page
from sgl_jax.mem_cache.pages.pool_records import TREE
from sgl_jax.mem_cache.rank_memory import RankMemory
from sgl_jax.mem_cache.tree.radix_cache import RadixCache
from sgl_jax.mem_cache.tree_node import TreeNode
from sgl_jax.scheduler.rank_scheduler import RankScheduler
from sgl_jax.scheduler.scheduler import Scheduler
from sgl_jax.sessions.store import Session
from sgl_jax.sessions.streaming import StreamingSession

# Code of a tree page locked by a lease. The code of any other page is its owner's number
# (`mem_cache/pages/page_allocator.py`).
LOCKED = -3
# Limits that bound the time of a snapshot. Nodes are counted over all ranks.
MAX_NODES = 4096
MAX_BLOCKS = 1 << 18  # of each pool in CPU memory
MAX_WAITING = 64
MAX_SESSIONS = 256
MAX_TURNS = 64
MAX_TEXT_TOKENS = 64  # first tokens of a request or a node
_MAX_DEFECT_PAGES = 256


class MemoryReader:
    """Reads the memory of `scheduler` between two of its events.

    `other_counters` returns additional counters from outside the scheduler.
    """

    def __init__(
        self, scheduler: Scheduler, other_counters: Callable[[], Mapping[str, int]] = dict
    ) -> None:
        self._scheduler = scheduler
        self._other_counters = other_counters

    def read(self, message: ReadMemory) -> dict[str, Any]:
        """Return a snapshot of all ranks; `build_s` is its processor time in seconds."""
        started = time.thread_time()
        scheduler, has_tokens = self._scheduler, message.has_tokens
        sessions, num_sessions_left_out = self._sessions()
        waiting, num_waiting_left_out = self._waiting()
        snapshot = {
            "counters": {**scheduler.counters(), **self._other_counters()},
            "num_sessions": scheduler.num_sessions,
            "num_waiting": scheduler.num_waiting,
            "ranks": [self._rank(rank, has_tokens) for rank in scheduler.ranks],
            "waiting": waiting,
            "num_waiting_left_out": num_waiting_left_out,
            "sessions": sessions,
            "num_sessions_left_out": num_sessions_left_out,
        }
        if message.has_tree:
            most = MAX_NODES // len(scheduler.ranks)
            snapshot["tree"] = [_tree(rank.memory, most, has_tokens) for rank in scheduler.ranks]
        return {**snapshot, "build_s": time.thread_time() - started}

    def describe_page(self, message: DescribePage) -> PageDescription:
        """Return the description of a page. Raises `InvalidRequestError` if it does not exist."""
        rank = self._rank_of(message.dp_rank)
        memory, tier, page = rank.memory, rank.host.tier, message.page
        num_pools = len(memory.allocators)
        num_host_pools = len(tier.blocks.allocators) if tier is not None else 0
        check_between("pool", message.pool, 0, num_pools + num_host_pools - 1)
        blocks = tier.blocks if tier is not None and message.pool >= num_pools else None
        pool = message.pool if blocks is None else message.pool - num_pools
        allocator = (blocks or memory).allocators[pool]
        check_between("page", page, 0, allocator.num_pages - 1)
        locks = memory.locked[pool].num_locks() if blocks is None else blocks.num_locks(pool)
        owner, holder = int(allocator.owners()[page]), "row" if blocks is None else "transfer"
        tokens = rid = node = None
        if owner == TREE:
            node, tokens = _node_of((blocks or memory).cache, pool, page)
        elif owner > 0 and blocks is None:
            tokens = _tokens_of(memory, pool, page, owner)
            rid = rank.columns.rids[owner] or None
        moves = allocator.transitions()
        return PageDescription(
            owner=describe_owner(owner, holder),
            tokens=tokens,
            rid=rid,
            session_id=None if blocks is not None else _sessions_by_row(memory).get(owner),
            # The page shows no tree of CPU memory.
            node=None if node is None or blocks is not None else node.node_id,
            num_locks=int(locks[page]) if owner == TREE else 0,
            last_access=None if node is None else node.last_access,
            clock=allocator.clock,
            moves=[
                PageMove(move.clock, move.action, describe_owner(mover, holder))
                for move in moves
                for moved, mover in each_page(move)
                if moved == page
            ],
            is_whole=not moves or moves[0].clock == 1,
        )

    def find_prefix(self, message: FindPrefix) -> PrefixFound:
        """Find a prefix on every rank without marking nodes as recently used."""
        tokens = np.array(message.input_ids, np.int32)
        found = []
        for rank in self._scheduler.ranks:
            cache = rank.memory.cache
            node, length = cache.find(tokens, message.namespace)
            path = [each.node_id for each in cache.tree.path_to(node)]
            found.append(FoundOnRank(rank.dp_rank, length, path if length else []))
        return PrefixFound(len(tokens), found)

    def _rank_of(self, dp_rank: int) -> RankScheduler:
        check_between("dp_rank", dp_rank, 0, len(self._scheduler.ranks) - 1)
        return self._scheduler.ranks[dp_rank]

    def _rank(self, rank: RankScheduler, has_tokens: bool) -> dict[str, Any]:
        memory, tier, defect = rank.memory, rank.host.tier, _defect(rank)
        return {
            **memory.view().as_dict(),
            "defect": defect,
            "defect_pages": [] if defect is None else _defect_pages(memory),
            "num_running": len(rank.running),
            "num_waiting": self._scheduler.num_waiting_for(rank.dp_rank),
            "counters": rank.counters(),
            "codes": [
                _codes(allocator, locked.num_locks())
                for allocator, locked in zip(memory.allocators, memory.locked, strict=True)
            ],
            "host_pools": [view._asdict() for view in rank.host.views()],
            "host_codes": _block_codes(tier.blocks) if tier is not None else [],
            "leases": _leases(rank, has_tokens),
        }

    def _waiting(self) -> tuple[list[dict[str, Any]], int]:
        listed = [
            {
                "rid": request.rid,
                "kind": reason.kind,
                "reason": reason.in_words(),
                "prompt_len": request.prompt_len,
                "num_output": request.num_output_tokens,
                "num_retractions": request.num_retractions,
                "priority": request.priority,
            }
            for request, reason in self._scheduler.waiting_for(MAX_WAITING)
        ]
        return listed, self._scheduler.num_waiting - len(listed)

    def _sessions(self) -> tuple[list[dict[str, Any]], int]:
        """Return sessions, those with a row first, and the number left out."""
        memories = [rank.memory for rank in self._scheduler.ranks]
        holding = {
            session_id: (memory, row)
            for memory in memories
            for row, session_id in _sessions_by_row(memory).items()
        }
        store = self._scheduler.session_store
        others = (
            session.session_id for session in store.newest() if session.session_id not in holding
        )
        listed = []
        for session_id in islice(chain(holding, others), MAX_SESSIONS):
            session = store.find(session_id)
            if session is not None:
                memory, row = holding.get(session_id, (None, None))
                entry = _session(session, memory, row)
                listed.append({**entry, "idle_s": store.idle_s(session)})
        return listed, len(store) - len(listed)


def _codes(allocator: PageAllocator, num_locks: Int32Array) -> bytes:
    codes = allocator.owners()
    codes[(codes == TREE) & (num_locks > 0)] = LOCKED
    return codes.tobytes()


def _block_codes(blocks: CpuPool) -> list[bytes]:
    """Return the codes of the first `MAX_BLOCKS` pages of each pool in CPU memory."""
    most = MAX_BLOCKS * np.dtype(np.int32).itemsize
    return [
        _codes(allocator, blocks.num_locks(pool))[:most]
        for pool, allocator in enumerate(blocks.allocators)
    ]


def _defect(rank: RankScheduler) -> str | None:
    """Return the first counts of a rank that disagree, in device or CPU memory, or None."""
    defect = find_imbalance(rank.memory, rank.num_leases)
    if defect is None:
        try:
            rank.host.check_balance()
        except LedgerError as error:
            return str(error)
    return defect


def _defect_pages(memory: RankMemory) -> list[tuple[int, int]]:
    """Return the first pages, each as (pool, page), named by a walk of wrong records."""
    found = ((each.pool, page) for each in find_defects(memory) for page in each.pages.tolist())
    return list(islice(found, _MAX_DEFECT_PAGES))


def _leases(rank: RankScheduler, has_tokens: bool) -> dict[str, Any]:
    memory, running = rank.memory, rank.running
    leases = [lease for _, lease in sorted(memory.leases.items())]
    rows = np.array([lease.row for lease in leases], np.intp)
    table = memory.rows
    sessions = _sessions_by_row(memory)
    requests = [running.requests[row] for row in rows.tolist()]
    idle = {lease.row for _, lease in memory.sessions.idle()}
    has_request = np.array([request is not None for request in requests], np.bool_)
    prompts, known = (
        np.where(has_request, lens[rows], 0)
        for lens in (running.columns.prompt_len, running.columns.known_len)
    )
    columns = {
        "row": rows.tolist(),
        "rid": [None if request is None else request.rid for request in requests],
        "session_id": [sessions.get(row) for row in rows.tolist()],
        "is_idle": [row in idle for row in rows.tolist()],
        "protected": table.cache_protected_len[rows].tolist(),
        "committed": table.kv_committed_len[rows].tolist(),
        "allocated": table.kv_allocated_len[rows].tolist(),
        "prompt_len": prompts.tolist(),
        "num_output": (known - prompts).tolist(),
        "num_retractions": [
            0 if request is None else request.num_retractions for request in requests
        ],
        "node": [None if lease.node is None else lease.node.node_id for lease in leases],
    }
    if has_tokens:
        columns["tokens"] = [
            b"" if request is None else running.known_tokens(row)[:MAX_TEXT_TOKENS].tobytes()
            for row, request in zip(rows.tolist(), requests, strict=True)
        ]
    return columns


def _sessions_by_row(memory: RankMemory) -> dict[int, str]:
    """Return the sessions with a row of this rank: idle first, and these from the longest idle."""
    sessions = memory.sessions
    holding = chain(sessions.idle(), sessions.checked_out())
    return {lease.row: session_id for session_id, lease in holding}


def _session(session: Session, memory: RankMemory | None, row: int | None) -> dict[str, Any]:
    turns = session.outline(MAX_TURNS)
    pages_held = pages_freed = 0
    if memory is not None and row is not None:
        lease = memory.leases[row]
        listed = memory.by_pool(lease.pages(memory.page_size))[0]
        pages_held = len(listed)
        pages_freed = int((memory.locked[0].num_locks()[listed] <= 1).sum())
    source = session.forked_from
    return {
        "session_id": session.session_id,
        "is_streaming": isinstance(session, StreamingSession),
        "turns": [turn._asdict() for turn in turns],
        "num_left_out": session.num_turns - len(turns),
        "forked_from": source and {"session_id": source[0], "num_turns": source[1]},
        "undone": [
            {"after_turns": kept, "num_turns": undone} for kept, undone in session.rollbacks
        ],
        "num_tokens": session.num_tokens,
        "is_running": session.num_running > 0,
        "dp_rank": None if memory is None else memory.dp_rank,
        "row": row,
        "num_pages": pages_held,
        "num_pages_freed_by_eviction": pages_freed,
    }


def _tree(memory: RankMemory, most: int, has_tokens: bool) -> dict[str, Any]:
    tree = memory.cache.tree
    nodes = list(islice(_breadth_first(tree.root), most))
    listed = [_node(memory, node, has_tokens) for node in nodes]
    return {
        "dp_rank": memory.dp_rank,
        "clock": tree.clock,
        "nodes": listed,
        "num_pages_left_out": memory.allocators[0].num_tree
        - sum(node["num_pages"][0] for node in listed),
    }


def _breadth_first(root: TreeNode) -> Iterator[TreeNode]:
    queue = deque(root.children.values())
    while queue:
        node = queue.popleft()
        yield node
        queue.extend(node.children.values())


def _node(memory: RankMemory, node: TreeNode, has_tokens: bool) -> dict[str, Any]:
    num_pages = [0] * len(memory.allocators)
    is_gone: BoolArray | None = None
    snapshots: list[int] = []
    start = node.end - len(node.key)
    for component in memory.cache.tree.components:
        if component.pool < 0:
            continue
        values = node.values[component.index]
        if component.index == 0:  # full attention: every page is present
            num_pages[component.pool] += len(values)
            continue
        count = int(np.count_nonzero(values))
        num_pages[component.pool] += count
        if component.pool == memory.state_pool:
            snapshots = (start + memory.page_size * (values.nonzero()[0] + 1)).tolist()
        elif count < len(values):
            is_gone = values == 0 if is_gone is None else is_gone | (values == 0)
    parent = node.parent
    entry: dict[str, Any] = {
        "id": node.node_id,
        "parent": None if parent is None or parent.parent is None else parent.node_id,
        "start": start,
        "end": node.end,
        "num_locks": node.locks[0],  # of the path's component, which counts locks by node
        "last_access": node.last_access,
        "namespace": namespace_hash(node.namespace),
        "num_pages": num_pages,
        "tombstones": [] if is_gone is None else _runs(is_gone),
        "snapshots": snapshots,
    }
    if has_tokens:
        entry["tokens"] = node.key[:MAX_TEXT_TOKENS].tobytes()
    return entry


def _runs(is_set: BoolArray) -> list[list[int]]:
    borders = (np.flatnonzero(is_set[1:] != is_set[:-1]) + 1).tolist()
    if is_set[0]:
        borders.insert(0, 0)
    if is_set[-1]:
        borders.append(len(is_set))
    firsts, ends = borders[::2], borders[1::2]
    return [[first, end - first] for first, end in zip(firsts, ends, strict=True)]


def _node_of(
    cache: RadixCache, pool: int, page: int
) -> tuple[TreeNode | None, tuple[int, int] | None]:
    """Return the node that holds a page of the tree, and the page's token range."""
    nodes, page_size = cache.nodes(), cache.tree.page_size
    for component in cache.tree.components:
        if component.pool != pool:
            continue
        places = np.flatnonzero(component.pages_of(nodes) == page)
        if len(places):
            ends = np.cumsum([len(node.values[component.index]) for node in nodes])
            index = int(np.searchsorted(ends, places[0], side="right"))
            last = nodes[index].end - (int(ends[index]) - 1 - int(places[0])) * page_size
            return nodes[index], (last - page_size, last)
    return None, None


def _tokens_of(memory: RankMemory, pool: int, page: int, row: int) -> tuple[int, int] | None:
    """Return the token range of a page owned by a row. The last tokens may not be written yet."""
    for group in memory.groups_of[pool]:
        places = (memory.rows.pages[row, group] == page).nonzero()[0]
        if len(places):
            first = int(places[0]) * memory.page_size
            allocated = int(memory.rows.kv_allocated_len[row])
            return first, min(first + memory.page_size, max(allocated, first))
    return None
