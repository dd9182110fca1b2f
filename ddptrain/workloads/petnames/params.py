"""The parameters of the petnames workload. The defaults are those of the tutorial."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class PetnamesParams(BaseModel):
    """The parameters of `workload: petnames`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    names: str = Field(
        "builtin",
        min_length=1,
        description="Where names come from: builtin, or a file, also in an object store (s3://, gs://, az://): .txt "
        "with a name on each line, or .json with a list of names.",
    )
    names_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the object store, such as {skip_signature: true, endpoint: ...} for S3.",
    )
    val_fraction: float = Field(
        0.1, ge=0.0, le=0.9, description="Share of the distinct names held out for val/loss; 0 holds out none."
    )

    context: Literal["window", "full"] = Field(
        "window", description="What a prediction sees: the last characters only (window), or the whole name so far."
    )
    window: int = Field(8, ge=1, le=64, description="Characters that a prediction sees with context: window.")
    input: Literal["one_hot", "embedding"] = Field("one_hot", description="How a symbol enters the LSTM.")
    embedding_size: int = Field(32, ge=1, le=4096, description="Width of the embedding with input: embedding.")
    hidden_size: int = Field(128, ge=1, le=8192, description="Width of each LSTM layer.")
    layers: int = Field(4, ge=1, le=32, description="Number of LSTM layers.")
    dropout: float = Field(0.1, ge=0.0, lt=1.0, description="Dropout between LSTM layers.")
    output_dropout: float = Field(0.0, ge=0.0, lt=1.0, description="Dropout after the last LSTM layer.")

    weights: str | None = Field(
        None,
        pattern=r"^model:.+$",
        description="Initial weights: a model of the registry with the same architecture, as "
        "model:petnames@champion; null starts with random weights.",
    )

    epochs: int = Field(25, ge=1, description="Epochs; in each, all ranks together see every row once.")
    batch_size: int = Field(16384, ge=1, description="Rows in a batch of a rank: windows, or names with context: full.")
    learning_rate: float = Field(1e-3, gt=0.0, le=10.0, description="Peak learning rate of AdamW.")
    lr_schedule: Literal["constant", "one_cycle", "cosine"] = Field(
        "constant", description="Learning rate over the run: constant, up and down, or down."
    )
    weight_decay: float = Field(0.0, ge=0.0, le=10.0, description="Weight decay of AdamW; with 0 it is Adam.")
    grad_clip: float = Field(0.0, ge=0.0, description="Largest norm of the gradient (clipping); 0 does not clip.")
    seed: int = Field(0, ge=0, lt=2**31, description="Seed of the split, the weights, the order and the dropout.")
