"""A model of a Hugging Face hub by `org/name` or `org/name@revision`, through huggingface_hub.

Its settings decide where from and where to: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_OFFLINE. Only
JSON, the chat template and safetensors are ever downloaded: no pickles, and no code to run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.models.errors import FetchFailed, NotFetched, UnknownModel

TOKENIZER_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json", "model-*.safetensors")
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SPELLING = re.compile(rf"({_PART}/{_PART})(?:@([A-Za-z0-9._/-]+))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """One revision of a repository."""

    repository: str
    revision: str | None
    """Branch, tag or commit; None is the hub's default branch."""

    @staticmethod
    def parse(text: str) -> HubModel | None:
        """From `org/name[@revision]`; None for anything that is not spelled so."""
        match = _SPELLING.fullmatch(text)
        return HubModel(match[1], match[2]) if match else None

    def __str__(self) -> str:
        return self.repository if self.revision is None else f"{self.repository}@{self.revision}"

    def fetch(self, *, weights: bool = True) -> Path:
        """The folder in huggingface_hub's cache; downloads what is missing, unless offline."""
        try:
            import huggingface_hub
            from huggingface_hub import errors
        except ModuleNotFoundError as error:
            raise FetchFailed(
                f"{self}: the hub needs huggingface_hub; run: pip install 'outrider[hub]'"
            ) from error
        patterns = [*TOKENIZER_FILES, *(WEIGHT_FILES if weights else ())]
        try:
            folder = Path(
                huggingface_hub.snapshot_download(
                    self.repository, revision=self.revision, allow_patterns=patterns
                )
            )
        except errors.GatedRepoError as error:
            raise FetchFailed(
                f"{self} is gated: accept its terms on the hub and set HF_TOKEN"
            ) from error
        except errors.RepositoryNotFoundError as error:
            raise UnknownModel(
                f"{self} is neither a folder or file here nor a repository that the hub shows you; "
                "check the spelling, and for a private one set HF_TOKEN"
            ) from error
        except errors.RevisionNotFoundError as error:
            raise UnknownModel(f"{self.repository} has no revision {self.revision!r}") from error
        except errors.LocalEntryNotFoundError as error:
            raise NotFetched(self._not_here(errors.OfflineModeIsEnabled, error)) from error
        except (errors.HfHubHTTPError, OSError, ValueError) as error:
            raise FetchFailed(f"{self}: the download failed, try again: {error}") from error
        self._check(folder, weights=weights)
        return folder

    def _not_here(self, offline: type[Exception], error: Exception) -> str:
        """What to do when the hub was not asked or did not answer and the cache lacks files."""
        if isinstance(error.__cause__, offline):
            why, remedy = "HF_HUB_OFFLINE is set", "unset it once"
        else:
            why, remedy = "the hub cannot be reached", "try again when it can"
        return (
            f"{self} is not whole in huggingface_hub's cache, and {why}; {remedy}, copy the cache "
            "from a machine that has the model, or give a folder instead"
        )

    def _check(self, folder: Path, *, weights: bool) -> None:
        """FetchFailed if the repository lacks what a model needs."""
        if not (folder / "config.json").is_file():
            raise FetchFailed(f"{self} has no config.json: not a model for transformers")
        if not (folder / "tokenizer.json").is_file():
            raise FetchFailed(f"{self} has no tokenizer.json; only fast tokenizers are supported")
        if weights and not any(folder.glob("*.safetensors")):
            raise FetchFailed(
                f"{self} has no safetensors weights; pickled ones (.bin, .pt) are never loaded"
            )
