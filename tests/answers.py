"""Small tokenizers that can chat, and answers as an engine would give them."""

from __future__ import annotations

from datetime import datetime

from transformers import PreTrainedTokenizerFast

from nanochat.conversation import Conversation
from nanochat.engine.outputs import RequestMetrics, RequestOutput
from nanochat.engine.request import FinishReason
from tests.tokenizer_zoo import CHAT_NAMES, make_tokenizer

TOKENIZERS = {name: make_tokenizer(name) for name in CHAT_NAMES}
END_OF_TURN = {
    "qwen3": "<|im_end|>",
    "smollm2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama2": "</s>",
    "mistral": "</s>",
    "gemma": "<end_of_turn>",
}
FIXED = datetime(2024, 12, 24)


def answer(
    tokenizer: PreTrainedTokenizerFast, ids: list[int], reason: FinishReason = "stop", text: str | None = None
) -> RequestOutput:
    """An output as the engine gives it; ``text`` where a stop string has cut it."""
    if text is None:
        text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return RequestOutput(text, ids, reason, None, None, RequestMetrics())


def say(name: str, text: str, *, end: bool = True) -> list[int]:
    """The ids with which a model says a text after the template's generation prompt."""
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [*ids, tokenizer.convert_tokens_to_ids(END_OF_TURN[name])] if end else ids


def rendered(name: str, chat: Conversation) -> str:
    """What the template makes of the plain messages."""
    messages = [{"role": message.role, "content": message.content} for message in chat.messages]
    return TOKENIZERS[name].apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, date_string="24 Dec 2024"
    )


def as_text(name: str, ids: list[int]) -> str:
    return TOKENIZERS[name].decode(ids, clean_up_tokenization_spaces=False)


def comparable(name: str, text: str) -> str:
    """Sentencepiece writes spaces after tokens and before answers; they say nothing here."""
    return text if name in ("qwen3", "smollm2", "llama3") else text.replace(" ", "")
