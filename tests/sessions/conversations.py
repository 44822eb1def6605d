"""Streaming sessions of a driver, with a model of what each must remember.

The model knows nothing of memory: a conversation is a list of tokens that a successful turn makes
longer, and that any other end leaves as it was.
"""

from dataclasses import dataclass, field

from sgl_jax.core.engine_messages import Reply
from sgl_jax.core.messages import (
    AbortRequest,
    CloseSession,
    ForkSession,
    ListSessions,
    OpenSession,
    RollbackSession,
    SessionTurn,
    StopRequest,
)
from sgl_jax.core.shares import Tenant
from sgl_jax.mem_cache.lease import KVLease
from sgl_jax.scheduler.events import Flush
from tests.scheduler.driver import Driver, common_len, generate


@dataclass
class Conversation:
    """What a session must remember."""

    tokens: list[int] = field(default_factory=list)
    turn_ends: list[int] = field(default_factory=list)
    running: str | None = None
    is_whole: bool = False  # whether the running turn handed in all of its prompt
    last: str | None = None  # the last turn, while it can be amended
    before_last: tuple[list[int], list[int]] = ([], [])  # tokens and turn ends

    def take(self, rid: str, prompt: list[int], output: list[int]) -> None:
        """A turn succeeded."""
        self.last, self.before_last = rid, (self.tokens, self.turn_ends)
        kept = common_len(self.tokens, prompt)
        self.turn_ends = [end for end in self.turn_ends if end <= kept]
        self.tokens = prompt + output
        self.turn_ends.append(len(self.tokens))


class Conversations:
    """Sessions by id. Turns are named after their session, with a number."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.of: dict[str, Conversation] = {}
        self.closing: dict[str, Conversation] = {}
        self._num_turns = 0

    def open(self, session_id: str, **kwargs: object) -> None:
        message = OpenSession(rid="", session_id=session_id, streaming=True, **kwargs)  # type: ignore[arg-type]
        reply = self.driver.session(message)
        assert reply.ok, reply.message
        self.of[session_id] = Conversation()

    def begin(
        self,
        session_id: str,
        new: list[int],
        max_new_tokens: int = 4,
        *,
        turn: SessionTurn | None = None,
        **kwargs: object,
    ) -> str:
        """A turn starts; `turn` where it does more than to append. Answers its request id."""
        rid = f"{session_id}.{self._num_turns}"
        self._num_turns += 1
        conversation = self.of[session_id]
        turn = turn or SessionTurn(id=session_id)
        history = [] if turn.is_whole else conversation.tokens
        message = generate(rid, new, max_new_tokens, session=turn, **kwargs)
        self.driver.submit(message, history)
        if rid not in self.driver.finish:
            conversation.running, conversation.is_whole = rid, turn.is_whole
        return rid

    def say(
        self, session_id: str, new: list[int], max_new_tokens: int = 4, **kwargs: object
    ) -> str:
        """A turn from beginning to end, among all that runs."""
        rid = self.begin(session_id, new, max_new_tokens, **kwargs)  # type: ignore[arg-type]
        self.run()
        assert self.driver.finish[rid].type != "abort", self.driver.finish[rid].message
        return rid

    def run(self) -> None:
        """Everything in flight comes to its end."""
        self.driver.run()
        self.settle()

    def settle(self) -> list[str]:
        """Learn from the turns that ended; answers the sessions concerned."""
        ended = []
        for session_id, conversation in (*self.of.items(), *self.closing.items()):
            rid = conversation.running
            if rid is None or rid not in self.driver.finish:
                continue
            conversation.running = None
            ended.append(session_id)
            driver, prompt = self.driver, self.driver.prompts[rid]
            driver.check_tokens(rid)
            assert driver.prompt_tokens[rid] == len(prompt), rid
            assert 0 <= driver.cached[rid] < len(prompt), rid
            if driver.finish[rid].type != "abort":
                conversation.take(rid, prompt, driver.tokens[rid])
        self.closing = {k: v for k, v in self.closing.items() if v.running is not None}
        return ended

    def stopped(self, rid: str, num_tokens: int) -> str | None:
        """The frontend stopped a request; answers its session, if it is the turn of one."""
        for session_id, conversation in (*self.of.items(), *self.closing.items()):
            if conversation.running == rid:
                output = self.driver.tokens[rid][:num_tokens]
                conversation.take(rid, self.driver.prompts[rid], output)
                conversation.running = None
                self.closing.pop(session_id, None)
                return session_id
        return None

    def stop_late(self, session_id: str, num_tokens: int) -> bool:
        """The frontend finds a stop string in the last turn, which has ended. Answers whether a
        turn in flight was built on what is cut."""
        conversation = self.of[session_id]
        rid = conversation.last
        assert rid is not None
        end = len(self.driver.prompts[rid]) + num_tokens
        is_cut = end < len(conversation.tokens)
        turn = SessionTurn(id=session_id)
        self.driver.scheduler.handle(
            StopRequest(rid=rid, num_output_tokens=num_tokens, session=turn)
        )
        self.driver.collect()
        if is_cut:
            conversation.tokens = conversation.tokens[:end]
            conversation.turn_ends = [*conversation.turn_ends[:-1], end]
        return is_cut and self._was_refused(conversation)

    def abort_late(self, session_id: str) -> bool:
        """The client of the last turn, which has ended, has gone without seeing that. Answers
        whether a turn in flight was built on it."""
        conversation = self.of[session_id]
        rid, conversation.last = conversation.last, None
        assert rid is not None
        turn = SessionTurn(id=session_id)
        self.driver.scheduler.handle(AbortRequest(rid=rid, session=turn))
        self.driver.collect()
        conversation.tokens, conversation.turn_ends = conversation.before_last
        return self._was_refused(conversation)

    def _was_refused(self, conversation: Conversation) -> bool:
        rid = conversation.running
        if rid is None or conversation.is_whole:
            assert rid not in self.driver.finish
            return False
        conversation.running = None
        finish = self.driver.finish[rid]
        assert (finish.type, finish.status_code) == ("abort", 400), rid
        assert "whose end its client had not seen" in (finish.message or "")
        return True

    def close(self, session_id: str) -> None:
        reply = self.driver.session(CloseSession(rid="", session_id=session_id))
        assert reply.ok, reply.message
        conversation = self.of.pop(session_id)
        if conversation.running is not None:
            self.closing[session_id] = conversation

    def roll_back(self, session_id: str, num_turns: int) -> None:
        message = RollbackSession(rid="", session_id=session_id, num_turns=num_turns)
        reply = self.driver.session(message)
        assert reply.ok, reply.message
        conversation = self.of[session_id]
        if num_turns < len(conversation.turn_ends):
            conversation.last = None
        conversation.turn_ends = conversation.turn_ends[:num_turns]
        conversation.tokens = conversation.tokens[: [0, *conversation.turn_ends][-1]]
        assert reply.data == {"num_turns": num_turns, "num_tokens": len(conversation.tokens)}

    def fork(self, session_id: str, new_session_id: str, tenant: Tenant | None = None) -> None:
        message = ForkSession(
            rid="", session_id=session_id, new_session_id=new_session_id, tenant=tenant
        )
        reply = self.driver.session(message)
        assert reply.ok, reply.message
        origin = self.of[session_id]
        self.of[new_session_id] = Conversation(list(origin.tokens), list(origin.turn_ends))
        assert reply.data["num_tokens"] == len(origin.tokens)

    def listed(self) -> dict[str, dict[str, object]]:
        """What `ListSessions` answers, by session."""
        reply: Reply = self.driver.session(ListSessions(rid=""))
        return {entry["session_id"]: entry for entry in reply.data["sessions"]}

    def listed_streaming(self) -> dict[str, dict[str, object]]:
        return {key: entry for key, entry in self.listed().items() if entry["streaming"]}

    def check(self) -> None:
        """The scheduler's sessions are the model's, and remember what they should."""
        listed = self.listed_streaming()
        assert set(listed) == set(self.of) | set(self.closing)
        for session_id, conversation in (*self.of.items(), *self.closing.items()):
            entry = listed[session_id]
            assert entry["num_tokens"] == len(conversation.tokens), session_id
            assert entry["num_turns"] == len(conversation.turn_ends), session_id
            assert entry["num_running"] == int(conversation.running is not None), session_id
            assert entry["is_closing"] == (session_id in self.closing), session_id

    def lease(self, session_id: str) -> KVLease | None:
        """The lease that the session keeps, on any rank."""
        found = [
            rank.memory.sessions.idle_lease(session_id)
            for rank in self.driver.scheduler.ranks
            if rank.memory.sessions.lease_of(session_id)
        ]
        assert len(found) <= 1, f"{session_id} has leases on several ranks"
        return found[0] if found else None

    def close_all(self) -> None:
        """And all pages are free, as soon as the caches are flushed."""
        for session_id in list(self.of):
            self.close(session_id)
        self.driver.check_idle()
        assert all(view.session_rows == 0 for view in self.driver.scheduler.memory_views())
        assert self.driver.scheduler.handle(Flush())
        for view in self.driver.scheduler.memory_views():
            assert view.free_pages == view.total_pages - view.reserved_pages
