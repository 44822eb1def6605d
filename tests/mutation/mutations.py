"""The ways to break the memory stack that tests must notice: one small slip each.

Most are slips that engines of this kind have really made. Each names a text that occurs once in
its file (`test_mutations.py` keeps that true) and what stands there instead.
"""

from typing import NamedTuple


class Mutation(NamedTuple):
    """One slip."""

    name: str
    path: str  # from the root of the repository
    before: str
    after: str


_RELEASE = "sgl_jax/mem_cache/release.py"
_PROMPTS = "sgl_jax/scheduler/running_prompts.py"
_WRITES = "sgl_jax/mem_cache/offload/store_writes.py"
_MEMORY = "sgl_jax/mem_cache/rank_memory.py"
_ALLOCATOR = "sgl_jax/mem_cache/pages/page_allocator.py"
_ROWS = "sgl_jax/mem_cache/pages/req_to_token_pool.py"
_LEASE = "sgl_jax/mem_cache/lease.py"
_TREE = "sgl_jax/mem_cache/tree/radix_tree.py"
_FULL = "sgl_jax/mem_cache/tree/full_component.py"
_COMPONENT = "sgl_jax/mem_cache/tree/tree_component.py"
_ADAPTIVE = "sgl_jax/mem_cache/eviction/adaptive_policy.py"
_SHADOWS = "sgl_jax/mem_cache/eviction/shadow_pages.py"
_GHOSTS = "sgl_jax/mem_cache/eviction/ghost_pages.py"
_CACHE = "sgl_jax/mem_cache/tree/radix_cache.py"
_CACHE_WALK = "sgl_jax/mem_cache/tree/cache_walk.py"
_WINDOW = "sgl_jax/mem_cache/tree/window_component.py"
_ORDER = "sgl_jax/mem_cache/tree/window_order.py"
_STATES = "sgl_jax/mem_cache/row_states.py"
_RESUMABLE = "sgl_jax/mem_cache/tree/resumable.py"
_LOCKED = "sgl_jax/mem_cache/pages/locked_pages.py"
_RANK_HOST = "sgl_jax/scheduler/rank_offload.py"
_RANK = "sgl_jax/scheduler/rank_scheduler.py"
_PLANNER = "sgl_jax/scheduler/step_builder.py"
_BUILDER = "sgl_jax/scheduler/step_arrays.py"
_LAUNCHED = "sgl_jax/scheduler/in_flight_rows.py"
_RUNNING = "sgl_jax/scheduler/running_rows.py"
_RUNNABLE = "sgl_jax/scheduler/runnable.py"
_DRAFTS = "sgl_jax/scheduler/draft_policy.py"
_KEPT = "sgl_jax/scheduler/kept_states.py"
_STEPS = "sgl_jax/scheduler/decode_steps.py"
_COMMIT = "sgl_jax/scheduler/apply_result.py"
_SCHEDULER = "sgl_jax/scheduler/scheduler.py"
_NON_FINITE = "sgl_jax/scheduler/non_finite.py"
_LIVE_REQUESTS = "sgl_jax/scheduler/live_requests.py"
_REQUEST = "sgl_jax/scheduler/request.py"
_SESSION_LEASES = "sgl_jax/mem_cache/session_leases.py"
_STREAMING = "sgl_jax/sessions/streaming.py"
_REGULAR = "sgl_jax/sessions/tree.py"
_BOOK = "sgl_jax/sessions/store.py"
_DESK = "sgl_jax/sessions/service.py"
_LEDGER = "sgl_jax/mem_cache/ledger.py"
_WALK = "sgl_jax/mem_cache/ledger_walk.py"
_ARGS = "sgl_jax/core/scheduler_args.py"
_WORKING_SET = "sgl_jax/scheduler/working_set.py"
_ADMISSION = "sgl_jax/scheduler/admission/admission.py"
_ROOM = "sgl_jax/scheduler/admission/rank_capacity.py"
_OPTIONS = "sgl_jax/scheduler/admission/rank_options.py"
_IN_FLIGHT = "sgl_jax/scheduler/admission/in_flight.py"
_BLOCKS = "sgl_jax/mem_cache/offload/cpu_pool.py"
_TIER = "sgl_jax/mem_cache/offload/cpu_tier.py"
_STORE = "sgl_jax/mem_cache/offload/remote_tier.py"
_HOST_LEDGER = "sgl_jax/mem_cache/offload/cpu_ledger.py"
_COLUMNS = "sgl_jax/scheduler/waiting/waiting_columns.py"
_QUEUE = "sgl_jax/scheduler/waiting/waiting_queue.py"
_ADMISSION_ORDER = "sgl_jax/scheduler/waiting/admission_order.py"
_LINES = "sgl_jax/scheduler/waiting/queue_loops.py"
_FITS = "sgl_jax/scheduler/forecast/fits.py"
_FORECAST = "sgl_jax/scheduler/forecast/forecast.py"
_LENGTHS = "sgl_jax/scheduler/forecast/output_lengths.py"
_PREEMPTION = "sgl_jax/scheduler/preemption.py"
_CURSOR = "sgl_jax/mem_cache/tree/prefix_cursor.py"
_CURSORS = "sgl_jax/mem_cache/tree/cursor_index.py"
_PROMPT_TREE = "sgl_jax/mem_cache/tree/prompt_tree.py"
_STOPS = "sgl_jax/mem_cache/tree/cursor_positions.py"
_GROWTH = "sgl_jax/mem_cache/row_growth.py"
_SIZES = "sgl_jax/core/engine_sizes.py"
_READER = "sgl_jax/memory_view/reader.py"
_FRAMES = "sgl_jax/memory_view/frames.py"
_WATCH = "sgl_jax/server/memory/memory_watch.py"
_VIEW = "sgl_jax/replay/view.py"

_BUILT_ON = (
    "if self.running is None or self._is_whole or self._len_after(message) == self.num_tokens:"
)
_FREE_REST = (
    "    _free(memory, lease.pages(memory.page_size, lease.cache_protected_len), lease.row)\n"
    "    if lease.node"
)
_FREE_DUPLICATES = "            allocator.free(fresh[numbers][is_duplicate[numbers]], lease.row)\n"
_UNLOCK_AT_END = """        memory.cache.unlock(lease.node, _first_pages(memory, lease))
        lease.node = None
    del memory"""

MUTATIONS = (
    # -- the end of a lease
    Mutation("skip the free at release", _RELEASE, _FREE_REST, "    if lease.node"),
    Mutation(
        "free twice at release",
        _RELEASE,
        _FREE_REST,
        _FREE_REST.removesuffix("    if lease.node") + _FREE_REST,
    ),
    Mutation(
        "free from the committed instead of the protected length",
        _RELEASE,
        _FREE_REST,
        _FREE_REST.replace(
            "lease.cache_protected_len",
            "-(-lease.kv_committed_len // memory.page_size) * memory.page_size",
        ),
    ),
    Mutation(
        "free up to the committed instead of the allocated length",
        _RELEASE,
        _FREE_REST,
        _FREE_REST.replace(
            "lease.cache_protected_len", "lease.cache_protected_len, lease.kv_committed_len"
        ),
    ),
    Mutation(
        "off by one in the ceil of a lease's last page",
        _LEASE,
        "start // page_size : -(-stop // page_size)]",
        "start // page_size : stop // page_size]",
    ),
    Mutation(
        "forget the lock at release",
        _RELEASE,
        _UNLOCK_AT_END,
        "        lease.node = None\n    del memory",
    ),
    Mutation(
        "unlock twice at release",
        _RELEASE,
        _UNLOCK_AT_END,
        "        memory.cache.unlock(lease.node, None)\n" + _UNLOCK_AT_END,
    ),
    Mutation("do not return the row", _RELEASE, "    memory.row_pool.free(lease.row)\n", ""),
    Mutation("leave the lease live", _RELEASE, "    lease.released = True\n", ""),
    Mutation("insert what a failed step wrote", _RELEASE, "    if insert:\n", "    if True:\n"),
    Mutation("never insert", _RELEASE, "    if insert:\n", "    if False:\n"),
    # -- the order of eviction
    Mutation(
        "evict what is most likely to be used again",
        _ADAPTIVE,
        "lambda leaf: self.rate(leaf.num_uses",
        "lambda leaf: -self.rate(leaf.num_uses",
    ),
    Mutation(
        "evict by age alone, though uses are counted",
        _ADAPTIVE,
        "        return reused / (reused + left) / (age",
        "        return 1.0 / (age",
    ),
    Mutation(
        "change the class of a leaf that is still listed in the old one",
        _ADAPTIVE,
        "                self.discard(node)\n            node.num_uses += 1\n",
        "                pass\n            node.num_uses += 1\n",
    ),
    Mutation(
        "a page that returns begins anew",
        _ADAPTIVE,
        "np.minimum(pages.num_uses + 1, NUM_CLASSES - 1)",
        "np.minimum(pages.num_uses * 0, NUM_CLASSES - 1)",
    ),
    Mutation(
        "count a return as if it had been served",
        _ADAPTIVE,
        "np.bincount(pages.num_uses, share * share * share, NUM_CLASSES)",
        "np.bincount(pages.num_uses, None, NUM_CLASSES)",
    ),
    Mutation(
        "recall less of a page than of what followed it",
        _ADAPTIVE,
        "        num_uses = np.maximum.accumulate(num_uses[::-1])[::-1]\n",
        "",
    ),
    Mutation(
        "let counts of long ago weigh as much as new ones",
        _ADAPTIVE,
        "if self._num_left_since_halved >= HALVED_AFTER * self._num_pages:",
        "if False:",
    ),
    Mutation(
        "remember what left after a reset",
        _CACHE,
        "        self.tree.policy.clear()\n",
        "",
    ),
    Mutation(
        "forget what leaves when it leaves together",
        _GHOSTS,
        "        place = (first_place + len(hashes) - 1 - i) % len(ring)\n",
        "        place = first_place % len(ring)\n",
    ),
    Mutation(
        "recall only what left lately",
        _GHOSTS,
        "        self._next = (self._next + len(hashes)) % len(self._ring)\n",
        "        self._next = (self._next + len(hashes)) % (len(self._ring) // 8)\n",
    ),
    Mutation(
        "note all but the first of the pages that left together",
        _GHOSTS,
        "    for i in range(len(hashes) - 1, -1, -1):\n        place",
        "    for i in range(len(hashes) - 1, 0, -1):\n        place",
    ),
    Mutation(
        "leave what a release hands over counted as locked",
        _RELEASE,
        "        memory.unlock(lease.pages(memory.page_size, 0, protected))\n",
        "        memory.unlock(lease.pages(memory.page_size, 0, protected)[:, 1:])\n",
    ),
    Mutation(
        "hash an edge as if it began the prompt",
        _TREE,
        "        if parent is not None and len(parent.page_hashes):\n",
        "        if False:\n",
    ),
    Mutation(
        "a shadow that is followed gives up the path that was just used",
        _ADAPTIVE,
        "if leaf.last_access >= self._shadows.path_used_at:",
        "if False:",
    ),
    Mutation(
        "a whole leaf goes where the shadow gave up its end",
        _ADAPTIVE,
        "        return self._shadows.num_used_more(leaf.page_hashes, num_uses)\n",
        "        return 0\n",
    ),
    Mutation(
        "a shadow counts a hit of no page",
        _SHADOWS,
        "            state.hits[shadow] += 1\n",
        "",
    ),
    Mutation(
        "the shadow of LFU has the order of LRU",
        _SHADOWS,
        "                num_uses[i] = min(uses + 1, MAX_USES)",
        "                num_uses[i] = 0",
    ),
    # -- edges that become one
    Mutation(
        "merge across the end of a lease",
        _FULL,
        "        return bool(upper.locks[self.index] == lower.locks[self.index])\n",
        "        return True\n",
    ),
    Mutation(
        "merge what was used more with what was used less",
        _TREE,
        "            and upper.num_uses == lower.num_uses\n",
        "",
    ),
    Mutation(
        "merge what was used lately with what was not",
        _TREE,
        "            and upper.last_access <= lower.last_access\n",
        "",
    ),
    Mutation(
        "merge a long edge with every chunk that follows",
        _TREE,
        "            and len(upper.key) < 2 * len(lower.key)\n",
        "",
    ),
    Mutation(
        "join the pages of merged edges in the wrong order",
        _FULL,
        "joined(upper.values[self.index], lower.values[self.index])",
        "joined(lower.values[self.index], upper.values[self.index])",
    ),
    Mutation(
        "leave apart what only a lock told apart",
        _CACHE,
        "        self.tree.merge_into_only_child(node)\n",
        "",
    ),
    Mutation(
        "leave apart what only a branch told apart",
        _TREE,
        "nodes above it\n        self.merge_into_only_child(parent)\n",
        "nodes above it\n",
    ),
    Mutation(
        "leave apart what only an age told apart",
        _TREE,
        "            self.merge_up(parent)  # it",
        "            pass  # it",
    ),
    Mutation(
        "leave the chunks of a prompt a chain",
        _CACHE,
        "        self.tree.merge_into_only_child(old)\n",
        "",
    ),
    # -- publishing a prefix
    Mutation(
        "forget the old lock when a longer prefix is published",
        _CACHE,
        "            self._move_lock(start, node, offer.first_pages)\n",
        "            pass\n        if start is not None:\n"
        "            self._lock(node, offer.first_pages)\n",
    ),
    Mutation(
        "lock what lies above a published prefix once more",
        _FULL,
        "        self._count_locks(new, old, 1)\n",
        "        self.lock(new)\n",
    ),
    Mutation(
        "forget that a prefix was used, once what continued it is gone",
        _TREE,
        "        parent.last_access = max(parent.last_access, leaf.last_access)\n",
        "",
    ),
    Mutation(
        "look for what a lease continues at the root",
        _TREE,
        "        node = below or self.root\n",
        "        node = self.root\n",
    ),
    Mutation(
        "keep the duplicates of a published prefix",
        _RELEASE,
        _FREE_DUPLICATES,
        "            pass\n",
    ),
    Mutation(
        "free duplicates from the matched instead of the protected length",
        _RELEASE,
        "        is_duplicate = (fresh != kept.pages) & (fresh > 0)\n",
        "        is_duplicate = (fresh != kept.pages) & (fresh > 0)\n"
        "        is_duplicate[:, 0] = False\n",
    ),
    Mutation(
        "offer tokens that were not written",
        _RELEASE,
        "min(lease.kv_committed_len, len(tokens)) //",
        "min(lease.kv_allocated_len, len(tokens)) //",
    ),
    Mutation(
        "offer KV of tokens that were forgotten",
        _RELEASE,
        "min(lease.kv_committed_len, len(tokens)) // page_size * page_size",
        "lease.kv_committed_len // page_size * page_size\n"
        "    tokens = np.pad(tokens, (0, max(0, length - len(tokens))))",
    ),
    Mutation(
        "offer the last, partial page",
        _RELEASE,
        "min(lease.kv_committed_len, len(tokens)) // page_size * page_size",
        "-(-min(lease.kv_committed_len, len(tokens)) // page_size) * page_size",
    ),
    Mutation(
        "leave the protected length as it was",
        _RELEASE,
        "    rows.cache_protected_len[lease.row] = length\n",
        "",
    ),
    Mutation(
        "go on reading the duplicates",
        _RELEASE,
        "        rows.list_pages(lease.row, first, kept.pages)\n",
        "",
    ),
    # -- namespaces
    Mutation(
        "namespaces: look edges up by tokens alone",
        "sgl_jax/mem_cache/tree_node.py",
        "return first_page if start else first_page + namespace.encode()",
        "return first_page",
    ),
    Mutation(
        "namespaces: insert into the default one",
        _CACHE,
        "node, length = tree.walk(tokens, offer.namespace, start)",
        'node, length = tree.walk(tokens, "", start)',
    ),
    Mutation(
        "namespaces: a new node is of the default one",
        _CACHE,
        "node = tree.add_child(node, tokens[length:].copy(), offer.namespace)",
        'node = tree.add_child(node, tokens[length:].copy(), "")',
    ),
    Mutation(
        "namespaces: a split lists its upper node by tokens alone",
        _TREE,
        "upper = self._new_node(key, parent, lower.child_key, namespace)",
        "upper = self._new_node(key, parent, key[: self.page_size].tobytes(), namespace)",
    ),
    Mutation(
        "namespaces: a lease forgets its own",
        _LEASE,
        "        self.namespace = namespace\n",
        '        self.namespace = ""\n',
    ),
    Mutation(
        "namespaces: publish under the default one",
        _RELEASE,
        "LeaseOffer(lease.row, offered, lease.node, lease.namespace, firsts)",
        'LeaseOffer(lease.row, offered, lease.node, "", firsts)',
    ),
    Mutation(
        "namespaces: match the default one",
        _MEMORY,
        "self.cache.match_prefix(prefix, namespace)",
        "self.cache.match_prefix(prefix)",
    ),
    Mutation(
        "namespaces: look up pages in the default one",
        _CACHE,
        "node, length = self.tree.walk(_contiguous(tokens), namespace, start)",
        'node, length = self.tree.walk(_contiguous(tokens), "", start)',
    ),
    Mutation(
        "namespaces: order the queue by what the default one has",
        _QUEUE,
        "self.prompts.follow(request.matchable(), request.namespace, known)",
        'self.prompts.follow(request.matchable(), "", known)',
    ),
    Mutation(
        "namespaces: prompts of different ones share a cursor",
        _PROMPT_TREE,
        "key = edge_key(self._page_size, prefix.end, rest, namespace)",
        'key = edge_key(self._page_size, prefix.end, rest, "")',
    ),
    Mutation(
        "namespaces: wait for what a request of another one computes",
        _PROMPTS,
        "next_key(lease.node, tokens, lease.namespace)\n        self._next_keys",
        'next_key(lease.node, tokens, "")\n        self._next_keys',
    ),
    Mutation(
        "namespaces: open every lease in the default one",
        _RANK,
        "memory.open_lease(request.matchable(), request.namespace)",
        "memory.open_lease(request.matchable())",
    ),
    Mutation(
        "namespaces: a turn does not inherit its session's",
        _REQUEST,
        "message.namespace if session is None else session.namespace",
        "message.namespace",
    ),
    Mutation(
        "namespaces: a fork does not inherit",
        _STREAMING,
        "        other = copy(self)\n",
        '        other = copy(self)\n        other.namespace = ""\n',
    ),
    Mutation(
        "namespaces: a turn may name any",
        _BOOK,
        'if message.namespace not in ("", session.namespace):',
        "if False:",
    ),
    Mutation(
        "namespaces: the audit looks at no lease's",
        _WALK,
        "        if lease.node.namespace != lease.namespace:\n",
        "        if False:\n",
    ),
    Mutation(
        "namespaces: the audit looks up no node",
        _CACHE_WALK,
        "        if not tree.is_listed(node):\n",
        "        if False:\n",
    ),
    Mutation(
        "priorities: low values first, and high values too",
        _ARGS,
        "return -priority if self.schedule_low_priority_values_first else priority",
        "return priority",
    ),
    Mutation(
        "priorities: heed them unasked",
        _ARGS,
        "        if not self.enable_priority_scheduling:\n            return 0\n",
        "",
    ),
    # -- leases begin and grow
    Mutation(
        "use the committed length for the protected length",
        _MEMORY,
        "protected=match.length, committed",
        "protected=0, committed",
    ),
    Mutation(
        "forget what was allocated",
        _GROWTH,
        "allocated_len[rows[i]] = max(allocated_len[rows[i]], lens[i])",
        "pass",
    ),
    Mutation(
        "shrink the allocated length without freeing",
        _GROWTH,
        "allocated_len[rows[i]] = max(allocated_len[rows[i]], lens[i])",
        "allocated_len[rows[i]] = lens[i]",
    ),
    Mutation(
        "off by one in the pages that a row lacks",
        _GROWTH,
        "            if lens[i] - held_len > num_left:\n                growing[num",
        "            if lens[i] - held_len > num_left + 1:\n                growing[num",
    ),
    Mutation(
        "evict without a need",
        _CACHE,
        "                self.evict(deficit + (num_ahead[pool] if num_ahead else 0), pool)\n",
        "                self.evict(count)\n",
    ),
    Mutation(
        "publish no part of a prompt before all of it",
        _PROMPTS,
        "            if memory.cache.is_awaited(lease.node, self.next_key(row)):\n",
        "            if self.next_key(row) is None:\n",
    ),
    Mutation(
        "keep what another published meanwhile",
        _CACHE,
        "        is_there = next_key in parent.children\n",
        "        is_there = False\n",
    ),
    Mutation(
        "go on publishing for a request that left",
        _PROMPTS,
        "        self.unpublished.pop(row, None)\n        self._next",
        "        self._next",
    ),
    Mutation(
        "give a row back with its old epoch",
        _ROWS,
        "        self.epoch[row] += 1\n",
        "",
    ),
    Mutation(
        "let the executor go on with the pages of a row that was given back",
        _ROWS,
        "        self.page_log.note(listed)\n",
        "",
    ),
    Mutation(
        "tell the executor of a rank's pages as if they were the first rank's",
        _ROWS,
        "        start = ((self.first_row + row) * self.num_groups + group)",
        "        start = (row * self.num_groups + group)",
    ),
    Mutation(
        "give a row back with its old lengths",
        _ROWS,
        "        self.lengths[:, row] = 0\n",
        "",
    ),
    Mutation(
        "let any caller free a page",
        _ALLOCATOR,
        "or owners[page] != owner:\n            return False\n",
        ":\n            return False\n",
    ),
    # -- the tree
    Mutation(
        "lock the end of a path alone",
        _FULL,
        "                    self.refresh(step)\n            step = step.parent\n",
        "                    self.refresh(step)\n            step = None\n",
    ),
    Mutation(
        "split an edge without its locks",
        _FULL,
        "        upper.locks[self.index] = lower.locks[self.index]\n",
        "",
    ),
    Mutation(
        "evict what is locked",
        _FULL,
        "not node.children and node.locks[self.index] == 0 and",
        "not node.children and",
    ),
    Mutation(
        "evict the root",
        _FULL,
        "node.locks[self.index] == 0 and node.parent is not None",
        "node.locks[self.index] == 0",
    ),
    Mutation(
        "evict a whole edge for one page",
        _FULL,
        "return max(len(leaf.values[self.index]) - num_pages, 0)",
        "return 0",
    ),
    Mutation(
        "lock the root when nothing matched",
        _CACHE,
        "        if length == 0:\n            return PrefixMatch(",
        "        if length == 0:\n            self._lock(tree.root)\n"
        "            return PrefixMatch(",
    ),
    Mutation(
        "match a part of a page",
        _TREE,
        "common_prefix_len(child.key, rest) // self.page_size * self.page_size",
        "common_prefix_len(child.key, rest)",
    ),
    Mutation(
        "reset the cache under a live lease",
        _CACHE,
        "        if self.num_locks:\n",
        "        if False:\n",
    ),
    # -- requests and their results
    Mutation(
        "serve even the last token from the cache",
        _REQUEST,
        "limit = len(self.tokens) - 1",
        "limit = len(self.tokens)",
    ),
    Mutation(
        "commit a result to the row's present holder",
        _LAUNCHED,
        "if step.samples and epoch[number] == step.epoch:",
        "if step.samples:",
    ),
    Mutation(
        "keep the overshoot past a stop",
        _LAUNCHED,
        "while end == GOES_ON and count < width and (",
        "while count < width and (",
    ),
    Mutation(
        "leave the committed length behind the accepted drafts",
        _COMMIT,
        "kv_committed_len[rows] + accepted)",
        "kv_committed_len[rows])",
    ),
    Mutation(
        "count a read draft as unread",
        _COMMIT,
        '    running.unread_drafts[rows] -= launched["num_ahead"]\n',
        "",
    ),
    Mutation(
        "hold slots for one step ahead only",
        _RUNNABLE,
        "tables.kv_committed_len[rows] + running.unread_drafts[rows] + np.int32(1)",
        "tables.kv_committed_len[rows] + np.int32(1)",
    ),
    Mutation(
        "plan chunks that a step cannot hold beside its decode rows",
        _PLANNER,
        "self.chunk_size = chunk_tokens",
        "self.chunk_size = sizes.max_step_tokens",
    ),
    Mutation(
        "let every row score as much as a step may",
        "sgl_jax/scheduler/step_builder.py",
        "self._num_scored_left -= num_scored\n        return count, num_scored",
        "self._num_scored_left -= 0\n        return count, num_scored",
    ),
    Mutation(
        "report the log-probability of the first token for every accepted one",
        _COMMIT,
        "logprobs[i],\n            top_ids[i],\n            top_logprobs[i],\n",
        "logprobs[0],\n            top_ids[0],\n            top_logprobs[0],\n",
    ),
    Mutation(
        "report the named tokens of the first of several accepted ones for all of them",
        _COMMIT,
        "_of_ids(result.id_logprobs, (index, i), num_ids)",
        "_of_ids(result.id_logprobs, (index, 0), num_ids)",
    ),
    Mutation(
        "fetch named tokens for the row with the fewest of them",
        _BUILDER,
        'int(ranks.running.num_logprob_ids[rows["row"]].max())',
        'int(ranks.running.num_logprob_ids[rows["row"]].min())',
    ),
    Mutation(
        "keep the slots of refused drafts while others are retracted",
        _PLANNER,
        "        return freed > 0\n",
        "        return False\n",
    ),
    Mutation(
        "lose the tokens of every full block",
        _LAUNCHED,
        "                if place == TOKEN_BLOCK - 1:\n",
        "                if False:\n",
    ),
    Mutation(
        "leave the last tokens of a request out when it ends",
        _RUNNING,
        "columns.tokens[row, last_block:count] = columns.latest[row, : count - last_block]",
        "pass",
    ),
    Mutation(
        "commit drafts at launch",
        _BUILDER,
        'rows["row"], rows["kv_end"])',
        'rows["row"], rows["kv_start"] + rows["q_len"])',
    ),
    Mutation(
        "draft past the tokens asked for",
        _DRAFTS,
        "np.clip(running.max_len[rows] - longest, 0, ",
        "np.clip(running.max_len[rows] - longest + 1, 0, ",
    ),
    Mutation(
        "save the lengths of what was launched, not of what was read",
        _RANK,
        "        tokens: Int32Array = self.running.remove(row)[:num_tokens]\n",
        "        planned = int(self.running.planned_len[row])\n"
        "        table = self.running.tokens[row].copy()\n"
        "        self.running.remove(row)\n"
        "        tokens: Int32Array = table[:planned][:num_tokens]\n",
    ),
    Mutation(
        "admit a retracted request twice on the device",
        _BUILDER,
        "        unsent.clear()\n",
        "        pass\n",
    ),
    Mutation(
        "retract from a rank that has room",
        _PLANNER,
        "while len(rows) and not self.rank.memory.grow_rows(rows, self._decode_ends(rows)):",
        "while len(rows) > 1 and (self._retract_one() or True) "
        "and not self.rank.memory.grow_rows(rows, self._decode_ends(rows)):",
    ),
    Mutation(
        "keep what a failed device has written",
        _SCHEDULER,
        "            self._live.end(request, finish, insert=False)\n        self._reset_caches()",
        "            self._live.end(request, finish, insert=True)",
    ),
    Mutation(
        "leave an aborted request in the queue",
        _LIVE_REQUESTS,
        "        elif request.state is RequestState.WAITING:\n"
        "            self.waiting.remove(request)\n",
        "",
    ),
    # -- sessions
    Mutation(
        "resume a session with its tail",
        _RELEASE,
        "    go_back(memory, lease, length)\n    _cut(memory, lease, length)\n    return lease",
        "    go_back(memory, lease, length)\n    return lease",
    ),
    Mutation(
        "free a tail from the page that its prefix ends in",
        _RELEASE,
        "    pages = lease.pages(page_size, first * page_size)\n",
        "    pages = lease.pages(page_size, length // page_size * page_size)\n",
    ),
    Mutation(
        "free a tail one page too late",
        _RELEASE,
        "    pages = lease.pages(page_size, first * page_size)\n",
        "    pages = lease.pages(page_size, (length // page_size + 1) * page_size)\n",
    ),
    Mutation(
        "free a tail and go on listing it",
        _RELEASE,
        "    memory.rows.unlist_pages(row, first)\n",
        "",
    ),
    Mutation(
        "take what was committed for the prefix of a turn",
        _RELEASE,
        "    go_back(memory, lease, length)\n    _cut(memory, lease, length)\n    return lease",
        "    _cut(memory, lease, lease.kv_committed_len)\n    return lease",
    ),
    Mutation(
        "a rolled back session keeps what followed",
        _RELEASE,
        "        _cut(memory, lease, length)\n        memory.mark_idle(lease)\n",
        "        memory.mark_idle(lease)\n",
    ),
    Mutation(
        "cut a lease though the tree owns more of it",
        _STATES,
        "    return most if most >= protected and memory",
        "    return most if memory",
    ),
    Mutation(
        "hand a lease to its session with the epoch of the turn before",
        _LEASE,
        "        self._rows.epoch[self.row] += 1\n        committed",
        "        committed",
    ),
    Mutation(
        "save the lengths of an aborted turn",
        _LEASE,
        "committed = min(self.kv_committed_len, num_tokens)",
        "committed = self.kv_committed_len",
    ),
    Mutation(
        "take a lease over and forget whose it is",
        _SESSION_LEASES,
        "        self.unbind(lease)\n        lease.change",
        "        lease.change",
    ),
    Mutation(
        "give a session a second lease",
        _SESSION_LEASES,
        "        if self.lease_of(session_id) is not None:\n",
        "        if False:\n",
    ),
    Mutation(
        "evict the session used last",
        _SESSION_LEASES,
        "next(iter(self._idle), None)",
        "next(reversed(self._idle), None)",
    ),
    Mutation(
        "keep the session's lease over a retract",
        "sgl_jax/scheduler/rank_scheduler.py",
        "        self.memory.sessions.unbind(lease)\n        request = self.running.request(row)\n",
        "        request = self.running.request(row)\n",
    ),
    Mutation(
        "keep all of an aborted turn",
        _RANK,
        "kept = request.kept_len if request.kept_by is not None else None",
        "kept = 10**6 if request.kept_by is not None else None",
    ),
    Mutation(
        "keep the tail of a turn that has ended",
        _RELEASE,
        "    _cut(memory, lease, length)\n    free_passed_window_pages(",
        "    free_passed_window_pages(",
    ),
    Mutation(
        "let an idle session hold what its windows have passed",
        _RELEASE,
        "    free_passed_window_pages("
        "memory.rows, [memory], np.array([lease.row]), np.array([length]))\n",
        "",
    ),
    Mutation(
        "keep a session's lease though the device failed",
        _RANK,
        "if not insert or kept is None or kept <",
        "if kept is None or kept <",
    ),
    Mutation(
        "keep a row whose tokens the device was never told",
        _RANK,
        "if unsent is not None and unsent.start < max(request.lease.kv_committed_len, 1):",
        "if False:",
    ),
    Mutation(
        "tell the device only the last tokens of a new row",
        _RANK,
        "        return lease, 0\n",
        "        return lease, lease.kv_committed_len\n",
    ),
    Mutation(
        "never evict a session",
        _RANK,
        "        if session_id is None:\n            return False\n        release_idle_lease",
        "        if True:\n            return False\n        release_idle_lease",
    ),
    Mutation(
        "evict ahead though nothing must be evicted",
        _CACHE,
        "            if deficit > 0:\n                self.evict",
        "            if True:\n                self.evict",
    ),
    Mutation(
        "evict sessions for a request that does not fit even so",
        _FITS,
        "                num_pages -= option.in_use\n                option.fits =",
        "                num_pages -= option.in_use\n                option.fits = True or",
    ),
    Mutation(
        "let idle sessions hold what they like",
        _RANK,
        "        while self.memory.num_session_pages > self._max_session_pages:\n",
        "        while False:\n",
    ),
    Mutation(
        "resume on tokens that the tree owns and the turn must compute",
        _REQUEST,
        "if self.resumable_len < lease.cache_protected_len or not",
        "if not",
    ),
    Mutation(
        "retract before an idle session is evicted",
        _PLANNER,
        " or self._evict_for(rows):",
        ":",
    ),
    Mutation(
        "publish a turn before it has succeeded",
        _PROMPTS,
        "            if self._running.request(row).kept_len:\n                continue\n",
        "",
    ),
    Mutation(
        "leave a closed session its lease",
        _DESK,
        "        home = self._home(session_id)\n        if home is not None:\n"
        "            release_idle_lease(home, session_id)\n",
        "",
    ),
    Mutation(
        "let a closed session take over what its turn leaves",
        _DESK,
        "                self._memories[turn.dp_rank].sessions.unbind(turn.lease)\n",
        "                pass\n",
    ),
    Mutation(
        "roll a session back without its memory",
        _DESK,
        "            roll_back_lease(home, message.session_id, session.num_tokens)\n",
        "            pass\n",
    ),
    Mutation(
        "move a turn without releasing its old lease",
        _ADMISSION,
        "            release_idle_lease(home, request.kept_by)\n",
        "            pass\n",
    ),
    Mutation(
        "leave the mark of a turn that failed",
        _STREAMING,
        "        self.running, self._pending = None, NO_TOKENS\n",
        "        if tokens is not None:\n"
        "            self.running, self._pending = None, NO_TOKENS\n",
    ),
    Mutation(
        "close a timed session at the first tick after it was opened",
        _BOOK,
        "        self._used_at.update(dict.fromkeys(self._used_since_tick, self._now_s))\n",
        "        self._used_at.update(dict.fromkeys(self._used_since_tick, 0.0))\n",
    ),
    Mutation(
        "look at a session that was used no more",
        _BOOK,
        "            else:\n                heapq.heappush(",
        "            elif False:\n                heapq.heappush(",
    ),
    Mutation(
        "count what a session was rolled back from as kept",
        _DESK,
        "        session.roll_back(message.num_turns)\n        self.store.recount(session)\n",
        "        session.roll_back(message.num_turns)\n",
    ),
    Mutation(
        "let sessions keep as many tokens as they like",
        _BOOK,
        "return session, whole, self._room_for(session.holder, num_added, num_needed)",
        "return session, whole, []",
    ),
    Mutation(
        "keep the memory of a session that another tenant's displaces",
        _DESK,
        "            self._close(session_id)\n        self.num_displaced",
        "            self.store.close(session_id)\n        self.num_displaced",
    ),
    Mutation(
        "count a closed session in its tenant's share",
        _BOOK,
        "        self._opened.add(session.holder, -1)\n",
        "",
    ),
    Mutation(
        "displace the session used last",
        _BOOK,
        "for session_id in self._idle.get(other, ()):",
        "for session_id in reversed(self._idle.get(other, {})):",
    ),
    Mutation(
        "displace a session with a time-out",
        _BOOK,
        "        if session.timeout_s is None and not session.num_running:\n",
        "        if not session.num_running:\n",
    ),
    Mutation(
        "displace a session with a turn in flight",
        _BOOK,
        "        if session.timeout_s is None and not session.num_running:\n",
        "        if session.timeout_s is None:\n",
    ),
    Mutation(
        "let a turn run on what a late stop cuts",
        _STREAMING,
        _BUILT_ON,
        "if True:",
    ),
    Mutation(
        "end a whole conversation for what the turn before it was",
        _STREAMING,
        _BUILT_ON,
        "if self.running is None or self._len_after(message) == self.num_tokens:",
    ),
    Mutation(
        "a whole conversation that fails leaves what is no history any more",
        _DESK,
        "            turn.kept_len = session.kept_len()\n",
        "            pass\n",
    ),
    Mutation(
        "end a turn though the stop before it cuts nothing",
        _STREAMING,
        _BUILT_ON,
        "if self.running is None or self._is_whole:",
    ),
    Mutation(
        "a turn whose end its client did not see stays",
        _LIVE_REQUESTS,
        "        self._amend(message)\n        if message.abort_all:",
        "        if message.abort_all:",
    ),
    Mutation(
        "forget what a turn that never was had replaced",
        _STREAMING,
        "            self.tokens = np.concatenate([self.tokens, self._replaced.tokens])\n",
        "",
    ),
    Mutation(
        "keep the KV of a turn that never was for what it had replaced",
        _DESK,
        "            roll_back_lease(home, session.session_id, fitting)\n",
        "            roll_back_lease(home, session.session_id, session.num_tokens)\n",
    ),
    Mutation(
        "cut a turn late without its memory",
        _DESK,
        "            roll_back_lease(home, session.session_id, fitting)\n",
        "            pass\n",
    ),
    Mutation(
        "cut what an ended turn of a tree has read",
        _REGULAR,
        "            if child.kept_len > standing:\n",
        "            if False:\n",
    ),
    Mutation(
        "take out a turn of a tree that another continues",
        _REGULAR,
        "        return None if is_continued else node\n",
        "        return node\n",
    ),
    Mutation(
        "a turn that is replaced runs on",
        _LIVE_REQUESTS,
        "        for request in turn.replaced:\n            self._replace(request)\n",
        "",
    ),
    Mutation(
        "a turn of a tree drops those that arrived after it",
        _REGULAR,
        "        stack = [each for each in stack if before is None or each.serial < before]\n",
        "",
    ),
    Mutation(
        "a turn of a tree ends held ones that arrived after it",
        _REGULAR,
        "            if each.serial < before\n            and ",
        "            if ",
    ),
    Mutation(
        "a turn enters its session though a grammar may be refused",
        _LIVE_REQUESTS,
        "        if self.gate.holds(request):\n",
        "        if turn is not None:\n            self._enter_turn(turn, request.rid)\n"
        "        if self.gate.holds(request):\n",
    ),
    Mutation(
        "a held turn closes sessions for its room although it is refused",
        _DESK,
        "        turn.session.hold(message, turn.prompt)\n",
        "        turn.session.hold(message, turn.prompt)\n        self._displace(turn.displaced)\n",
    ),
    Mutation(
        "count a shared page for every session that reads it",
        _LOCKED,
        "        self.num_idle += _count_locks(pages, 1, self._idle, self._running)[0]\n",
        "        _count_locks(pages, 1, self._idle, self._running)\n"
        "        self.num_idle += len(pages)\n",
    ),
    Mutation(
        "refuse a turn for a length that its client did not ask for",
        "sgl_jax/scheduler/request.py",
        "if wanted is None or message.is_length_default:",
        "if wanted is None:",
    ),
    Mutation(
        "keep what was generated past a stop string",
        _RELEASE,
        "    length = resumable_len(memory, lease, num_tokens)\n    if length < 1 or",
        "    length = lease.kv_committed_len\n    if length < 1 or",
    ),
    Mutation(
        "tell the prompt of a turn twice",
        _REQUEST,
        "        self.is_prompt_told = True\n",
        "",
    ),
    # -- what idle sessions keep, counted as it changes
    Mutation(
        "count a page as running again for each lease that is checked out",
        _LOCKED,
        "        self.num_running += _count_locks(pages, 1, self._running, self._idle)[0]\n",
        "        _count_locks(pages, 1, self._running, self._idle)\n"
        "        self.num_running += len(pages)\n",
    ),
    Mutation(
        "count a page as locked though sessions have locked it before",
        _LOCKED,
        "self.num_locked += num_alone",
        "self.num_locked += num_first",
    ),
    Mutation(
        "count a page as let go though sessions have locked it still",
        _LOCKED,
        "self.num_locked -= num_alone",
        "self.num_locked -= num_last",
    ),
    Mutation(
        "publish a prefix without a count of its locks",
        _RELEASE,
        "    memory.lock(_hand_to_tree(memory, lease, tokens))\n",
        "    _hand_to_tree(memory, lease, tokens)\n",
    ),
    Mutation(
        "keep a session's lease without a count of what it published at its end",
        _RELEASE,
        "    memory.lock(added)\n    memory.s",
        "    memory.s",
    ),
    Mutation(
        "evict a session that goes on to be counted as idle",
        _RELEASE,
        "    memory.mark_running(lease)\n    # The session",
        "    # The session",
    ),
    Mutation(
        "roll an idle session back and go on counting what it held",
        _RELEASE,
        "        memory.mark_running(lease)\n        go_back",
        "        go_back",
    ),
    Mutation(
        "call what idle sessions have locked beyond reach",
        _MEMORY,
        "self.cache.num_evictable[0] + num_idle\n",
        "self.cache.num_evictable[0]\n",
    ),
    Mutation(
        "call what requests share with idle sessions reclaimable",
        _MEMORY,
        "num_idle = locked.num_locked - locked.num_running",
        "num_idle = locked.num_idle",
    ),
    Mutation(
        "take pages that a request shares for new ones",
        _MEMORY,
        "                return node.end\n",
        "                return 0\n",
    ),
    Mutation(
        "look for a session where another has been checked out",
        _SESSION_LEASES,
        "            self._checked_out.pop(lease.session_id, None)\n",
        "            pass\n",
    ),
    # -- a turn reads the longer of lease and tree
    Mutation(
        "never adopt what the tree has beyond a lease",
        _RELEASE,
        "    if memory.cache.peek(tokens, lease.namespace, lease.node) <= "
        "lease.kv_allocated_len:\n",
        "    if True:\n",
    ),
    Mutation(
        "adopt a prefix of the tree that is shorter than the row",
        _RELEASE,
        "lease.namespace, lease.node) <= lease.kv_allocated_len:\n",
        "lease.namespace, lease.node) <= lease.cache_protected_len:\n",
    ),
    Mutation(
        "adopt a prefix and keep the row's own pages",
        _RELEASE,
        "    _free(memory, lease.pages(memory.page_size, lease.cache_protected_len), lease.row)\n"
        "    if memory.lists_all",
        "    if memory.lists_all",
    ),
    Mutation(
        "adopt a prefix and go on reading the row's own pages",
        _RELEASE,
        "        memory.rows.list_pages(lease.row, first, match.pages)\n",
        "        pass\n",
    ),
    Mutation(
        "adopt a prefix without a count of its locks",
        _RELEASE,
        "        memory.lock(match.pages)\n        memory.rows.list",
        "        memory.rows.list",
    ),
    Mutation(
        "adopt a prefix under the lock of a shorter one",
        _CACHE,
        "            self._move_lock(start, node, first_pages)\n",
        "            self._lock(node)\n",
    ),
    Mutation(
        "upload only what follows an adopted prefix",
        _RANK,
        "            adopt_prefix(memory, lease, request.matchable())\n"
        "            return lease, start\n",
        "            adopt_prefix(memory, lease, request.matchable())\n"
        "            return lease, lease.kv_committed_len\n",
    ),
    Mutation(
        "keep a row that lacks tokens of an adopted prefix on the device",
        _RANK,
        "unsent.start < max(request.lease.kv_committed_len, 1)",
        "unsent.start == 0",
    ),
    Mutation(
        "adopt a prefix of tokens that must be scored",
        _RANK,
        "            adopt_prefix(memory, lease, request.matchable())\n",
        "            adopt_prefix(memory, lease, request.tokens[:-1])\n",
    ),
    # -- which request starts, and where
    Mutation(
        "hold no rank for a request that is due",
        _ADMISSION,
        "        room.hold(request, num_pages, max(hold.until_step - step, 0))\n",
        "",
    ),
    Mutation(
        "choose in each step anew the rank that is held",
        _ADMISSION,
        "self._holds = {r: k for r, k in self._holds.items() if self._waiting.find_due(r)}",
        "self._holds = {}",
    ),
    Mutation(
        "hold the rank where most is lacking",
        _ADMISSION,
        "return max(short, 0), room.num_running",
        "return -short, room.num_running",
    ),
    Mutation(
        "start a request on another rank than it is pinned to",
        _ADMISSION,
        "return ranks if pinned is None else [ranks[pinned]]",
        "return ranks",
    ),
    Mutation(
        "wait for a better rank without an end",
        _ADMISSION,
        "return best if self._waiting.is_staying(request, step) else cheapest",
        "return best",
    ),
    Mutation(
        "wait for a better rank again and again",
        _ADMISSION,
        "        if stayed is None:\n",
        "        if not self._waiting.is_staying(request, step):\n",
    ),
    Mutation(
        "start where most is to be computed",
        _ADMISSION,
        "best = min(best, rooms[dp_rank]",
        "best = max(best, rooms[dp_rank]",
    ),
    Mutation(
        "wait for no rank without a row or tokens in the step",
        _ADMISSION,
        "        for dp_rank in others:\n",
        "        for dp_rank in others[:0]:\n",
    ),
    Mutation(
        "send all to the rank that has their prefix, however busy",
        _FITS,
        "num_skewed = max(room.num_running - num_unskewed, 0)",
        "num_skewed = 0",
    ),
    Mutation(
        "go around the ranks without going on",
        _ADMISSION,
        "        self._next_rank = dp_rank + 1\n",
        "",
    ),
    Mutation(
        "go around the ranks and leave a prefix in flight that was waited for",
        _ADMISSION,
        "            if stayed not in fitting:\n",
        "            if True:\n",
    ),
    Mutation(
        "start a request without a row",
        _ROOM,
        "            self.rank.has_row,\n",
        "            True,\n",
    ),
    Mutation(
        "count the room of a step once for all that start in it",
        _ROOM,
        "        self._look()\n        self._note_pages()\n        self.in_flight",
        "        self.in_flight",
    ),
    Mutation(
        "take what a rank prefills for no work",
        _ROOM,
        "            builder.num_prefill_tokens,\n",
        "            0,\n",
    ),
    Mutation(
        "take the wait for a full rank for no work",
        _ROOM,
        "            cost += self.chunk_size * self._steps_to_room(num_pages)\n",
        "            pass\n",
    ),
    Mutation(
        "let all that wait for a rank have the first room there",
        _ROOM,
        "last = min(last, len(self._sorted_ends) - 1)",
        "last = 0",
    ),
    Mutation(
        "reserve nothing for running requests",
        _FORECAST,
        "growth *= min(room.conservativeness, 1.0)",
        "growth *= 0.0",
    ),
    Mutation(
        "reserve twice",
        _FORECAST,
        "growth *= min(room.conservativeness, 1.0)",
        "growth *= 2.0",
    ),
    Mutation(
        "reserve nothing for what starts in the same step",
        "sgl_jax/scheduler/admission/rank_capacity.py",
        "            self._forecast.start(self.dp_rank, row)\n",
        "            pass\n",
    ),
    Mutation(
        "leave room for all known tokens but not for the next",
        _RANK,
        "request_pages(min(len(request.tokens) + 1, request.max_kv_len))",
        "request_pages(min(len(request.tokens), request.max_kv_len))",
    ),
    Mutation(
        "take a page for a last token that is never computed",
        _REQUEST,
        "return self.max_len - 1",
        "return self.max_len",
    ),
    Mutation(
        "forecast a page for a last token that is never computed",
        _FORECAST,
        "lens[2, i] = planned_len[row], max_len[row] - 1",
        "lens[2, i] = planned_len[row], max_len[row]",
    ),
    Mutation(
        "take what a turn's session has computed for work",
        _RANK,
        "return max(cursor.length, resumable_len(self.memory, lease, request.resumable_len))",
        "return cursor.length",
    ),
    # -- a prefix in flight is waited for
    Mutation(
        "wait for a prompt that is scored a little at a time",
        _IN_FLIGHT,
        "running.known_tokens(row)[: running.columns.score_start[row]]",
        "running.known_tokens(row)",
    ),
    Mutation(
        "states: wait only for what is still to be published",
        _IN_FLIGHT,
        "num_saved = length - num_read",
        "num_saved = length - node.end",
    ),
    Mutation(
        "wait for what a session's turn publishes only at its end",
        _IN_FLIGHT,
        "        if running.request(row).kept_len:\n",
        "        if False:\n",
    ),
    Mutation(
        "wait for the first page of a prefix in flight alone",
        _IN_FLIGHT,
        "start += common_prefix_len(self._tokens(row)[start:], tokens[start:])",
        "start += self._page_size",
    ),
    Mutation(
        "wait for a page more than is shared",
        _IN_FLIGHT,
        "return Leader(row, length)",
        "return Leader(row, length + self._page_size)",
    ),
    Mutation(
        "wait for however little is shared",
        _IN_FLIGHT,
        "num_saved >= min(num_left, self._step_price)",
        "num_saved > 0",
    ),
    Mutation(
        "wait only for what is much for each that waits",
        _IN_FLIGHT,
        "if num_alike * num_saved",
        "if num_saved",
    ),
    Mutation(
        "count what the step has no room for among those that save by waiting",
        _IN_FLIGHT,
        "cursors.num_awaiting(node, key, num_starts)",
        "cursors.num_awaiting(node, key, 2**31)",
    ),
    Mutation(
        "count more among those that save by waiting than go on alike",
        _IN_FLIGHT,
        "num_alike = memory.cache.cursors.num_awaiting(node, key, num_starts)",
        "num_alike = num_starts",
    ),
    Mutation(
        "start what the step cannot complete rather than wait",
        _IN_FLIGHT,
        ">= min(num_left, self._step_price)",
        ">= self._step_price",
    ),
    Mutation(
        "wait only for the first of those that begin alike",
        _IN_FLIGHT,
        "            self._branches[other, shared, page.tobytes()] = row\n",
        "            pass\n",
    ),
    Mutation(
        "compute a gap as often as there are requests for it",
        _CURSOR,
        "            below, node = node, node.parent\n",
        "            break\n",
    ),
    Mutation(
        "count none of the others that wait for a gap",
        _CURSORS,
        "            standing = [cursor.prefix.resting(self._dp_rank) for cursor in watching]\n",
        "            return 1\n",
    ),
    Mutation(
        "wait for a prefix in flight of lower priority",
        _IN_FLIGHT,
        "if running.columns.priority[row] < request.priority or not",
        "if not",
    ),
    Mutation(
        "of two that go on alike, the first is the leader, however low its priority",
        _IN_FLIGHT,
        "if running.columns.priority[row] > running.columns.priority[first]:",
        "if False:",
    ),
    Mutation(
        "states: keep none where one that waits for a gap branches off",
        _ADMISSION,
        "            room.rank.prompts.keep_branch(*chosen.leader)\n        cursor",
        "        cursor",
    ),
    Mutation(
        "states: wait for one that cannot be kept",
        _IN_FLIGHT,
        "if not memory.can_keep_state:",
        "if False:",
    ),
    Mutation(
        "share nothing with what starts in the same step",
        _ROOM,
        "        self.in_flight.add(self.dp_rank, row)\n",
        "",
    ),
    Mutation(
        "wait for the prefix of a request that is gone",
        _LINES,
        "if epoch[row] != leader[line, 1] or protected_len",
        "if protected_len",
    ),
    Mutation(
        "wait for what runs in the same row of another rank",
        _QUEUE,
        "        row += self._memories[dp_rank].rows.first_row\n",
        "",
    ),
    # -- whether a request fits
    Mutation(
        "fit without growth of its own",
        _FITS,
        "growth = min(room.conservativeness, 1.0) * (need.most - need.pages) / max(need.left, 1)",
        "growth = 0.0",
    ),
    Mutation(
        "grow whatever the conservativeness",
        _FITS,
        "growth = min(room.conservativeness, 1.0) * (need.most - need.pages) / max(need.left, 1)",
        "growth = 1.0 * (need.most - need.pages) / max(need.left, 1)",
    ),
    Mutation(
        "grow beyond the forecast at a high conservativeness",
        _FITS,
        "growth = min(room.conservativeness, 1.0) * (need.most - need.pages) / max(need.left, 1)",
        "growth = room.conservativeness * (need.most - need.pages) / max(need.left, 1)",
    ),
    Mutation(
        "fit as if its output came to no end",
        _FITS,
        "own = chances[after] * (",
        "own = 1.0 * (",
    ),
    Mutation(
        "grow beyond its limit",
        _FITS,
        "(num_pages + growth * min(ahead, need.left))",
        "(num_pages + growth * ahead)",
    ),
    Mutation(
        "stay after its limit",
        _FITS,
        "if j and (is_far or moments[j] >= num_steps + need.left):",
        "if j and is_far:",
    ),
    Mutation(
        "generate while its prompt is computed",
        _FITS,
        "ahead = max((moments[j] + moments[j + 1]) // 2 - num_steps, 0)",
        "ahead = (moments[j] + moments[j + 1]) // 2",
    ),
    Mutation(
        "fit by the forecast alone, though all fit to their limits",
        _FITS,
        "    if worst <= 0:\n        return worst\n    assert 0 <= need.length_class",
        "    assert 0 <= need.length_class",
    ),
    Mutation(
        "take shared pages of a prefix twice up to its limit",
        _FITS,
        "worst: int = int(room.most + need.most - (need.pages - num_pages) - room.total)",
        "worst: int = int(room.most + need.most - room.total)",
    ),
    Mutation(
        "say that more pages are lacking than can ever be",
        _FITS,
        "return min(worst, int(np.ceil(",
        "return max(0, int(np.ceil(",
    ),
    Mutation(
        "look as far as the forecast, though the steps saved have paid for a retract",
        _FITS,
        "horizon = num_pages * steps_per_page",
        "horizon = np.inf",
    ),
    Mutation(
        "look at the present alone",
        _FITS,
        "horizon = num_pages * steps_per_page",
        "horizon = 0.0",
    ),
    Mutation(
        "save a whole step with each token, however many run",
        _FITS,
        "room.step_price / (room.num_running + 1)",
        "room.step_price",
    ),
    Mutation(
        "price a retract whatever the conservativeness",
        _FITS,
        "room.step_price / (room.num_running + 1), room.conservativeness",
        "room.step_price / (room.num_running + 1), 1.0",
    ),
    Mutation(
        "compute again the prompt alone after a retract",
        _FITS,
        "/ (gain - price))",
        "/ gain)",
    ),
    Mutation(
        "hold a rank from the present on",
        _FITS,
        "        if is_held and moments[j + 1] > room.held_steps:\n",
        "        if is_held:\n",
    ),
    Mutation(
        "hold a rank without pages",
        _FITS,
        "            own += room.held_pages\n",
        "            pass\n",
    ),
    Mutation(
        "forecast more than requests may come to hold",
        _FORECAST,
        "        room.pages[j] = min(num_in_use + growth, room.most)\n",
        "        room.pages[j] = num_in_use + growth\n",
    ),
    Mutation(
        "hold a rank for what a due request takes to start alone",
        _FITS,
        "room.held_pages = int(np.ceil(room.total + short))",
        "room.held_pages = num_pages",
    ),
    Mutation(
        "hold a rank for the pages of those that run there, too",
        _FITS,
        "_most_short(room, need, num_pages, num_before, True,",
        "_most_short(room, need, num_pages, num_before, False,",
    ),
    Mutation(
        "let nothing pass that ends before a due request starts",
        _FITS,
        "is_held = need.priority <= room.held_above and num_steps + need.left > room.held_steps",
        "is_held = need.priority <= room.held_above",
    ),
    Mutation(
        "count only the output of what is to end before a due request starts",
        _FITS,
        "is_held = need.priority <= room.held_above and num_steps + need.left > room.held_steps",
        "is_held = need.priority <= room.held_above and need.left > room.held_steps",
    ),
    Mutation(
        "look no further than a retract is worth before a due request",
        _FITS,
        "is_far = moments[j] > horizon and not is_held",
        "is_far = moments[j] > horizon",
    ),
    Mutation(
        "fit up to the limits without the one of a due request",
        _FITS,
        "        worst += int(room.held_most)\n",
        "        pass\n",
    ),
    Mutation(
        "pass a due request up to the limits, though it ends later",
        _FITS,
        "    if is_held:\n        worst",
        "    if is_held and need.priority < room.held_above:\n        worst",
    ),
    Mutation(
        "find room where the forecast has one page less",
        _FITS,
        "if room.pages[j] + num_pages <= room.total:",
        "if room.pages[j] + num_pages <= room.total + 1:",
    ),
    Mutation(
        "find room at once",
        _FITS,
        "            return int(moments[j])\n    return int(moments[len(moments) - 1])",
        "            return int(moments[0])\n    return int(moments[len(moments) - 1])",
    ),
    Mutation(
        "start below the floor that a start has raised",
        _FITS,
        "    return priority > floor\n",
        "    return True\n",
    ),
    Mutation(
        "take a length for one of a longer bucket",
        _LENGTHS,
        "while num_tokens >> num_doublings >= 2 * _PER_DOUBLING:",
        "while num_tokens >> num_doublings >= _PER_DOUBLING:",
    ),
    Mutation(
        "give the longest outputs a bucket behind the last",
        _LENGTHS,
        "return int(min(bucket, num_buckets - 1))",
        "return int(min(bucket, num_buckets))",
    ),
    Mutation(
        "forecast outputs while their prompts are computed",
        _FORECAST,
        "num_steps = max(lens[4, i] - 1, 0) // chunk_size",
        "num_steps = 0",
    ),
    Mutation(
        "keep requests after their limits",
        _FORECAST,
        "        if j and moments[j] >= num_steps + left_len:\n            break\n",
        "",
    ),
    Mutation(
        "forecast the mean alone",
        _FORECAST,
        "mean + _NUM_DEVIATIONS * np.sqrt(variance)",
        "mean",
    ),
    Mutation(
        "forecast that each gives back all pages that it shares",
        _FORECAST,
        "own_part = num_in_use / max(need.held, 1)",
        "own_part = 1.0",
    ),
    Mutation(
        "start beside prompts whose pages are still to be taken",
        _FORECAST,
        "            growth = max(growth, need.known)  # uncomputed prompts are certain\n",
        "            pass\n",
    ),
    Mutation(
        "let all fit up to the limits of those that run not",
        _FORECAST,
        "num_in_use + need.most",
        "num_in_use",
    ),
    Mutation(
        "count what the engine ends as an output that ended",
        _RANK,
        "int(self.columns.known_len[row]), has_ended=is_own)",
        "int(self.columns.known_len[row]), has_ended=True)",
    ),
    Mutation(
        "count what its client ends as cut off",
        _RANK,
        "int(self.columns.known_len[row]), has_ended=is_own)",
        "int(self.columns.known_len[row]), has_ended=False)",
    ),
    Mutation(
        "count an output that came to its limit as one that ended",
        _RANK,
        "has_ended = num_tokens is not None or known_len < max_len",
        "has_ended = True",
    ),
    Mutation(
        "stay for a rank that has no more of the prefix",
        _FITS,
        "is_longer = best != NO_RANK and option.num_read > options[best].num_read",
        "is_longer = best != NO_RANK",
    ),
    Mutation(
        "start on the fullest of equal ranks",
        _FITS,
        "is_better = is_full < best_is_full",
        "is_better = is_full > best_is_full",
    ),
    Mutation(
        "take no notice of the free pages of a rank",
        _FITS,
        "option.is_full = room.pages[room.peak] + num_pages > FULL_PART * room.total",
        "option.is_full = False",
    ),
    Mutation(
        "take what stays for a rank for no pages",
        _ROOM,
        "self.steps_to_room(num_pages + self._staying_pages)",
        "self.steps_to_room(num_pages)",
    ),
    Mutation(
        "wait for a row of a full rank as long as for its pages",
        _ROOM,
        "return max(num_steps, int(self._sorted_ends[last]))",
        "return num_steps",
    ),
    Mutation(
        "take every rank for ample",
        _ROOM,
        "self._most_growth >= self._enough",
        "self._most_growth >= -self._enough * 1000",
    ),
    Mutation(
        "take a rank for ample after starts that are not",
        _ROOM,
        "        self._most_growth += self.rank.memory.request_pages(request.max_kv_len)\n",
        "",
    ),
    Mutation(
        "be due by the count of passes alone",
        _LINES,
        "part = min(service[started] / service[line], 1.0)",
        "part = 0.0",
    ),
    Mutation(
        "be due after one pass without pages",
        _LINES,
        "part = min(service[started] / service[line], 1.0)",
        "part = 1.0",
    ),
    Mutation(
        "be due by service though the pages were there",
        _LINES,
        "if is_large and cached_pages[started] <=",
        "if cached_pages[started] <=",
    ),
    Mutation(
        "take the cached prefix of a request that is passed over for lacking",
        _LINES,
        "1, need.pages - cached_pages[line] > num_free",
        "1, need.pages > num_free",
    ),
    Mutation(
        "fix the end of a hold anew in each step",
        _ADMISSION,
        "room.hold(request, num_pages, max(hold.until_step - step, 0))",
        "room.hold(request, num_pages, max(room.steps_to_room(num_pages), 1))",
    ),
    Mutation(
        "hold one rank for several requests",
        _ADMISSION,
        "        if room.is_held:\n",
        "        if False:\n",
    ),
    Mutation(
        "choose a rank to hold that is held",
        _ADMISSION,
        "[room for room in _allowed(rooms, request) if not room.is_held]",
        "list(_allowed(rooms, request))",
    ),
    Mutation(
        "hold the pages of a due request up to its present length alone",
        _FITS,
        "room.held_above, room.held_steps, room.held_most = need.priority, num_steps, need.most",
        "room.held_above, room.held_steps, room.held_most = need.priority, num_steps, num_pages",
    ),
    Mutation(
        "pressure: leave the pages of those that give way in use",
        _PREEMPTION,
        "            rooms.append(self._room_without(num_freed, self._rows[:end]))\n",
        "            rooms.append(self._room_without(0, self._rows[:end]))\n",
    ),
    Mutation(
        "pressure: count those that give way as running",
        _PREEMPTION,
        '        room["num_running"] = len(kept)\n',
        "",
    ),
    Mutation(
        "pressure: share a page with one that gives way as well",
        _PREEMPTION,
        "        self._num_ended[pages] += 1\n        return int(",
        "        return int(",
    ),
    Mutation(
        "say that the step lacks tokens where a rank is held",
        _ADMISSION,
        "if self._waiting.pages_short(request, held_rooms, dp_rank, num_pages) <= 0:",
        "if self._waiting.pages_short(request, rooms, dp_rank, num_pages) <= 0:",
    ),
    Mutation(
        "say that pages are lacking where a rank is held",
        _ADMISSION,
        "            if short[dp_rank] <= 0:\n                behind = holders[dp_rank]\n",
        "            pass\n",
    ),
    Mutation(
        "count pages as lacking where a rank is held",
        _LINES,
        "kind = _ORDER if fits_unheld[rank, line] or kind == _ORDER else _PAGES",
        "kind = _PAGES",
    ),
    Mutation(
        "count a held rank last for what lacks pages elsewhere",
        _LINES,
        "kind = _ORDER if fits_unheld[rank, line] or kind == _ORDER else _PAGES",
        "kind = _ORDER if fits_unheld[rank, line] else _PAGES",
    ),
    Mutation(
        "state the hold of a step later",
        _ADMISSION,
        "max(hold.until_step - step + 1, 0)",
        "max(hold.until_step - step + 1, 0) + 8",
    ),
    Mutation(
        "name a due request whose rank is held for a more important one",
        _ADMISSION,
        "        self._holds.pop(request.rid, None)\n        self._holds[request.rid] = hold",
        "        self._holds[request.rid] = hold",
    ),
    Mutation(
        "forecast by the chunk size of the engine's start",
        _SCHEDULER,
        "        self._all_ranks.set_chunk_size(self._chunk_tokens)\n",
        "",
    ),
    Mutation(
        "be due by the service of later requests with a longer prefix",
        _LINES,
        "            if is_large and cached_pages[started] <= cached_pages[line]:\n",
        "            if is_large:\n",
    ),
    Mutation(
        "wait for the ends of requests on a rank with rows for all that wait there",
        _ROOM,
        "last = self.num_staying - self.rank.num_rows_left",
        "last = self.num_staying",
    ),
    Mutation(
        "leave out what has paid for a retract before the peak",
        _FITS,
        "        and moments[peak] <= num_pages * steps_per_page\n",
        "",
    ),
    Mutation(
        "leave out long prompts that generate after the peak",
        _FITS,
        "        and num_pages * room.page_size < room.chunk_size\n",
        "",
    ),
    Mutation(
        "leave out what ends before the peak",
        _FITS,
        "        and 0 < moments[peak] < need.left\n",
        "        and 0 < need.left\n",
    ),
    Mutation(
        "leave out what fits up to the limits of all, since it lacks pages at the peak",
        _FITS,
        "        room.most + need.most - num_shared > room.total\n        and 0 <",
        "        0 <",
    ),
    # -- the waiting queue
    Mutation(
        "pass over the older ones too",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "is_before = arrival[line] < arrival[started]",
        "is_before = arrival[line] != arrival[started]",
    ),
    Mutation(
        "pass over without a count",
        _LINES,
        "            num_passes, is_large = 1,",
        "            num_passes, is_large = 0,",
    ),
    Mutation(
        "pass over what may not run there",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "if not may_run[line] or not is_waiting[line] or held_until[line]:\n",
        "if not is_waiting[line] or held_until[line]:\n",
    ),
    Mutation(
        "let all that were passed over start one after the other",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "        elif was_due and not is_before",
        "        elif False and not is_before",
    ),
    Mutation(
        "let a due request make an older one wait anew",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "        elif was_due and not is_before and need.priority",
        "        elif was_due and need.priority",
    ),
    Mutation(
        "a request inherits how often the last one of its line was passed over",
        _COLUMNS,
        "        self.lines.skip_count[line] = 0\n",
        "",
    ),
    Mutation(
        "a request inherits what the last one of its line waited for",
        _QUEUE,
        "        lines.has_leader[line] = False\n        lines.stay_rank",
        "        lines.stay_rank",
    ),
    Mutation(
        "a request inherits the rank that the last one of its line stayed for",
        _QUEUE,
        "        lines.stay_rank[line], lines.stay_until[line] = NO_RANK, 0\n",
        "",
    ),
    Mutation(
        "never try a request that is pinned",
        _QUEUE,
        "            lines.may_run[pinned, line] = True\n",
        "            pass\n",
    ),
    Mutation(
        "wait for a better rank though it has room",
        _LINES,
        "if deferred_rank != _NO_RANK and not rooms[deferred_rank].is_open:",
        "if deferred_rank != _NO_RANK:",
    ),
    Mutation(
        "leave out a request that needs all that is there",
        _FITS,
        "not room.is_open or num_pages > room.total - room.pages[0]",
        "not room.is_open or num_pages >= room.total - room.pages[0]",
    ),
    Mutation(
        "try no request that needs all that is there",
        _FITS,
        "may_start = num_pages <= num_free[k]",
        "may_start = num_pages < num_free[k]",
    ),
    Mutation(
        "pressure: preempt nothing for a request that needs all that is there",
        _FITS,
        "if is_tried[line] and pages[k, line] <= num_free:",
        "if is_tried[line] and pages[k, line] < num_free:",
    ),
    Mutation(
        "leave out a request that needs all that is there at the peak",
        _FITS,
        "growth * ahead) > room.total - room.pages[peak]",
        "growth * ahead) >= room.total - room.pages[peak]",
    ),
    Mutation(
        "count nothing of a prefix as in use",
        _FITS,
        "num_pages = need.pages - min(in_use[k, line], num_cached)",
        "num_pages = need.pages",
    ),
    Mutation(
        "count all that is cached as in use",
        _FITS,
        "if num_cached == 0 or _fits(room, need, need.pages, chances, moments):",
        "if num_cached >= 0:",
    ),
    Mutation(
        "count the pages in use on another rank",
        _ADMISSION_ORDER,
        "counted[place] = memory.in_use_len(",
        "counted[place] = self._memories[0].in_use_len(",
    ),
    Mutation(
        "read the pages in use on another rank",
        _FITS,
        "min(in_use[k, line], num_cached)",
        "min(in_use[0, line], num_cached)",
    ),
    Mutation(
        "read the pages in use of another prefix",
        "sgl_jax/scheduler/waiting/admission_order.py",
        "in_use[found, lines] = self._count_in_use(",
        "in_use[found, lines[::-1]] = self._count_in_use(",
    ),
    Mutation(
        "read how many pages are in use on a rank that has not counted them",
        _FITS,
        "            if in_use[k, line] < 0:\n",
        "            if in_use[k, line] < -1:\n",
    ),
    Mutation(
        "forget where a cursor went",
        _LINES,
        "        places[i] = place[number]\n",
        "        places[i] = place[prefix[lines[i]]]\n",
    ),
    Mutation(
        "look no further than the first requests",
        _ADMISSION_ORDER,
        "order, rest = _sorted_part(rest, keys, most)",
        "order, rest = _sorted_part(rest, keys, most)[0], rest[:0]",
    ),
    Mutation(
        "try the first requests twice",
        _ADMISSION_ORDER,
        "lines, rest, own = lines[is_first], lines[~is_first], own[is_first]",
        "lines, rest, own = lines[is_first], lines, own[is_first]",
    ),
    Mutation(
        "leave out requests behind the first ones",
        _ADMISSION_ORDER,
        'return lines[own.argsort(kind="stable")], rest',
        'return lines[own.argsort(kind="stable")][:most], rest',
    ),
    Mutation(
        "try the first requests by their lines",
        _ADMISSION_ORDER,
        'return lines[own.argsort(kind="stable")], rest',
        "return lines, rest",
    ),
    Mutation(
        "learn of no prefix that is cached later",
        _LINES,
        "        cached_pages[line] = usable_pages[number]\n",
        "",
    ),
    Mutation(
        "take what one rank has cached for what all have",
        _QUEUE,
        "cached = lines.cached_pages[dp_rank, :end]\n                read",
        "cached = lines.cached_pages[0, :end]\n                read",
    ),
    Mutation(
        "try the least important first",
        _ADMISSION_ORDER,
        'levels.highest - lines.needs["priority"][:end], levels.number',
        'lines.needs["priority"][:end] - levels.highest + levels.number - 1, levels.number',
    ),
    Mutation(
        "take far priorities for the same",
        _ADMISSION_ORDER,
        "if num_levels > MOST_LEVELS:",
        "if False:",
    ),
    Mutation(
        "try the retracted before the more important",
        _LINES,
        "(key + (not lines.is_retracted[line])) <<",
        "(key + ((not lines.is_retracted[line]) << 16)) <<",
    ),
    Mutation(
        "try the retracted as if they were new",
        _LINES,
        "(key + (not lines.is_retracted[line]))",
        "(key + 1)",
    ),
    Mutation(
        "try what is due in its turn",
        _LINES,
        "key = (key + (not is_starved[line])) << 1",
        "key = (key + 1) << 1",
    ),
    # -- how much of a waiting prompt is cached
    Mutation(
        "keep the cursors of a request that waits no more",
        _QUEUE,
        "        self.prompts.unfollow(self._prefixes.pop(line))\n",
        "        self._prefixes.pop(line)\n",
    ),
    Mutation(
        "leave the cursors of an edge that is split at its end",
        _TREE,
        "        self.cursors.node_split(upper, lower)\n",
        "",
    ),
    Mutation(
        "leave a cursor below a split that is made where it ends",
        _CURSORS,
        "if cursor.reached <= upper.end:",
        "if cursor.reached < upper.end:",
    ),
    Mutation(
        "leave the cursors of an edge that is merged",
        _TREE,
        "        self.cursors.nodes_merged(upper, lower)\n",
        "",
    ),
    Mutation(
        "leave the cursors of a leaf that is evicted",
        _TREE,
        "        self.cursors.leaf_trimmed(leaf, parent)\n",
        "",
    ),
    Mutation(
        "leave the cursors of a leaf that is shortened",
        _TREE,
        "            self.cursors.leaf_trimmed(leaf, leaf)\n",
        "",
    ),
    Mutation(
        "shorten a cursor without a report",
        _CURSORS,
        "        if cursors:\n            self._has_moved = True\n",
        "",
    ),
    Mutation(
        "leave a shared prefix live though the walk does not get past its parent",
        _CURSORS,
        "            if cursor.prefix.start < end.end:\n",
        "            if cursor.prefix.start <= end.end:\n",
    ),
    Mutation(
        "shorten those alone that stand at the end of a leaf",
        _STOPS,
        "        return list(self._cursors.get(node.node_id, {}).values())\n",
        "        return list(self._cursors.get(node.node_id, {}).values())[:1]\n",
    ),
    Mutation(
        "leave a cursor though a new child continues it",
        _TREE,
        "        self.cursors.child_added(parent, child)\n",
        "",
    ),
    Mutation(
        "extend a cursor without a report",
        _CURSORS,
        "            self._has_moved = True\n            self._go_along(",
        "            self._go_along(",
    ),
    Mutation(
        "extend a shared prefix, but not those that continue it",
        _CURSORS,
        "            if start < prefix.end or not len(edge):\n                return\n",
        "            return\n",
    ),
    Mutation(
        "give the place of a node where cursors are away",
        _STOPS,
        "        if not self._cursors[node_id]:\n",
        "        if node_id not in self._at_end:\n",
    ),
    Mutation(
        "extend a cursor by a part of a page",
        _CURSORS,
        "return common_prefix_len(a, b) // self._page_size * self._page_size",
        "return common_prefix_len(a, b)",
    ),
    Mutation(
        "a shared prefix that parts below its walk's end is not live",
        _CURSORS,
        "        self._file(upper, node, upper.end)\n        self._measure_all()\n",
        "        self._measure_all()\n",
    ),
    Mutation(
        "a shared prefix that parts behind its walk's end stays live",
        _CURSORS,
        "        if lower.reached <= upper.end:\n",
        "        if lower.reached < upper.end:\n",
    ),
    Mutation(
        "keep a shared prefix where prompts part no more",
        _PROMPT_TREE,
        "not prefix.num_prompts and len(prefix.children) < 2:\n            rest",
        "not prefix.num_prompts and not prefix.children:\n            rest",
    ),
    Mutation(
        "what continues a shared prefix that is gone forgets where it stood",
        _PROMPT_TREE,
        "                self._ranks[dp_rank].move_to(rest, cursor)\n",
        "                pass\n",
    ),
    Mutation(
        "a line reads its own cursor though that is not live",
        _LINES,
        "            number = np.uint32(above[number])\n        cached_pages[line]",
        "            break\n        cached_pages[line]",
    ),
    Mutation(
        "a line reads the moves of one rank alone",
        _QUEUE,
        "            if has_moved:\n                above,",
        "            if has_moved and not dp_rank:\n                above,",
    ),
    Mutation(
        "a cursor ends before the last page of its tokens",
        _PROMPT_TREE,
        "        tokens = tokens[: len(tokens) // self._page_size * self._page_size]\n",
        "        tokens = tokens[: (len(tokens) - 1) // self._page_size * self._page_size]\n",
    ),
    Mutation(
        "look for all that a cursor follows from the root",
        _CURSORS,
        "if known is not None and node.end < known.end <= prefix.end:",
        "if False:",
    ),
    Mutation(
        "a rank hears nothing of prompts that continue what it has",
        _PROMPT_TREE,
        "if cursor.reached == end and",
        "if not dp_rank and cursor.reached == end and",
    ),
    Mutation(
        "a prompt is not looked for below a node that ends before it",
        _PROMPT_TREE,
        "(cursor.at.end > end or key in cursor.at.children)",
        "cursor.at.end > end",
    ),
    Mutation(
        "what continues a divided prefix passes over its first part",
        _PROMPT_TREE,
        "        above[above != LIVE] = upper.number\n",
        "",
    ),
    Mutation(
        "what continues a prefix that is gone reads its column",
        _PROMPT_TREE,
        "        above[above != LIVE] = parent.number\n",
        "",
    ),
    Mutation(
        "divide a shared prefix on one rank alone",
        _PROMPT_TREE,
        "            self._ranks[dp_rank].divide(upper, cursor)\n",
        "            self._ranks[dp_rank].divide(upper, cursor)\n            break\n",
    ),
    # -- sliding windows
    Mutation(
        "windows: read a page less than the window has",
        _WINDOW,
        "return -(-(sliding_window - 1) // page_size)",
        "return (sliding_window - 1) // page_size",
    ),
    Mutation(
        "windows: count the query's own token twice",
        _WINDOW,
        "return -(-(sliding_window - 1) // page_size)",
        "return -(-sliding_window // page_size)",
    ),
    Mutation(
        "windows: lock more than a lease reads",
        _WINDOW,
        "        first = max(end - self.num_pages, 0)\n",
        "        first = max(end - self.num_pages - 1, 0)\n",
    ),
    Mutation(
        "windows: lock again what a lease has let go of",
        _WINDOW,
        "max(first, int(first_pages[self.group]))",
        "first",
    ),
    Mutation(
        "windows: keep the window that a lease has locked before",
        _COMPONENT,
        "        self.lock(new, first_pages)\n        self.unlock(old, first_pages)\n",
        "        self.lock(new, first_pages)\n",
    ),
    Mutation(
        "windows: split an edge without the locks of its window",
        _WINDOW,
        "pages[:cut].copy(), locks[:cut].copy()",
        "pages[:cut].copy(), 0 * locks[:cut]",
    ),
    Mutation(
        "windows: join the windows of merged edges in the wrong order",
        _WINDOW,
        "[above[self.index], below[self.index]]",
        "[below[self.index], above[self.index]]",
    ),
    Mutation(
        "windows: take over a page that the tree has already",
        _WINDOW,
        "is_new = (pages == 0) & (offered != 0)",
        "is_new = offered != 0",
    ),
    Mutation(
        "windows: never heal a tombstone",
        _WINDOW,
        "        taken = offered[is_new]\n",
        "        is_new &= not np.count_nonzero(pages)\n        taken = offered[is_new]\n",
    ),
    Mutation(
        "windows: count what is healed under a lock as evictable",
        _WINDOW,
        "            self._count_locked(int(np.count_nonzero(locks[is_new])))\n",
        "",
    ),
    Mutation(
        "windows: free what an offer brought and nothing can read",
        _WINDOW,
        "            is_dropped = np.isin(taken, dropped)\n",
        "            is_dropped = np.zeros(len(taken), np.bool_)\n",
    ),
    Mutation(
        "windows: evict a locked window",
        _WINDOW,
        "(node.values[self.index] != 0) & (node.locks[self.index] == 0)\n        return may_go",
        "(node.values[self.index] != 0)\n        return may_go",
    ),
    Mutation(
        "windows: let go of a window without counting",
        _WINDOW,
        "        self.num_evictable -= len(gone)\n        pages[is_gone] = 0\n",
        "        pages[is_gone] = 0\n",
    ),
    Mutation(
        "windows: free no window with its tokens",
        _WINDOW,
        "        gone = gone[gone != 0]\n        self._dropped.append(gone)\n",
        "        gone = gone[gone != 0]\n",
    ),
    Mutation(
        "windows: take more of a window than is wanted",
        _WINDOW,
        "        is_chosen[np.flatnonzero(is_chosen)[num_pages:]] = False\n",
        "",
    ),
    Mutation(
        "windows: list no leaf that a lease keeps",
        _ORDER,
        "present[-1] &= bool(node.children) or node.locks[0] > 0",
        "present[-1] &= bool(node.children)",
    ),
    Mutation(
        "windows: keep the end of a window less long than its inside",
        _ORDER,
        "WEIGHTS = (0.1, 0.3, 4.0)",
        "WEIGHTS = (4.0, 0.3, 0.1)",
    ),
    Mutation(
        "windows: resume where one of two windows is there",
        _RESUMABLE,
        "is_usable &= run >= window.num_pages",
        "is_usable = run >= window.num_pages",
    ),
    Mutation(
        "windows: see no window across the end of an edge",
        _RESUMABLE,
        "run = positions - last_gap + run_above * (last_gap == 0)",
        "run = positions - last_gap",
    ),
    Mutation(
        "windows: see a window across a gap",
        _RESUMABLE,
        "run = positions - last_gap + run_above * (last_gap == 0)",
        "run = positions - last_gap + run_above",
    ),
    Mutation(
        "windows: leave what is below a tombstone as it was",
        _RESUMABLE,
        "                stack += step.children.values()\n\n    def _positions",
        "                pass\n\n    def _positions",
    ),
    Mutation(
        "windows: keep dead pages of windows above a change",
        _RESUMABLE,
        "            for each in self._with_those_above(node):\n",
        "            for each in [node]:\n",
    ),
    Mutation(
        "windows: keep tokens that lead nowhere",
        _RESUMABLE,
        "                trim(node, self._last_usable(node))\n",
        "                pass\n",
    ),
    Mutation(
        "windows: take as dead what only a branch reads",
        _RESUMABLE,
        "            is_dead &= (following <= count) | (below - pages > window.num_pages)\n",
        "",
    ),
    Mutation(
        "windows: look for dead pages no more after a merge",
        _RESUMABLE,
        "            if nodes.pop(upper.node_id, None) is not None:\n",
        "            if nodes.pop(upper.node_id, None) is lower:\n",
    ),
    Mutation(
        "windows: release a lock and keep what it held, though dead",
        _RESUMABLE,
        "        if node.end and not self.can_resume(node):\n",
        "        if False:\n",
    ),
    Mutation(
        "windows: answer pages of a window that are not read",
        _CACHE,
        "            pages[window.group, : max(num_unread, 0)] = 0\n",
        "",
    ),
    Mutation(
        "windows: evict from one pool for another",
        _CACHE,
        "sum(each.num_evictable for each in components if each.pool == pool)",
        "sum(each.num_evictable for each in components)",
    ),
    Mutation(
        "windows: a cursor hears nothing of tombstones",
        _CURSORS,
        "        for node in nodes:\n            self._measure_watchers(node)\n",
        "",
    ),
    Mutation(
        "windows: a cursor is as long as its walk",
        _CURSORS,
        "length, cursor.watched = self._usable_len(cursor.at, cursor.reached)",
        "length, cursor.watched = cursor.reached, []",
    ),
    Mutation(
        "windows: a cursor is measured anew without a report",
        _CURSORS,
        "        if self._measure_all():\n            self._has_moved = True\n",
        "        self._measure_all()\n",
    ),
    Mutation(
        "windows: a cursor that is not needed is watched for",
        _CURSORS,
        "        self._stops.take_out(cursor)\n        self._unwatch(cursor)\n",
        "        self._stops.take_out(cursor)\n",
    ),
    Mutation(
        "windows: pass a token that the next query sees",
        _RELEASE,
        "firsts = np.maximum(ends + (1 - window), 0) // page_size",
        "firsts = np.maximum(ends + (2 - window), 0) // page_size",
    ),
    Mutation(
        "windows: keep the pages that a row has passed",
        _RELEASE,
        "    memory.allocators[pool].free(own[own > 0], row)\n",
        "",
    ),
    Mutation(
        "windows: keep the lock of what a row has passed",
        _RELEASE,
        "        memory.cache.unlock_passed(lease.node, group, passed, end)\n",
        "",
    ),
    Mutation(
        "windows: count what a row has passed as locked",
        _RELEASE,
        "        memory.locked[pool].unlock(read[read > 0])\n",
        "",
    ),
    Mutation(
        "windows: count what a published prefix leaves behind as locked",
        _RELEASE,
        "        memory.locked[group.pool].unlock(passed[passed > 0])\n",
        "",
    ),
    Mutation(
        "windows: list again what the tree has of a window that has passed",
        _RELEASE,
        "            kept.pages[number, : max(passed - first, 0)] = 0\n",
        "            kept.pages[number, :0] = 0\n",
    ),
    Mutation(
        "windows: go back behind what a window has passed",
        _REQUEST,
        " or not can_go_back(memory, lease, length):\n",
        ":\n",
    ),
    Mutation(
        "windows: leave no page for a step that begins within one",
        _SIZES,
        "self.pages_for(num_ahead - 1) + 1\n",
        "self.pages_for(num_ahead - 1)\n",
    ),
    Mutation(
        "windows: take a page for the first group alone",
        _GROWTH,
        "        for number, group in enumerate(memories[0].groups):\n            if group",
        "        for number, group in enumerate(memories[0].groups[:1]):\n            if group",
    ),
    Mutation(
        "windows: tell the executor of one group's pages as another's",
        _ROWS,
        "(rows * self.num_groups + group) * self.pages_per_row + columns",
        "(rows * self.num_groups) * self.pages_per_row + columns",
    ),
    # -- states of recurrent layers
    Mutation(
        "states: list the root as a leaf that may go when its tree is empty",
        _FULL,
        "node.locks[self.index] == 0 and node.parent is not None",
        "node.locks[self.index] == 0",
    ),
    Mutation(
        "states: a match that found nothing holds the root",
        _CACHE,
        "        if length == 0:\n            return PrefixMatch(",
        "        if length == 0:\n            if not tree.walk(tokens, namespace, start)[1]:\n"
        "                self._lock(tree.root)\n"
        "            return PrefixMatch(",
    ),
    Mutation(
        "states: a match that is cut until it reaches the root holds the root",
        _CACHE,
        "        if length == 0:\n            return PrefixMatch(",
        "        if length == 0:\n            if tree.walk(tokens, namespace, start)[1]:\n"
        "                self._lock(tree.root)\n            return PrefixMatch(",
    ),
    Mutation(
        "states: lose the snapshots that a prompt crossed before it was given up",
        _RELEASE,
        "    _free(memory, lease.pages(memory.page_size, lease.cache_protected_len), lease.row)\n"
        "    if lease.node is not None:\n        # The pages",
        "    own = lease.pages(memory.page_size, lease.cache_protected_len)\n"
        "    if memory.state_group is not None:\n        own[memory.state_group] = 0\n"
        "    _free(memory, own, lease.row)\n"
        "    if lease.node is not None:\n        # The pages",
    ),
    Mutation(
        "states: offer no snapshot of a prompt that is given up",
        _RELEASE,
        "    if insert:\n        added = _hand_to_tree(memory, lease, tokens)\n",
        "    if insert:\n        drop_snapshots_past(memory, lease, lease.cache_protected_len)\n"
        "        added = _hand_to_tree(memory, lease, tokens)\n",
    ),
    Mutation(
        "states: start a cached prefix from nothing",
        _STATES,
        "    if length == 0:\n        return NULL_SLOT\n",
        "    if length == lease.cache_protected_len:\n        return NULL_SLOT\n",
    ),
    Mutation(
        "states: go on from the first state of a half, whatever was accepted",
        _STATES,
        "own_slot(lease.row, half, length - first)",
        "own_slot(lease.row, half)",
    ),
    Mutation(
        "states: read the snapshot of the page behind",
        _STATES,
        "        slot = int(_listed(memory, lease.row)[length // memory.page_size - 1])\n",
        "        slot = int(_listed(memory, lease.row)[length // memory.page_size])\n",
    ),
    Mutation(
        "states: resume where there is no state",
        _STATES,
        "        most = _deepest_state(memory, lease.row, most)\n",
        "",
    ),
    Mutation(
        "states: begin again only where there is a state",
        _STATES,
        "            most = 0\n",
        "            pass\n",
    ),
    Mutation(
        "states: keep a state that is published already",
        _STATES,
        "is_own = lease.cache_protected_len < length <=",
        "is_own = length <=",
    ),
    Mutation(
        "states: take a second slot for the same state",
        _STATES,
        "    if listed:\n        return listed\n    pool",
        "    pool",
    ),
    Mutation(
        "states: evict nothing for a snapshot",
        _STATES,
        "num_free == 0 and memory.cache.evict(1, pool) == 0:",
        "num_free == 0:",
    ),
    Mutation(
        "states: list a snapshot one page late",
        _STATES,
        "*_cells(row, np.array([column])), slots)",
        "*_cells(row, np.array([column + 1])), slots)",
    ),
    Mutation(
        "states: let go of snapshots for one that is not certain",
        _STATES,
        "listed[first : certain_len // page_size].nonzero()",
        "listed[first:].nonzero()",
    ),
    Mutation(
        "states: let go of the last snapshot, too",
        _STATES,
        "    is_kept[-1:] = True\n",
        "    is_kept[-1:] |= not np.count_nonzero(is_kept)\n",
    ),
    Mutation(
        "states: let go of what was to be published",
        _STATES,
        "    is_kept = (own + 1) * page_size % memory.sizes.snapshot_interval == 0\n",
        "    is_kept = np.zeros(len(own), np.bool_)\n",
    ),
    Mutation(
        "states: let go of snapshots and keep the tree's locked",
        _STATES,
        "        memory.cache.unlock_passed(lease.node, group, first, protected)\n",
        "        pass\n",
    ),
    Mutation(
        "states: count the tree's snapshot as locked when it is not",
        _STATES,
        "    memory.locked[_pool(memory)].unlock(read[read > 0])\n",
        "",
    ),
    Mutation(
        "states: keep snapshots past the tokens of a session",
        _STATES,
        "    _free(memory, lease.row, columns)\n    return len(columns)",
        "    return 0",
    ),
    Mutation(
        "states: find no state before those that were let go of",
        _STATES,
        "    firsts[lease.row] = min(firsts[lease.row], first)\n",
        "",
    ),
    Mutation(
        "states: keep the states past what a turn knows",
        _RELEASE,
        "    forget_states_past(memory, lease, length)\n",
        "",
    ),
    Mutation(
        "states: forget to what length a row went back",
        _STATES,
        "    rows.resumed_len[row] = length\n",
        "",
    ),
    Mutation(
        "states: take the half that was abandoned for the latest",
        _STATES,
        "        rows.state_half[row] = holding[0]\n",
        "        pass\n",
    ),
    Mutation(
        "states: see no snapshot where a row could go back to",
        _STATES,
        "    if len(columns):\n        lengths.append",
        "    if not lengths and len(columns):\n        lengths.append",
    ),
    Mutation(
        "states: free a snapshot and list it on",
        _STATES,
        "    memory.rows.list_page_each(_group(memory), *_cells(row, columns), np",
        "    (_group(memory), *_cells(row, columns), np",
    ),
    Mutation(
        "states: lock what another row brings to the end of a chunk",
        _RELEASE,
        "            memory.cache.unlock_passed(lease.node, number, seen, end)\n"
        "            seen = end\n",
        "            pass\n",
    ),
    Mutation(
        "states: let go of snapshots as of windows",
        _RELEASE,
        "        if window is None or is_recurrent:\n",
        "        if window is None:\n",
    ),
    Mutation(
        "states: cut a lease where there is no state",
        _RELEASE,
        "and resumable_len(memory, lease, length) < length:",
        "and resumable_len(memory, lease, length) < 0:",
    ),
    Mutation(
        "states: a session that goes back holds its snapshots still",
        _RELEASE,
        "        num_freed[memory.state_pool] += num_snapshots\n",
        "        pass\n",
    ),
    Mutation(
        "states: take a slot for each page of a row",
        _GROWTH,
        "            if group.is_recurrent:\n                continue",
        "            if False:\n                continue",
    ),
    Mutation(
        "states: give a row back with its states",
        _ROWS,
        "        self.states[:, row] = _NO_STATES\n",
        "",
    ),
    Mutation(
        "states: make room for states as for pages",
        _MEMORY,
        "            sum(not sizes.groups[number].is_recurrent for number in numbers)\n",
        "            len(numbers)\n",
    ),
    Mutation(
        "states: read drafts of a step whose end is not known",
        _STATES,
        "        drafts = np.zeros_like(drafts)\n",
        "        pass\n",
    ),
    Mutation(
        "states: take a stop amid drafts for where the step in flight began",
        _KEPT,
        "    lens = ranks.running.known_len[gained] + overshoot.astype(np.int32)\n",
        "    lens = ranks.running.known_len[gained]\n",
    ),
    Mutation(
        "states: count on states after drafts that a step had not",
        _STATES,
        "    drafts = rows.state_drafts[:, row]\n",
        "    drafts = np.full(2, memory.sizes.max_draft_tokens)\n",
    ),
    Mutation(
        "states: read refused drafts rather than what the next step wrote",
        _STATES,
        "    for half in (latest, 1 - latest):\n",
        "    for half in (1 - latest, latest):\n",
    ),
    Mutation(
        "states: go back and keep the states of the tokens behind",
        _STATES,
        "    forget_states_past(memory, lease, length)\n    if memory",
        "    if memory",
    ),
    Mutation(
        "states: go back once more and trust a half that was cut before",
        _STATES,
        "        of_row[is_cut] = NO_STATE\n",
        "",
    ),
    Mutation(
        "states: count the tree's snapshots as those of rows",
        _LEDGER,
        "range(protected_len[row] // page_size, pages.shape[1])",
        "range(pages.shape[1])",
    ),
    Mutation(
        "states: keep what a conversation went past as long as a branch",
        _ORDER,
        "if places[-1] == count - 1 and branches != 1:",
        "if places[-1] == count - 1:",
    ),
    Mutation(
        "states: offer the inner snapshot with the widest gap",
        _ORDER,
        "np.argmin(saved[listed])",
        "np.argmax(saved[listed])",
    ),
    Mutation(
        "states: offer an inner snapshot that is locked",
        _ORDER,
        "listed = may_go[places[:num_inner]].nonzero()[0]",
        "listed = np.arange(num_inner)",
    ),
    Mutation(
        "states: keep a snapshot of a long path as long as one of a short path",
        _ORDER,
        "((first + count) * to_end)",
        "(count * to_end)",
    ),
    Mutation(
        "states: begin as if prompts branched as often as they continue",
        _ORDER,
        "_INSIDE, _AT_END = 0.001, 1.0",
        "_INSIDE, _AT_END = 1.0, 1.0",
    ),
    Mutation(
        "states: learn nothing from prompts that branch",
        _ORDER,
        "self._num_inside += _INSIDE_COUNT",
        "self._num_inside += 0.0",
    ),
    Mutation(
        "states: count the end of an edge that was cut as the end of a prompt",
        _RESUMABLE,
        "usable == node.end and not node.children and not node.was_cut",
        "usable == node.end and not node.children",
    ),
    Mutation(
        "states: do not copy a prefix whose snapshot is evicted",
        "sgl_jax/mem_cache/tree/radix_cache.py",
        "                    if length:\n",
        "                    if False:\n",
    ),
    Mutation(
        "windows: copy the whole path instead of the prefix that loses its window",
        _RESUMABLE,
        "        if not window.is_recurrent:\n",
        "        if False:\n",
    ),
    Mutation(
        "host: take a copy in flight without the last snapshot for the whole prefix",
        _TIER,
        "            and common_prefix_len(copy.tokens, tokens) == len(tokens)\n",
        "",
    ),
    Mutation(
        "states: say that snapshots are pages",
        _MEMORY,
        'kind="states" if has_states else "pages"',
        'kind="pages"',
    ),
    Mutation(
        "states: find states of free rows nowhere",
        _WALK,
        "        if (rows.state_lens[:, row] != NO_STATE).any():\n",
        "        if False:\n",
    ),
    # -- priorities, preemption and tenants
    Mutation(
        "pressure: preempt at the threshold",
        _PREEMPTION,
        "int(np.searchsorted(self._priorities, below))",
        'int(np.searchsorted(self._priorities, below, "right"))',
    ),
    Mutation(
        "pressure: preempt for any difference of priority",
        "sgl_jax/scheduler/admission/admission.py",
        "priority_scheduling_preemption_threshold\n        preemptible",
        "priority_scheduling_preemption_threshold * 0\n        preemptible",
    ),
    Mutation(
        "pressure: preempt though the request then does not fit",
        "sgl_jax/scheduler/preemption.py",
        "        else:\n            return None\n",
        "        if not chosen:\n            return None\n",
    ),
    Mutation(
        "pressure: count what others read among the pages that a victim leaves",
        "sgl_jax/scheduler/preemption.py",
        "np.maximum(memory.locked[0].num_running_locks(pages), 1)",
        "np.ones(len(pages), np.int32)",
    ),
    Mutation(
        "pressure: count the prefix of a request among the pages that it gains",
        "sgl_jax/scheduler/preemption.py",
        "FreedPages(memory, memory.prefix_pages(cursor)), 0",
        "FreedPages(memory), 0",
    ),
    Mutation(
        "pressure: keep a victim that has become superfluous",
        "sgl_jax/scheduler/preemption.py",
        "        for row in chosen[-2::-1]:\n",
        "        for row in []:\n",
    ),
    Mutation(
        "pressure: spare a victim without which it does not fit",
        _PREEMPTION,
        "if fits(self._room_without(num_freed - num_less, rest), num_needed):",
        "if True:",
    ),
    Mutation(
        "pressure: reserve for victims as well",
        "sgl_jax/scheduler/preemption.py",
        "kept = running.active[~np.isin(running.active, gone)]",
        "kept = running.active",
    ),
    Mutation(
        "pressure: preempt the least to compute again before the lowest priority",
        "sgl_jax/scheduler/preemption.py",
        'self._rows: RowIndex = rows[np.argsort(running.columns.priority[rows], kind="stable")]',
        "self._rows: RowIndex = rows",
    ),
    Mutation(
        "pressure: preempt the most to compute again",
        "sgl_jax/scheduler/preemption.py",
        "rows = rows[by_cost(rank.memory, running, rows)]",
        "rows = rows[by_cost(rank.memory, running, rows)][::-1]",
    ),
    Mutation(
        "pressure: preempt where a request may not run",
        "sgl_jax/scheduler/admission/admission.py",
        "for room in _allowed(rooms, request):\n            found = room.preemption",
        "for room in rooms:\n            found = room.preemption",
    ),
    Mutation(
        "pressure: preempt for a request that waits for a prefix in flight",
        "sgl_jax/scheduler/admission/admission.py",
        "rank.prompts.keep_branch(*leader)\n                return False\n",
        "rank.prompts.keep_branch(*leader)\n",
    ),
    Mutation(
        "pressure: preempt where the most is to be computed",
        "sgl_jax/scheduler/admission/admission.py",
        "cost < best[0]",
        "cost > best[0]",
    ),
    Mutation(
        "pressure: start in the place of what goes on running",
        _ADMISSION,
        "        room.preempt(found.rows)\n        self._start(room, request)\n",
        "        self._start(room, request)\n",
    ),
    Mutation(
        "pressure: replace a request in the step of its start",
        "sgl_jax/scheduler/preemption.py",
        "        rows = rows[~np.isin(rows, started)]\n",
        "",
    ),
    Mutation(
        "pressure: hold a rank on for a request that has started elsewhere",
        "sgl_jax/scheduler/admission/admission.py",
        '            rooms.records["held_above"] = NO_FLOOR\n',
        "",
    ),
    Mutation(
        "pressure: try no preemption on a rank without a row",
        _FITS,
        "if preempts.size and preempts[k, line]:",
        "if preempts.size and preempts[k, line] and room.is_open:",
    ),
    Mutation(
        "pressure: try no preemption",
        _FITS,
        "if preempts.size and preempts[k, line]:",
        "if preempts.size and False:",
    ),
    Mutation(
        "pressure: preempt again what gave way in the same step",
        _ROOM,
        "        self._preemptible = self._sorted_ends = None\n        end",
        "        self._sorted_ends = None\n        end",
    ),
    Mutation(
        "pressure: start nothing in what a preemption leaves over",
        "sgl_jax/scheduler/admission/admission.py",
        "options, request, threshold)\n            ):\n                return True\n",
        "options, request, threshold)\n            ):\n                return False\n",
    ),
    Mutation(
        "pressure: preempt where the step has no tokens for it",
        "sgl_jax/scheduler/admission/rank_capacity.py",
        "if not has_tokens or not",
        "if not",
    ),
    Mutation(
        "pressure: preempt where the step has just retracted",
        "sgl_jax/scheduler/admission/rank_capacity.py",
        " or not self._builder.can_admit:\n            return None",
        ":\n            return None",
    ),
    Mutation(
        "pressure: decode what was preempted",
        "sgl_jax/scheduler/step_builder.py",
        "        self.decode_rows = self.decode_rows[self.decode_rows != row]\n",
        "        pass\n",
    ),
    Mutation(
        "pressure: prefill what was preempted",
        "sgl_jax/scheduler/step_builder.py",
        "            self._prefilling.remove(row)\n",
        "            pass\n",
    ),
    Mutation(
        "pressure: compute chunks by age alone",
        "sgl_jax/scheduler/step_builder.py",
        "self._prefilling.sort(key=lambda row: -needs[row][2])",
        "self._prefilling.sort(key=lambda row: 0)",
    ),
    Mutation(
        "pressure: take no notice of chunks of a lower priority",
        "sgl_jax/scheduler/step_builder.py",
        "for level, left in self._levels if level < priority)",
        "for level, left in self._levels if level <= priority)",
    ),
    Mutation(
        "pressure: hold a rank against every priority",
        _FITS,
        "room.held_above, room.held_steps, room.held_most = need.priority, num_steps, need.most",
        "room.held_above, room.held_steps, room.held_most = 2**62, num_steps, need.most",
    ),
    Mutation(
        "pressure: hold a rank against lower priorities alone",
        _FITS,
        "room.held_above, room.held_steps, room.held_most = need.priority,",
        "room.held_above, room.held_steps, room.held_most = need.priority - 1,",
    ),
    Mutation(
        "pressure: hold a rank that is held",
        _FITS,
        "if is_starved and room.held_above == NO_FLOOR:",
        "if is_starved:",
    ),
    Mutation(
        "pressure: hold no rank for what is due",
        _FITS,
        "        if may_hold:\n",
        "        if may_hold and False:\n",
    ),
    Mutation(
        "pressure: hold a rank for what may start",
        _FITS,
        "        if uncounted >= 0:\n",
        "        if uncounted >= 0 and not may_hold:\n",
    ),
    Mutation(
        "pressure: fit a rank at its floor",
        _FITS,
        "num_pages > room.total - room.pages[0] or need.priority <= room.floor:",
        "num_pages > room.total - room.pages[0] or need.priority < room.floor:",
    ),
    Mutation(
        "pressure: be passed over by what is more important",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "if is_before and need.priority >= started_priority:",
        "if is_before:",
    ),
    Mutation(
        "pressure: age in the wrong direction",
        _LIVE_REQUESTS,
        "self.args.importance(message.priority) - self._age()",
        "self.args.importance(message.priority) + self._age()",
    ),
    Mutation(
        "pressure: serve every tenant by the same weight",
        "sgl_jax/scheduler/tenants.py",
        "self._served += OUTPUT_WEIGHT * gained / self._weight",
        "self._served += OUTPUT_WEIGHT * gained",
    ),
    Mutation(
        "pressure: save up shares of a tenant that is away",
        "sgl_jax/scheduler/tenants.py",
        "self._served[number] = max(self._served[number], self._lowest())",
        "pass",
    ),
    Mutation(
        "pressure: count cached tokens of a tenant as computed",
        "sgl_jax/scheduler/tenants.py",
        "cost = PROMPT_WEIGHT * (num_tokens - num_cached)",
        "cost = PROMPT_WEIGHT * num_tokens",
    ),
    Mutation(
        "pressure: start more of a tenant than may run",
        "sgl_jax/scheduler/tenants.py",
        "(running >= self._max_running)",
        "(running > self._max_running)",
    ),
    Mutation(
        "pressure: queue more of a tenant than may wait",
        "sgl_jax/scheduler/tenants.py",
        "< tenant.max_queued",
        "<= tenant.max_queued",
    ),
    Mutation(
        "pressure: shares before priorities",
        _ADMISSION_ORDER,
        "level = level * NUM_LEVELS + turns.level[tenant]",
        "level = level + turns.level[tenant] * num_levels",
    ),
    Mutation(
        "pressure: no turn among tenants of one level",
        _ADMISSION_ORDER,
        "turn, num_levels = turns.order[tenant], num_levels",
        "turn, num_levels = columns.no_turns[:end], num_levels",
    ),
    Mutation(
        "pressure: turns of tenants after the requests that others would read",
        _ADMISSION_ORDER,
        "turn = turn * NUM_REUSES + reuse",
        "turn = turn + reuse * NUM_REUSES",
    ),
    Mutation(
        "pressure: the requests first that others would read least",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "order[line] -= min(num_read, NUM_REUSES - 1)",
        "order[line] -= NUM_REUSES - 1 - min(num_read, NUM_REUSES - 1)",
    ),
    Mutation(
        "pressure: count a request among those that would read it",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "(num_prompts[number] - 1)",
        "num_prompts[number]",
    ),
    Mutation(
        "pressure: a prompt counts for its own shared prefix alone",
        "sgl_jax/scheduler/waiting/queue_loops.py",
        "                number = parent[number]\n",
        "                number = -1\n",
    ),
    Mutation(
        "pressure: forget what waits at the gate among a tenant's requests",
        _LIVE_REQUESTS,
        "            self._tenants.queue(request.tenant, 1)\n",
        "            pass\n",
    ),
    # -- the memory view
    Mutation(
        "view: show pages that leases have locked as evictable",
        _READER,
        "    codes[(codes == TREE) & (num_locks > 0)] = LOCKED\n",
        "",
    ),
    Mutation(
        "view: a lease of a fetch from the host is a defect",
        _READER,
        "find_imbalance(rank.memory, rank.num_leases)",
        "find_imbalance(rank.memory, len(rank.running))",
    ),
    Mutation(
        "view: show no lock of a prefix that a copy continues",
        "sgl_jax/mem_cache/offload/cpu_pool.py",
        "(*self.leaving.values(), *(copy.node for copy in self.copies.values()))",
        "tuple(self.leaving.values())",
    ),
    Mutation(
        "view: list no session whose turn runs among those with pages",
        _READER,
        "holding = chain(sessions.idle(), sessions.checked_out())",
        "holding = sessions.idle()",
    ),
    Mutation("view: show namespaces", _READER, "namespace_hash(node.namespace)", "node.namespace"),
    Mutation(
        "view: show the tokens of prompts without being asked",
        _READER,
        "    if has_tokens:\n        columns",
        "    if True:\n        columns",
    ),
    Mutation(
        "view: show the tokens of cached prefixes without being asked",
        _READER,
        "    if has_tokens:\n        entry",
        "    if True:\n        entry",
    ),
    Mutation(
        "view: a history seems whole after moves were forgotten",
        _READER,
        "is_whole=not moves or moves[0].clock == 1",
        "is_whole=True",
    ),
    Mutation(
        "view: count output from before a retract in a rate",
        _FRAMES,
        "unseen = count if num_retractions else 0",
        "unseen = 0",
    ),
    Mutation(
        "view: a sample has the marks of its frame alone",
        _FRAMES,
        'self._unsampled += self._frame["marks"]',
        'self._unsampled = self._frame["marks"]',
    ),
    Mutation(
        "view: a viewer waits for a reading that has ended",
        _WATCH,
        "self._reading is None or self._reading.done()",
        "self._reading is None",
    ),
    Mutation(
        "view: read on though nobody watches",
        _WATCH,
        "            self._viewers.discard(viewer)\n",
        "            pass\n",
    ),
    Mutation(
        "view: a difference follows frames that a viewer has missed",
        _WATCH,
        "                self._events.get_nowait()\n        self._needs_key = True\n",
        "                self._events.get_nowait()\n",
    ),
    Mutation(
        "view: a recording forgets the marks of frames left out",
        _VIEW,
        'marks = [*gone.sample["marks"], *kept.sample["marks"]]',
        'marks = kept.sample["marks"]',
    ),
    Mutation(
        "host: keep the lock of a prefix that needs no copy",
        _BLOCKS,
        "            if node is not None:\n"
        "                self.cache.unlock(node)\n"
        "            return None",
        "            return None",
    ),
    Mutation(
        "host: copy what is there",
        _BLOCKS,
        "        is_copied[:, :num_before] = False\n",
        "        is_copied[:, :0] = False\n",
    ),
    Mutation(
        "host: count free blocks as evictable",
        _CACHE,
        "            deficit = count - allocator.num_free\n",
        "            deficit = count\n",
    ),
    Mutation(
        "host: keep duplicates of the tree's blocks",
        _BLOCKS,
        "            held[held == added] = 0\n",
        "            held[:] = 0\n",
    ),
    Mutation(
        "host: free blocks that the tree took",
        _BLOCKS,
        "            held[held == added] = 0\n",
        "            del held\n",
    ),
    Mutation(
        "host: keep a copy that failed",
        _BLOCKS,
        "        if succeeded and copy.is_wanted:\n",
        "        if copy.is_wanted:\n",
    ),
    Mutation(
        "host: keep a copy from before a flush",
        _BLOCKS,
        "        if succeeded and copy.is_wanted:\n",
        "        if succeeded:\n",
    ),
    Mutation(
        "host: keep the lock after a copy",
        _BLOCKS,
        "        elif node is not None:\n            self.cache.unlock(node)\n",
        "",
    ),
    Mutation(
        "host: keep the lock after a fetch",
        _BLOCKS,
        "        self.cache.unlock(self.leaving.pop(number))\n",
        "        self.leaving.pop(number)\n",
    ),
    Mutation(
        "host: offer under no namespace",
        _BLOCKS,
        "blocks, copy.node, copy.namespace)",
        "blocks, copy.node)",
    ),
    Mutation(
        "host: copy evicted pages after the step",
        _TIER,
        "        saved = self._begins.copies.copy()\n",
        "        return []\n",
    ),
    Mutation(
        "host: copy whole windows from the device",
        _TIER,
        "                is_offered[number, :first] = False\n",
        "                is_offered[number, : first + 1] = False\n",
    ),
    Mutation(
        "host: copy the pages of another length",
        _TIER,
        "pages_to(node)[:, : length // memory.page_size]",
        "pages_to(node)[:, :: 1][:, -(length // memory.page_size) :]",
    ),
    Mutation(
        "host: fetch into pages that the tree holds",
        _TIER,
        "        blocks[:, :num_held] = 0\n",
        "        blocks[:, :0] = 0\n",
    ),
    Mutation(
        "host: keep the host's lock when room lacks",
        _TIER,
        "            self.blocks.end_fetch(number)\n"
        "            release_kv_cache(memory, lease, tokens, insert=False)\n"
        "            return None",
        "            release_kv_cache(memory, lease, tokens, insert=False)\n"
        "            return None",
    ),
    Mutation(
        "host: keep the lease when room lacks",
        _TIER,
        "            release_kv_cache(memory, lease, tokens, insert=False)\n"
        "            return None",
        "            return None",
    ),
    Mutation(
        "host: publish a fetch that failed",
        _TIER,
        "                self._end_lease(number, insert=is_placed)\n",
        "                self._end_lease(number, insert=True)\n",
    ),
    Mutation(
        "host: never place what has arrived",
        _TIER,
        "                begins.append(fetch.move)\n",
        "                now.append(fetch.move) if not end.succeeded else None\n",
    ),
    Mutation(
        "host: place a fetch whose pages were given back",
        _TIER,
        "                self._begins.dropped.append(self._dropped.pop(number))\n",
        "                self._begins.placed.append(self._dropped.pop(number))\n",
    ),
    Mutation(
        "host: begin a fetch that was dropped",
        _TIER,
        "                self._begins.fetches.remove(fetch.move)\n",
        "                pass\n",
    ),
    Mutation(
        "host: free nothing when pages lack",
        _TIER,
        "        for number, fetch in list(self.fetches.items()):\n",
        "        for number, fetch in list(self.fetches.items())[1:]:\n",
    ),
    Mutation(
        "host: keep windows' locks before a fetched window",
        _TIER,
        "        free_passed_window_pages("
        "memory.rows, [memory], np.array([row]), np.array([length]))\n"
        "        return pages",
        "        return pages",
    ),
    Mutation(
        "host: keep the host's prefixes over a flush",
        _TIER,
        "            self.store.drop_writes()\n        self.blocks.reset()\n",
        "            self.store.drop_writes()\n",
    ),
    Mutation(
        "host: know transfers from before a reset",
        _TIER,
        "        self.fetches.clear()\n        self._start()\n",
        "        self.fetches.clear()\n",
    ),
    Mutation(
        "host: begin a copy whose beginning is under way",
        _TIER,
        "            if self._is_leaving(*offer):\n                self.offers.append(offer)\n",
        "            if False:\n                self.offers.append(offer)\n",
    ),
    Mutation(
        "host: wait for a fetch of another namespace",
        _TIER,
        "            if fetch.lease.namespace == namespace:\n                shared",
        "            if True:\n                shared",
    ),
    Mutation(
        "host: fetch for a request again and again",
        _RANK_HOST,
        "        request.num_fetches += 1\n        return fetch.lease.row",
        "        return fetch.lease.row",
    ),
    Mutation(
        "host: fetch nothing while idle sessions have all rows",
        _RANK,
        "            self.evict_idle_session()\n        num_pages = self",
        "            pass\n        num_pages = self",
    ),
    Mutation(
        "host: fetch nothing while idle sessions have all pages",
        _RANK,
        "        num_pages = self.memory.request_pages(length) - ",
        "        num_pages = 0 * self.memory.request_pages(length) - ",
    ),
    Mutation(
        "host: take no notice of arriving blocks",
        _HOST_LEDGER,
        "        if arriving[pool] != allocator.num_leased:\n",
        "        if False:\n",
    ),
    Mutation(
        "host: leave pages with fetches while rows lack them",
        _PLANNER,
        "host.drop_fetches() or self._evict_for",
        "self._evict_for",
    ),
    Mutation(
        "store: keep values that a load has not found",
        _BLOCKS,
        "                blocks[:, before:][~is_found] = 0\n",
        "",
    ),
    Mutation(
        "store: keep pages behind a missing one",
        _STORE,
        "                is_found = is_found[:, :num_pages]\n",
        "",
    ),
    Mutation(
        "store: keep the lock after a put",
        _WRITES,
        "write.pages)\n        self._blocks.end_fetch(number)\n",
        "write.pages)\n",
    ),
    Mutation(
        "store: never put again what has failed",
        _WRITES,
        "        else:\n            add_keys(self._left_out, write.pages)\n",
        "",
    ),
    Mutation(
        "store: keep the lock of pages that are not put again",
        _WRITES,
        "            self._blocks.end_fetch(number)\n            return\n",
        "            return\n",
    ),
    Mutation(
        "store: put without a lock",
        _BLOCKS,
        "            self.leaving[lock_for] = node\n",
        "            self.leaving[lock_for] = node\n            self.cache.unlock(node)\n",
    ),
    Mutation(
        "store: put the pages under the keys of the first ones",
        _WRITES,
        "keys[:, keys.shape[1] - values.shape[1] :]",
        "keys[:, : values.shape[1]]",
    ),
    Mutation(
        "store: load behind a beginning that the host lacks",
        _STORE,
        "        if not search.first <= num_here < end:\n",
        "        if not num_here < end:\n",
    ),
    Mutation(
        "store: load under the keys of pages that the host has",
        _STORE,
        "keys = search.keys[:, num_here - search.first : end - search.first]",
        "keys = search.keys[:, : end - num_here]",
    ),
    Mutation(
        "store: wait forever for a prefix that is not there",
        _STORE,
        "                self._waits_no_more(each)\n                self._search",
        "                self._search",
    ),
    Mutation(
        "store: wait forever for a load",
        _STORE,
        "                self._waits_no_more(each)\n                num",
        "                num",
    ),
    Mutation(
        "store: keys without a namespace",
        "sgl_jax/mem_cache/offload/content_keys.py",
        "hashlib.blake2b(namespace.encode(), digest_size",
        "hashlib.blake2b(digest_size",
    ),
    Mutation(
        "store: keys of a page alone",
        "sgl_jax/mem_cache/offload/content_keys.py",
        "        chained = hashlib.blake2b(page, key=chained, digest",
        "        chained = hashlib.blake2b(page, digest",
    ),
    Mutation(
        "store: one key for all groups",
        "sgl_jax/mem_cache/offload/content_keys.py",
        "np.arange(self._num_groups)[:, None]",
        "0",
    ),
    Mutation(
        "store: flush while prefixes are on their way",
        "sgl_jax/scheduler/scheduler.py",
        "        if self.num_running or self.is_storing:\n",
        "        if self.num_running:\n",
    ),
    Mutation(
        "store: start before the prefix has arrived",
        "sgl_jax/scheduler/rank_offload.py",
        "        return request.rid in self.store.pending\n",
        "        return False\n",
    ),
    Mutation(
        "store: try requests before their prefix has arrived",
        _LINES,
        "is_blocked = lines.awaits_event[line] or lines.has_leader[line]\n        is_tried",
        "is_blocked = lines.has_leader[line]\n        is_tried",
    ),
    Mutation(
        "store: try requests no more after their prefix has arrived",
        "sgl_jax/scheduler/scheduler.py",
        "        for rid in host.take_released():\n            self._waiting.note_event(rid)\n",
        "        host.take_released()\n",
    ),
    Mutation(
        "store: move the blocks of a transfer that was given up",
        "sgl_jax/executor/store_transfers.py",
        "                raise _GivenUpError\n",
        "                pass\n",
    ),
    Mutation(
        "store: search while it is suspended",
        _STORE,
        "        if first * page_size == len(tokens) or self.is_suspended:\n",
        "        if first * page_size == len(tokens):\n",
    ),
    Mutation(
        "store: put values that no lock covers",
        _BLOCKS,
        "            self.cache.drop_unread(added)\n",
        "",
    ),
    Mutation(
        "host: wait for a fetch of what is on the device",
        _TIER,
        "if shared > max(least, fetch.lease.kv_committed_len):",
        "if shared > least:",
    ),
    # -- rows that are not finite
    Mutation(
        "not finite: publish what the row computed",
        _NON_FINITE,
        "self._live.end(request, finish, insert=False)",
        "self._live.end(request, finish)",
    ),
    Mutation(
        "not finite: leave what was published on the tree",
        _NON_FINITE,
        "            rank.withdraw(tokens, namespace, start)\n",
        "            pass\n",
    ),
    Mutation(
        "not finite: trust the prefix that the first steps of two rows read",
        _NON_FINITE,
        "                start = 0\n",
        "                pass\n",
    ),
    Mutation(
        "not finite: withdraw a shared prefix for one row's sake",
        _NON_FINITE,
        "                del self.failed_on[key]\n                return True\n        if len",
        "                return True\n        return True\n        if len",
    ),
    Mutation(
        "not finite: never forget that a row failed on a prefix",
        _NON_FINITE,
        "                self.failed_on.pop((rank.dp_rank, request",
        "                self.failed_on.get((rank.dp_rank, request",
    ),
    Mutation(
        "not finite: forget who left the row",
        _NON_FINITE,
        '            prefixes = list(self._left(rank, row, int(step["epoch"])))\n',
        "            prefixes = []\n",
    ),
    Mutation(
        "not finite: keep who left the row until a row fails",
        _SCHEDULER,
        "if num_failed or has_records or any(rank.departed for rank in self.ranks):",
        "if num_failed:",
    ),
    Mutation(
        "not finite: walk into a withdrawn node",
        _TREE,
        "            if child is None or child.is_withdrawn:\n",
        "            if child is None:\n",
    ),
    Mutation(
        "not finite: keep withdrawn pages without a lock",
        _TREE,
        "                    self.trim(node, 0)\n",
        "                    continue\n",
    ),
    Mutation(
        "not finite: leave a withdrawn node under its key",
        _TREE,
        'return key + b"\\xff%d" % node.node_id if node.is_withdrawn else key',
        "return key",
    ),
    Mutation(
        "not finite: insert below a withdrawn node",
        _CACHE,
        "        if start is not None and start.is_withdrawn:\n            return None\n",
        "",
    ),
    Mutation(
        "not finite: withdraw the top of a path alone",
        _TREE,
        "            each.is_withdrawn = True\n",
        "            top.is_withdrawn = True\n",
    ),
    Mutation(
        "not finite: report the end of another path's blocks",
        _TREE,
        "        if not leaf.is_withdrawn:  #",
        "        if True:  #",
    ),
    Mutation(
        "not finite: publish below a withdrawn node again and again",
        _CACHE,
        "return is_awaited and not parent.is_withdrawn",
        "return is_awaited",
    ),
    Mutation(
        "not finite: leave an idle session on a withdrawn prefix",
        _RANK,
        "            if not self.memory.cache.finds(lease.node):\n",
        "            if False:\n",
    ),
    Mutation(
        "not finite: keep a withdrawn prefix for a session",
        _RELEASE,
        "if length < 1 or not memory.cache.finds(lease.node):",
        "if length < 1:",
    ),
    Mutation(
        "not finite: keep a copy in flight",
        _TIER,
        "                self.blocks.give_up_copy(number)\n",
        "                continue\n",
    ),
    Mutation(
        "not finite: keep a copy whose page the failed step shares with an earlier one",
        _TIER,
        "num_shared = (first + 1) * self._memory.page_size",
        "num_shared = length + self._memory.page_size",
    ),
    Mutation(
        "not finite: place a fetch whose prefix was withdrawn",
        _TIER,
        "end.succeeded and fetch.is_wanted",
        "end.succeeded",
    ),
    Mutation(
        "not finite: load a withdrawn prefix from the store",
        _STORE,
        "            is_found &= [key.tobytes() not in self.withdrawn for key in each.keys[0]]\n",
        "",
    ),
    # -- the walk in slices
    Mutation(
        "walk: visit nothing above a node that was removed",
        _CACHE_WALK,
        "(*node.children.values(), parent_of(node))",
        "node.children.values()",
    ),
    Mutation(
        "walk: visit no node that was put above a listed one",
        _CACHE_WALK,
        "        while node.parent is not None and node.parent.node_id not in self._visited_ids:\n"
        "            node = node.parent\n",
        "",
    ),
    Mutation(
        "walk: lose what was merged into the child of a listed node",
        _CACHE_WALK,
        "(*node.children.values(), parent_of(node))",
        "(parent_of(node),)",
    ),
    Mutation(
        "walk: compare with pages that a node had once",
        _CACHE_WALK,
        "            if is_on_tree(other):\n",
        "            if True:\n",
    ),
    Mutation(
        "walk: miss pages that the tree got during the walk",
        _ALLOCATOR,
        " = (self._owner == TREE) & (self._stamp < num_moved)\n",
        " = self._owner == TREE\n",
    ),
    Mutation(
        "walk: miss no page of the tree",
        _CACHE_WALK,
        "        is_missed &= self._seen[pool] == _NOT_SEEN\n",
        "        is_missed &= False\n",
    ),
    Mutation(
        "walk: look at no node's locks",
        _CACHE_WALK,
        "            component.audit_nodes(nodes, ends)\n",
        "            pass\n",
    ),
    Mutation(
        "walk: look at no row",
        _WALK,
        "        yield check_rows(memory, first, min(first + rows_at_once, num_rows))\n",
        "        yield ()\n",
    ),
    Mutation(
        "walk: take the free list of blocks as it is",
        _HOST_LEDGER,
        "    if len(misplaced):\n",
        "    if False:\n",
    ),
    # -- many ends at once
    Mutation(
        "end all aborted requests at once",
        _LIVE_REQUESTS,
        "        for _ in range(min(num_left, MAX_ENDS)):\n",
        "        for _ in range(num_left):\n",
    ),
    Mutation(
        "abort a request that has the id of an aborted one",
        _LIVE_REQUESTS,
        "            if self.by_rid.get(request.rid) is request:\n",
        "            if (request := self.by_rid.get(request.rid)) is not None:\n",
    ),
    Mutation(
        "start requests that are about to be aborted",
        "sgl_jax/scheduler/scheduler.py",
        "        is_held = self._live.aborted or not (",
        "        is_held = not (",
    ),
    Mutation(
        "forget a tenant by what it was served before",
        "sgl_jax/scheduler/tenants.py",
        "            if now > served and not self._num_requests[number]:\n",
        "            if False:\n",
    ),
    Mutation(
        "chunks: give the short part to prompts of about the same length",
        "sgl_jax/scheduler/shared_tokens.py",
        "return max(num_older - SHORT_PART * num_shorter - 1, 0) // (SHORT_PART - 1)",
        "return num_older",
    ),
    Mutation(
        "chunks: share a step that completes the older prompts",
        "sgl_jax/scheduler/shared_tokens.py",
        "if SHORT_PART * num_older <= (2 * SHORT_PART - 1) * num_tokens:",
        "if num_older <= 0:",
    ),
    Mutation(
        "chunks: start as many short prompts as there are",
        "sgl_jax/scheduler/shared_tokens.py",
        "            if num_shorter >= self.num_short:\n                return most\n",
        "            if num_shorter < 0:\n                return most\n",
    ),
    Mutation(
        "chunks: order started short prompts by age",
        "sgl_jax/scheduler/shared_tokens.py",
        "            index = bisect_right(self._short_lens, num_tokens)\n",
        "            index = len(self._short_lens)\n",
    ),
    Mutation(
        "chunks: give a tenant its share besides the short part",
        "sgl_jax/scheduler/step_builder.py",
        "min(most - sum(self.chunks.get(row, 0) for row in rows), self._num_left)",
        "min(most, self._num_left)",
    ),
    Mutation(
        "chunks: start prompts of any number of tenants",
        "sgl_jax/scheduler/shared_tokens.py",
        "len(self._by_tenant) >= MAX_TENANTS_AT_ONCE",
        "len(self._by_tenant) < 0",
    ),
    Mutation(
        "chunks: start a second long prompt of a tenant",
        "sgl_jax/scheduler/shared_tokens.py",
        "        is_open[present] = False\n",
        "        is_open[present] = True\n",
    ),
    Mutation(
        "chunks: give short prompts a page of every step",
        "sgl_jax/scheduler/step_builder.py",
        "max(self.rank.short_debt + num_taken - shared.num_tokens, 0)",
        "0",
    ),
    Mutation(
        "chunks: give short prompts all scored positions",
        "sgl_jax/scheduler/step_builder.py",
        "num_scored_before * part // shared.num_tokens",
        "num_scored_before",
    ),
    Mutation(
        "chunks: try long prompts where only short ones start",
        _FITS,
        "return num_tokens <= most_tokens or is_open_tenant",
        "return True",
    ),
    Mutation(
        "chunks: take a cached prefix for tokens to compute",
        _FITS,
        "            num_tokens = need.tokens - num_cached * room.page_size\n",
        "            num_tokens = need.tokens\n",
    ),
    Mutation(
        "chunks: bind the prompts of higher priorities, too",
        _FITS,
        "    if priority == floor + 1:\n        return num",
        "    if priority > floor:\n        return num",
    ),
    Mutation(
        "chunks: read the tenants that get tokens on another rank",
        _FITS,
        "is_open_tenant = open_tenants[ranks[k], tenant[line]]",
        "is_open_tenant = open_tenants[k, tenant[line]]",
    ),
    Mutation(
        "chunks: look for no short prompt that waits",
        _LINES,
        "if num_lacking <= most_tokens[k] or",
        "if",
    ),
    Mutation(
        "chunks: start a long prompt in the short part",
        "sgl_jax/scheduler/step_builder.py",
        "return is_open or num_tokens <= self.most_tokens",
        "return True",
    ),
    Mutation(
        "chunks: wait for the prefix of a prompt that gets no tokens",
        _IN_FLIGHT,
        " or not self._builder.is_served(row):\n",
        " or False:\n",
    ),
    Mutation(
        "chunks: keep the prompt of a request that is retracted",
        "sgl_jax/scheduler/step_builder.py",
        "        self._drop_prompt(victim)\n",
        "",
    ),
    Mutation(
        "chunks: count the prompt tokens of retracted requests",
        "sgl_jax/scheduler/step_builder.py",
        "        if self.retracted:\n            self._plan_tokens()\n",
        "",
    ),
    Mutation(
        "chunks: leave a later request less than the candidates were chosen by",
        "sgl_jax/scheduler/step_builder.py",
        "self.most_tokens = min(self.most_tokens, most_tokens)",
        "self.most_tokens = 0",
    ),
    Mutation(
        "chunks: put the prompt that starts behind those of a lower priority",
        "sgl_jax/scheduler/step_builder.py",
        "insort_right(self._prefilling, row, key=lambda each: -self._needs[each][2])",
        "self._prefilling.append(row)",
    ),
    Mutation(
        "chunks: find the tokens of candidates on another rank",
        _LINES,
        "has_tokens = np.int32(num_tokens[line] - cached[line] * page_size) <= most",
        "has_tokens = np.int32(num_tokens[line] - cached_pages[0, line] * page_size) <= most",
    ),
    Mutation(
        "awaited: keep the key of the page behind a part that is published",
        _PROMPTS,
        "        if known_length == length:\n",
        "        if key is not None:\n",
    ),
    Mutation(
        "in use: keep what was counted before a start",
        "sgl_jax/scheduler/waiting/admission_order.py",
        "                    in_use_at.pop(k, None)\n",
        "",
    ),
    Mutation(
        "in use: keep the lines' counts of before a start",
        "sgl_jax/scheduler/waiting/admission_order.py",
        "                    in_use[k] = -1\n",
        "",
    ),
    Mutation(
        "room: take what lacks on the first rank for what lacks on each",
        _FITS,
        "room, option, num_pages = rooms[k], options[k], need.pages",
        "room, option, num_pages = rooms[0], options[k], need.pages",
    ),
    Mutation(
        "room: leave out pages in use that a start would share",
        _OPTIONS,
        'self._columns["in_use"][dp_rank] = memory.num_pages_in_use(cursor)',
        'self._columns["in_use"][dp_rank] = 0',
    ),
    Mutation(
        "room: take the least that a rank may cost for its cost",
        _OPTIONS,
        "if not self._unconfirmed or found < 0:",
        "if True:",
    ),
    Mutation(
        "room: find out of the cheapest rank alone what its rows compute",
        _OPTIONS,
        "(self.confirm([found]) or self.confirm(others))",
        "self.confirm([found])",
    ),
    Mutation(
        "room: look for rows in flight at the end of the cached part only on the first rank",
        _OPTIONS,
        "if place < option.num_present:",
        "if rank or place < option.num_present:",
    ),
    Mutation(
        "room: leave out ranks that cost as much as the cheapest after a wait",
        _FITS,
        "not option.fits and least <= options[best].cost",
        "not option.fits and least < 0",
    ),
    Mutation(
        "room: a wait for a row takes as long as the last request",
        _FITS,
        "step_tokens * rooms[k].soonest_end",
        "step_tokens * 1000",
    ),
    Mutation(
        "chunks: let the floor of a step fall as a request starts",
        "sgl_jax/scheduler/step_builder.py",
        "        if self.priority_floor < floor:\n",
        "        if False:\n",
    ),
    Mutation(
        "steps: let a row with a grammar take several",
        _STEPS,
        "    if running.has_grammar[rows].any():\n        return None\n",
        "",
    ),
    Mutation(
        "steps: take several next to a chunk of a prompt",
        _STEPS,
        "    if any(builder.chunks for builder in builders):\n        return None\n",
        "",
    ),
    Mutation(
        "steps: take several while a request waits",
        _SCHEDULER,
        "        if self._num_decode_steps > 1 and self._waiting.priorities.highest is None:\n",
        "        if self._num_decode_steps > 1:\n",
    ),
    Mutation(
        "steps: go past the limit by the steps of a launch in flight",
        _STEPS,
        "running.max_len[rows] - running.planned_len[rows] - unread, most)",
        "running.max_len[rows] - running.planned_len[rows], most)",
    ),
    Mutation(
        "steps: reserve no slots for the steps of a launch in flight",
        _STEPS,
        "tables.kv_committed_len[rows] + unread + num_steps",
        "tables.kv_committed_len[rows] + num_steps",
    ),
    Mutation(
        "steps: take several without slots for them",
        _STEPS,
        "return num_steps if all(grow_rows(tables, ranks.memories, rows, ends, bounds)) else None",
        "return num_steps if grow_rows(tables, ranks.memories, rows, ends, bounds) else None",
    ),
    Mutation(
        "steps: count the first token of a launch as uncertain",
        _BUILDER,
        "        num_ahead = num_steps - np.int32(1)\n",
        "        num_ahead = num_steps\n",
    ),
    Mutation(
        "steps: tell the device that the tokens of all are there",
        _BUILDER,
        '        rows["q_len"] = 1  # in each step\n',
        "        pass\n",
    ),
    Mutation(
        "steps: list pages for the first alone",
        _LAUNCHED,
        "share.longest = max(share.longest, end + row.unread_drafts + ahead)",
        "share.longest = max(share.longest, end + row.unread_drafts)",
    ),
    Mutation(
        "steps: count them as drafts",
        _COMMIT,
        "    if not ranks.max_draft_tokens:\n        return\n",
        "",
    ),
    Mutation(
        "steps: keep the number of before",
        _SCHEDULER,
        "                self._num_decode_steps = event.num_steps\n",
        "                pass\n",
    ),
    Mutation(
        "steps: hold window pages for one in each launch",
        _SIZES,
        "max(1 + self.max_draft_tokens, self.max_decode_steps)",
        "1 + self.max_draft_tokens",
    ),
    Mutation(
        "steps: plan several as one",
        _BUILDER,
        "        has_steps=num_steps is not None,\n",
        "",
    ),
    Mutation(
        "working set: take the time of the last tick for the beginning of the window",
        _WORKING_SET,
        "            since = self._clocks[0][1]\n",
        "            since = self._clocks[-1][1]\n",
    ),
    Mutation(
        "working set: keep every sample, so that the window has no end",
        _WORKING_SET,
        "now_s - self._window_s:\n            self._clocks.popleft()",
        "now_s - self._window_s:\n            break",
    ),
    Mutation(
        "working set: hold continued conversations",
        _WORKING_SET,
        "        is_continued = 2 * num_read >= len(request.tokens)\n",
        "        is_continued = False\n",
    ),
    Mutation(
        "working set: hold for ever",
        _WORKING_SET,
        "        return self._now_s - request.held_since < MAX_HOLD_S\n",
        "        return True\n",
    ),
    Mutation(
        "working set: begin the wait again each time",
        _WORKING_SET,
        "        if request.held_since is None:\n",
        "        if True:\n",
    ),
    Mutation(
        "working set: hold although there is room",
        _WORKING_SET,
        "        if self._memory.request_pages(num_lacking) <= num_spare:\n",
        "        if False:\n",
    ),
    Mutation(
        "working set: count locked pages twice",
        _WORKING_SET,
        "            if not node.locks[0]:\n                num_pages",
        "            if True:\n                num_pages",
    ),
    Mutation(
        "working set: forget that a path is used with its end",
        _WORKING_SET,
        "                used.add(node.parent.node_id)\n",
        "                pass\n",
    ),
    Mutation(
        "working set: thrash whatever returns",
        _WORKING_SET,
        "self._num_returned > _RETURNED_PART * self._num_evicted >= self._least_evicted",
        "self._num_evicted > 0",
    ),
    Mutation(
        "working set: keep a count of pages after a tick",
        _WORKING_SET,
        "        self._now_s, self._num_recent = now_s, None\n",
        "        self._now_s = now_s\n",
    ),
    Mutation(
        "working set: hold requests where nothing runs",
        _ADMISSION,
        "            self._waiting.release_held()  # no step would come\n",
        "            pass\n",
    ),
    Mutation(
        "working set: hold more important requests",
        _ADMISSION,
        "            and request.priority <= lowest\n",
        "",
    ),
    Mutation(
        "working set: hold due requests",
        _ADMISSION,
        "            and not self._waiting.is_starved(request)\n            and rank.working_set",
        "            and rank.working_set",
    ),
    Mutation(
        "working set: count passes over requests that wait for it",
        _LINES,
        " or held_until[line]:\n",
        ":\n",
    ),
    Mutation(
        "working set: order by the longest prefix while a rank thrashes",
        _LINES,
        "        if uses_cached_len and is_thrashing:\n",
        "        if False:\n",
    ),
    Mutation(
        "working set: try a request in each step",
        _LINES,
        "        is_tried &= lines.held_until[line] <= step\n",
        "",
    ),
    Mutation(
        "outputs: list the former requests of the same rows",
        "sgl_jax/scheduler/output_buffer.py",
        "if self._listed[:2] != wanted:",
        "if self._listed.rows != wanted[0]:",
    ),
    Mutation(
        "publish: take the offered pages for the tree's where the tree had some",
        "sgl_jax/mem_cache/tree/radix_cache.py",
        "return node, length == start.end and not self._windows",
        "return node, not self._windows",
    ),
)
