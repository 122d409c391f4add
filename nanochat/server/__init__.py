"""The engine behind the OpenAI API, for other programs: ``nanochat serve``. Needs the extra ``serve``.

Knows engines and prompts; nothing of terminals, of the app or of its history.
"""
