"""What goes wrong with a server, in one sentence that says what to do. What the server says is not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import httpx2
import openai

from nanochat.backend.dropping import drop_offer
from nanochat.backend.interface import DropOffer, Refused, Turn
from nanochat.backend.remote.client import SILENCE_TIMEOUT_S, TooMuch
from nanochat.backend.remote.config import RemoteConfig
from nanochat.backend.remote.whole import NoAnswer
from nanochat.errors import NanochatError, reason_of
from nanochat.sanitize import sanitize_line

MAX_WORDS = 300
"""Characters of a server's own words that are shown."""
_TOO_LONG = re.compile(
    r"context[ _]length|context_length_exceeded|context window|maximum model length|too many tokens", re.I
)
_LIMIT = (
    re.compile(r"(?:context|model)[ _](?:length|window|len)\D{0,24}(\d{2,9})", re.I),
    re.compile(r"at most (\d{2,9}) fit", re.I),
)
_PROMPT = (
    re.compile(r"\((\d{1,9}) in the messages", re.I),
    re.compile(r"(\d{1,9})(?: text)? tokens from the input", re.I),
    re.compile(r"request has (\d{1,9}) input tokens", re.I),
    re.compile(r"input \((\d{1,9}) tokens\)", re.I),
    re.compile(r"prompt (?:contains|has|is|of) (?:at least )?(\d{1,9})", re.I),  # also nanochat's own
    re.compile(r"(?:requested|resulted in) (\d{1,9}) tokens", re.I),
)
"""How servers tell a model's context and a prompt's length, in tokens; the first that fits counts."""


class Explainer:
    """Turns errors into sentences about one server, without ever repeating its key."""

    def __init__(self, config: RemoteConfig, key: str | None) -> None:
        self._config, self._key = config, key
        self.place = self.words(config.place, 100)

    def words(self, text: object, limit: int = MAX_WORDS) -> str:
        """A server's own words, fit to be shown: printable, on one line, without the key."""
        shown = self._without_key(str(text)[: 8 * limit])
        # Once more, as what is left out of a text may have stood within the key.
        return self._without_key(sanitize_line(shown, limit)).rstrip(".")

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "•••") if self._key else text

    def sentence(self, error: BaseException) -> str:
        """What has gone wrong, and what to do about it."""
        if isinstance(error, openai.APIStatusError):
            return self._status(error.status_code, message_of(error), error)
        if isinstance(error, openai.APITimeoutError) or isinstance(error.__cause__, httpx2.TimeoutException):
            return f"{self.place} did not answer in time; is it busy, or the address wrong?"
        if isinstance(error, openai.APIConnectionError):
            return self._connection(error.__cause__ or error)
        if isinstance(error, httpx2.HTTPError):
            return self._connection(error)
        if isinstance(error, TooMuch):
            return f"{self.place} {error}; that is not taken."
        if isinstance(error, openai.APIError):  # told in the midst of a stream
            return f"{self.place} has failed: {self.words(message_of(error))}."
        # Its words are Python's, about what the server has sent; they would help nobody.
        return self.no_such_server(str(error) if isinstance(error, NoAnswer) else "it sends no answer")

    def no_such_server(self, why: str) -> str:
        """It answers, but not in the API's terms."""
        return f"{self.place} doesn't answer as an OpenAI-compatible server does ({why}); check the address."

    def no_list(self) -> str:
        """It says that it has no list of models, and none was named."""
        base = self._config.base_url
        if base.endswith("/v1"):
            return f"{self.place} doesn't list its models; name one with --model."
        return (
            f"{self.place} has no list of models under {self.words(base, 200)}: most addresses end in /v1 or in "
            "nothing. Check it, or name a model with --model."
        )

    def lost(self, error: BaseException | None) -> str:
        """The answer broke off in its midst."""
        if isinstance(error, openai.APITimeoutError):
            what = f"{self.place} has said nothing for {SILENCE_TIMEOUT_S:.0f} seconds"
        elif isinstance(error, TooMuch):
            what = f"{self.place} {error}"
        elif isinstance(error, (ValueError, TypeError, AttributeError, RecursionError)):
            what = f"{self.place} sent something in mid-answer that is no part of one"
        elif isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
            what = f"{self.place} has failed in mid-answer: {self.words(message_of(error), 160)}"
        else:
            what = f"The connection to {self.place} broke in mid-answer"
        return f"{what}. What had come of it stays."

    def refusal(
        self, error: openai.APIError, turn: Turn, num_characters: int, limit: int | None
    ) -> NanochatError:
        """The same for a turn that was refused; with an offer where leaving out turns would help.

        Args:
            num_characters: of all messages that were sent.
            limit: the model's context in tokens, where the server has told it before.
        """
        said = message_of(error)
        status = getattr(error, "status_code", 400)  # or it came in the midst of a stream
        if status not in (400, 413, 422) or not _TOO_LONG.search(f"{error.code} {said}"):
            return NanochatError(self.sentence(error))
        limit, tokens = limit or _number(_LIMIT, said), _number(_PROMPT, said)
        offer = None
        if limit and tokens and num_characters:
            offer = _offer(turn, limit, tokens, num_characters)
        could_drop = offer is None and len(turn.messages) > 1
        hint = " /drop 1 leaves out the oldest turn." if could_drop else ""
        return Refused(f"{self.place} finds the prompt too long: {self.words(said)}.{hint}", offer)

    def _status(self, status: int, said: str, error: openai.APIStatusError) -> str:
        place, variable = self.place, self._config.api_key_env
        words = f": {self.words(said)}" if said else ""
        if status == 401:
            way_out = (
                f"the key in {variable} is not the right one"
                if variable
                else "it wants a key: --api-key-env NAME says which variable holds it"
            )
            return f"{place} does not let you in (401); {way_out}."
        if status == 403:
            return f"{place} forbids this (403){words}."
        if status == 404 and "model" in said.lower():
            return f"{place} does not have this model (404){words}; choose another."
        if status == 404:
            base = self._config.base_url
            hint = "" if base.endswith("/v1") else " Most addresses end in /v1 or in nothing."
            return f"{place} has nothing at {base} (404); is the path of the address right?{hint}"
        if status == 429:
            return f"{place} has too much to do, or you have asked too often (429){words}. Try again in a moment."
        if status >= 500:
            return f"{place} has failed ({status}){words}. Try again, or look into the server's log."
        if 300 <= status < 400:
            target = self.words(error.response.headers.get("location", "elsewhere"), 200)
            return f"{place} sends us on to {target} ({status}); give that address."
        return f"{place} refuses the request ({status}){words}."

    def _connection(self, cause: BaseException) -> str:
        why = self.words(reason_of(cause), 160)
        if isinstance(cause, httpx2.RemoteProtocolError) and "disconnected" not in why:
            return self.no_such_server("what it sends is not HTTP")
        if "refused" in why.lower() or "all connection attempts failed" in why.lower():
            return f"Nothing answers at {self.place}; is the server running there?"
        if re.search(r"name or service|nodename|getaddrinfo|name resolution", why, re.I):
            return f"There is no host of the name {self.place}; check the address."
        if re.search(r"certificate|ssl|tls", why, re.I):
            return f"{self.place} can't be trusted, or speaks no https ({why})."
        return f"The connection to {self.place} failed ({why})."


def message_of(error: openai.APIError) -> str:
    """The server's own words, at most some thousand characters; may be empty."""
    body: Any = error.body
    if isinstance(body, dict):
        inner = body.get("error", body)
        body = inner.get("message", inner) if isinstance(inner, dict) else inner
        if isinstance(body, dict):  # such as FastAPI's {"detail": …}
            body = body.get("detail", "")
    if body is None:
        body = error.message
    text = str(body)[:4_000]
    return "" if "<html" in text[:200].lower() else text


def _number(patterns: Iterable[re.Pattern[str]], said: str) -> int | None:
    return next((int(found[1]) for pattern in patterns if (found := pattern.search(said))), None)


def _offer(turn: Turn, limit: int, tokens: int, num_characters: int) -> DropOffer | None:
    """Reckoned from the texts' lengths: a server tells the tokens of the whole only."""
    lengths = [len(message.output.text if message.output else message.text) for message in turn.messages]
    per_character = tokens / num_characters

    def count(first: int) -> int:
        return tokens - round(per_character * sum(lengths[:first]))

    offer = drop_offer(turn.messages, limit, count)
    return None if offer is None else replace(offer, is_estimate=True)
