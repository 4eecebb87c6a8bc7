"""Asks a completion server that speaks OpenAI's protocol instead of a model in this process."""

import hashlib
import http.client
import json
import threading
import urllib.error
import urllib.request
from concurrent.futures import Future

from .sizing import EvalError, Prompt, Tokens
from .suite import Task, answer_room

PROBE = "The grass is green."
LONGEST = 16 << 20  # bytes of a reply, which has some kilobytes


class EndpointReader:
    """Greedy answers of `POST URL/completions`, one request a question: the server keeps what prompts share.

    Args:
        url: up to and without "/completions".
        model: its name on the server.
        tokens: the model's tokenizer, by which prompts are sized.
        timeout: seconds for one answer.

    Raises:
        EvalError: if the server does not answer a first short request, or counts its tokens differently.
    """

    def __init__(self, url: str, model: str, tokens: Tokens, timeout: float = 600):
        if not url.startswith(("http://", "https://")):
            raise EvalError(f"the endpoint {url} is no address: write http://localhost:8000/v1")
        self.url, self.model, self.tokens, self.timeout = url.rstrip("/") + "/completions", model, tokens, timeout
        (_, counted), own = self._ask(PROBE, 1), tokens.count(PROBE)
        if counted not in (None, own):
            raise EvalError(
                f"the endpoint counts {counted} tokens in {PROBE!r} and the tokenizer of MODEL {own}: "
                "give the folder of the model that the server runs"
            )

    def fingerprint(self) -> str:
        """A digest of the address and the name: the model behind them cannot be seen from here."""
        return hashlib.sha256(f"{self.url} {self.model}".encode()).hexdigest()

    def units_at_once(self, length: int, questions: int) -> int:
        return 1

    def answers(self, task: Task, units: list[list[Prompt]]) -> list[list[str]]:
        return [[self._answer(prompt, task) for prompt in prompts] for prompts in units]

    def _answer(self, prompt, task):
        text, counted = self._ask(prompt.text, answer_room(prompt, task, self.tokens))
        if counted not in (None, len(prompt.ids)):
            raise EvalError(
                f"the endpoint {self.url} read {counted} tokens of a prompt of {len(prompt.ids)}: "
                "it cuts long prompts, or its tokenizer is not that of MODEL"
            )
        return text

    def _ask(self, text, most):
        """The server's text, and how many tokens it says it read; None if it does not say.

        Raises:
            EvalError: for an error, silence longer than the timeout, or a reply of another form.
        """
        asked = {"model": self.model, "prompt": text, "max_tokens": most, "temperature": 0}
        try:
            body = self._body(json.dumps(asked).encode())
        except EvalError:
            raise
        except (OSError, ValueError, http.client.HTTPException) as error:  # ValueError: an address that is none
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise EvalError(f"the endpoint {self.url} gave no answer within {self.timeout} seconds") from error
            raise EvalError(f"the endpoint {self.url} cannot be reached: {reason}") from error
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise EvalError(f"the endpoint {self.url} did not answer in JSON") from error
        try:
            text = answer["choices"][0]["text"]
        except (LookupError, TypeError):
            text = None
        if not isinstance(text, str):
            raise EvalError(f"the endpoint {self.url} answered without choices[0].text: {json.dumps(answer)[:200]}")
        usage = answer.get("usage")
        return text, usage.get("prompt_tokens") if isinstance(usage, dict) else None

    def _body(self, asked):
        """All bytes of a reply, within the timeout: that of a socket alone would start again with each byte, of a
        header too, so a thread reads them, which is left to itself when the time is over."""
        body = Future()

        def read():
            try:
                body.set_result(self._read(asked))
            except Exception as error:  # whatever it is, somebody waits for it
                body.set_exception(error)

        threading.Thread(target=read, name="endpoint", daemon=True).start()
        return body.result(self.timeout)

    def _read(self, asked):
        request = urllib.request.Request(self.url, asked, {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                found = reply.read(LONGEST + 1)
        except urllib.error.HTTPError as error:
            message = " ".join(error.read(1000).decode(errors="replace").split())  # on one line
            raise EvalError(f"the endpoint {self.url} answered {error.code} {error.reason}: {message[:300]}") from error
        if len(found) > LONGEST:
            raise EvalError(f"the endpoint {self.url} answered with more than {LONGEST:,} bytes")
        return found
