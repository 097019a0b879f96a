"""How large the target's messages can get, so that a limit that is too low shows at the start.

Else it would show as a failure now and then, at the longest prompt or in the fullest step. Frames
of the draft protocol have a limit of their own, and are filled up to it and not beyond.
"""

from __future__ import annotations

from outrider.serving.settings import SettingsError

_TOKEN_BYTES = 320
"""A token with the most alternatives that can be asked for, each with its log-probability."""
_ID_BYTES = 5
_SETTINGS_BYTES = 64 * 1024
"""Everything else of a request or a chunk: a full bias map, stop ids, counts."""


def check_message_limit(
    max_message_bytes: int, *, max_model_len: int, step_tokens: int, max_draft_tokens: int
) -> None:
    """Raise SettingsError when a request or an answer that is allowed would not fit."""
    prompt = max_model_len * _ID_BYTES + _SETTINGS_BYTES
    chunk = (step_tokens + max_draft_tokens + 1) * _TOKEN_BYTES + _SETTINGS_BYTES
    if max_message_bytes < prompt:
        raise SettingsError(
            f"max_message_bytes must be at least {prompt} for sequences of {max_model_len} tokens, "
            f"got {max_message_bytes}; raise it here and at the gateway, or lower max_model_len"
        )
    if max_message_bytes < chunk:
        raise SettingsError(
            f"max_message_bytes must be at least {chunk} for steps of {step_tokens} tokens with "
            f"{max_draft_tokens} drafts each, got {max_message_bytes}; raise it here and at the "
            "gateway, or lower step_tokens"
        )
