"""What a model says of tokens that are known already, by the engine's own prefill and decode over paged caches.

Several caches, of different types but of one model, take each step side by side and are compared token by
token. Knows nothing of texts, windows, schedules or files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from nanochat.engine.config import SamplingParams
from nanochat.engine.request import Request
from nanochat.engine.runner import Runner
from nanochat.engine.step_plan import ScheduledChunk, StepPlan

LOGITS_AT_ONCE = 2**23
"""Logits that are in memory at a time for each cache: 32 MiB of float32, whatever the vocabulary."""


@dataclass(frozen=True, slots=True)
class TokenScores:
    """How each of ``C`` caches makes the model predict ``n`` tokens; the first cache is the reference."""

    nll: np.ndarray
    """``[C, n]`` float32: minus the natural logarithm of each token's probability."""
    kl: np.ndarray
    """``[C, n]`` float32: Kullback-Leibler divergence in nats, KL(reference ‖ cache), of the distribution over
    the whole vocabulary that the token is drawn from."""
    same_top: np.ndarray
    """``[C, n]`` bool: whether the likeliest token is the reference's."""

    @property
    def num_tokens(self) -> int:
        return self.nll.shape[1]

    @classmethod
    def concatenate(cls, parts: Sequence[TokenScores]) -> TokenScores:
        return cls(
            np.concatenate([part.nll for part in parts], axis=1),
            np.concatenate([part.kl for part in parts], axis=1),
            np.concatenate([part.same_top for part in parts], axis=1),
        )

    def take(self, columns: np.ndarray | slice) -> TokenScores:
        """The scores of the tokens in these places."""
        return TokenScores(self.nll[:, columns], self.kl[:, columns], self.same_top[:, columns])


class Scorer:
    """Runs rows of known tokens through caches of its own; row ``r`` of a batch always has the same blocks.

    Args:
        runners: one a cache, over the same model and with equally many blocks; the first is the reference.
        blocks_per_row: KV blocks for the longest row.
        chunk_tokens: longest prefill chunk.
    """

    def __init__(self, runners: Sequence[Runner], *, blocks_per_row: int, chunk_tokens: int) -> None:
        self._runners = list(runners)
        self._decoder = self._runners[0].decoder
        self._blocks_per_row = blocks_per_row
        self._chunk_tokens = chunk_tokens

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[int], first: int) -> TokenScores:
        """Score ``tokens[first:]`` (``first`` 1 or more) from prefill chunks of all tokens but the last.

        Every chunk's K/V goes to the cache first and is read from there, as in any step of the engine.
        """
        request = self._request(0, tokens)
        parts = []
        for start, hidden in self._prefill(request, len(tokens) - 1):
            # The hidden state of token i predicts token i + 1.
            skipped = max(first - 1 - start, 0)
            targets = tokens[start + skipped + 1 : start + len(hidden[0]) + 1]
            if targets:
                parts.append(self._score([states[skipped:] for states in hidden], targets))
        return TokenScores.concatenate(parts)

    @torch.inference_mode()
    def fill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Prefill all of each prompt but its last token, as :meth:`decode` and :meth:`roll_out` need it."""
        for row, prompt in enumerate(prompts):
            for _ in self._prefill(self._request(row, prompt), len(prompt) - 1):
                pass

    @torch.inference_mode()
    def decode(
        self, rows: Sequence[Sequence[int]], first: int, report: Callable[[int], None] = lambda _: None
    ) -> TokenScores:
        """Score ``tokens[first:]`` of rows of one length by decoding, given the right token at every step.

        ``tokens[:first]`` are the prompts that were filled last. Tokens of a row lie side by side. ``report`` is told
        how many are scored.
        """
        requests = [self._request(row, tokens) for row, tokens in enumerate(rows)]
        length = len(rows[0])
        steps = []
        for position in range(first - 1, length - 1):
            plan = _decode_plan(requests, position)
            hidden = [runner.hidden_states(plan) for runner in self._runners]
            steps.append(self._score(hidden, [tokens[position + 1] for tokens in rows]))
            report(len(steps) * len(rows))
        by_row = np.arange(len(steps) * len(rows)).reshape(len(steps), len(rows)).T.ravel()
        return TokenScores.concatenate(steps).take(by_row)

    @torch.inference_mode()
    def roll_out(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> np.ndarray:
        """Greedy answers ``[C, rows, num_tokens]`` to prompts of one length, which were filled last."""
        answers = []
        for runner in self._runners:
            requests = [self._request(row, prompt) for row, prompt in enumerate(prompts)]
            for position in range(len(prompts[0]) - 1, len(prompts[0]) - 1 + num_tokens):
                hidden = runner.hidden_states(_decode_plan(requests, position))
                likeliest = self._decoder.compute_logits(hidden).argmax(dim=-1).tolist()
                for request, token in zip(requests, likeliest, strict=True):
                    request.token_ids.append(token)
            answers.append([request.token_ids[-num_tokens:] for request in requests])
        return np.array(answers, dtype=np.int64)

    def _request(self, row: int, tokens: Sequence[int]) -> Request:
        blocks = range(row * self._blocks_per_row, (row + 1) * self._blocks_per_row)
        return Request(
            request_id=row, token_ids=list(tokens), params=SamplingParams(), block_table=list(blocks)
        )

    def _prefill(self, request: Request, end: int) -> Iterator[tuple[int, list[torch.Tensor]]]:
        """Run tokens ``0 .. end - 1`` in chunks: each one's start and hidden states ``[n, hidden]`` by cache."""
        for start in range(0, end, self._chunk_tokens):
            length = min(self._chunk_tokens, end - start)
            chunk = ScheduledChunk(request, start, length, samples=False)
            plan = StepPlan(step=0, decodes=(), prefills=(chunk,), preempted=())
            yield start, [runner.hidden_states(plan) for runner in self._runners]

    def _score(self, hidden: Sequence[torch.Tensor], targets: Sequence[int]) -> TokenScores:
        """``hidden``: ``[n, hidden]`` of each cache; ``targets``: the ``n`` tokens that they should predict."""
        target_ids = torch.tensor(targets, device=hidden[0].device)
        rows = max(1, LOGITS_AT_ONCE // self._decoder.config.vocab_size)
        parts = []
        for begin in range(0, len(targets), rows):
            part = slice(begin, begin + rows)
            parts.append(self._score_at_once([states[part] for states in hidden], target_ids[part]))
        return TokenScores.concatenate(parts)

    def _score_at_once(self, hidden: Sequence[torch.Tensor], targets: torch.Tensor) -> TokenScores:
        """:meth:`_score` of so few tokens that their logits need little memory."""
        reference = self._log_probabilities(hidden[0])
        nll = [_nll(reference, targets)]
        kl = [torch.zeros_like(nll[0])]
        top = reference.argmax(dim=-1)
        same_top = [torch.ones_like(top, dtype=torch.bool)]
        for states in hidden[1:]:
            own = self._log_probabilities(states)
            nll.append(_nll(own, targets))
            kl.append(F.kl_div(own, reference, reduction="none", log_target=True).sum(dim=-1))
            same_top.append(own.argmax(dim=-1) == top)
        return TokenScores(*(torch.stack(values).cpu().numpy() for values in (nll, kl, same_top)))

    def _log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[n, hidden]`` to ``[n, vocab]`` float32."""
        return torch.log_softmax(self._decoder.compute_logits(hidden), dim=-1)


def _nll(log_probabilities: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -log_probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)


def _decode_plan(requests: Sequence[Request], position: int) -> StepPlan:
    """One step in which every request decodes its token at ``position``."""
    decodes = tuple(ScheduledChunk(request, position, 1, samples=True) for request in requests)
    return StepPlan(step=0, decodes=decodes, prefills=(), preempted=())
