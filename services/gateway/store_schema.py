"""The tables of the response store. `packed` columns hold zlib-compressed JSON."""

from typing import Final

VERSION: Final = 1

SCHEMA: Final = (
    # `items`: the whole input, earlier turns included, so that a turn reads one row; one a line.
    # `plan`: of a background response that is not finished: the request to run (again).
    # `epoch` fences: it rises with every claim, cancel and end, and old writers change nothing.
    """CREATE TABLE IF NOT EXISTS responses (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        created_s REAL NOT NULL,
        expires_s REAL NOT NULL,
        status TEXT NOT NULL,
        is_background INTEGER NOT NULL,
        owner TEXT NOT NULL,
        epoch INTEGER NOT NULL,
        num_attempts INTEGER NOT NULL,
        bytes INTEGER NOT NULL,
        body BLOB NOT NULL,
        items BLOB NOT NULL,
        plan BLOB
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS responses_by_tenant ON responses (tenant, created_s, bytes)",
    "CREATE INDEX IF NOT EXISTS responses_by_expiry ON responses (expires_s)",
    """CREATE INDEX IF NOT EXISTS responses_unfinished ON responses (status)
        WHERE status IN ('queued', 'in_progress')""",
    # Events `first_seq` to `last_seq` of a background stream, one JSON document a line.
    """CREATE TABLE IF NOT EXISTS events (
        response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        first_seq INTEGER NOT NULL,
        last_seq INTEGER NOT NULL,
        packed BLOB NOT NULL,
        PRIMARY KEY (response_id, first_seq)
    ) WITHOUT ROWID""",
    # Where an `item_reference` leads.
    """CREATE TABLE IF NOT EXISTS item_index (
        item_id TEXT NOT NULL,
        response_id TEXT NOT NULL REFERENCES responses (id) ON DELETE CASCADE,
        PRIMARY KEY (item_id, response_id)
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS item_index_by_response ON item_index (response_id)",
    """CREATE TABLE IF NOT EXISTS conversations (
        id TEXT PRIMARY KEY,
        tenant TEXT NOT NULL,
        created_s REAL NOT NULL,
        expires_s REAL NOT NULL,
        bytes INTEGER NOT NULL,
        raw_bytes INTEGER NOT NULL,
        metadata TEXT NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS conversations_by_tenant ON conversations (tenant, bytes)",
    "CREATE INDEX IF NOT EXISTS conversations_by_expiry ON conversations (expires_s)",
    """CREATE TABLE IF NOT EXISTS conversation_items (
        position INTEGER PRIMARY KEY AUTOINCREMENT,
        conversation_id TEXT NOT NULL REFERENCES conversations (id) ON DELETE CASCADE,
        item_id TEXT NOT NULL,
        raw_bytes INTEGER NOT NULL,
        packed BLOB NOT NULL,
        UNIQUE (conversation_id, item_id)
    )""",
    """CREATE INDEX IF NOT EXISTS conversation_items_in_order
        ON conversation_items (conversation_id, position)""",
    "CREATE INDEX IF NOT EXISTS conversation_items_by_id ON conversation_items (item_id)",
)
