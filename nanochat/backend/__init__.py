"""What answers chats: the engine of this process, or a server that speaks OpenAI's API.

:class:`nanochat.backend.interface.Backend` is all that the app and ``ask`` know of it. This package knows no
widget and no terminal.
"""
