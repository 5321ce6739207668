"""Where a base model's files are. Owns nothing, downloads nothing.

The command line, the router and the worker all take a model as a folder or as a hub id, and all find it here.
"""

from __future__ import annotations

from pathlib import Path


class ModelNotFound(FileNotFoundError):
    """There is no such model on this machine; the message names it."""

    def __str__(self) -> str:
        return str(self.args[0])


def model_folder(model: str) -> Path:
    """The folder with a base model's files.

    Args:
        model: a folder, or a hub id (`ORG/NAME`) whose files are in the local Hugging Face cache. A folder wins.

    Raises:
        ModelNotFound: it is neither.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download  # here: most processes are given a folder, and do without
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ModelNotFound(
            f"{model}: neither a folder nor a model in the local hub cache (nothing is downloaded from here)"
        ) from error


def model_name(model: str) -> str:
    """The last component of a folder or of a hub id. Adapters name the model that they were made for by it."""
    return model.rstrip("/").rsplit("/", 1)[-1]
