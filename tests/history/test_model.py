"""The tree of messages against a plain model of it, through random operations."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from nanochat.history import History, Message


@dataclass
class Node:
    """A message, or with parent None the root of a chat."""

    parent: Node | None
    text: str = ""
    id: int | None = None
    children: list[Node] = field(default_factory=list)
    chosen: Node | None = None

    def add(self, text: str, message_id: int) -> Node:
        self.chosen = Node(self, text, message_id)
        self.children.append(self.chosen)
        return self.chosen

    def path(self) -> list[Node]:
        child = self.chosen
        return [] if child is None else [child, *child.path()]

    def all(self) -> list[Node]:
        return self.children + [node for child in self.children for node in child.all()]

    def is_in(self, root: Node) -> bool:
        return self is root or (
            self.parent is not None and self in self.parent.children and self.parent.is_in(root)
        )


class HistoryMachine(RuleBasedStateMachine):
    chats = Bundle("chats")
    nodes = Bundle("nodes")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.open()
        self.roots: dict[int, Node] = {}
        self.count = 0

    def open(self) -> None:
        self.history = History(Path(self.folder.name) / "history.db")

    def teardown(self) -> None:
        self.history.close()
        self.folder.cleanup()

    def chat_of(self, node: Node) -> int | None:
        return next((chat_id for chat_id, root in self.roots.items() if node.is_in(root)), None)

    def add(self, chat_id: int, parent: Node) -> Node:
        self.count += 1
        text = f"text{self.count}"
        if self.count % 3:
            message_id = self.history.add_message(chat_id, parent.id, text)
        else:
            message_id = self.history.begin_answer(chat_id, parent.id)
            self.history.grow_answer(message_id, text[:2])
            self.history.grow_answer(message_id, text[2:])
        return parent.add(text, message_id)

    @rule(target=chats)
    def create_chat(self) -> int:
        chat_id = self.history.create_chat("Chat")
        self.roots[chat_id] = Node(None)
        return chat_id

    @rule(target=nodes, chat_id=chats)
    def begin_again(self, chat_id: int) -> object:
        return self.add(chat_id, self.roots[chat_id]) if chat_id in self.roots else multiple()

    @rule(target=nodes, parent=nodes)
    def follow(self, parent: Node) -> object:
        chat_id = self.chat_of(parent)
        return multiple() if chat_id is None else self.add(chat_id, parent)

    @rule(node=nodes)
    def activate(self, node: Node) -> None:
        if self.chat_of(node) is not None:
            self.history.activate(node.id or 0)
            while node.parent is not None:
                node.parent.chosen, node = node, node.parent

    @rule(node=consumes(nodes))
    def delete_message(self, node: Node) -> None:
        if self.chat_of(node) is not None and node.parent is not None:
            self.history.delete_message(node.id or 0)
            siblings = node.parent.children
            siblings.remove(node)
            if node.parent.chosen is node:
                node.parent.chosen = siblings[-1] if siblings else None

    @rule(target=chats, chat_id=chats, share=st.floats(0, 1))
    def fork_chat(self, chat_id: int, share: float) -> object:
        if chat_id not in self.roots:
            return multiple()
        path = self.roots[chat_id].path()
        path = path[: round(len(path) * share)]
        copy_id, ids = self.history.fork_chat(chat_id, [node.id or 0 for node in path], "Fork")
        end = self.roots[copy_id] = Node(None)
        for node, message_id in zip(path, ids, strict=True):
            end = end.add(node.text, message_id)
        return copy_id

    @rule(target=chats, chat_id=chats)
    def export_and_import(self, chat_id: int) -> object:
        if chat_id not in self.roots:
            return multiple()
        copy_id = self.history.import_json(self.history.export_json(chat_id))
        messages = {message.text: message for message in self.history.tree(copy_id)}
        self.roots[copy_id] = copied(self.roots[chat_id], None, messages)
        return copy_id

    @rule(chat_id=consumes(chats))
    def delete_chat(self, chat_id: int) -> None:
        self.history.delete_chat(chat_id)
        self.roots.pop(chat_id, None)

    @rule(chat_id=chats)
    def clear_chat(self, chat_id: int) -> None:
        if chat_id in self.roots:
            self.history.clear_chat(chat_id)
            self.roots[chat_id] = Node(None)

    @rule()
    def reopen(self) -> None:
        self.history.close()
        self.open()

    @invariant()
    def same_as_the_model(self) -> None:
        assert {chat.id for chat in self.history.list_chats()} == set(self.roots)
        for chat_id, root in self.roots.items():
            assert [m.id for m in self.history.path(chat_id)] == [node.id for node in root.path()]
            tree = {m.id: m for m in self.history.tree(chat_id)}
            nodes = root.all()
            assert set(tree) == {node.id for node in nodes}
            for node in nodes:
                assert node.parent is not None
                message, siblings = tree[node.id or 0], node.parent.children
                assert (message.text, message.parent_id) == (node.text, node.parent.id)
                assert message.branch == (siblings.index(node) + 1, len(siblings))
                assert message.is_active == (node.parent.chosen is node)
            if nodes:
                siblings = (nodes[-1].parent or root).children
                assert self.history.siblings(nodes[-1].id or 0) == [node.id for node in siblings]


def copied(node: Node, parent: Node | None, messages: dict[str, Message]) -> Node:
    """The same tree with the ids of an imported chat; texts are unique within a chat."""
    copy = Node(parent, node.text, messages[node.text].id if parent is not None else None)
    copy.children = [copied(child, copy, messages) for child in node.children]
    copy.chosen = copy.children[node.children.index(node.chosen)] if node.chosen is not None else None
    return copy


TestHistoryMachine = HistoryMachine.TestCase
TestHistoryMachine.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, derandomize=True
)
