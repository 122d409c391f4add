"""The engine of this process as a backend: token-exact prompts, and every figure of the engine."""

from __future__ import annotations

from nanochat.backend.context import Contexts
from nanochat.backend.interface import About, Refused, Started, Turn
from nanochat.backend.stats import BackendStats
from nanochat.engine.config import SamplingParams
from nanochat.engine.engine import Engine
from nanochat.engine.stats import BlockMap
from nanochat.errors import PromptTooLong
from nanochat.sanitize import sanitize_line


class LocalBackend:
    """Owns the engine. :meth:`start` and :meth:`count` are for one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._contexts = Contexts(engine.tokenizer)
        model = sanitize_line(engine.model_name)
        blocks, size = engine.stats().blocks_total, engine.config.block_size
        self.about = About(
            model=model,
            place=f"{engine.compute_name} · kv {engine.kv_dtype_name}",
            description=(
                f"{model} on {engine.device_name}, KV cache {engine.kv_dtype_name}: {blocks:,} blocks of {size} "
                f"tokens, at most {engine.max_model_len:,} tokens a chat. "
                f"Files: {sanitize_line(str(engine.model_dir), 300)}. "
                "/model followed by a folder, a .gguf file or a Hub id loads another."
            ),
            context_limit=engine.max_model_len,
            reasoning_tags=self._contexts.reasoning_tags,
            has_template=self._contexts.has_template,
            default_sampling=engine.default_sampling,
        )

    def start(self, turn: Turn) -> Started:
        """As :meth:`Backend.start`; encodes the prompt on the calling thread.

        Raises:
            Refused: the prompt is too long; with an offer if leaving out turns helps.
            NanochatError: the model's template refuses the messages, a setting can't work, or the engine is closed.
        """
        prepared = self._contexts.prepare(turn)
        params = SamplingParams(**{**self.about.default_sampling, **turn.sampling})
        begun = 0 if prepared.partial is None else len(prepared.partial.token_ids)
        try:
            handle = self.engine.submit(prepared.token_ids, params, continues=begun)
        except PromptTooLong as error:
            offer = self._contexts.drop_offer(turn, self.engine.max_model_len)
            raise Refused(str(error), offer) from error
        return Started(handle, self.about.reasoning_tags, prepared.opens_reasoning, prepared.partial)

    def count(self, turn: Turn) -> int:
        return len(self._contexts.prepare(turn).token_ids)

    def forget(self, chat_id: int) -> None:
        self._contexts.forget(chat_id)

    def stats(self, *, is_shown: bool = True) -> BackendStats:
        return BackendStats.of_engine(self.engine.stats())

    def block_map(self) -> BlockMap | None:
        return self.engine.block_map()

    def close(self, wait_s: float = 0.0) -> None:
        self.engine.close(wait_s)
