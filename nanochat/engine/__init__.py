"""The engine: requests in, tokens out. Knows nothing of terminals, chats or files of chats."""
