"""The tree of messages, forks, titles and the order of tabs, without widgets."""

from __future__ import annotations

import pytest

from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.ui.chat import Chat
from nanochat.ui.reasoning import AnswerText
from nanochat.ui.titles import MAX_TITLE, NEW_TITLE, TITLE_LENGTH, short_title, title_from
from nanochat.ui.workspace import Workspace


def output(text: str, prompt_tokens: int = 10) -> RequestOutput:
    return RequestOutput(text, [1, 2], "stop", None, None, RequestMetrics(prompt_tokens, 0, 2))


def answered(chat: Chat, *turns: tuple[str, str]) -> Chat:
    for question, answer in turns:
        chat.ask(question)
        chat.end_answer(output(answer))
    return chat


def texts(chat: Chat) -> list[str]:
    return [message.text if message.role == "user" else message.answer.text for message in chat.path]


def test_answering_again_makes_a_branch_and_loses_nothing() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"))
    question = chat.path[0]
    chat.begin_answer(question)
    chat.end_answer(output("b1"))
    assert texts(chat) == ["q1", "b1"]
    assert chat.path[1].branch == (2, 2)
    assert chat.choose_branch(chat.path[1], -1)
    assert texts(chat) == ["q1", "a1", "q2", "a2"]
    assert not chat.choose_branch(chat.path[1], -1)
    assert not chat.choose_branch(chat.path[0], 1)


def test_a_withdrawn_question_leaves_no_trace() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    chat.ask("too long")
    assert chat.withdraw()[0] == "too long"
    assert texts(chat) == ["q1", "a1"]
    assert not chat.is_busy


@pytest.mark.parametrize("title", [NEW_TITLE, "Mine"])
def test_a_withdrawn_first_question_takes_its_title_along(title: str) -> None:
    chat = Chat(title=title)
    chat.ask("too long")
    chat.withdraw()
    assert chat.title == title


def test_withdrawing_a_second_answer_keeps_the_question_and_the_first() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    chat.begin_answer(chat.path[0])
    assert chat.withdraw()[0] == ""
    assert texts(chat) == ["q1", "a1"]


@pytest.mark.parametrize("shown", [0, 1, 2])
def test_a_withdrawn_answer_leaves_the_one_in_view_that_was_in_view(shown: int) -> None:
    chat = answered(Chat(), ("q1", "a1"))
    question = chat.path[0]
    for text in ("b1", "c1"):
        chat.begin_answer(question)
        chat.end_answer(output(text))
    question.chosen = shown
    before = texts(chat)
    chat.begin_answer(question)
    chat.withdraw()
    assert texts(chat) == before


def test_a_fork_has_the_path_and_lives_on_its_own() -> None:
    chat = answered(Chat(system="s", sampling={"seed": 1}), ("q1", "a1"))
    fork = chat.fork()
    answered(chat, ("q2", "a2"))
    answered(fork, ("q3", "a3"))
    assert texts(chat) == ["q1", "a1", "q2", "a2"]
    assert texts(fork) == ["q1", "a1", "q3", "a3"]
    assert (fork.system, fork.sampling, fork.started) == ("s", {"seed": 1}, chat.started)
    assert fork.id != chat.id


def test_dropped_turns_leave_the_context_but_the_last_one_stays() -> None:
    chat = answered(Chat(), ("q1", "a1"), ("q2", "a2"), ("q3", "a3"))
    chat.leave_out(2)
    assert [message.text for message in chat.context if message.role == "user"] == ["q3"]
    assert chat.droppable_turns == 0
    chat.leave_out(1)
    assert chat.context == chat.path[4:]


def test_turns_are_left_out_where_the_path_goes_through_them() -> None:
    chat = answered(Chat(), *((f"q{number}", f"a{number}") for number in range(6)))
    chat.leave_out(2)
    chat.leave_out(3)
    assert [message.text for message in chat.context if message.role == "user"] == ["q5"]
    fork = answered(chat.fork(), ("q6", "a6"))
    assert [message.text for message in fork.context if message.role == "user"] == ["q5", "q6"]
    chat.editing = chat.path[10]
    answered(chat, ("other q5", "a5"))
    assert [message.text for message in chat.context if message.role == "user"] == ["other q5"]
    chat.editing = chat.path[0]
    answered(chat, ("other q0", "a0"), ("other q1", "a1"))
    assert chat.context == chat.path
    assert chat.droppable_turns == 1
    chat.choose_branch(chat.path[0], -1)
    assert [message.text for message in chat.context if message.role == "user"] == ["other q5"]


def test_context_tokens_follow_the_chosen_branch() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    assert chat.context_tokens == 12
    chat.ask("q2")
    assert chat.context_tokens == 12
    chat.end_answer(output("a2", prompt_tokens=100))
    assert chat.context_tokens == 102


@pytest.mark.parametrize(
    ("text", "title"),
    [
        ("Hello", "Hello"),
        (
            "Compose a travel post about Hawaii" + ", please" * 9,
            "Compose a travel post about Hawaii, please, please, please…",
        ),
        ("  two\nlines ", "two lines"),
        ("x" * 70, "x" * (MAX_TITLE - 1) + "…"),
        ("\x1b[31m", "␛[31m"),
    ],
)
def test_titles_come_from_the_first_message(text: str, title: str) -> None:
    assert title_from(text) == title
    chat = Chat()
    assert chat.title == NEW_TITLE
    answered(chat, (text, "a"), ("second", "b"))
    assert chat.title == title


def test_a_tab_shows_the_beginning_of_a_title() -> None:
    assert short_title("Hello") == "Hello"
    assert short_title("Compose a travel post about Hawaii") == "Compose a travel post…"
    assert short_title("x" * 50) == "x" * (TITLE_LENGTH - 1) + "…"


def test_clearing_starts_over() -> None:
    chat = answered(Chat(), ("q1", "a1"))
    chat.clear()
    assert (chat.path, chat.title, chat.context_tokens) == ([], NEW_TITLE, 0)


def test_reasoning_is_told_from_the_answer_as_it_streams() -> None:
    text = AnswerText()
    text.tags = ("<think>", "</think>")
    seen = []
    for piece in ("<think>", "let me", " see</thi", "nk>\n\nFour", "."):
        text.append(piece, 1)
        seen.append((text.is_reasoning, text.reasoning, text.answer))
    assert seen == [
        (True, "", ""),
        (True, "let me", ""),
        (True, "let me see</thi", ""),
        (False, "let me see", "Four"),
        (False, "let me see", "Four."),
    ]
    assert (text.reasoning_tokens, text.num_tokens) == (4, 5)


def test_reasoning_that_was_never_opened_is_found_at_its_end() -> None:
    text = AnswerText()
    text.tags = ("<think>", "</think>")
    text.append("hmm\n</think>\n\nYes", 3)
    assert (text.reasoning, text.answer) == ("hmm", "Yes")
    text.replace("hmm\n</think>")
    assert (text.reasoning, text.answer) == ("hmm", "")


@pytest.mark.parametrize(
    "whole",
    [
        "The tag `</think>` ends it.\nSo it does.",
        "It ends with </think>",
        "</think> ends it",
        "As in\n```\n<think>\nso\n</think>\n```\nit is.",
        "<",
        "<thin line",
    ],
)
def test_an_answer_that_only_mentions_a_tag_is_all_answer(whole: str) -> None:
    text = AnswerText()
    text.tags = ("<think>", "</think>")
    for character in whole:
        text.append(character, 1)
        assert text.reasoning == ""
        assert text.answer in (text.text, "")
    text.replace(whole)
    assert (text.is_reasoning, text.reasoning, text.answer) == (False, "", whole)


def test_a_part_of_the_opening_tag_is_never_shown() -> None:
    text = AnswerText()
    text.tags = ("<think>", "</think>")
    seen = []
    for piece in ("\n<thi", "nk>", "so</think>Yes"):
        text.append(piece, 1)
        seen.append((text.reasoning, text.answer))
    assert seen == [("", ""), ("", ""), ("so", "Yes")]


def test_a_model_without_reasoning_shows_its_tags() -> None:
    text = AnswerText()
    text.append("<think>x</think>y", 3)
    assert (text.reasoning, text.answer) == ("", "<think>x</think>y")


def test_tabs_keep_their_order_and_colours() -> None:
    first = Chat()
    workspace = Workspace(first)
    others = [Chat() for _ in range(3)]
    for chat in others:
        workspace.add(chat)
    assert workspace.active is first
    assert [workspace.slots[chat.id] for chat in workspace.chats] == [0, 1, 2, 3]
    workspace.show(others[0])
    assert workspace.neighbour(-1) is first
    assert workspace.neighbour(-2) is others[2]
    workspace.close(others[0])
    assert workspace.active is others[1]
    newest = Chat()
    workspace.add(newest)
    workspace.show(newest)
    assert workspace.slots[newest.id] == 1
    workspace.close(newest)
    assert workspace.active is others[2]
    assert workspace.find(newest.id) is None


def test_a_fork_is_named_after_its_chat() -> None:
    workspace = Workspace(answered(Chat(), ("q", "a")))
    assert workspace.fork(workspace.active).title == f"Fork of {workspace.active.title}"
