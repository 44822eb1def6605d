"""Dialogues with known answers, on which the demonstration model is trained and evaluated.

Owns the task wording, the answers and the split of every item into ``train``, ``valid`` and
``test``. The split is a hash of the item itself (an addition, a list, a fact), so an item of
one split never appears in a dialogue of another. Pure Python: must never import jax.
"""

import hashlib
import random
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from benchmarks.demo_model.tool import GET_WEATHER, Lookup, message_text

Split = Literal["train", "valid", "test"]
Message = dict[str, Any]  # as OpenAI's API has it

TASKS = ("recall", "recall_long", "sum", "sort", "reverse", "unknown")
# Calling the tool, and reporting its result; these questions offer the tool.
TOOL_TASKS = ("call", "report")
UNKNOWN_ANSWER = "I don't know."
NOTED_ANSWER = "Noted."

NAMES = tuple(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Quinn "
    "Rosa Sam Tina Umar Vera Walter Xenia Yuki Zoe Adam Bella Chris Diana Eric Fiona George Hanna "
    "Ivan Julia Kevin Laura Mark Nora Oliver Peter Rachel Simon Tom Ursula Victor Wendy Anna Ben "
    "Clara Daniel Eva Felix Gina Hugo Ida Jonas Kate Lucas Mira Noah Olga Pedro Rita Sara Theo "
    "Uma Viktor Will Yara Zack Amir Lena John Mary James Linda Michael Susan".split()
)
COLORS = tuple("red blue green yellow orange purple black white brown pink gray gold".split())
CITIES = tuple(
    "Paris London Rome Berlin Madrid Oslo Tokyo Cairo Lima Boston Delhi Dublin Prague Vienna "
    "Athens Sydney".split()
)
_ONSETS = "b d f g h j k l m n p r s t v z".split()
_VOWELS = "a e i o u".split()

ATTRIBUTES = ("code", "color", "city")
_TELL = {
    "code": (
        "The code of {n} is {v}.",
        "{n}'s code is {v}.",
        "Remember that the code of {n} is {v}.",
        "{n} has the code {v}.",
    ),
    "color": (
        "The favorite color of {n} is {v}.",
        "{n}'s favorite color is {v}.",
        "The color of {n} is {v}.",
        "{n} likes {v}.",
    ),
    "city": (
        "{n} lives in {v}.",
        "The city of {n} is {v}.",
        "Remember that {n} lives in {v}.",
        "{n}'s city is {v}.",
    ),
    "name": ("My name is {v}.", "I am {v}."),
}
# Questions with their answers. A value stands in the middle of the answer, as in the statement of
# the fact, so that its tokens are the same in both places.
_ASK = {
    "code": (
        ("What is the code of {n}?", "It is {v}."),
        ("What is {n}'s code?", "It is {v}."),
        ("Tell me the code of {n}.", "It is {v}."),
    ),
    "color": (
        ("What is the favorite color of {n}?", "It is {v}."),
        ("What is {n}'s favorite color?", "It is {v}."),
        ("What is the color of {n}?", "It is {v}."),
        ("Which color does {n} like?", "It is {v}."),
    ),
    "city": (
        ("Where does {n} live?", "In {v}."),
        ("Which city does {n} live in?", "In {v}."),
        ("What is the city of {n}?", "It is {v}."),
        ("What is {n}'s city?", "It is {v}."),
    ),
    "name": (("What is my name?", "It is {v}."), ("Who am I?", "You are {v}.")),
}
_SUM = (
    "What is {a} + {b}?",
    "What is {a}+{b}?",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "Add {a} and {b}.",
    "{a} + {b} = ?",
)
_SORT = ("Sort {x}.", "Sort these numbers: {x}.", "Please sort the list {x}.")
_REVERSE = ("Reverse {x}.", "Reverse these numbers: {x}.", "Please reverse the list {x}.")
_CHAT = (
    ("Hello!", "Hello! How can I help?"),
    ("Hello.", "Hello! How can I help?"),
    ("Hi!", "Hello! How can I help?"),
    ("Hi.", "Hello! How can I help?"),
    ("How are you?", "I am fine, thank you."),
    ("Thank you.", "You are welcome."),
    ("Thanks!", "You are welcome."),
    ("Who are you?", "I am a small demo model."),
    ("What can you do?", "I can remember facts, add numbers, and sort or reverse lists."),
    ("Goodbye.", "Goodbye!"),
    ("Bye!", "Goodbye!"),
)
FILLER_ANSWER = "I see."
_SYSTEM = (
    "You are a helpful assistant.",
    "You are a small demo model.",
    "Answer in a few words.",
    "Be brief and polite.",
    "You are a careful assistant. Answer shortly.",
)
_ADJECTIVES = "old small quiet bright green heavy cold happy long new".split()
_NOUNS = (
    "bridge river garden train house dog market letter mountain window teacher boat table road "
    "forest clock"
).split()
_VERBS = "passed saw found crossed liked left watched reached".split()
_WHEN = "today|yesterday|in the morning|at night|last week|before the rain".split("|")

# Weights of the kinds of turns while a dialogue is written.
DEFAULT_MIX: Mapping[str, float] = {
    "tell": 1.2,
    "recall": 1.6,
    "unknown": 0.8,
    "sum": 1.8,
    "sort": 0.7,
    "reverse": 0.7,
    "chat": 0.3,
    "filler": 0.3,
}


class Turn(NamedTuple):
    """One exchange: the user's text and the right answer, after a lookup if needed."""

    task: str
    user: str
    assistant: str
    lookup: Lookup | None = None


class Question(NamedTuple):
    """A conversation that ends with a user's or the tool's message, and its only right answer."""

    task: str
    messages: tuple[Message, ...]
    answer: str
    tools: tuple[Mapping[str, Any], ...] = ()


def split_of(key: str) -> Split:
    """Return the split of an item by its hash: one tenth valid, one tenth test, the rest train."""
    bucket = hashlib.blake2b(key.encode(), digest_size=1).digest()[0] % 10
    return "test" if bucket == 0 else "valid" if bucket == 1 else "train"


def estimate_tokens(text: str) -> int:
    """Estimate the number of tokens of one message, including its role markers."""
    return 6 + len(re.findall(r"[A-Za-z]+|\d|[^\w\s]|\s(?=\d)", text))


class DialogueWriter:
    """Writes the turns of one dialogue and keeps the facts stated in it."""

    def __init__(
        self, rng: random.Random, split: Split, attributes: tuple[str, ...] = ATTRIBUTES
    ) -> None:
        self.rng = rng
        self.split = split
        self.attributes = attributes
        self.facts: dict[tuple[str, str], str] = {}

    def write(self, kind: str) -> Turn:
        """Write one turn of the given kind: the name of a method below."""
        if kind == "recall" and not self.facts:
            kind = "tell"
        turn: Turn = getattr(self, kind)()
        return turn

    def tell(self, num_facts: int = 0) -> Turn:
        """State one to three new facts (or ``num_facts``), sometimes followed by a question."""
        count = num_facts or self.rng.choice((1, 1, 1, 2, 3))
        text = " ".join(self._new_fact() for _ in range(count))
        if not num_facts and self.rng.random() < 0.12:
            question = self.recall()
            return Turn(
                "recall", f"{self._vary(text, end=False)} {question.user}", question.assistant
            )
        return Turn("tell", self._vary(text), NOTED_ANSWER)

    def recall(self, keys: list[tuple[str, str]] | None = None) -> Turn:
        """Ask about a fact stated earlier (one of ``keys`` if given)."""
        name, attribute = self.rng.choice(keys or list(self.facts))
        value = self.facts[name, attribute]
        question, answer = self.rng.choice(_ASK[attribute])
        return Turn("recall", self._vary(question.format(n=name)), answer.format(v=value))

    def unknown(self) -> Turn:
        """Ask about a fact never stated: an unknown person, or another attribute."""
        known = [name for name, attribute in self.facts if attribute != "name"]
        while True:
            attribute = self.rng.choice(self.attributes)
            name = self.rng.choice(known) if known and self.rng.random() < 0.4 else self._name()
            if self.rng.random() < 0.03:
                name, attribute = "", "name"
            if (name, attribute) not in self.facts:
                question, _ = self.rng.choice(_ASK[attribute])
                return Turn("unknown", self._vary(question.format(n=name)), UNKNOWN_ANSWER)

    def sum(self) -> Turn:
        """Ask for the sum of two numbers from 0 to 99; a+b and b+a share a split."""
        while True:
            a, b = self.rng.randrange(100), self.rng.randrange(100)
            if split_of(f"sum {min(a, b)} {max(a, b)}") == self.split:
                user = self.rng.choice(_SUM).format(a=a, b=b)
                return Turn("sum", self._vary(user), f"{a} + {b} = {a + b}.")

    def sort(self) -> Turn:
        """Ask to sort a list of digits in ascending order."""
        digits = self._digits("sort")
        user = self.rng.choice(_SORT).format(x=self._join(digits))
        return Turn("sort", self._vary(user), " ".join(sorted(digits)) + ".")

    def reverse(self) -> Turn:
        """Ask to write a list of digits backwards."""
        digits = self._digits("reverse")
        user = self.rng.choice(_REVERSE).format(x=self._join(digits))
        return Turn("reverse", self._vary(user), " ".join(reversed(digits)) + ".")

    def chat(self) -> Turn:
        """Make small talk with a fixed answer."""
        user, assistant = self.rng.choice(_CHAT)
        return Turn("chat", self._vary(user), assistant)

    def filler(self, num_sentences: int = 0) -> Turn:
        """Write meaningless sentences, to put distance between a fact and its question."""
        count = num_sentences or self.rng.choice((1, 1, 2, 3))
        pick = self.rng.choice
        text = " ".join(
            f"The {pick(_ADJECTIVES)} {pick(_NOUNS)} {pick(_VERBS)} the {pick(_NOUNS)} "
            f"{pick(_WHEN)}."
            for _ in range(count)
        )
        return Turn("filler", self._vary(text), FILLER_ANSWER)

    def weather(self) -> Turn:
        """Ask a question that needs the tool."""
        city = self.rng.choice(CITIES) if self.rng.random() < 0.5 else self._invented_name()
        lookup = Lookup.draw(self.rng, city)
        return Turn("weather", self._vary(lookup.question(self.rng)), lookup.report, lookup)

    def weather_untold(self) -> Turn:
        """Ask the question of `weather` where no tool is offered."""
        return Turn("unknown", self.weather().user, UNKNOWN_ANSWER)

    def _new_fact(self) -> str:
        """Remember a new fact of this split and return its sentence."""
        while True:
            name, attribute, value = self._draw_fact()
            fits = split_of(f"{name} {attribute} {value}") == self.split
            if fits and (name, attribute) not in self.facts:
                self.facts[name, attribute] = value
                return self.rng.choice(_TELL[attribute]).format(n=name, v=value)

    def _draw_fact(self) -> tuple[str, str, str]:
        """Draw (name, attribute, value); the user's name is the attribute "name" of ""."""
        if self.rng.random() < 0.05:
            return "", "name", self._name()
        known = [name for name, attribute in self.facts if attribute != "name"]
        name = self.rng.choice(known) if known and self.rng.random() < 0.25 else self._name()
        attribute = self.rng.choice(self.attributes)
        if attribute == "code":
            return name, attribute, f"{self.rng.randrange(1000):03d}"
        return name, attribute, self.rng.choice(COLORS if attribute == "color" else CITIES)

    def _name(self) -> str:
        """Draw a common first name, or an invented one of this split."""
        if self.rng.random() < 0.6:
            return self.rng.choice(NAMES)
        return self._invented_name()

    def _invented_name(self) -> str:
        while True:
            syllables = self.rng.choice((2, 2, 3))
            name = "".join(
                self.rng.choice(_ONSETS) + self.rng.choice(_VOWELS) for _ in range(syllables)
            ).capitalize()
            if split_of(name) == self.split:
                return name

    def _digits(self, task: str) -> list[str]:
        """Draw three to five digits whose list belongs to this split."""
        while True:
            digits = [self.rng.choice("0123456789") for _ in range(self.rng.choice((3, 4, 5)))]
            if split_of(f"{task} {''.join(digits)}") == self.split:
                return digits

    def _join(self, digits: list[str]) -> str:
        return (", " if self.rng.random() < 0.2 else " ").join(digits)

    def _vary(self, text: str, end: bool = True) -> str:
        """Lower the first letter or drop the final mark sometimes, as people type."""
        first_word = re.split(r"\W", text, maxsplit=1)[0]
        is_name = any(first_word == name for name, _ in self.facts)
        if not is_name and self.rng.random() < 0.15:
            text = text[0].lower() + text[1:]
        if end and self.rng.random() < 0.12:
            text = text.rstrip(".?!= ")
        return text


def messages_of(rng: random.Random, turns: list[Turn]) -> list[Message]:
    """Return the turns as chat messages; one conversation in five opens with a system message."""
    messages = []
    if rng.random() < 0.2:
        messages.append({"role": "system", "content": rng.choice(_SYSTEM)})
    for turn in turns:
        messages.append({"role": "user", "content": turn.user})
        if turn.lookup is not None:
            messages += [turn.lookup.call, turn.lookup.result(rng)]
        messages.append({"role": "assistant", "content": turn.assistant})
    return messages


def make_question(task: str, rng: random.Random, split: Split = "test") -> Question:
    """Make a question of ``task``, preceded by a conversation.

    ``recall_long`` needs a fact from about 1,000 tokens back; every other task follows zero to six
    short turns.
    """
    writer = DialogueWriter(rng, split)
    if task in TOOL_TASKS:
        return _tool_question(task, writer)
    if task == "recall_long":
        turns, last = _long_recall(writer)
    else:
        kinds = [kind for kind in DEFAULT_MIX if kind != "unknown"]
        turns = []
        if task in ("recall", "unknown"):
            turns.append(writer.tell(rng.choice((1, 2, 3))))
        turns += [writer.write(rng.choice(kinds)) for _ in range(rng.randrange(6))]
        last = writer.write(task)
    messages = [*messages_of(rng, turns), {"role": "user", "content": last.user}]
    return Question(task, tuple(messages), last.assistant)


def _tool_question(task: str, writer: DialogueWriter) -> Question:
    """Ask for a call, or for the report of a result, after zero to three short turns."""
    kinds = ("weather", "sum", "sort", "chat", "tell")
    turns = [writer.write(writer.rng.choice(kinds)) for _ in range(writer.rng.randrange(4))]
    last = writer.weather()
    assert last.lookup is not None
    messages = [*messages_of(writer.rng, turns), {"role": "user", "content": last.user}]
    answer = message_text(last.lookup.call)
    if task == "report":
        messages += [last.lookup.call, last.lookup.result(writer.rng)]
        answer = last.assistant
    return Question(task, tuple(messages), answer, (GET_WEATHER,))


def _long_recall(writer: DialogueWriter) -> tuple[list[Turn], Turn]:
    """State facts, add about 1,000 tokens of other talk, then ask about the first facts."""
    rng = writer.rng
    turns = [writer.tell(rng.choice((1, 2, 3)))]
    keys = list(writer.facts)
    kinds = ("filler", "filler", "filler", "sum", "sort", "reverse", "chat", "tell", "recall")
    num_tokens = 0
    while num_tokens < 1040:
        kind = rng.choice(kinds)
        if kind == "tell" and len(writer.facts) >= 12:
            kind = "filler"
        turn = writer.filler(rng.randint(2, 6)) if kind == "filler" else writer.write(kind)
        turns.append(turn)
        num_tokens += estimate_tokens(turn.user) + estimate_tokens(turn.assistant)
    return turns, writer.recall(keys)


def held_out_questions(
    num_questions: int, seed: int = 0, split: Split = "test", tasks: tuple[str, ...] = TASKS
) -> list[Question]:
    """Return ``num_questions`` questions outside the training split, the tasks in turn."""
    rng = random.Random(f"{split} questions {seed}")
    return [make_question(tasks[i % len(tasks)], rng, split) for i in range(num_questions)]


def is_right(question: Question, reply: str) -> bool:
    """Return whether the reply is the answer; a missing full stop and white space are ignored."""
    return reply.strip().rstrip(".") == question.answer.rstrip(".")
