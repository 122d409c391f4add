"""The tables, and the steps from each version of them to the next. Knows no connection.

``PRAGMA user_version`` counts the steps that a file has taken. A step never changes once released.
"""

from __future__ import annotations

APPLICATION_ID = 0x6E616E6F
"""Marks the file as ours ("nano")."""

Migration = tuple[str, ...]
"""Statements of one step, run in one transaction."""

_TABLES: Migration = (
    # Ids of chats and messages are made from the id of the session that makes them, so that they are
    # known before anything is written and two sessions never make the same. So a session's id must
    # never be used again.
    "CREATE TABLE sessions (id INTEGER PRIMARY KEY AUTOINCREMENT, started_at REAL NOT NULL) STRICT",
    """CREATE TABLE chats (
        id INTEGER PRIMARY KEY,
        title TEXT NOT NULL,
        system TEXT,
        model TEXT NOT NULL,
        sampling TEXT NOT NULL,
        dropped_turns INTEGER NOT NULL DEFAULT 0 CHECK (dropped_turns >= 0),
        created_at REAL NOT NULL,
        updated_at REAL NOT NULL,
        -- Open in a tab of that session, which is running or was the last to have it open.
        tab_session INTEGER,
        tab_position INTEGER,
        -- Whether it is the session's tab in view.
        tab_in_view INTEGER NOT NULL DEFAULT 0,
        -- Where the active path begins. The newest branch if it is empty or no longer there.
        active_child_id INTEGER
    ) STRICT""",
    "CREATE INDEX chats_by_update ON chats (updated_at, id)",
    "CREATE INDEX chats_open ON chats (tab_session) WHERE tab_position IS NOT NULL",
    """CREATE TABLE messages (
        id INTEGER PRIMARY KEY,
        chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        parent_id INTEGER,
        active_child_id INTEGER,
        role TEXT NOT NULL CHECK (role IN ('user', 'assistant')),
        state TEXT NOT NULL CHECK (state IN ('streaming', 'complete', 'interrupted', 'error')),
        text TEXT NOT NULL,
        token_ids BLOB NOT NULL,
        model TEXT NOT NULL,
        finish_reason TEXT,
        error TEXT,
        metrics TEXT NOT NULL,
        created_at REAL NOT NULL,
        finished_at REAL,
        -- Who is streaming it.
        session_id INTEGER,
        UNIQUE (chat_id, id),
        -- A parent is a message of the same chat. No cascade: a long chat is deeper than SQLite lets
        -- actions nest, so whole subtrees are deleted in one statement.
        FOREIGN KEY (chat_id, parent_id) REFERENCES messages (chat_id, id)
    ) STRICT""",
    "CREATE INDEX messages_by_parent ON messages (chat_id, parent_id)",
    "CREATE INDEX messages_streaming ON messages (session_id) WHERE state = 'streaming'",
    # The index keeps no text of its own, and no sizes: hits are ordered by age, not by rank.
    """CREATE VIRTUAL TABLE message_index USING fts5 (
        text, content = '', columnsize = 0, tokenize = 'unicode61 remove_diacritics 2'
    )""",
    # An answer is indexed when it ends, not each time that it grows.
    """CREATE TRIGGER message_added AFTER INSERT ON messages WHEN new.state <> 'streaming' BEGIN
        INSERT INTO message_index (rowid, text) VALUES (new.id, segmented(new.text));
    END""",
    """CREATE TRIGGER message_deleted AFTER DELETE ON messages WHEN old.state <> 'streaming' BEGIN
        INSERT INTO message_index (message_index, rowid, text)
        VALUES ('delete', old.id, segmented(old.text));
    END""",
    # One trigger, because the order of two isn't defined: the old words must go before the new ones come.
    """CREATE TRIGGER message_changed AFTER UPDATE OF text, state ON messages
    WHEN new.text <> old.text OR (new.state = 'streaming') <> (old.state = 'streaming') BEGIN
        INSERT INTO message_index (message_index, rowid, text)
        SELECT 'delete', old.id, segmented(old.text) WHERE old.state <> 'streaming';
        INSERT INTO message_index (rowid, text)
        SELECT new.id, segmented(new.text) WHERE new.state <> 'streaming';
    END""",
    f"PRAGMA application_id = {APPLICATION_ID}",
)

_LETTERS: Migration = (
    # Without an index of first letters, a search for single letters would join the lists of nearly all words.
    "DROP TABLE message_index",
    """CREATE VIRTUAL TABLE message_index USING fts5 (
        text, content = '', columnsize = 0, prefix = '1', tokenize = 'unicode61 remove_diacritics 2'
    )""",
    """INSERT INTO message_index (rowid, text)
    SELECT id, segmented(text) FROM messages WHERE state <> 'streaming'""",
)

_DRAFTS: Migration = (
    # What stands in a prompt, by the session whose tab it is: two may have the same chat open.
    """CREATE TABLE drafts (
        chat_id INTEGER NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
        session_id INTEGER NOT NULL,
        text TEXT NOT NULL,
        PRIMARY KEY (chat_id, session_id)
    ) STRICT""",
)

_LEFT_OUT: Migration = (
    # The last message that isn't sent, because the user chose so. A number of turns would count on every branch,
    # also on those that had none of these turns.
    "ALTER TABLE chats ADD COLUMN left_out_id INTEGER",
    # On the active path: what precedes the first turn that was sent. The last turn always was.
    """WITH RECURSIVE path (chat_id, id, parent_id, role, turn) AS (
        SELECT chats.id, message.id, NULL, message.role, message.role = 'user'
        FROM chats JOIN messages AS message ON message.id = coalesce(
            (SELECT id FROM messages WHERE chat_id = chats.id AND parent_id IS NULL AND id = active_child_id),
            (SELECT max(id) FROM messages WHERE chat_id = chats.id AND parent_id IS NULL))
        WHERE chats.dropped_turns > 0
        UNION ALL
        SELECT path.chat_id, message.id, path.id, message.role, path.turn + (message.role = 'user')
        FROM path JOIN messages AS parent ON parent.id = path.id JOIN messages AS message ON message.id = coalesce(
            (SELECT id FROM messages
             WHERE chat_id = path.chat_id AND parent_id = path.id AND id = parent.active_child_id),
            (SELECT max(id) FROM messages WHERE chat_id = path.chat_id AND parent_id = path.id))
    )
    UPDATE chats SET left_out_id = first.parent_id
    FROM (
        SELECT path.chat_id, path.parent_id, max(path.turn)
        FROM path JOIN chats ON chats.id = path.chat_id
        WHERE path.role = 'user' AND path.turn <= chats.dropped_turns + 1 GROUP BY path.chat_id
    ) AS first
    WHERE first.chat_id = chats.id""",
    "ALTER TABLE chats DROP COLUMN dropped_turns",
)

MIGRATIONS: tuple[Migration, ...] = (_TABLES, _LETTERS, _DRAFTS, _LEFT_OUT)
