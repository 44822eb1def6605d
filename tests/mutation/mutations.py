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
_MEMORY = "sgl_jax/mem_cache/rank_memory.py"
_ALLOCATOR = "sgl_jax/mem_cache/page_allocator.py"
_ROWS = "sgl_jax/mem_cache/req_to_token_pool.py"
_LEASE = "sgl_jax/mem_cache/lease.py"
_TREE = "sgl_jax/mem_cache/radix_tree.py"
_FULL = "sgl_jax/mem_cache/full_component.py"
_CACHE = "sgl_jax/mem_cache/radix_cache.py"
_RANK = "sgl_jax/scheduler/rank_scheduler.py"
_PLANNER = "sgl_jax/scheduler/step_planner.py"
_COMMIT = "sgl_jax/scheduler/commit.py"
_SCHEDULER = "sgl_jax/scheduler/scheduler.py"
_REQUEST = "sgl_jax/scheduler/request.py"
_SLOTS = "sgl_jax/mem_cache/session_cache.py"
_STREAMING = "sgl_jax/scheduler/streaming_session.py"
_REGULAR = "sgl_jax/scheduler/regular_session.py"
_BOOK = "sgl_jax/scheduler/session_book.py"
_DESK = "sgl_jax/scheduler/session_desk.py"

_BUILT_ON = (
    "if self._running is None or self._is_whole or self._len_after(message) == self.num_tokens:"
)
_FREE_REST = (
    "    memory.allocator.free(lease.pages(memory.page_size, lease.cache_protected_len), "
    "owner=lease.row)\n"
)
_FREE_DUPLICATES = "    memory.allocator.free(fresh[fresh != kept.pages], lease.row)\n"
_UNLOCK_AT_END = """        memory.cache.unlock(lease.node)
        lease.node = None
    del memory"""

MUTATIONS = (
    # -- the end of a lease
    Mutation("skip the free at release", _RELEASE, _FREE_REST, ""),
    Mutation("free twice at release", _RELEASE, _FREE_REST, 2 * _FREE_REST),
    Mutation(
        "free from the committed instead of the protected length",
        _RELEASE,
        "lease.pages(memory.page_size, lease.cache_protected_len), owner",
        "lease.pages(memory.page_size, -(-lease.kv_committed_len // memory.page_size) "
        "* memory.page_size), owner",
    ),
    Mutation(
        "free up to the committed instead of the allocated length",
        _RELEASE,
        "lease.pages(memory.page_size, lease.cache_protected_len), owner",
        "lease.pages(memory.page_size, lease.cache_protected_len, lease.kv_committed_len), owner",
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
        "        memory.cache.unlock(lease.node)\n" + _UNLOCK_AT_END,
    ),
    Mutation("do not return the row", _RELEASE, "    memory.rows.free(lease.row)\n", ""),
    Mutation("leave the lease live", _RELEASE, "    lease.released = True\n", ""),
    Mutation("insert what a failed step wrote", _RELEASE, "    if insert:\n", "    if True:\n"),
    Mutation("never insert", _RELEASE, "    if insert:\n", "    if False:\n"),
    # -- publishing a prefix
    Mutation(
        "forget the old lock when a longer prefix is published",
        _CACHE,
        "            self.tree.move_lock(start, node)\n",
        "            self.tree.lock(node)\n",
    ),
    Mutation(
        "lock what lies above a published prefix once more",
        _FULL,
        "        self._lock_up_to(new, old)\n",
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
    Mutation("keep the duplicates of a published prefix", _RELEASE, _FREE_DUPLICATES, ""),
    Mutation(
        "free duplicates from the matched instead of the protected length",
        _RELEASE,
        "fresh[fresh != kept.pages]",
        "fresh[1:][(fresh != kept.pages)[1:]]",
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
        "    rows.pages[lease.row, first : length // page_size] = kept.pages\n",
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
        _MEMORY,
        "np.maximum(allocated[rows], allocated_lens)",
        "allocated[rows]",
    ),
    Mutation(
        "shrink the allocated length without freeing",
        _MEMORY,
        "np.maximum(allocated[rows], allocated_lens)",
        "allocated_lens",
    ),
    Mutation(
        "off by one in the pages that a row lacks",
        _MEMORY,
        "lacking = -(-allocated_lens // self.page_size) - held",
        "lacking = allocated_lens // self.page_size + 1 - held",
    ),
    Mutation(
        "evict without a need", _MEMORY, "self.cache.evict(deficit)", "self.cache.evict(num_pages)"
    ),
    Mutation(
        "give a row back with its old epoch",
        _ROWS,
        "        self.epoch[row] += 1\n        self._free.append(row)",
        "        self._free.append(row)",
    ),
    Mutation(
        "give a row back with its old lengths",
        _ROWS,
        "        self.lengths[:, row] = 0\n        self.epoch",
        "        self.epoch",
    ),
    Mutation(
        "let anybody free a page",
        _ALLOCATOR,
        '        self._require(pages, owner, "free")\n',
        "",
    ),
    # -- the tree
    Mutation(
        "lock the end of a path alone",
        _FULL,
        """                self.refresh(step)
            step = step.parent

    def unlock""",
        """                self.refresh(step)
            step = None

    def unlock""",
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
        "keep = max(len(leaf.values[self.index]) - num_units, 0)",
        "keep = 0",
    ),
    Mutation(
        "lock the root when nothing matched",
        _TREE,
        "        if length == 0:\n            return None\n",
        "        if length == 0:\n            self.lock(self.root)\n            return None\n",
    ),
    Mutation(
        "match a part of a page",
        _TREE,
        "            matched = matched // self.page_size * self.page_size\n",
        "",
    ),
    Mutation(
        "reset the cache under a live lease",
        _CACHE,
        "        if self.num_protected:\n",
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
        "commit a result to whoever holds the row now",
        _COMMIT,
        "current = memory.rows.epoch[plan.rows] == plan.epochs",
        "current = np.isin(plan.rows, running.active)",
    ),
    Mutation(
        "keep the overshoot past a stop",
        _COMMIT,
        "np.where(is_finished, last + 1, is_token.sum(axis=1))",
        "is_token.sum(axis=1)",
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
        "    rank.running.unread_drafts[rows] -= drafted\n",
        "",
    ),
    Mutation(
        "hold slots for one step ahead only",
        _PLANNER,
        "committed + self.rank.running.unread_drafts[rows] + 1",
        "committed + 1",
    ),
    Mutation(
        "plan chunks that a step cannot hold beside its decode rows",
        _PLANNER,
        "self._budget = min(chunk_size, sizes.max_chunk_tokens)",
        "self._budget = chunk_size",
    ),
    Mutation(
        "let every row score as much as a step may",
        _PLANNER,
        "self._score_budget -= max(committed + count - score_start, 0)",
        "self._score_budget -= 0",
    ),
    Mutation(
        "report the log-probability of the first token for every accepted one",
        _COMMIT,
        "TokenLogprobs(t, logprobs[i], top_ids[i], top_logprobs[i])",
        "TokenLogprobs(t, logprobs[0], top_ids[0], top_logprobs[0])",
    ),
    Mutation(
        "keep the slots of refused drafts while others are retracted",
        _PLANNER,
        "        return freed > 0\n",
        "        return False\n",
    ),
    Mutation(
        "commit drafts at launch",
        _PLANNER,
        "memory.commit_rows(rows, ends)",
        "memory.commit_rows(rows, kv_starts + q_lens)",
    ),
    Mutation(
        "draft past the tokens asked for",
        _PLANNER,
        "drafts = np.clip(running.max_len[rows] - longest, 0, drafts)",
        "drafts = np.clip(running.max_len[rows] - longest + 1, 0, drafts)",
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
        _RANK,
        "        self._unsent_admissions.clear()\n        return admissions",
        "        return admissions",
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
        "            self._end(request, finish, insert=False)\n        self._reset_caches()",
        "            self._end(request, finish, insert=True)",
    ),
    Mutation(
        "leave an aborted request in the queue",
        _SCHEDULER,
        "        if request.state is RequestState.WAITING:\n"
        "            self._waiting.remove(request)\n",
        "",
    ),
    # -- sessions
    Mutation(
        "resume a session with its tail",
        _RELEASE,
        "    lease = memory.cache.lend(session_id)\n"
        "    free_tail(memory, lease, min(lease.kv_committed_len, num_tokens))\n",
        "    lease = memory.cache.lend(session_id)\n",
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
        "    memory.rows.pages[row, first:] = 0\n",
        "",
    ),
    Mutation(
        "take what was committed for the prefix of a turn",
        _RELEASE,
        "    free_tail(memory, lease, min(lease.kv_committed_len, num_tokens))\n    return lease",
        "    free_tail(memory, lease, lease.kv_committed_len)\n    return lease",
    ),
    Mutation(
        "a rolled back session keeps what followed",
        _RELEASE,
        "    else:\n        free_tail(memory, lease, min(lease.kv_committed_len, num_tokens))\n",
        "",
    ),
    Mutation(
        "cut a lease though the tree owns more of it",
        _RELEASE,
        "    if num_tokens < max(lease.cache_protected_len, 1):\n",
        "    if num_tokens < 1:\n",
    ),
    Mutation(
        "hand a lease to its slot with the epoch of the turn before",
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
        _SLOTS,
        "        session_id = self._lent.pop(lease.row, None)\n        if session_id is None:",
        "        session_id = self._lent.get(lease.row)\n        if session_id is None:",
    ),
    Mutation(
        "give a session a second lease",
        _SLOTS,
        "        if self.holds(session_id):\n",
        "        if False:\n",
    ),
    Mutation(
        "evict the session used last",
        _SLOTS,
        "next((each for each in self._idle if",
        "next((each for each in reversed(self._idle) if",
    ),
    Mutation(
        "keep the slot's lease over a retract",
        _RANK,
        "        self.memory.cache.unbind(lease)\n        request = self._leave(row)",
        "        request = self._leave(row)",
    ),
    Mutation(
        "keep all of an aborted turn",
        _RANK,
        "kept = request.kept_len if request.slot_id is not None else None",
        "kept = 10**6 if request.slot_id is not None else None",
    ),
    Mutation(
        "keep the tail of an aborted turn",
        _RANK,
        "            self.roll_back_session(request.slot_id, request.kept_len)\n",
        "            pass\n",
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
        "is_untold = unsent is not None and unsent.start == 0",
        "is_untold = False",
    ),
    Mutation(
        "tell the device only the last tokens of a new row",
        _RANK,
        "start = 0 if slot is None else lease.kv_committed_len",
        "start = lease.kv_committed_len",
    ),
    Mutation(
        "never evict a session",
        _RANK,
        "        if session_id is None:\n            return False\n        self.release_session",
        "        if True:\n            return False\n        self.release_session",
    ),
    Mutation(
        "evict sessions for a request that does not fit even so",
        _RANK,
        "may_fit = self._fits_without_idle(request, slot)",
        "may_fit = True",
    ),
    Mutation(
        "evict the slot that a turn is about to use",
        _RANK,
        "self.evict_idle_session(except_id=request.slot_id)",
        "self.evict_idle_session()",
    ),
    Mutation(
        "let idle sessions hold what they like",
        _RANK,
        "        while self.memory.idle_sessions_keep_more_than(self._max_session_pages):\n",
        "        while False:\n",
    ),
    Mutation(
        "resume on tokens that the tree owns and the turn must compute",
        _RANK,
        "self._reusable_len(request) < lease.cache_protected_len:",
        "False:",
    ),
    Mutation(
        "retract before an idle session is evicted",
        _PLANNER,
        "if self._give_back_tails(rows) or self.rank.evict_idle_session():",
        "if self._give_back_tails(rows):",
    ),
    Mutation(
        "publish a turn before it has succeeded",
        _COMMIT,
        "if current[i] and not rank.running.request(row).kept_len:",
        "if current[i]:",
    ),
    Mutation(
        "leave the slot of a closed session full",
        _DESK,
        "        home = self._home(session_id)\n        if home is not None:\n"
        "            home.release_session(session_id)\n",
        "",
    ),
    Mutation(
        "let the slot of a closed session take over what its turn leaves",
        _DESK,
        "                    self._ranks[request.dp_rank].memory.cache.unbind(request.lease)\n",
        "                    pass\n",
    ),
    Mutation(
        "roll a session back without its memory",
        _DESK,
        "            home.roll_back_session(message.session_id, session.num_tokens)\n",
        "            pass\n",
    ),
    Mutation(
        "let a turn go to any rank",
        _DESK,
        "return session, prompt, message.dp_rank if home is None else home.dp_rank",
        "return session, prompt, message.dp_rank",
    ),
    Mutation(
        "leave the mark of a turn that failed",
        _STREAMING,
        "        self._running, self._pending = None, NO_TOKENS\n",
        "        if tokens is not None:\n"
        "            self._running, self._pending = None, NO_TOKENS\n",
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
        _BOOK,
        "        session.roll_back(num_turns)\n        self._recount(session)\n",
        "        session.roll_back(num_turns)\n",
    ),
    Mutation(
        "let sessions keep as many tokens as they like",
        _BOOK,
        "        self._require_room(len(message.input_ids) - num_known)\n",
        "",
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
        "if self._running is None or self._len_after(message) == self.num_tokens:",
    ),
    Mutation(
        "a whole conversation that fails leaves what is no history any more",
        _DESK,
        "                request.kept_len = session.kept_len()\n",
        "                pass\n",
    ),
    Mutation(
        "end a turn though the stop before it cuts nothing",
        _STREAMING,
        _BUILT_ON,
        "if self._running is None or self._is_whole:",
    ),
    Mutation(
        "a turn whose end nobody saw stays",
        _SCHEDULER,
        "        self._amend(message)\n        rids",
        "        rids",
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
        "            home.roll_back_session(session.session_id, fitting)\n",
        "            home.roll_back_session(session.session_id, session.num_tokens)\n",
    ),
    Mutation(
        "cut a turn late without its memory",
        _DESK,
        "            home.roll_back_session(session.session_id, fitting)\n",
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
        "a replaced turn ends as if it had not been",
        _REGULAR,
        "        if self._nodes.get(node.name) is not node:\n            return  # replaced",
        "        if node.name not in self._nodes:\n            return  # replaced",
    ),
    Mutation(
        "count a shared page for every session that reads it",
        _MEMORY,
        "        return int(is_kept.sum()) > num_pages\n",
        "        return True\n",
    ),
    Mutation(
        "refuse a turn for a length that nobody asked for",
        "sgl_jax/scheduler/request_len.py",
        "if wanted is None or message.is_length_default:",
        "if wanted is None:",
    ),
    Mutation(
        "keep what was generated past a stop string",
        _RANK,
        "            self.roll_back_session(request.slot_id, len(request.tokens))\n",
        "            pass\n",
    ),
    Mutation(
        "tell the prompt of a turn twice",
        _REQUEST,
        "        self.is_prompt_told = True\n",
        "",
    ),
)
