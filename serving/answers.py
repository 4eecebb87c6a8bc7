"""OpenAI's forms of an answer: completions and chat completions, whole or piece by piece."""

from typing import Any

from .engine import Job, Piece
from .protocol import ChatRequest, CompletionRequest
from .sampling import Choice
from .token_texts import PART, TokenText, TokenTexts

LEAST = -9999.0  # stands for the logarithm of zero, which JSON does not know


class Completions:
    """Of `POST /v1/completions`."""

    prefix, whole_kind, part_kind = "cmpl-", "text_completion", "text_completion"

    def __init__(self, asked: CompletionRequest, tokenizer):
        self.asked, self.tokenizer = asked, tokenizer

    def whole(self, index: int, job: Job, pieces: list[Piece]) -> dict[str, Any]:
        """One of the choices."""
        return self._choice(index, [*self._echo(job), *pieces], job.finish)

    def first(self, index: int, job: Job) -> list[dict[str, Any]]:
        """What a stream says of a choice before the first piece of its text."""
        return [self._choice(index, [piece], None) for piece in self._echo(job)]

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, [piece], None)

    def last(self, index: int, job: Job) -> dict[str, Any]:
        return self._choice(index, [], job.finish)

    def _choice(self, index: int, pieces: list[Piece], finish: str | None) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        told = (
            None if self.asked.logprobs is None else self._told([token for piece in pieces for token in piece.tokens])
        )
        return {"index": index, "text": text, "logprobs": told, "finish_reason": finish}

    def _echo(self, job: Job) -> list[Piece]:
        if job.echo is None:
            return []
        if self.asked.logprobs is None:
            return [Piece(job.echo)]
        texts = TokenTexts(self.tokenizer, with_special=True)
        scored = (job.request.scored.get(place, Choice(token)) for place, token in enumerate(job.ids))
        return [Piece(job.echo, [texts.add(choice) for choice in scored])]

    def _told(self, tokens: list[TokenText]) -> dict[str, list]:
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [_finite(token.choice.log_probability) for token in tokens],
            "top_logprobs": [self._highest(token.choice) for token in tokens],
            "text_offset": [token.offset for token in tokens],
        }

    def _highest(self, choice: Choice) -> dict[str, float] | None:
        """By text: of several ids with one text, the most likely."""
        if choice.log_probability is None:
            return None
        found: dict[str, float] = {}
        for token, value in (*choice.top, (choice.token, choice.log_probability)):
            found.setdefault(self.tokenizer.decode([token]), _finite(value))
        return found


class Chat:
    """Of `POST /v1/chat/completions`."""

    prefix, whole_kind, part_kind = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, asked: ChatRequest, tokenizer):
        self.asked, self.tokenizer = asked, tokenizer

    def whole(self, index: int, job: Job, pieces: list[Piece]) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(piece.text for piece in pieces)}
        told = self._told([token for piece in pieces for token in piece.tokens])
        return {"index": index, "message": message, "logprobs": told, "finish_reason": job.finish}

    def first(self, index: int, job: Job) -> list[dict[str, Any]]:
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._delta(index, {"content": piece.text}, self._told(piece.tokens))

    def last(self, index: int, job: Job) -> dict[str, Any]:
        return self._delta(index, {}, finish=job.finish)

    @staticmethod
    def _delta(index: int, delta: dict, told: dict | None = None, finish: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": told, "finish_reason": finish}

    def _told(self, tokens: list[TokenText]) -> dict[str, list] | None:
        if not self.asked.logprobs:
            return None
        content = []
        for token in tokens:
            tops = [self._token(self.tokenizer.decode([other]), value) for other, value in token.choice.top]
            content.append({**self._token(token.text, token.choice.log_probability), "top_logprobs": tops})
        return {"content": content}

    @staticmethod
    def _token(text: str, value: float) -> dict[str, Any]:
        """Without bytes where it is part of a character."""
        return {"token": text, "logprob": _finite(value), "bytes": None if PART in text else list(text.encode())}


def _finite(value: float | None) -> float | None:
    return None if value is None else max(value, LEAST)


def usage(prompts: list[list[Job]]) -> dict[str, Any]:
    """Of the texts that were made behind each of the prompts; a prompt counts once."""
    read = sum(len(jobs[0].ids) for jobs in prompts)
    made = sum(job.tokens for jobs in prompts for job in jobs)
    cached = sum(jobs[0].request.cached for jobs in prompts)
    return {
        "prompt_tokens": read,
        "completion_tokens": made,
        "total_tokens": read + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
