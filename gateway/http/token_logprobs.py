"""Log-probabilities of tokens in the two shapes that OpenAI's API has for them."""

from __future__ import annotations

from collections.abc import Iterable

from gateway.http.answer_schema import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from gateway.tokenizer import ModelTokenizer
from protos.outrider.v1 import sampling_pb2

LEAST_LOGPROB = -9999.0
"""What OpenAI says for a token that cannot be: JSON has no infinity."""

_Tokens = Iterable[sampling_pb2.GeneratedToken]


def chat_logprobs(tokens: _Tokens, tokenizer: ModelTokenizer) -> ChatLogprobs:
    """One entry a token."""
    content: list[TokenLogprob] = [
        {
            **_entry(token.id, token.logprob, tokenizer),
            "top_logprobs": [_entry(each.id, each.logprob, tokenizer) for each in token.top],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


class CompletionOffsets:
    """The log-probabilities of one text, which knows how far the text has come."""

    def __init__(self, tokenizer: ModelTokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._num_chars = 0

    def logprobs(self, tokens: _Tokens) -> CompletionLogprobs:
        """Of the next tokens: the entry of each stands at the same place of all four lists."""
        lists: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token in tokens:
            text, logprob = _text(token.id, self._tokenizer), _finite(token.logprob)
            # Tokens may read alike, such as halves of characters: the likeliest stands.
            top = {text: logprob}
            for each in token.top:
                top.setdefault(_text(each.id, self._tokenizer), _finite(each.logprob))
            lists["tokens"].append(text)
            lists["token_logprobs"].append(logprob)
            lists["top_logprobs"].append(top)
            lists["text_offset"].append(self._num_chars)
            self._num_chars += len(self._detokenizer.push(token.id))
        return lists


def _entry(token_id: int, logprob: float, tokenizer: ModelTokenizer) -> TopLogprob:
    spelled = tokenizer.token_bytes(token_id)
    return {
        "token": spelled.decode(errors="replace"),
        "logprob": _finite(logprob),
        "bytes": list(spelled),
    }


def _text(token_id: int, tokenizer: ModelTokenizer) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # NaN too
