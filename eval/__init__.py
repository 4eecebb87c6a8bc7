"""Evaluation: a recall suite over the length of the context for any causal language model, and its pictures."""

from .endpoint import EndpointReader
from .haystack import Haystack, open_haystack
from .reader import ModelReader
from .run import Plan, evaluate, parse_length, summary
from .sizing import EvalError, Prompt, Question, Tokens
from .suite import TASKS

__all__ = [
    "TASKS",
    "EndpointReader",
    "EvalError",
    "Haystack",
    "ModelReader",
    "Plan",
    "Prompt",
    "Question",
    "Tokens",
    "evaluate",
    "open_haystack",
    "parse_length",
    "summary",
]
