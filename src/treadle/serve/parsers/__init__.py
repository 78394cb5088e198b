"""What is in an answer besides text: the calls of tools, in each way that models write them, and reasoning."""

from __future__ import annotations

from treadle.serve.parsers.answer import AnswerParser, Piece, Reasoning, Text, Thought
from treadle.serve.parsers.formats import FORMATS, ToolFormat
from treadle.serve.parsers.tools import ToolCall

__all__ = ["FORMATS", "AnswerParser", "Piece", "Reasoning", "Text", "Thought", "ToolCall", "ToolFormat"]
