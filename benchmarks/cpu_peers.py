"""What `benchmarks/cpu.py` compares nanochat with: llama.cpp's low-level calls and transformers' forward passes.

Both get a loop of their own that does what a good server would: all running chats in one batch, prompts in
chunks beside them, and the part of a prompt that the last one began with kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

CHUNK = 128
"""Tokens of a prompt in a step, while another chat is running."""
BATCH = 2048
LONGEST = 2560
"""Tokens of a chat that is alone, with its answer."""


@dataclass
class Job:
    """A prompt and how many tokens are to follow it."""

    prompt: list[int]
    out: int
    after_job: int = 0
    after_tokens: int = 0
    """Submitted when the job ``after_job`` has so many tokens."""
    submitted_s: float = 0.0
    answer: list[int] = field(default_factory=list)
    handle: Any = None


class Peer(Protocol):
    """Something that serves jobs."""

    about: dict[str, Any]

    def run(self, jobs: list[Job]) -> list[list[float]]:
        """Serve them; when each token came, by ``time.perf_counter``. Fills in times and answers."""

    def close(self) -> None:
        """Free it."""


def common_prefix(one: list[int], other: list[int]) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


class _Row:
    """A job on its way: its tokens, and how many of them are in the cache."""

    def __init__(self, job: Job, seq: int, computed: int) -> None:
        self.job, self.seq, self.computed = job, seq, computed
        self.tokens = list(job.prompt)
        self.times: list[float] = []

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def done(self) -> bool:
        return len(self.times) >= self.job.out


class LlamaCpp:
    """``llama_decode`` over a context with a sequence for each chat.

    The caches of many are apart, as llama.cpp's documentation asks for where chats have no long beginning in common: in
    one cache each chat's attention meets all chats' keys.
    """

    def __init__(self, gguf: Path, threads: int, repack: bool) -> None:
        """``repack``: let it bring weights into an order for the processor; some builds crash over AMX then."""
        import llama_cpp

        self._lib = llama_cpp
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.use_extra_bufts = repack
        self._model = llama_cpp.llama_model_load_from_file(str(gguf).encode(), model_params)
        self._threads = threads
        self._context: Any = None
        self._room = (0, 0)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._cached: list[int] = []
        self.about = {
            "llama_cpp_python": llama_cpp.__version__,
            "threads": threads,
            "chunk": CHUNK,
            "repack": repack,
            "system": llama_cpp.llama_print_system_info().decode(),
        }

    def _make_room(self, jobs: list[Job]) -> None:
        """A context for so many chats, of as many tokens as the longest has; a chat alone keeps its own."""
        longest = max(len(job.prompt) + job.out for job in jobs)
        room = (len(jobs), LONGEST if len(jobs) == 1 else -(-longest // 256) * 256)
        if room == self._room:
            return
        if self._context is not None:
            self._lib.llama_free(self._context)
        params = self._lib.llama_context_default_params()
        params.n_ctx, params.n_seq_max = room[0] * room[1], room[0]
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = room[0] <= 2  # a step of a prompt's part and one token would be cut in two
        self._context = self._lib.llama_init_from_model(self._model, params)
        self._room, self._cached = room, []

    def run(self, jobs: list[Job]) -> list[list[float]]:
        self._make_room(jobs)
        memory = self._lib.llama_get_memory(self._context)
        kept = min(common_prefix(self._cached, jobs[0].prompt), len(jobs[0].prompt) - 1)
        for seq in range(len(jobs)):
            self._lib.llama_memory_seq_rm(memory, seq, kept if seq == 0 else 0, -1)
        rows: list[_Row] = []
        while len(rows) < len(jobs) or not all(row.done for row in rows):
            while len(rows) < len(jobs):
                job = jobs[len(rows)]
                if job.after_tokens and len(rows[job.after_job].times) < job.after_tokens:
                    break
                job.submitted_s = time.perf_counter()
                rows.append(_Row(job, len(rows), kept if not rows else 0))
            self._step([row for row in rows if not row.done])
        for row in rows:
            row.job.answer = row.tokens[len(row.job.prompt) :]
        self._cached = rows[0].tokens[: rows[0].computed]
        return [row.times for row in rows]

    def _step(self, rows: list[_Row]) -> None:
        decoding = any(row.times for row in rows)
        batch, sampling, n = self._batch, [], 0
        for row in sorted(rows, key=lambda row: row.uncomputed):
            length = min(row.uncomputed, BATCH - n)
            if decoding and not row.times:
                length = min(length, CHUNK)
            for token in row.tokens[row.computed : row.computed + length]:
                batch.token[n], batch.pos[n] = token, row.computed
                batch.n_seq_id[n], batch.seq_id[n][0], batch.logits[n] = 1, row.seq, 0
                row.computed += 1
                n += 1
            if length and not row.uncomputed:
                batch.logits[n - 1] = 1
                sampling.append((row, n - 1))
        batch.n_tokens = n
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        self._sample(sampling)

    def _sample(self, sampling: list[tuple[_Row, int]]) -> None:
        import numpy as np

        for row, index in sampling:
            logits = self._lib.llama_get_logits_ith(self._context, index)
            row.tokens.append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
            row.times.append(time.perf_counter())

    def close(self) -> None:
        if self._context is not None:
            self._lib.llama_free(self._context)
        self._lib.llama_model_free(self._model)


class Transformers:
    """Forward passes with a cache; chats that begin together share a batch."""

    def __init__(self, threads: int, weights: str) -> None:
        import torch
        import transformers

        from nanochat.engine.models.resolve import resolve_model
        from nanochat.engine.progress import ignore_progress

        torch.set_num_threads(threads)
        dtype = torch.float32 if weights == "fp32" else torch.bfloat16
        folder = resolve_model("", ignore_progress).path
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        self._torch, self._new_cache = torch, transformers.DynamicCache
        self._cached: list[int] = []
        self._cache: Any = None
        self.about = {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "threads": threads,
        }

    def run(self, jobs: list[Job]) -> list[list[float]]:
        with self._torch.inference_mode():
            if jobs[-1].after_tokens:
                return self._run_beside(*jobs)
            return self._run_together(jobs)

    def _forward(self, ids: list[list[int]], cache: Any) -> list[int]:
        tokens = self._torch.tensor(ids)
        logits = self._model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return list(logits[:, -1].argmax(-1).tolist())

    def _run_together(self, jobs: list[Job]) -> list[list[float]]:
        kept = common_prefix(self._cached, jobs[0].prompt) if len(jobs) == 1 else 0
        if not kept or kept < len(self._cached) or kept >= len(jobs[0].prompt):
            kept, self._cache = 0, self._new_cache()
        times = []
        for job in jobs:
            job.submitted_s, job.answer = time.perf_counter(), []
        new = self._forward([job.prompt[kept:] for job in jobs], self._cache)
        times.append(time.perf_counter())
        for step in range(jobs[0].out):
            for job, token in zip(jobs, new, strict=True):
                job.answer.append(token)
            if step == jobs[0].out - 1:
                break
            new = self._forward([[token] for token in new], self._cache)
            times.append(time.perf_counter())
        self._cached = jobs[0].prompt + jobs[0].answer[:-1] if len(jobs) == 1 else []
        return [list(times) for _ in jobs]

    def _run_beside(self, chat: Job, long: Job) -> list[list[float]]:
        caches, times = [self._new_cache(), self._new_cache()], [[], []]  # type: ignore[var-annotated]
        chat.submitted_s = time.perf_counter()
        new, done = self._forward([chat.prompt], caches[0]), 0
        times[0].append(time.perf_counter())
        while len(times[0]) < chat.out:
            new = self._forward([new], caches[0])
            times[0].append(time.perf_counter())
            if len(times[0]) == long.after_tokens:
                long.submitted_s = time.perf_counter()
            if long.submitted_s and done < len(long.prompt):
                first = self._forward([long.prompt[done : done + CHUNK]], caches[1])
                done += CHUNK
                if done >= len(long.prompt):
                    times[1].append(time.perf_counter())
                    long.answer = first
        return times

    def close(self) -> None:
        self._cache = None
